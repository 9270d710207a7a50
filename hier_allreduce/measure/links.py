"""A machine's copies, measured in processes that end when a copy takes longer than 10 seconds.

::

    devices ─► pairs, groups ─► copies (a process) ─► Measured ─► report, or Topology with measured links
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import permutations
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..errors import HierAllreduceError
from ..topology import PCIE, Topology

Pair = Tuple[str, str]
START = 180.0  # seconds until TensorFlow has the devices
LIMIT = 10.0  # seconds for all figures of a pair
REPEATS_WITHIN = 0.25  # of each other: two measurements of one figure
_LIMITED = 0.9  # of the copies' speeds alone: a group below it shares something


class Copies(NamedTuple):
    """The figures of copies that run at once, or the reason that there are none.

    Attributes:
        pairs: the copies, from one device to another.
        differ: bytes that arrive changed.
        rate: bytes/s of all together, measured twice.
        start: seconds to start a copy, or an op with the same device twice, measured twice.
        fault: the reason that nothing was measured.
    """

    pairs: Sequence[Pair] = ()
    differ: int = 0
    rate: Sequence[float] = ()
    start: Sequence[float] = ()
    fault: str = ""


class Measured(NamedTuple):
    """Copies by the ordered pair of devices, copies out of groups by their label, and the host's ops."""

    pairs: Dict[Pair, Copies]
    groups: Dict[str, Copies]
    op: Copies


def repeated(figures: Sequence[float]) -> Optional[float]:
    """Return the mean of two measurements; None if they differ by more than 25 %, or say nothing."""
    if not figures or min(figures) <= 0 or max(figures) > (1 + REPEATS_WITHIN) * min(figures):
        return None
    return float(f"{sum(figures) / len(figures):.3g}")


def measure(devices: Sequence[str], machine: Optional[Topology]) -> Measured:
    """Copy between every ordered pair of devices, and then out of groups of the machine's matrix all at once.

    Args:
        devices: K ≥ 2 devices of TensorFlow; device k is the machine's k-th.
        machine: the K devices, where the links are known.

    Raises:
        HierAllreduceError: TensorFlow cannot use the devices.
    """
    pairs = list(permutations(devices, 2))
    alone = dict(zip(pairs, _ask(devices[0], [[pair] for pair in pairs])))
    groups = {}
    for name, members in (_groups_of(machine) if machine else {}).items():
        outside = [k for k in range(len(devices)) if k not in members]
        around = [*members[1:], members[0]]
        ends = [outside[n % len(outside)] if outside else around[n] for n in range(len(members))]
        out = [(devices[src], devices[dst]) for src, dst in zip(members, ends)]
        if not any(alone[pair].fault or alone[pair].differ for pair in out):
            groups[name] = out
    *together, op = _ask(devices[0], [*groups.values(), [(devices[0], devices[0])]])
    return Measured(alone, dict(zip(groups, together)), op)


def _groups_of(machine: Topology) -> Dict[str, List[int]]:
    """Return the groups of devices that may share something: near ones by every kind of PCIe link, and all."""
    groups = {}
    for most in range(len(PCIE)):
        for a, kinds in enumerate(machine.kinds):
            members = [b for b, kind in enumerate(kinds) if a == b or kind in PCIE[: most + 1]]
            if 1 < len(members) < len(machine):
                groups["+".join(machine.devices[b] for b in members)] = members
    return {**groups, "host": list(range(len(machine)))}


def with_figures(machine: Topology, devices: Sequence[str], found: Measured) -> Topology:
    """Return a machine with the figures that repeat: ``links``, ``starts``, ``shared`` and ``speeds.dispatch``.

    A group shares something if its copies together are slower than alone by a tenth. Pairs whose bits differ are left
    out.
    """
    label = dict(zip(devices, machine.devices))
    links, starts, shared = dict(machine.links), dict(machine.starts), dict(machine.shared)
    for (src, dst), copies in found.pairs.items():
        for figure, into in ((repeated(copies.rate), links), (repeated(copies.start), starts)):
            if figure is not None and not copies.differ:
                into[f"{label[src]}-{label[dst]}"] = figure
    for name, copies in found.groups.items():
        together, alone = repeated(copies.rate), [repeated(found.pairs[pair].rate) for pair in copies.pairs]
        if together is not None and None not in alone and together < _LIMITED * sum(filter(None, alone)):
            shared[name] = together
    speeds = replace(machine.speeds, dispatch=repeated(found.op.start) or machine.speeds.dispatch)
    by_key = [tuple(figures.items()) for figures in (links, starts, shared)]
    return replace(machine, speeds=speeds, links=by_key[0], starts=by_key[1], shared=by_key[2])


def _ask(first: str, tasks: Sequence[List[Pair]]) -> List[Copies]:
    """Return figures for every task, or a fault; a process that hangs or dies is replaced by a new one.

    Raises:
        HierAllreduceError: TensorFlow cannot use the first device.
    """
    found: List[Copies] = []
    while len(found) < len(tasks):
        todo = {"first": first, "start": START, "limit": LIMIT, "tasks": tasks[len(found) :]}
        command = [sys.executable, "-m", f"{__package__}.copies", json.dumps(todo)]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        with tempfile.TemporaryFile() as errors, subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            lines: Any = process.stdout
            if not lines.readline():
                raise HierAllreduceError(f"TensorFlow cannot use {first}: {_fault(process, errors, START)}")
            for task in tasks[len(found) :]:
                line = lines.readline()
                if not line:
                    found.append(Copies(task, fault=_fault(process, errors, LIMIT)))
                    break
                found.append(Copies(task, **json.loads(line)))
            process.kill()  # the end of TensorFlow may hang, too
    return found


def _fault(process: Any, errors: Any, limit: float) -> str:
    """Return why a process has ended."""
    process.wait()
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").split("\n")
    if any(line.startswith("Timeout (") for line in lines):
        return f"no answer for {limit:g} s"
    told = [line.strip() for line in lines if "Error" in line] or ["no message"]
    return f"the process ended: {told[-1][:150]}"
