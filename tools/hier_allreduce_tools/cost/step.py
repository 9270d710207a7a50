"""One traced step: what ran on each tower, when, and what for.

::

    processor   scheduled ─► launch ──► end                                 a node
    GPU                                  begin ── kernel, copy ──► end      what runs for it

TensorFlow writes both into ``RunMetadata.step_stats``. Its executor knows the nodes; CUPTI knows
the kernels and copies of GPUs, and calls them by their nodes. On a CPU device a node is its own
kernel, and there are no copies, because devices read each other's memory. All times are ms after
the first kernel of the step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Dict, Iterable, List, NamedTuple, Set, Tuple

from hier_allreduce import AllReduce, AuditError

# What nodes are for, as it is printed. A copy is no node, but has a color in the picture too.
PASS, COPY = "pass and other kernels", "copies that it sends"
PACK, SUM, UNPACK, UPDATE = "packing", "sums", "unpacking", "updates"

_LABEL = re.compile(r" = \w+\((.*)\)$", re.DOTALL)
_STREAM = re.compile(r"(?:.*/)?device:GPU:\d+/stream:\d+(?:<.*>)?$", re.IGNORECASE)
_NUMBER = re.compile(r"/_\d+$")  # behind the node in the name of a _Recv
_SEND = re.compile(r"(.+)/_(\d+):_Send$")
_SIZE = re.compile(r"\b(?:size|bytes):(\d+)")  # CUDA says size, ROCm bytes
_TRANSFERS = (":_Send", ":_HostSend", ":_Recv", ":_HostRecv")


class Node(NamedTuple):
    """An op that the processor executed."""

    device: str
    # By what it waits for, the node whose result that is. What comes from another device has the
    # name of the _Recv that brings it, which is no executed node itself.
    waits: Dict[str, str]
    scheduled: float  # when all of them were there
    end: float  # when the processor had done it; on a GPU it was launched then


Edges = Dict[str, List[str]]


class Kernel(NamedTuple):
    """What ran for a node on its device."""

    begin: float
    end: float
    node: str


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
    kinds: Dict[str, str]  # what nodes are for
    gradients: Set[str]  # the nodes that the sums of gradients need
    towers: Dict[str, int]  # by executed device; towers that share one are one
    # Begin, end and bytes of copies, by the towers that send and receive them.
    copies: Dict[Tuple[int, int], List[Tuple[float, float, int]]]
    arrivals: Dict[str, float]  # of copies, by the name of their _Recv

    def __init__(self, step_stats: Any, all_reduces: Iterable[AllReduce]):
        executed: Dict[str, Tuple[Any, str]] = {}
        streams: List[Any] = []
        for part in step_stats.dev_stats:
            if part.device.startswith("/job:"):
                executed.update({ran.node_name: (ran, part.device) for ran in part.node_stats})
            elif _STREAM.match(part.device):
                streams += part.node_stats
        # Times begin with a GPU's first kernel, because the processor may begin long before.
        kernels = [ran for ran in streams if not ran.node_name.endswith(_TRANSFERS)]
        first = kernels or [ran for ran, _ in executed.values()]
        self._zero = min((ran.all_start_micros for ran in first), default=0)
        self.kernels = defaultdict(list)
        self._read_nodes(executed)
        self._read_kernels(kernels)
        self._classify(all_reduces)
        self._read_copies(streams)

    # ---- what ran ------------------------------------------------------------------------------

    def _ms(self, micros: int) -> float:
        return (micros - self._zero) / 1e3

    def _times(self, ran: Any) -> Tuple[float, float]:
        """Return when a kernel or a copy began and ended."""
        begin = self._ms(ran.all_start_micros)
        return begin, begin + ran.all_end_rel_micros / 1e3

    def _read_nodes(self, executed: Dict[str, Tuple[Any, str]]) -> None:
        self.nodes = {}
        self.sources = {name: [] for name in executed}
        self.readers = {name: [] for name in executed}
        for name, (ran, device) in executed.items():
            label = _LABEL.search(ran.timeline_label)
            waits: Dict[str, str] = {}
            for written in label[1].split(", ") if label else []:
                awaited = written.lstrip("^").split(":")[0]
                source = awaited if awaited in executed else _NUMBER.sub("", awaited)
                if source not in executed:
                    continue
                waits[awaited] = source
                if not written.startswith("^"):  # a control edge
                    self.sources[name].append(source)
                    self.readers[source].append(name)
            begin = ran.all_start_micros
            scheduled = self._ms(min(ran.scheduled_micros or begin, begin))
            end = self._ms(begin + ran.op_end_rel_micros)
            self.nodes[name] = Node(device, waits, scheduled, end)
            if not is_gpu(device):
                start = self._ms(begin + ran.op_start_rel_micros)
                self.kernels[device].append(Kernel(start, end, name))

    def _read_kernels(self, kernels: Iterable[Any]) -> None:
        for ran in kernels:
            name = ran.node_name.rpartition(":")[0]
            if name in self.nodes:
                self.kernels[self.nodes[name].device].append(Kernel(*self._times(ran), name))
        for of_device in self.kernels.values():
            of_device.sort()

    def _read_copies(self, streams: Iterable[Any]) -> None:
        # A copy's destination is the device that waits for it, because no node is the copy.
        device_by_awaited: Dict[str, str] = {}
        for node in self.nodes.values():
            device_by_awaited.update(dict.fromkeys(node.waits, node.device))
        self.arrivals = {}
        self.copies = defaultdict(list)
        for ran in streams:
            send = _SEND.match(ran.node_name)
            # TensorFlow numbers a _Recv right after its _Send.
            received = f"{send[1]}/_{int(send[2]) + 1}" if send else ""
            if send is None or received not in device_by_awaited:
                continue
            begin, end = self._times(ran)
            self.arrivals[received] = end
            src = self.towers.get(self.nodes[send[1]].device)
            dst = self.towers.get(device_by_awaited[received])
            if src is not None and dst is not None:
                size = _SIZE.search(ran.timeline_label)
                self.copies[src, dst].append((begin, end, int(size[1]) if size else 0))

    # ---- what it was for -----------------------------------------------------------------------

    def _classify(self, all_reduces: Iterable[AllReduce]) -> None:
        """Find the towers, and the kinds of nodes by the names of our ops."""
        ours: Set[str] = set()
        sums: Set[str] = set()
        needed: Set[str] = set()
        tower_by_device: Dict[str, int] = {}
        for built in all_reduces:
            own = {node for node in self.nodes if node.startswith(built.scope)}
            own_sums = set(filter(built.is_of_sum, own))
            # Copies of variables have no sum. A trace cannot tell which device a function chose.
            if not own_sums or any(map(callable, built.devices)):
                continue
            ours |= own
            sums |= own_sums
            needed |= reached(own_sums, self.sources)
            for device in self.kernels:
                tower = built.tower_at(device)
                if tower is not None:
                    tower_by_device[device] = tower
        if not tower_by_device:
            raise AuditError(
                "the trace has no sum of an all-reduce of this graph, or no kernel on a tower's"
                " device: fetch the updates, and run the step with options=tf.compat.v1.RunOptions"
                "(trace_level=tf.compat.v1.RunOptions.FULL_TRACE). Of devices that are functions"
                " nothing is known here. If TensorFlow could not use CUPTI, its log says why"
                " (another profiler runs, or the user may not read the GPU's counters)"
            )
        ordered = sorted(tower_by_device, key=tower_by_device.__getitem__)
        self.towers = {device: tower for tower, device in enumerate(ordered)}
        # Sums that other ones need, such as those of statistics, are part of the pass.
        before = reached(sums - needed, self.sources)
        after = reached(sums - needed, self.readers)
        self.gradients = before - ours - after
        # A node may be in several of these sets, of which the last one counts.
        self.kinds = dict.fromkeys(self.nodes, PASS)
        for kind, nodes in ((UPDATE, after), (UNPACK, ours), (PACK, ours & before), (SUM, sums)):
            self.kinds.update(dict.fromkeys(nodes, kind))


def is_gpu(device: str) -> bool:
    """Return whether an executed device is a GPU."""
    return ":GPU:" in device


def reached(starts: Set[str], edges: Edges) -> Set[str]:
    """Return the nodes to which edges lead from others, without these."""
    ends: Set[str] = set()
    waiting = list(starts)
    while waiting:
        new = set(edges[waiting.pop()]) - ends
        ends |= new
        waiting += new
    return ends - starts
