"""The emulated GPUs' trace as CUPTI would write it: streams of kernels and copies in a RunMetadata.

TensorFlow gets no streams from these devices. Their own trace (``plugin.environment(trace=…)``)
knows kernels by op, and copies by pair of devices, size and source. The step's own statistics know
the tensors that cross, and in which memory each was made. Of tensors that were in the same memory
one after another, the one that is read first came first.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf


class Tensor(NamedTuple):
    """A tensor that crosses, by its ``_Send``.

    Attributes:
        memory: the addresses in which it lies, perhaps with others.
        read: when it is read, in µs of the system's clock.
    """

    send: str
    memory: range
    read: float


class Span(NamedTuple):
    """A kernel of a GPU, or a copy that it sends. Times are seconds of the system's clock."""

    gpu: int
    what: str  # "AddN hier_allreduce/v0/sum", or "copy 0>2 40000000"
    source: int  # the address of a copy's
    queued: float
    begin: float
    end: float

    @property
    def copy(self) -> Optional[Tuple[int, int, int]]:
        """Sender, receiver and bytes of a copy; None for a kernel."""
        word, _, rest = self.what.partition(" ")
        if word != "copy":
            return None
        pair, size = rest.split()
        src, dst = pair.split(">")
        return int(src), int(dst), int(size)


def spans_in(path: Path) -> List[Span]:
    """Return all kernels and copies in the file of a trace."""
    spans = []
    for line in path.read_text("utf-8").splitlines()[1:]:
        gpu, what, source, *times = line.split("\t")
        queued, begin, end = map(float, times)
        spans.append(Span(int(gpu), what, int(source), queued, begin, end))
    return spans


def add_streams(metadata: Any, spans: List[Span], ahead: float) -> None:
    """Add the streams of a step to its RunMetadata.

    Args:
        metadata: of a step with ``FULL_TRACE`` and ``output_partition_graphs``.
        spans: of the whole process.
        ahead: seconds by which the clock of the day is ahead of the trace's clock.
    """
    nodes = {
        stats.node_name: stats
        for part in metadata.step_stats.dev_stats
        for stats in part.node_stats
        if part.device.startswith("/job:")
    }
    began = min(stats.all_start_micros for stats in nodes.values()) / 1e6 - ahead
    tensors = _tensors(metadata, nodes)
    for span in sorted(spans, key=lambda span: span.queued):
        if span.queued < began:
            continue
        if span.copy is None:
            op, name = span.what.split(" ", 1)
            _add(metadata, span, "13", f"{name}:{op}", "", ahead)
        else:
            crossing = tensors[span.copy]
            here = [tensor for tensor in crossing if span.source in tensor.memory]
            tensor = min(here, key=lambda tensor: tensor.read)
            crossing.remove(tensor)
            label = f"MemcpyP2P size:{span.copy[2]}"
            _add(metadata, span, "16<MemcpyP2P>", f"{tensor.send}:_Send", label, ahead)


def _add(metadata: Any, span: Span, stream: str, name: str, label: str, ahead: float) -> None:
    device = f"/device:GPU:{span.gpu}/stream:{stream}"
    parts = metadata.step_stats.dev_stats
    part = next((part for part in parts if part.device == device), None)
    if part is None:
        part = parts.add(device=device)
    micros = round(1e6 * (span.end - span.begin))
    part.node_stats.add(
        node_name=name,
        timeline_label=label,
        all_start_micros=round(1e6 * (span.begin + ahead)),
        op_end_rel_micros=micros,
        all_end_rel_micros=micros,
    )


def _tensors(metadata: Any, nodes: Dict[str, Any]) -> Dict[Tuple[int, int, int], List[Tensor]]:
    """Return the tensors that cross, by sender, receiver and bytes."""
    readers: Dict[str, List[str]] = defaultdict(list)
    received = {}
    for part in metadata.partition_graphs:
        for node in part.node:
            if node.op == "_Recv":
                received[_key(node)] = node.name
            for name in node.input:
                readers[name.split(":")[0].lstrip("^")].append(node.name)
    tensors: Dict[Tuple[int, int, int], List[Tensor]] = defaultdict(list)
    for part in metadata.partition_graphs:
        for node in part.node:
            source = node.input[0].split(":")[0] if node.op == "_Send" else ""
            ends = _key(node)[:2]
            if source in nodes and all(b"GPU:" in end for end in ends):
                slot = int((*node.input[0].split(":"), "0")[1])
                reading = [nodes[name] for name in readers[received[_key(node)]] if name in nodes]
                read = min((stats.scheduled_micros for stats in reading), default=float("inf"))
                src, dst = (int(end.decode().rpartition(":")[2]) for end in ends)
                size, memory = _made(nodes[source], slot)
                tensors[src, dst, size].append(Tensor(node.name, memory, read))
    return tensors


def _key(node: Any) -> Tuple[bytes, bytes, bytes]:
    attributes = ("send_device", "recv_device", "tensor_name")
    send, receive, tensor = (node.attr[name].s for name in attributes)
    return send, receive, tensor


def _made(stats: Any, slot: int) -> Tuple[int, range]:
    """Return the bytes of a result, and the addresses of the memory that was allocated for it."""
    description = next(output for output in stats.output if output.slot == slot).tensor_description
    size = tf.as_dtype(description.dtype).size
    for dimension in description.shape.dim:
        size *= dimension.size
    memory = description.allocation_description
    return int(size), range(memory.ptr, memory.ptr + max(size, memory.allocated_bytes))
