"""One traced step: what the host executed, what the devices ran for it, and when.

::

    host      scheduled ─► start ── launch ──► end                      a node
    GPU                                  begin ── kernel, copy ──► end      what runs for it

TensorFlow writes both into ``RunMetadata.step_stats`` if the step has ``FULL_TRACE``. Its executor
knows the nodes; CUPTI knows the kernels and copies, by streams, and calls them by their nodes. On a
CPU device a node is its own kernel.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Set, Tuple

from ..errors import AuditError

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
        node: whose result it is.
        receive: the number in the name of the ``_Recv`` that brings it from another device; 0 on
            the same device.
        is_control: whether the node only waits for it.
    """

    node: str
    receive: int
    is_control: bool


class Node(NamedTuple):
    """An op that the host executed. Times are ms after the first kernel of the step.

    Attributes:
        op: its type.
        device: on which it was executed.
        inputs: what it reads and what it waits for.
        scheduled: when all of these were there.
        start: when the host began it.
        end: when the host had done it; on a GPU it was launched then.
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
        node: whose result it is.
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
        nodes: by name.
        kernels: by device, in order of their begin.
        copies: from device to device, in order of their begin. CPU devices make none, because they
            read each other's memory.
    """

    def __init__(self, step_stats: Any):
        """Read the ``step_stats`` of a RunMetadata.

        Raises:
            AuditError: the step was not traced, or the streams of its GPUs were not.
        """
        parts = list(step_stats.dev_stats)
        starts = [stats.all_start_micros for part in parts for stats in part.node_stats]
        if not starts:
            raise AuditError(f"the RunMetadata has no trace; run the step with {_TRACE}")
        self._first = _first_kernel(parts) or min(starts)  # µs
        self.nodes: Dict[str, Node] = {}
        self.kernels: Dict[str, List[Kernel]] = defaultdict(list)
        self.copies: List[Sent] = []
        for part in parts:
            if part.device.startswith("/job:"):  # the others are CUPTI's
                for stats in part.node_stats:
                    self.nodes[stats.node_name] = self._node(stats, part.device)
        for name, node in self.nodes.items():
            self.nodes[name] = node._replace(inputs=tuple(self._inputs(node.inputs)))
        for part in parts:
            if _STREAM.match(part.device):
                self._read_stream(part)
        self._check_streams()
        for name, node in self.nodes.items():
            if "GPU:" not in node.device:
                self.kernels[node.device].append(Kernel(name, node.start, node.end))
        for kernels in self.kernels.values():
            kernels.sort(key=lambda kernel: kernel.begin)
        self.copies.sort(key=lambda copy: copy.begin)

    # ---- reading ---------------------------------------------------------------------------------

    def _ms(self, micros: int) -> float:
        return (micros - self._first) / 1e3

    def _node(self, stats: Any, device: str) -> Node:
        label = _LABEL.match(stats.timeline_label)
        op, texts = label.groups() if label else ("", "")
        begin = stats.all_start_micros
        return Node(
            op,
            device,
            tuple(Input(text, 0, False) for text in texts.split(", ") if text),
            self._ms(min(stats.scheduled_micros or begin, begin)),
            self._ms(begin + stats.op_start_rel_micros),
            self._ms(begin + stats.op_end_rel_micros),
        )

    def _inputs(self, texts: Iterable[Input]) -> Iterator[Input]:
        """Yield the inputs whose nodes were executed, from the texts in a label."""
        for text in texts:
            is_control = text.node.startswith("^")
            name = text.node.lstrip("^").split(":")[0]
            received = _NUMBERED.match(name)
            if name in self.nodes:
                yield Input(name, 0, is_control)
            elif received and received[1] in self.nodes:
                yield Input(received[1], int(received[2]), is_control)

    def _read_stream(self, part: Any) -> None:
        for stats in part.node_stats:
            name, _, op = stats.node_name.rpartition(":")
            begin = self._ms(stats.all_start_micros)
            end = begin + stats.all_end_rel_micros / 1e3
            sent = _NUMBERED.match(name)
            if op == "_Send" and sent and sent[1] in self.nodes:
                size = _SIZE.search(stats.timeline_label)
                # TensorFlow numbers a _Send and its _Recv one after the other
                copy = Sent(sent[1], int(sent[2]) + 1, begin, end, int(size[1]) if size else 0)
                self.copies.append(copy)
            elif op not in _TRANSFERS and name in self.nodes:
                self.kernels[self.nodes[name].device].append(Kernel(name, begin, end))

    def _check_streams(self) -> None:
        """Raise an AuditError if GPUs worked and their streams were not traced."""
        on_gpus = {node.device for node in self.nodes.values() if "GPU:" in node.device}
        if on_gpus and not self.kernels:
            raise AuditError(
                f"the trace has the launches for {min(on_gpus)}, but no stream of a GPU: run the"
                f" step with {_TRACE}; if it was, TensorFlow could not use CUPTI, and its log says"
                " why (another profiler runs, or the user may not read the GPU's counters)"
            )

    # ---- the graph that ran ----------------------------------------------------------------------

    def sources(self) -> Edges:
        """Return for each node those whose results it reads."""
        sources: Edges = defaultdict(list)
        for name, node in self.nodes.items():
            sources[name] += [read.node for read in node.inputs if not read.is_control]
        return sources

    def readers(self) -> Edges:
        """Return for each node those that read its result."""
        readers: Edges = defaultdict(list)
        for name, sources in self.sources().items():
            for source in sources:
                readers[source].append(name)
        return readers


def _first_kernel(parts: Iterable[Any]) -> int:
    """Return the µs of the first kernel on a GPU; 0 if there is none."""
    starts = []
    for part in parts:
        for stats in part.node_stats if _STREAM.match(part.device) else ():
            if stats.node_name.rpartition(":")[2] not in _TRANSFERS:
                starts.append(stats.all_start_micros)
    return min(starts, default=0)


def reached(names: Iterable[str], edges: Edges) -> Set[str]:
    """Return the nodes to which edges lead from ``names``, without these."""
    names = set(names)
    found: Set[str] = set()
    waiting = list(names)
    while waiting:
        for name in edges.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found - names
