"""A traced step in the terms of an all-reduce: towers, kinds of nodes, copies between towers."""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from hier_allreduce.errors import AuditError
from hier_allreduce.graph.devices import device_fields, devices_match, is_gpu
from hier_allreduce.graph.record import AllReduce
from hier_allreduce.auditing.traffic import check_devices, tower_at
from .trace import Trace, reached

# Kinds of nodes. A copy is no node, but has a kind, because it has a color in the picture too.
PASS, PACK, SUM, UNPACK, UPDATE, COPY = "pass", "pack", "sum", "unpack", "update", "copy"

# Grappler adds prefixes, and a sum over hosts is several ops.
_SUM = re.compile(r"((^|[/_])(column|sum|mean|gather|sent)(_\d+)?|/across/[^/]+)$")
_UPDATE = re.compile(r"(Resource)?(Sparse)?Apply")
_REDUCING = re.compile(r"Nccl|Collective")


class TowerCopy(NamedTuple):
    """A copy between towers. Times are ms after the first kernel of the step.

    Attributes:
        src, dst: towers.
        node: the one whose result it is.
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
        trace: what ran, and when.
        all_reduces: those of this package that ran in it.
        devices: the towers' devices, as executed. Towers that share one are the first of them.
        gradients: the nodes that only the towers' passes need.
        copies: between towers.
        ends: the ms when the last kernel of each node ended.
    """

    def __init__(self, trace: Trace, all_reduces: Sequence[AllReduce]):
        self.trace = trace
        self.all_reduces = []
        for built in all_reduces:
            if any(node.startswith(built.scope) for node in trace.nodes):
                check_devices(built)
                self.all_reduces.append(built)
        self.devices = self._devices()
        self._tower_by_device = {device: tower for tower, device in enumerate(self.devices)}
        self._kind_by_node: Dict[str, str] = {}
        self.gradients = self._classify_ours() if self.all_reduces else self._classify_others()
        # A copy's destination is the tower of its readers, because no node of a trace is the copy.
        readers_by_receive: Dict[Tuple[str, int], List[str]] = {}
        for reader, node in trace.nodes.items():
            for read in node.inputs:
                if read.receive:
                    readers_by_receive.setdefault((read.node, read.receive), []).append(reader)
        self.copies: List[TowerCopy] = []
        for copy in trace.copies:
            readers = tuple(readers_by_receive.get((copy.node, copy.receive), ()))
            src = self.tower(copy.node)
            dst = self.tower(readers[0]) if readers else None
            if src is not None and dst is not None:
                self.copies.append(
                    TowerCopy(src, dst, copy.node, readers, copy.begin, copy.end, copy.bytes)
                )
        # A node may have several kernels, and its result is there when the last one has ended.
        self.ends: Dict[str, float] = {}
        for kernels in trace.kernels.values():
            for kernel in kernels:
                self.ends[kernel.node] = max(kernel.end, self.ends.get(kernel.node, kernel.end))

    def kind(self, node: str) -> str:
        """Return what a node is for."""
        return self._kind_by_node.get(node, PASS)

    def tower(self, node: str) -> Optional[int]:
        """Return the tower on whose device a node ran; None for other devices."""
        return self._tower_by_device.get(self.trace.nodes[node].device)

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
            # Without a record of ours all GPUs are towers, and CPU devices if there are none.
            towers = [device for device in ran if is_gpu(device)] or ran
            return sorted(towers, key=lambda device: device_fields(device).device_index or 0)
        # Small all-reduces, such as those of losses, may be of fewer towers than the gradients'.
        largest = max(self.all_reduces, key=lambda built: len(built.devices))
        device_by_tower: Dict[int, str] = {}
        for device in ran:
            tower = tower_at(device, largest.devices)
            if tower is not None:
                device_by_tower.setdefault(tower, device)
        if not device_by_tower:
            raise AuditError("no kernel ran on a tower's device; fetch the updates of the towers")
        return [device_by_tower[tower] for tower in sorted(device_by_tower)]

    # ---- kinds -----------------------------------------------------------------------------------

    def _classify_ours(self) -> Set[str]:
        """Find the kinds of nodes by the names of our ops, and return the gradients' nodes."""
        scopes = tuple(built.scope for built in self.all_reduces)
        ours = {node for node in self.trace.nodes if node.startswith(scopes)}
        sums = {node for node in ours if _SUM.search(node)} or ours
        before = reached(sums, self.trace.sources)
        after = reached(sums, self.trace.readers)
        # A node may be in several of these sets, of which the last one counts.
        kinds = self._kind_by_node
        kinds.update(dict.fromkeys(after, UPDATE))
        kinds.update({node: PACK if node in before else UNPACK for node in ours})
        kinds.update(dict.fromkeys(sums, SUM))
        return before - ours - after

    def _classify_others(self) -> Set[str]:
        """Do so for another all-reduce: it begins where a tower reads from another one."""
        nodes = self.trace.nodes
        updates = {update for update, node in nodes.items() if _UPDATE.match(node.op)}
        needed = reached(updates, self.trace.sources)
        begun = {node for node in needed | updates if self._reads_another_tower(node)} - updates
        after = reached(begun, self.trace.readers)
        kinds = self._kind_by_node
        kinds.update(dict.fromkeys(begun | after, SUM))
        kinds.update(dict.fromkeys(updates, UPDATE))
        return reached(begun or updates, self.trace.sources) - begun - after - updates

    def _reads_another_tower(self, reader: str) -> bool:
        node = self.trace.nodes[reader]
        # A collective has no input from another device, because it exchanges values itself.
        if _REDUCING.match(node.op):
            return True
        for read in node.inputs:
            if read.receive and not read.is_control and self.tower(read.node) is not None:
                return True
        return False
