"""Partition graphs: the tensors that crossed between devices in one executed step.

TensorFlow cuts a graph into one partition for each device. Where a tensor crosses, it puts a
``_Send`` into the sender's partition and a ``_Recv`` into the receiver's::

    partition of cpu:0                     partition of cpu:1
    sum ─► _Send ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ► _Recv ─► copy

After placement, pruning and Grappler these pairs are exactly the copies that the step makes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Dict, FrozenSet, Iterator, NamedTuple, Sequence, Set, Tuple

import tensorflow as tf

_SENDS = ("_Send", "_HostSend")
_RECVS = ("_Recv", "_HostRecv")


class Crossing(NamedTuple):
    """One tensor that crossed between two devices."""

    src: str
    dst: str
    op: str  # the one whose result it is
    readers: FrozenSet[str]  # the nodes that read it there
    dtype: str  # the one in which it crossed


def crossings(partitions: Sequence[Any]) -> Iterator[Crossing]:
    """Yield each tensor that crossed in one step. Control dependencies and fetches are left out."""
    # Note what is sent, and by which op: a _Recv does not know the op.
    op_by_key: Dict[Tuple[str, str, str], str] = {}
    for partition in partitions:
        nodes = {node.name: node for node in partition.node}
        for node in partition.node:
            if node.op not in _SENDS or node.attr["client_terminated"].b:
                continue
            key = _rendezvous_key(node)
            op = key[2].split("_", 2)[2]  # edge_12_hier_allreduce/v0/sum
            sent = nodes[node.input[0].split(":")[0]]
            # A control dependency crosses as a dummy constant that waits for the op.
            is_dependency = sent.op == "Const" and list(sent.input) == [f"^{op}"]
            if not is_dependency:
                op_by_key[key] = op
    for partition in partitions:
        # A _Retval is no reader, because it brings a result to the client.
        readers: Dict[str, Set[str]] = defaultdict(set)
        nodes_that_read = [node for node in partition.node if node.op != "_Retval"]
        for node in nodes_that_read:
            for tensor in node.input:
                readers[tensor.split(":")[0]].add(node.name)
        for node in partition.node:
            key = _rendezvous_key(node)
            if node.op in _RECVS and key in op_by_key and node.name in readers:
                src, dst, _ = key
                dtype = tf.as_dtype(node.attr["tensor_type"].type).name
                yield Crossing(src, dst, op_by_key[key], frozenset(readers[node.name]), dtype)


def _rendezvous_key(node: Any) -> Tuple[str, str, str]:
    """Return the sender, the receiver and the tensor, which a ``_Send`` and its ``_Recv`` share."""
    src = node.attr["send_device"].s.decode()
    dst = node.attr["recv_device"].s.decode()
    return src, dst, node.attr["tensor_name"].s.decode()
