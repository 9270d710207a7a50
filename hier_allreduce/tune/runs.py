"""Runs of a user's program, each ended with all its processes once enough steps are measured.

A run fails if the program ends before it has made enough steps. It hangs if no step comes for a while.
Both are results. GPUs work asynchronously: single steps tell little, and means over windows of 20 steps do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Generator, List, NamedTuple, Sequence

from tqdm import tqdm

from ..errors import HierAllreduceError
from ..formatting import count, duration
from ..measured import VARIABLE, Measurement, read_facts
from ..planning.candidate import Candidate
from .candidates import NOW, candidates

LEFT_OUT = 10  # steps: compilation, caches, the first batches
WINDOW = 20  # steps
LEAST, MOST = LEFT_OUT + WINDOW + 1, LEFT_OUT + 100 * WINDOW + 1  # steps of a run
START = 600.0  # seconds until the first step
MERCY = 5.0  # seconds between SIGTERM and SIGKILL, and for the end after it
FIRST_SHARE = 1 / 20  # of all seconds, for the first run; only its facts tell how many there are


class Run(NamedTuple):
    """One run of the program: the seconds of a step in every window, or a fault; its output; its facts."""

    candidate: Candidate
    seconds: List[float]
    output: Path
    fault: str = ""
    facts: Dict[str, Any] = {}  # noqa: RUF012  no one changes it


def measure_all(
    command: Sequence[str], seconds: float, patience: float, only: Sequence[str], folder: Path
) -> Generator[Run, None, None]:
    """Run a program once for each candidate, then again in reversed order: first and last as it is.

    Args:
        command: the program and its arguments.
        seconds: of all runs together; longer if runs of 31 steps take longer, which is said after the first one.
        patience: seconds without a step, after which a program hangs.
        only: names of candidates; empty for all.
        folder: for the programs' outputs.

    Yields: each run. A generator that is closed or interrupted ends the program.

    Raises:
        HierAllreduceError: the program builds no all-reduce of this package; or as :func:`.candidates`.
        OSError: the program cannot be started.
    """
    with tqdm(unit="run", disable=None, file=sys.stderr) as bar:
        begun = time.monotonic()
        first = _run(
            command, Candidate(NOW), seconds * FIRST_SHARE, patience, folder / "1-now", bar
        )
        if "towers" not in first.facts:
            reason = first.fault or "it made its steps without one"
            raise HierAllreduceError(
                f"{command[0]} builds no all-reduce of this package: {reason}; see {first.output}"
            )
        chosen = candidates(first.facts, only)
        bar.total = 2 * len(chosen)
        longest = max(seconds, bar.total * (time.monotonic() - begun))
        told = f"{bar.total} runs of {LEAST} to {MOST} steps: at most about {longest / 60:.1f} min"
        bar.write(f"{told}; --only A,B measures fewer candidates", sys.stderr)
        yield first
        failed = {NOW} if first.fault else set()
        for number, candidate in enumerate([*chosen[1:], *chosen[::-1]], 2):
            if candidate.name not in failed:
                name = folder / f"{number}-{candidate.name}"
                run = _run(command, candidate, seconds / bar.total, patience, name, bar)
                failed.update([candidate.name] if run.fault else [])
                yield run


def _run(
    command: Sequence[str],
    candidate: Candidate,
    share: float,
    patience: float,
    name: Path,
    bar: Any,
) -> Run:
    clock, output = name.with_suffix(".clock"), name.with_suffix(".log")
    setting = Measurement(candidate.peer, candidate.changes, str(clock)).as_text()
    with output.open("wb") as log:
        pipes: Dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        environment = {**os.environ, VARIABLE: setting}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        fault = _wait(process, clock, share, patience, bar)
    finally:
        _end(process, f"{VARIABLE}={setting}".encode())
        bar.update(1)
    times, facts = _times(clock), read_facts(str(clock))
    if fault:
        text = output.read_text(encoding="utf-8", errors="replace").strip()
        memory = (
            ", out of memory"
            if re.search("OOM when|ResourceExhausted|out.of.memory", text, re.IGNORECASE)
            else ""
        )
        last = text.rpartition("\n")[2].strip()[:100]
        return Run(candidate, [], output, f"{fault}{memory}; last line: {last or 'none'}", facts)
    starts = range(LEFT_OUT, len(times) - WINDOW, WINDOW)
    return Run(
        candidate,
        [(times[start + WINDOW] - times[start]) / WINDOW for start in starts],
        output,
        "",
        facts,
    )


def _times(clock: Path) -> List[float]:
    """Return the times in a clock file, in seconds; a line that is still being written is left out."""
    lines = clock.read_text(encoding="ascii").split("\n")[:-1] if clock.exists() else []
    return [float(line) for line in lines if line]


def _wait(process: Any, clock: Path, share: float, patience: float, bar: Any) -> str:
    """Wait until a program has made enough steps, and return its fault, or an empty text."""
    begun = last = time.monotonic()
    seen = 0
    while True:
        status = process.poll()  # before the file is read: a program that has ended writes no more
        steps, now = len(_times(clock)), time.monotonic()
        if steps > seen:
            seen, last = steps, now
            bar.set_description(f"{clock.stem}, step {steps}")
        if steps >= MOST or (steps >= LEAST and (status is not None or now - begun > share)):
            return ""
        if status == 0:
            return f"ended after {count(steps, 'step')}, {LEAST} are needed"
        if status is not None:
            by = f"status {status}" if status > 0 else signal.Signals(-status).name
            return f"failed: {by} after {count(steps, 'step')}"
        allowed = patience if steps else START
        if now - last > allowed:
            return f"hung: no step {f'after step {steps}' if steps else 'at all'} for {duration(allowed, 4)}, killed"
        time.sleep(0.1)


def _end(process: Any, setting: bytes) -> None:
    """End all processes of a run: SIGTERM, and SIGKILL after five seconds."""
    for number in (int(signal.SIGTERM), int(signal.SIGKILL)):
        deadline, to_send = time.monotonic() + MERCY, number
        while time.monotonic() < deadline:
            process.poll()  # a zombie would count as alive
            if not _send(to_send, process.pid, setting):
                return
            to_send = 0  # it only looks who is left
            time.sleep(0.02)


def _send(number: int, group: int, setting: bytes) -> bool:
    """Send a signal to the processes of a run; return whether there are any.

    They are a process group and, on Linux, those that have left it: a process there shows the setting of its run.
    """
    found = False
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        found = True
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if setting in (process / "environ").read_bytes():
                os.kill(int(process.name), number)
                found = True
    return found
