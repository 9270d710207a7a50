"""Partition graphs: the copies between devices that TensorFlow made in one step.

TensorFlow cuts a graph into one partition for each device. Where a tensor crosses, it puts a ``_Send`` into the
sender's partition and a ``_Recv`` into the receiver's::

    partition of cpu:0                     partition of cpu:1
    sum ─► _Send ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ► _Recv ─► copy

After placement, pruning and Grappler these pairs are exactly the copies that the step makes.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Collection, Dict, FrozenSet, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import tensorflow as tf

_SENDS = ("_Send", "_HostSend")
_RECVS = ("_Recv", "_HostRecv")


class Edge(NamedTuple):
    """A tensor that crossed from device ``src`` to ``dst``: the op it comes from, and the ops that read it.

    ``name`` is TensorFlow's name of the edge, and ``tensor`` the executed tensor that was sent, as in ``op:0``.
    """

    src: str
    dst: str
    source: str
    readers: FrozenSet[str]
    name: str
    tensor: str


def edges_between(partitions: Sequence[Any]) -> List[Edge]:
    """Return the tensors that crossed between devices, without control dependencies and fetches."""
    sent = {_rendezvous_key(node): node.input[0] for part in partitions for node in _data_sends(part)}
    edges = []
    for part in partitions:
        readers = _readers(part)
        for node in part.node:
            key = _rendezvous_key(node) if node.op in _RECVS else None
            if key in sent and node.name in readers:
                src, dst, name = key
                edges.append(Edge(src, dst, _source(node), frozenset(readers[node.name]), name, sent[key]))
    return edges


def overtaken(partitions: Sequence[Any], followed: Mapping[str, Collection[str]]) -> List[Tuple[str, str]]:
    """Return the pairs of executed ops (op, other) in which ``op`` did not wait for ``other``, as it should.

    It may wait for it through other devices: Grappler drops a control edge that data imply.

    Args:
        partitions: of the step.
        followed: ``{op: others}``; what was not executed, because nobody needs it or it is constant, is left out.
    """
    nodes = [node for part in partitions for node in part.node]
    needs = {node.name: [name.lstrip("^").split(":")[0] for name in node.input] for node in nodes}
    sends = {_rendezvous_key(node): node.name for node in nodes if node.op in _SENDS}
    for node in nodes:
        if node.op in _RECVS and _rendezvous_key(node) in sends:
            needs[node.name].append(sends[_rendezvous_key(node)])
    pairs = [(op, other) for op in followed if op in needs for other in followed[op] if other in needs]
    return sorted((op, other) for op, other in pairs if not _waits_for(op, other, needs))


def _waits_for(op: str, other: str, needs: Mapping[str, Sequence[str]]) -> bool:
    """Return whether ``op`` waits for ``other``, directly or not."""
    seen, waiting = {op}, deque([op])
    while waiting:
        needed = needs.get(waiting.popleft(), ())
        if other in needed:
            return True
        waiting.extend(name for name in needed if name not in seen)
        seen.update(needed)
    return False


def inputs_of(partitions: Sequence[Any]) -> Dict[str, List[str]]:
    """Return for each executed op the ops that it waited for; what came from another device counts as its source."""
    sources = {node.name: _source(node) for part in partitions for node in part.node if node.op in _RECVS}
    return {
        node.name: [sources.get(name, name) for name in (text.lstrip("^").split(":")[0] for text in node.input)]
        for part in partitions
        for node in part.node
    }


def tensor_bytes(run_metadata: Any) -> Dict[Tuple[str, str, int], int]:
    """Return the bytes of what each op of a traced step put out: ``{(device, op, output): bytes}``."""
    return {
        (device.device, node.node_name, output.slot): _bytes(output.tensor_description)
        for device in run_metadata.step_stats.dev_stats
        for node in device.node_stats
        for output in node.output
    }


def executed_copies(run_metadata: Any) -> Dict[Tuple[str, str], Tuple[int, int]]:
    """Return tensors and bytes from device to device: ``{("cpu:0", "cpu:1"): (count, bytes)}``.

    Args:
        run_metadata: of a step with FULL_TRACE and ``output_partition_graphs=True``.
    """
    sizes = tensor_bytes(run_metadata)
    counts: Counter = Counter()
    volumes: Counter = Counter()
    for send in (send for part in run_metadata.partition_graphs for send in _data_sends(part)):
        sender, receiver, _ = _rendezvous_key(send)
        source, _, slot = send.input[0].partition(":")
        pair = sender.rpartition("device:")[2].lower(), receiver.rpartition("device:")[2].lower()
        counts[pair] += 1
        volumes[pair] += sizes[sender, source, int(slot or 0)]
    return {pair: (counts[pair], volumes[pair]) for pair in sorted(counts)}


def _data_sends(part: Any) -> Iterator[Any]:
    """Yield the nodes of one partition that send a tensor to another device."""
    nodes = {node.name: node for node in part.node}
    for node in part.node:
        if node.op not in _SENDS or node.attr["client_terminated"].b:
            continue
        sender, receiver, _ = _rendezvous_key(node)
        if sender == receiver:  # from a GPU's memory to the host's or back: TensorFlow's int32 kernels work on the host
            continue
        value = nodes[node.input[0].split(":")[0]]
        # a control dependency crosses as a dummy constant that waits for the op
        if not (value.op == "Const" and list(value.input) == [f"^{_source(node)}"]):
            yield node


def _readers(part: Any) -> Dict[str, List[str]]:
    """Return the ops of one partition that read each op's results; fetches are not among them."""
    readers: Dict[str, List[str]] = {}
    for node in part.node:
        if node.op != "_Retval":  # brings a fetched result to the client
            for tensor in node.input:
                readers.setdefault(tensor.split(":")[0], []).append(node.name)
    return readers


def _rendezvous_key(node: Any) -> Tuple[str, str, str]:
    """Return the sender, the receiver and the tensor: what a ``_Send`` and its ``_Recv`` have in common."""
    src, dst, tensor = (node.attr[name].s.decode() for name in ("send_device", "recv_device", "tensor_name"))
    return src, dst, tensor


def _source(node: Any) -> str:
    """Return the op whose result crosses: ``edge_12_hier_allreduce/v0/sum`` → ``hier_allreduce/v0/sum``."""
    return _rendezvous_key(node)[2].split("_", 2)[2]


def _bytes(description: Any) -> int:
    elements = 1
    for dim in description.shape.dim:
        elements *= dim.size
    return elements * tf.as_dtype(description.dtype).size
