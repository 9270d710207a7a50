"""A machine's copies, measured in processes that are ended when one of their copies takes longer than 10 seconds.

::

    devices ─► pairs, groups ─► copies (a process) ─► Measured ─► report, or Topology with measured links
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import permutations
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..errors import HierAllreduceError
from ..topology import PCIE, Topology

Pair = Tuple[str, str]
LIMIT = 10.0  # seconds for all figures of a pair
START = 180.0  # seconds until TensorFlow has the devices
BIG = 32 << 20  # bytes of a copy whose speed counts
REPEATS_WITHIN = 0.25  # of each other: two measurements of one figure
_LIMITED = 0.9  # of the copies' speeds alone: a group below it shares something


class Copies(NamedTuple):
    """The figures of the copies from one device to another, or of a group at once; or the reason that there are none.

    Attributes:
        differ: bytes that arrive changed.
        rate: bytes/s, measured twice.
        start: seconds to start a copy, measured twice.
        fault: the reason that nothing was measured.
    """

    differ: int = 0
    rate: Sequence[float] = ()
    start: Sequence[float] = ()
    fault: str = ""


class Measured(NamedTuple):
    """All figures of some devices.

    Attributes:
        pairs: of every ordered pair of devices.
        groups: of copies out of several devices at once, by labels such as ``GPU0+GPU1``.
        dispatch: seconds of the host for an op, measured twice.
    """

    pairs: Dict[Pair, Copies]
    groups: Dict[str, Copies]
    dispatch: Sequence[float]


def repeated(figures: Sequence[float]) -> Optional[float]:
    """Return the mean of two measurements; None if they differ by more than 25 %, or say nothing."""
    if not figures or min(figures) <= 0 or max(figures) > (1 + REPEATS_WITHIN) * min(figures):
        return None
    return sum(figures) / len(figures)


def measure(devices: Sequence[str], machine: Optional[Topology], tell: Callable[[str], Any]) -> Measured:
    """Copy between every ordered pair of devices, and then out of groups of the machine's matrix all at once.

    Args:
        devices: K ≥ 2 devices of TensorFlow; device k is the machine's k-th.
        machine: the K devices, where the links are known.
        tell: is called with the copies that begin.

    Raises:
        HierAllreduceError: TensorFlow cannot use the devices.
    """
    pairs = list(permutations(devices, 2))
    by_pair = dict(zip(pairs, _ask(devices[0], [[pair] for pair in pairs], tell)))
    names = groups_of(machine) if machine else {}
    tasks = {name: _copies_out(members, devices, by_pair) for name, members in names.items()}
    kept = {name: task for name, task in tasks.items() if len(task) > 1}
    *together, op = _ask(devices[0], [*kept.values(), []], tell)
    return Measured(by_pair, dict(zip(kept, together)), op.start)


def groups_of(machine: Topology) -> Dict[str, List[int]]:
    """Return the groups of devices that may share something: near ones by every kind of PCIe link, and all."""
    groups: Dict[Tuple[int, ...], None] = {}
    for most in range(len(PCIE)):
        near = PCIE[: most + 1]
        for a in range(len(machine)):
            members = tuple(b for b in range(len(machine)) if a == b or machine.kinds[a][b] in near)
            if 1 < len(members) < len(machine):
                groups[members] = None
    named = {"+".join(machine.devices[d] for d in members): list(members) for members in groups}
    return {**named, "host": list(range(len(machine)))}


def _copies_out(members: Sequence[int], devices: Sequence[str], pairs: Dict[Pair, Copies]) -> List[Pair]:
    """Return a copy out of every device of a group: to devices outside of it, or around if it has all."""
    outside = [d for d in range(len(devices)) if d not in members]
    chosen = []
    for number, src in enumerate(members):
        dst = outside[number % len(outside)] if outside else members[(number + 1) % len(members)]
        pair = (devices[src], devices[dst])
        if not pairs[pair].fault:
            chosen.append(pair)
    return chosen


def with_figures(machine: Topology, devices: Sequence[str], found: Measured) -> Topology:
    """Return a machine with the figures that repeat: ``links``, ``starts``, ``shared`` and ``speeds.dispatch``.

    A group shares something if its copies together are slower than alone by a tenth. Pairs whose bits differ are left
    out.
    """
    label = dict(zip(devices, machine.devices))
    usable = {pair: copies for pair, copies in found.pairs.items() if not (copies.fault or copies.differ)}
    links, starts, shared = dict(machine.links), dict(machine.starts), dict(machine.shared)
    for (src, dst), copies in usable.items():
        for figures, into in ((copies.rate, links), (copies.start, starts)):
            figure = repeated(figures)
            if figure is not None:
                into[f"{label[src]}-{label[dst]}"] = float(f"{figure:.3g}")
    for name, copies in found.groups.items():
        rate, members = repeated(copies.rate), groups_of(machine)[name]
        pairs = [pair for pair in _copies_out(members, devices, found.pairs) if pair in usable]
        alone = sum(repeated(usable[pair].rate) or 0.0 for pair in pairs)
        if rate is not None and alone and rate < _LIMITED * alone:
            shared[name] = float(f"{rate:.3g}")
    dispatch = repeated(found.dispatch)
    speeds = machine.speeds if dispatch is None else replace(machine.speeds, dispatch=float(f"{dispatch:.3g}"))
    by_key = [tuple(numbers.items()) for numbers in (links, starts, shared)]
    return replace(machine, speeds=speeds, links=by_key[0], starts=by_key[1], shared=by_key[2])


def _ask(first: str, tasks: Sequence[List[Pair]], tell: Callable[[str], Any]) -> List[Copies]:
    """Return figures for every task, or a fault; a process that hangs or dies is replaced by a new one."""
    found: List[Copies] = []
    while len(found) < len(tasks):
        with _Process(first, tasks[len(found) :]) as process:
            for task in tasks[len(found) :]:
                tell(", ".join(f"{src} → {dst}" for src, dst in task) or f"ops on {first}")
                found.append(Copies(**process.line(LIMIT)))
                if found[-1].fault:
                    break
    return found


class _Process:
    """A process of :mod:`.copies`; the end of the ``with`` block ends it."""

    def __init__(self, first: str, tasks: Sequence[List[Pair]]):
        text = json.dumps({"first": first, "big": BIG, "tasks": list(tasks)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.copies", text],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._lines: Any = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        ready = self.line(START)
        if "fault" in ready:
            self.__exit__()
            raise HierAllreduceError(f"TensorFlow cannot use {first}: {ready['fault']}")

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        errors = (self._process.stderr.read() if self._process.stderr else b"").decode("utf-8", "replace").split("\n")
        told = [line.strip() for line in errors if "Error" in line] or ["no message"]
        self._lines.put(json.dumps({"fault": f"the process ended: {told[-1][:150]}"}))

    def line(self, seconds: float) -> Dict[str, Any]:
        """Return the next answer, or a fault after so many seconds."""
        try:
            answer: Dict[str, Any] = json.loads(self._lines.get(timeout=seconds))
        except queue.Empty:
            return {"fault": f"no answer for {seconds:.0f} s"}
        return answer

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
