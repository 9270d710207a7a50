"""A traced step in the terms of an all-reduce: towers, kinds of nodes, copies between towers."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..errors import AuditError
from ..graph.devices import device_fields, devices_match
from ..graph.record import AllReduce
from .executed import check_devices
from .trace import Trace, reached

# kinds of nodes; a copy is no node, but has a colour in the picture too
PASS, PACK, SUM, UNPACK, UPDATE, COPY = "pass", "pack", "sum", "unpack", "update", "copy"

_SUM = re.compile(r"(^|_)(sum|mean|across|gather|sent|widened)(_\d+)?$")  # Grappler adds prefixes
_UPDATE = re.compile(r"(Resource)?(Sparse)?Apply")
_REDUCING = re.compile(r"Nccl|Collective")


class TowerCopy(NamedTuple):
    """A copy between towers. Times are ms after the first kernel of the step.

    Attributes:
        src, dst: towers.
        node: whose result it is.
        readers: the nodes that read it on ``dst``.
        begin, end: its time.
        bytes: its size.
    """

    src: int
    dst: int
    node: str
    readers: Tuple[str, ...]
    begin: float
    end: float
    bytes: int


class TracedStep:
    """A traced step.

    Attributes:
        trace: it.
        all_reduces: of this package, that ran in it.
        devices: of the towers, as executed. Towers that share a device are the first of them.
        gradients: the nodes that only the towers' passes need.
        copies: between towers.
        ends: when the last kernel of each node ended; ms.
    """

    def __init__(self, trace: Trace, all_reduces: Sequence[AllReduce]):
        self.trace = trace
        self.all_reduces = []
        for built in all_reduces:
            if any(name.startswith(built.scope) for name in trace.nodes):
                check_devices(built)
                self.all_reduces.append(built)
        self.devices = self._devices()
        self._tower_on = {device: tower for tower, device in enumerate(self.devices)}
        self.sources = trace.sources()
        self.readers = trace.readers()
        self._kinds: Dict[str, str] = {}
        self.gradients = self._classify_ours() if self.all_reduces else self._classify_others()
        self.copies = list(self._tower_copies())
        self.ends: Dict[str, float] = {}
        for kernels in trace.kernels.values():
            for kernel in kernels:
                self.ends[kernel.node] = max(kernel.end, self.ends.get(kernel.node, kernel.end))

    def kind(self, node: str) -> str:
        """Return what a node is for."""
        return self._kinds.get(node, PASS)

    def tower(self, node: str) -> Optional[int]:
        """Return the tower on whose device a node ran; None for other devices."""
        return self._tower_on.get(self.trace.nodes[node].device)

    def tower_on(self, device: Any) -> int:
        """Return the tower on a device of an all-reduce; 0 if it did not run."""
        for tower, executed in enumerate(self.devices):
            if devices_match(executed, device):
                return tower
        return 0

    # ---- towers ----------------------------------------------------------------------------------

    def _devices(self) -> List[str]:
        """Return the executed devices of the towers."""
        ran = sorted(device for device, kernels in self.trace.kernels.items() if kernels)
        if not self.all_reduces:
            on_gpus = [device for device in ran if "GPU:" in device]
            return sorted(on_gpus or ran, key=lambda device: device_fields(device)[4] or 0)
        largest = max(self.all_reduces, key=lambda built: len(built.devices))
        by_tower: Dict[int, str] = {}
        for device in ran:
            matching = [
                tower
                for tower, wanted in enumerate(largest.devices)
                if devices_match(device, wanted)
            ]
            if matching:  # of "" and "/cpu:1" the one that says most
                by_tower.setdefault(max(matching, key=lambda k: _said(largest.devices[k])), device)
        if not by_tower:
            raise AuditError("no kernel ran on a tower's device; fetch the updates of the towers")
        return [device for _, device in sorted(by_tower.items())]

    # ---- kinds -----------------------------------------------------------------------------------

    def _classify_ours(self) -> Set[str]:
        """Find the kinds of nodes by the names of our ops, and return the gradients' nodes."""
        scopes = tuple(built.scope for built in self.all_reduces)
        ours = {name for name in self.trace.nodes if name.startswith(scopes)}
        sums = {name for name in ours if _SUM.search(name.rpartition("/")[2])} or ours
        before = reached(sums, self.sources)
        after = reached(sums, self.readers)
        for name in after:
            self._kinds[name] = UPDATE
        for name in ours:
            self._kinds[name] = PACK if name in before else UNPACK
        for name in sums:
            self._kinds[name] = SUM
        return before - ours - after

    def _classify_others(self) -> Set[str]:
        """Do so for another all-reduce: it begins where a tower reads from another one."""
        updates = {name for name, node in self.trace.nodes.items() if _UPDATE.match(node.op)}
        needed = reached(updates, self.sources)
        begun = {name for name in needed | updates if self._reads_another_tower(name)} - updates
        after = reached(begun, self.readers)
        for name in begun | after:
            self._kinds[name] = SUM
        for name in updates:
            self._kinds[name] = UPDATE
        return reached(begun or updates, self.sources) - begun - after - updates

    def _reads_another_tower(self, name: str) -> bool:
        node = self.trace.nodes[name]
        if _REDUCING.match(node.op):
            return True
        for read in node.inputs:
            if read.receive and not read.is_control and self.tower(read.node) is not None:
                return True
        return False

    # ---- copies ----------------------------------------------------------------------------------

    def _tower_copies(self) -> Iterator[TowerCopy]:
        reading: Dict[Tuple[str, int], List[str]] = {}
        for name, node in self.trace.nodes.items():
            for read in node.inputs:
                if read.receive:
                    reading.setdefault((read.node, read.receive), []).append(name)
        for copy in self.trace.copies:
            readers = tuple(reading.get((copy.node, copy.receive), ()))
            src = self.tower(copy.node)
            dst = self.tower(readers[0]) if readers else None
            if src is not None and dst is not None:
                yield TowerCopy(src, dst, copy.node, readers, copy.begin, copy.end, copy.bytes)


def _said(device: Any) -> int:
    """Return how many fields a device's name says."""
    return sum(field is not None for field in device_fields(device))
