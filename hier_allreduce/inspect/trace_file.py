"""Runs as Chrome's JSON trace: a process for each device, with rows for its copies and its computations.

The format is Google's "Trace Event Format": complete events (``ph`` X, ``ts`` and ``dur`` in microseconds), and
metadata events (``ph`` M) that name processes and threads. Perfetto reads it too. Events of one thread must not overlap
in part, so copies that overlap get rows of their own.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Iterator, List, Sequence

from .bars import COPY, EXECUTED, SUM, Bar, Run

_ROWS = {COPY: "copies out", SUM: "sums"}

Event = Dict[str, Any]


def trace_json(runs: Sequence[Run]) -> str:
    """Return the text of the JSON file. Each run begins at time 0, so that they can be compared."""
    devices = max((run.devices for run in runs), key=len, default=())
    events = [event for pid, device in enumerate(devices) for event in _named("process", device, pid, 0, pid)]
    rows = [0] * len(devices)  # of each device so far
    for run in runs:
        events += list(_run_events(run, rows))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False)


def _run_events(run: Run, rows: List[int]) -> Iterator[Event]:
    for pid in range(len(run.devices)):
        for kind, row in _ROWS.items():
            bars = [bar for bar in run.bars if bar.kind == kind and bar.src == pid]
            places = in_rows(bars)
            for number in range(max(places, default=-1) + 1):
                numbered = f" {number + 1}" if number else ""
                tid = rows[pid] + number
                yield from _named("thread", f"{run.kind}: {row}{numbered}", pid, tid, tid)
            yield from (_event(bar, run.begin, rows[pid] + place) for bar, place in zip(bars, places))
            rows[pid] += max(places, default=-1) + 1
    if run.kind == EXECUTED and run.last_gradient:
        instant = _microseconds(run.last_gradient - run.begin)
        yield {"ph": "i", "name": "last gradient", "ts": max(0.0, instant), "pid": 0, "tid": 0, "s": "g"}


def in_rows(bars: Sequence[Bar]) -> List[int]:
    """Return the number of a row for each bar, as few as possible, so that no two bars of a row overlap."""
    rows = [0] * len(bars)
    free: List[float] = []  # since when each row is free
    for number in sorted(range(len(bars)), key=lambda number: (bars[number].start, bars[number].end)):
        bar = bars[number]
        row = next((row for row, since in enumerate(free) if since <= bar.start), len(free))
        free[row : row + 1] = [bar.end]
        rows[number] = row
    return rows


def _named(what: str, name: str, pid: int, tid: int, place: int) -> Iterator[Event]:
    """Yield the events that name a process or a thread, and that say at which place it is shown."""
    yield {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": place}}


def _event(bar: Bar, begin: float, tid: int) -> Event:
    seconds = bar.end - bar.start
    details: Dict[str, Any] = {"bytes": round(bar.size), "waited_us": _microseconds(bar.start - bar.ready)}
    if bar.kind == COPY:
        details["from"], details["to"] = bar.src, bar.dst
        if bar.exact and seconds > 0:
            details["GB/s"] = round(bar.size / seconds / 1e9, 3)
        if not bar.exact:
            details["end"] = "at the latest: the op that read it waited for other values too"
    if bar.op:
        details["op"] = bar.op
    return {
        "ph": "X",
        "name": bar.name,
        "cat": bar.kind,
        "ts": _microseconds(bar.start - begin),
        "dur": _microseconds(seconds),
        "pid": bar.src,
        "tid": tid,
        "args": details,
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
