"""The emulated GPUs' trace as CUPTI would write it: streams of kernels and copies in a RunMetadata.

TensorFlow gets no streams from these devices. Their own trace (``plugin.environment(trace=…)``)
knows kernels by op, and copies by pair of devices and size. The partition graphs know which tensors
cross between a pair. A copy is that of a tensor that had been made when it was queued, and that is
read after it; of several such tensors, it is the one that is read first.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import tensorflow as tf


class Tensor(NamedTuple):
    """A tensor that crosses, by its ``_Send``. Times are µs of the system's clock."""

    send: str
    made: float
    read: float


class Span(NamedTuple):
    """A kernel of a GPU, or a copy that it sends. Times are seconds of the system's clock."""

    gpu: int
    what: str  # "AddN hier_allreduce/v0/sum", or "copy 0>2 40000000"
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
        gpu, what, *times = line.split("\t")
        queued, begin, end = map(float, times)
        spans.append(Span(int(gpu), what, queued, begin, end))
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
        elif tensors[span.copy]:
            crossing = tensors[span.copy]
            queued = 1e6 * (span.queued + ahead)
            made = [tensor for tensor in crossing if tensor.made <= queued]
            tensor = min(made or crossing, key=lambda tensor: tensor.read)
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
                made = nodes[source].all_start_micros + nodes[source].op_start_rel_micros
                reading = [nodes[name] for name in readers[received[_key(node)]] if name in nodes]
                read = min((stats.scheduled_micros for stats in reading), default=float("inf"))
                src, dst = (int(end.decode().rpartition(":")[2]) for end in ends)
                size = _bytes(nodes[source], slot)
                tensors[src, dst, size].append(Tensor(node.name, made, read))
    return tensors


def _key(node: Any) -> Tuple[bytes, bytes, bytes]:
    attributes = ("send_device", "recv_device", "tensor_name")
    send, receive, tensor = (node.attr[name].s for name in attributes)
    return send, receive, tensor


def _bytes(stats: Any, slot: int) -> int:
    """Return the size of a result; 0 if it is not known."""
    for output in stats.output:
        if output.slot == slot:
            size = tf.as_dtype(output.tensor_description.dtype).size
            for dimension in output.tensor_description.shape.dim:
                size *= dimension.size
            return int(size)
    return 0
