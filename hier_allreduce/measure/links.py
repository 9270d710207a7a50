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
from itertools import cycle, permutations
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from tqdm import tqdm

from ..errors import HierAllreduceError
from ..topology import PCIE, Topology

Pair = Tuple[str, str]
START = 180.0  # seconds until TensorFlow has the devices
LIMIT = 10.0  # seconds for all figures of a pair
REPEATS_WITHIN = 0.25  # of each other: two measurements of one figure
_LIMITED = 0.9  # of the copies' speeds alone: a group below it shares something


class Copies(NamedTuple):
    """The figures of copies that run at once, each measured twice, or the reason that there are none."""

    pairs: Sequence[Pair] = ()
    differ: int = 0  # bytes that arrive changed
    rate: Sequence[float] = ()  # bytes/s of all together
    start: Sequence[float] = ()  # seconds to start a copy, or an op with the same device twice
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
    """Copy between every ordered pair of devices, then out of groups of the machine's matrix all at once; show a bar.

    Args:
        devices: K ≥ 2 devices of TensorFlow; device k is the machine's k-th.
        machine: the K devices, where the links are known.

    Raises:
        HierAllreduceError: TensorFlow cannot use the devices.
    """
    pairs = list(permutations(devices, 2))
    groups = {}
    for name, members in (_groups_of(machine) if machine else {}).items():
        outside = [k for k in range(len(devices)) if k not in members]
        ends = cycle(outside or [*members[1:], members[0]])
        groups[name] = [(devices[src], devices[dst]) for src, dst in zip(members, ends)]
    tasks = [*([pair] for pair in pairs), *groups.values(), [(devices[0], devices[0])]]
    *found, op = tqdm(_ask(devices[0], tasks), "copies", len(tasks), disable=None)
    return Measured(dict(zip(pairs, found)), dict(zip(groups, found[len(pairs) :])), op)


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
        together, alone = (
            repeated(copies.rate),
            [repeated(found.pairs[pair].rate) for pair in copies.pairs],
        )
        if (
            together is not None
            and None not in alone
            and together < _LIMITED * sum(filter(None, alone))
        ):
            shared[name] = together
    speeds = replace(machine.speeds, dispatch=repeated(found.op.start) or machine.speeds.dispatch)
    by_key = [tuple(figures.items()) for figures in (links, starts, shared)]
    return replace(machine, speeds=speeds, links=by_key[0], starts=by_key[1], shared=by_key[2])


def _ask(first: str, tasks: List[List[Pair]]) -> Iterator[Copies]:
    """Yield figures for every task, or a fault; a process that hangs or dies is replaced by a new one."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    while tasks:
        todo = {"first": first, "start": START, "limit": LIMIT, "tasks": tasks}
        command = [sys.executable, "-m", f"{__package__}.copies", json.dumps(todo)]
        with tempfile.TemporaryFile() as errors, subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process:
            lines: Any = process.stdout
            if not lines.readline():
                raise HierAllreduceError(
                    f"TensorFlow cannot use {first}: {_fault(process, errors, START)}"
                )
            line = b"{}"
            while tasks and line:
                line, task, tasks = lines.readline(), tasks[0], tasks[1:]
                yield (
                    Copies(task, **json.loads(line))
                    if line
                    else Copies(task, fault=_fault(process, errors, LIMIT))
                )
            process.kill()  # the end of TensorFlow may hang, too


def _fault(process: Any, errors: Any, limit: float) -> str:
    """Return why a process has ended."""
    process.wait()
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").split("\n")
    if any(line.startswith("Timeout (") for line in lines):
        return f"no answer for {limit:g} s"
    told = [line.strip() for line in lines if "Error" in line] or ["no message"]
    return f"the process ended: {told[-1][:150]}"
