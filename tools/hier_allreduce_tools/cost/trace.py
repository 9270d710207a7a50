"""One traced step: what the processor executed, what the devices ran for it, and when.

::

    processor scheduled ─► start ── launch ──► end                      a node
    GPU                                  begin ── kernel, copy ──► end      what runs for it

TensorFlow writes both into ``RunMetadata.step_stats`` if the step has ``FULL_TRACE``. Its executor
knows the nodes; CUPTI knows the kernels and copies, by streams, and calls them by their nodes. On a
CPU device a node is its own kernel.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain
from typing import Any, Container, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from hier_allreduce.errors import AuditError
from hier_allreduce.graph.devices import is_gpu

_LABEL = re.compile(r"(?:\[.*?\] )?\S+ = (\w+)\((.*)\)$", re.DOTALL)
_STREAM = re.compile(r"(?:.*/)?device:GPU:\d+/stream:\d+(?:<.*>)?$", re.IGNORECASE)
_NUMBERED = re.compile(r"(.+)/_(\d+)$")  # a _Send or _Recv
_SIZE = re.compile(r"\b(?:size|bytes):(\d+)")  # CUDA says size, ROCm bytes
_TRANSFERS = ("_Send", "_HostSend", "_Recv", "_HostRecv")
_TRACE = "options=tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)"

Edges = Dict[str, List[str]]


class Input(NamedTuple):
    """A value that a node reads.

    Attributes:
        node: the one whose result it is.
        receive: the number in the name of the ``_Recv`` that brings it from another device; 0 on
            the same device.
        is_control: whether the node only waits for it.
    """

    node: str
    receive: int
    is_control: bool


class Node(NamedTuple):
    """An op that the processor executed. Times are ms after the first kernel of the step.

    Attributes:
        op: its type.
        device: where it was executed.
        inputs: what it reads and what it waits for.
        scheduled: the time when all of these were there.
        start: the time when the processor began it.
        end: the time when the processor had done it; on a GPU it was launched then.
    """

    op: str
    device: str
    inputs: Tuple[Input, ...]
    scheduled: float
    start: float
    end: float


class Kernel(NamedTuple):
    """What ran for a node on its device. Times are ms after the first kernel of the step."""

    node: str
    begin: float
    end: float


class Sent(NamedTuple):
    """A copy to another device. Times are ms after the first kernel of the step.

    Attributes:
        node: the one whose result it is.
        receive: the number in the name of the ``_Recv`` that brings it.
        begin, end: its time.
        bytes: its size.
    """

    node: str
    receive: int
    begin: float
    end: float
    bytes: int


class Trace:
    """A traced step.

    Attributes:
        nodes: the executed ops by name.
        sources: for each node those whose results it reads.
        readers: for each node those that read its result.
        kernels: a list for each device, in order of their begin.
        copies: what went from device to device, in order of its begin. CPU devices make none: they
            read each other's memory.
    """

    def __init__(self, step_stats: Any):
        """Read the ``step_stats`` of a RunMetadata.

        Raises:
            AuditError: the step was not traced, or the streams of its GPUs were not.
        """
        devices = list(step_stats.dev_stats)
        starts = [stats.all_start_micros for device in devices for stats in device.node_stats]
        if not starts:
            raise AuditError(f"the RunMetadata has no trace; run the step with {_TRACE}")
        # Times begin with a GPU's first kernel, because the processor may begin long before.
        streams = [device for device in devices if _STREAM.match(device.device)]
        kernel_starts = chain.from_iterable(map(_kernel_starts, streams))
        self._first_start = min(kernel_starts, default=0) or min(starts)  # µs
        # All names come first, because labels also name inputs that were not executed.
        executed = {
            stats.node_name: (stats, device.device)
            for device in devices
            if device.device.startswith("/job:")  # the others are CUPTI's
            for stats in device.node_stats
        }
        self.nodes: Dict[str, Node] = {}
        self.sources: Edges = {}
        for node_name, (stats, device_name) in executed.items():
            node = self._node(stats, device_name, executed)
            self.nodes[node_name] = node
            self.sources[node_name] = [read.node for read in node.inputs if not read.is_control]
        self.readers: Edges = {node_name: [] for node_name in self.nodes}
        for node_name, sources in self.sources.items():
            for source in sources:
                self.readers[source].append(node_name)
        self.kernels: Dict[str, List[Kernel]] = defaultdict(list)
        self.copies: List[Sent] = []
        for stream in streams:
            self._read_stream(stream)
        self._check_streams()
        # On a CPU device a node is its own kernel, because its thread computes it.
        for node_name, node in self.nodes.items():
            if not is_gpu(node.device):
                self.kernels[node.device].append(Kernel(node_name, node.start, node.end))
        for kernels in self.kernels.values():
            kernels.sort(key=lambda kernel: kernel.begin)
        self.copies.sort(key=lambda copy: copy.begin)

    def _check_streams(self) -> None:
        # Without streams a GPU's time is unknown, because the processor only knows its launches.
        on_gpus = {node.device for node in self.nodes.values() if is_gpu(node.device)}
        if on_gpus and not self.kernels:
            raise AuditError(
                f"the trace has the launches for {min(on_gpus)}, but no stream of a GPU: run the"
                f" step with {_TRACE}; if it was, TensorFlow could not use CUPTI, and its log says"
                " why (another profiler runs, or the user may not read the GPU's counters)"
            )

    def _ms(self, micros: int) -> float:
        return (micros - self._first_start) / 1e3

    def _node(self, stats: Any, device: str, executed: Container[str]) -> Node:
        """Return a node, without the inputs that are not among the ``executed`` nodes."""
        label = _LABEL.match(stats.timeline_label)
        op, inputs = label.groups() if label else ("", "")
        reads = [_input(read, executed) for read in inputs.split(", ")]
        begin = stats.all_start_micros
        return Node(
            op,
            device,
            tuple(read for read in reads if read is not None),
            self._ms(min(stats.scheduled_micros or begin, begin)),
            self._ms(begin + stats.op_start_rel_micros),
            self._ms(begin + stats.op_end_rel_micros),
        )

    def _read_stream(self, stream: Any) -> None:
        for stats in stream.node_stats:
            node_name, _, op = stats.node_name.rpartition(":")
            begin = self._ms(stats.all_start_micros)
            end = begin + stats.all_end_rel_micros / 1e3
            sent = _NUMBERED.match(node_name)
            if op == "_Send" and sent and sent[1] in self.nodes:
                size = _SIZE.search(stats.timeline_label)
                # Copies are found by their _Recv, which TensorFlow numbers right after its _Send.
                copy = Sent(sent[1], int(sent[2]) + 1, begin, end, int(size[1]) if size else 0)
                self.copies.append(copy)
            elif op not in _TRANSFERS and node_name in self.nodes:
                self.kernels[self.nodes[node_name].device].append(Kernel(node_name, begin, end))


def _kernel_starts(stream: Any) -> List[int]:
    """Return the µs at which the kernels of a stream begin, without its copies."""
    kernels = [s for s in stream.node_stats if s.node_name.rpartition(":")[2] not in _TRANSFERS]
    return [stats.all_start_micros for stats in kernels]


def _input(label: str, executed: Container[str]) -> Optional[Input]:
    """Return the input that a label calls ``node:1``; None if its node was not executed."""
    # The node only waits for an input that is called ^node.
    is_control = label.startswith("^")
    node_name = label.lstrip("^").split(":")[0]
    # What another device sends is named by its _Recv, which is no executed node itself.
    received = _NUMBERED.match(node_name)
    if node_name in executed:
        return Input(node_name, 0, is_control)
    if received and received[1] in executed:
        return Input(received[1], int(received[2]), is_control)
    return None


def reached(names: Iterable[str], edges: Edges) -> Set[str]:
    """Return the nodes to which edges lead from ``names``, without these."""
    starts = set(names)
    ends: Set[str] = set()
    waiting = list(starts)
    while waiting:
        for end in edges.get(waiting.pop(), ()):
            if end not in ends:
                ends.add(end)
                waiting.append(end)
    return ends - starts
