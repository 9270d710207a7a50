"""One traced step: what ran on each tower, when, and what for.

::

    processor   scheduled ─► start ── launch ──► end                        a node
    GPU                                  begin ── kernel, copy ──► end      what runs for it

TensorFlow writes both into ``RunMetadata.step_stats``. Its executor knows the nodes; CUPTI knows
the kernels and copies of GPUs, and calls them by their nodes. On a CPU device a node is its own
kernel, and there are no copies, because devices read each other's memory. All times are ms after
the first kernel of the step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from hier_allreduce import AllReduce, AuditError

# Kinds of nodes. A copy is no node, but has a kind, because it has a color in the picture too.
PASS, PACK, SUM, UNPACK, UPDATE, COPY = "pass", "pack", "sum", "unpack", "update", "copy"

_LABEL = re.compile(r" = \w+\((.*)\)$", re.DOTALL)
_STREAM = re.compile(r"(?:.*/)?device:GPU:\d+/stream:\d+(?:<.*>)?$", re.IGNORECASE)
_NUMBERED = re.compile(r"(.+)/_(\d+)$")  # a _Send or _Recv
_SIZE = re.compile(r"\b(?:size|bytes):(\d+)")  # CUDA says size, ROCm bytes
_TRANSFERS = ("_Send", "_HostSend", "_Recv", "_HostRecv")

Edges = Dict[str, List[str]]
# What a node reads: the node whose result it is, and the number in the name of the _Recv that
# brings it from another device; 0 on the same one.
Read = Tuple[str, int]


class Node(NamedTuple):
    """An op that the processor executed."""

    device: str
    reads: Tuple[Read, ...]  # also of nodes for which it only waits
    scheduled: float  # when all of them were there
    start: float  # when the processor began it
    end: float  # when the processor had done it; on a GPU it was launched then


class Kernel(NamedTuple):
    """What ran for a node on its device."""

    node: str
    begin: float
    end: float


class TowerCopy(NamedTuple):
    """A copy from tower ``src`` to tower ``dst``."""

    src: int
    dst: int
    node: str  # whose result it is
    readers: Tuple[str, ...]  # the nodes that read it on dst
    begin: float
    end: float
    bytes: int


class Step:
    """The step of K towers, from the ``step_stats`` of a RunMetadata.

    Raises:
        AuditError: the step, or the streams of its GPUs, were not traced; or it ran none of the
            all-reduces.
    """

    nodes: Dict[str, Node]
    sources: Edges  # of each node: those whose results it reads
    readers: Edges  # of each node: those that read its own
    kernels: Dict[str, List[Kernel]]  # by device, in order of their begin
    ends: Dict[str, float]  # when the last kernel of each node ended; views have none
    devices: List[str]  # of the towers, as executed; towers that share one are one
    copies: List[TowerCopy]  # between towers, in order of their begin
    arrivals: Dict[Read, float]  # of copies
    kinds: Dict[str, str]  # what nodes are for, but those of the pass
    gradients: Set[str]  # the nodes that only the towers' passes need

    def __init__(self, step_stats: Any, all_reduces: Sequence[AllReduce]):
        executed: Dict[str, Tuple[Any, str]] = {}
        streams: List[Any] = []
        for part in step_stats.dev_stats:
            if part.device.startswith("/job:"):
                executed.update({ran.node_name: (ran, part.device) for ran in part.node_stats})
            elif _STREAM.match(part.device):
                streams += part.node_stats
        # Times begin with a GPU's first kernel, because the processor may begin long before.
        kernels = [ran for ran in streams if _split(ran)[1] not in _TRANSFERS]
        first = kernels or [ran for ran, _ in executed.values()]
        self._zero = min((ran.all_start_micros for ran in first), default=0)
        self._read_nodes(executed)
        self._read_kernels(kernels)
        self.all_reduces = []
        for built in all_reduces:
            if any(node.startswith(built.scope) for node in executed):
                self.all_reduces.append(built)
        self._of_gradients: Any = self._find_of_gradients()
        self.devices = self._devices()
        self._read_copies(ran for ran in streams if _split(ran)[1] == "_Send")
        self._classify()

    def kind(self, node: str) -> str:
        """Return what a node is for."""
        return self.kinds.get(node, PASS)

    def tower(self, node: str) -> Optional[int]:
        """Return the tower on whose device a node ran; None for other devices."""
        device = self.nodes[node].device
        return self.devices.index(device) if device in self.devices else None

    # ---- what ran ------------------------------------------------------------------------------

    def _ms(self, micros: int) -> float:
        return (micros - self._zero) / 1e3

    def _read_nodes(self, executed: Dict[str, Tuple[Any, str]]) -> None:
        self.nodes = {}
        self.sources = {}
        self.readers = {name: [] for name in executed}
        for name, (ran, device) in executed.items():
            label = _LABEL.search(ran.timeline_label)
            inputs = label[1].split(", ") if label else []
            reads = []
            self.sources[name] = []
            for label_of_input in inputs:
                source = label_of_input.lstrip("^").split(":")[0]
                # What another device sends is named by its _Recv, which is no executed node itself.
                read = (source, 0) if source in executed else _numbered(source)
                if read[0] not in executed:
                    continue
                reads.append(read)
                if not label_of_input.startswith("^"):  # a node for which it only waits
                    self.sources[name].append(read[0])
                    self.readers[read[0]].append(name)
            begin = ran.all_start_micros
            scheduled = self._ms(min(ran.scheduled_micros or begin, begin))
            start = self._ms(begin + ran.op_start_rel_micros)
            end = self._ms(begin + ran.op_end_rel_micros)
            self.nodes[name] = Node(device, tuple(reads), scheduled, start, end)

    def _read_kernels(self, kernels: Iterable[Any]) -> None:
        self.kernels = defaultdict(list)
        for ran in kernels:
            name = _split(ran)[0]
            begin = self._ms(ran.all_start_micros)
            if name in self.nodes:
                kernel = Kernel(name, begin, begin + ran.all_end_rel_micros / 1e3)
                self.kernels[self.nodes[name].device].append(kernel)
        for name, node in self.nodes.items():
            if not is_gpu(node.device):
                self.kernels[node.device].append(Kernel(name, node.start, node.end))
        self.ends = {}
        for of_device in self.kernels.values():
            of_device.sort(key=lambda kernel: kernel.begin)
            for kernel in of_device:
                self.ends[kernel.node] = max(kernel.end, self.ends.get(kernel.node, kernel.end))

    def _read_copies(self, sends: Iterable[Any]) -> None:
        # A copy's destination is the tower of its readers, because no node of a trace is the copy.
        nodes_by_read: Dict[Read, List[str]] = defaultdict(list)
        for name, node in self.nodes.items():
            for read in node.reads:
                nodes_by_read[read].append(name)
        self.arrivals = {}
        self.copies = []
        for ran in sends:
            source, number = _numbered(_split(ran)[0])
            read = source, number + 1  # TensorFlow numbers a _Recv right after its _Send
            readers = tuple(nodes_by_read[read])
            if not readers:
                continue
            begin = self._ms(ran.all_start_micros)
            self.arrivals[read] = end = begin + ran.all_end_rel_micros / 1e3
            size = _SIZE.search(ran.timeline_label)
            src, dst = self.tower(source), self.tower(readers[0])
            if src is not None and dst is not None:
                times = (begin, end, int(size[1]) if size else 0)
                self.copies.append(TowerCopy(src, dst, source, readers, *times))
        self.copies.sort(key=lambda copy: copy.begin)

    def _devices(self) -> List[str]:
        """Return the executed devices of the towers."""
        if self.nodes and not self.all_reduces:
            raise AuditError(
                "the run has no all-reduce of several towers of this graph: fetch the updates; or"
                " it is not ours, or its devices are functions"
            )
        device_by_tower: Dict[int, str] = {}
        for device, kernels in self.kernels.items():
            tower = self._of_gradients.tower_at(device)
            if kernels and tower is not None:
                device_by_tower[tower] = device
        if not device_by_tower:
            raise AuditError(
                "the trace has no kernel on a tower's device: fetch the updates, and run the step"
                " with options=tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions"
                ".FULL_TRACE); if you did, TensorFlow could not use CUPTI, and its log says why"
                " (another profiler runs, or the user may not read the GPU's counters)"
            )
        return [device_by_tower[tower] for tower in sorted(device_by_tower)]

    # ---- what it was for -----------------------------------------------------------------------

    def _find_of_gradients(self) -> Optional[AllReduce]:
        """Return the gradients' all-reduce, the largest that no other one needs; None without any.

        Others are of losses, or of statistics.
        """
        needed: Set[str] = set()
        for built in self.all_reduces:
            needed |= reached(self._sums_of(built), self.sources)

        def rank(built: AllReduce) -> Tuple[int, bool, int]:
            # Gradients need the sums of the forward pass, which may be more, and more bytes.
            is_last = not needed & self._sums_of(built)
            size = sum(tensor.bytes or 0 for tensor in built.tensors)
            return len(built.devices), is_last, size

        # Of two alike it is the later one.
        return max(reversed(self.all_reduces), key=rank, default=None)

    def _sums_of(self, built: AllReduce) -> Set[str]:
        """Return the nodes of an all-reduce's sums, or all of its nodes if no sum ran."""
        own = {node for node in self.nodes if node.startswith(built.scope)}
        return {node for node in own if built.is_of_sum(node)} or own

    def _classify(self) -> None:
        """Find the kinds of nodes by the names of our ops, and the gradients' nodes."""
        ours: Set[str] = set()
        sums: Set[str] = set()
        for built in self.all_reduces:
            ours |= {node for node in self.nodes if node.startswith(built.scope)}
            sums |= self._sums_of(built)
        # Sums that the gradients' ones need, such as those of statistics, are part of the pass.
        scope = self._of_gradients.scope
        in_pass = reached((node for node in sums if node.startswith(scope)), self.sources)
        before = reached(sums - in_pass, self.sources)
        after = reached(sums - in_pass, self.readers)
        # A node may be in several of these sets, of which the last one counts.
        self.kinds = dict.fromkeys(after, UPDATE)
        self.kinds.update({node: PACK if node in before else UNPACK for node in ours})
        self.kinds.update(dict.fromkeys(sums, SUM))
        self.gradients = before - ours - after


def is_gpu(device: str) -> bool:
    """Return whether an executed device is a GPU."""
    return ":GPU:" in device


def _split(ran: Any) -> Tuple[str, str]:
    """Return the node for which something ran, and its op."""
    node_name, _, op = ran.node_name.rpartition(":")
    return node_name, op


def _numbered(name: str) -> Read:
    """Return the node, and the number, in the name of a ``_Send`` or ``_Recv``; 0 for others."""
    parts = _NUMBERED.match(name)
    return (parts[1], int(parts[2])) if parts else (name, 0)


def reached(names: Iterable[str], edges: Edges) -> Set[str]:
    """Return the nodes to which edges lead from ``names``, without these."""
    starts = set(names)
    ends: Set[str] = set()
    waiting = list(starts)
    while waiting:
        new = set(edges[waiting.pop()]) - ends
        ends |= new
        waiting += new
    return ends - starts
