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
    """One tensor that crossed between two devices.

    Attributes:
        src, dst: the devices.
        op: whose result it is.
        readers: the nodes that read it there.
        dtype: as it crossed.
    """

    src: str
    dst: str
    op: str
    readers: FrozenSet[str]
    dtype: str


def crossings(partitions: Sequence[Any]) -> Iterator[Crossing]:
    """Yield each tensor that crossed in one step. Control dependencies and fetches are left out."""
    sent: Dict[Tuple[str, str, str], str] = {}
    for part in partitions:
        sent.update(_sends(part))
    for part in partitions:
        readers = _readers(part)
        for node in part.node:
            key = _rendezvous_key(node)
            if node.op in _RECVS and key in sent and node.name in readers:
                src, dst, _ = key
                dtype = tf.as_dtype(node.attr["tensor_type"].type).name
                yield Crossing(src, dst, sent[key], frozenset(readers[node.name]), dtype)


def _readers(part: Any) -> Dict[str, Set[str]]:
    """Return the nodes that read the results of each node of one partition."""
    readers: Dict[str, Set[str]] = defaultdict(set)
    for node in part.node:
        if node.op != "_Retval":  # it brings a result to the client
            for tensor in node.input:
                readers[tensor.split(":")[0]].add(node.name)
    return readers


def _sends(part: Any) -> Iterator[Tuple[Tuple[str, str, str], str]]:
    """Yield the rendezvous key and the op of each tensor that one partition sends."""
    nodes = {node.name: node for node in part.node}
    for node in part.node:
        if node.op in _SENDS and not node.attr["client_terminated"].b:
            key = _rendezvous_key(node)
            *_, tensor = key
            op = tensor.split("_", 2)[2]  # edge_12_hier_allreduce/v0/sum
            value = nodes[node.input[0].split(":")[0]]
            # a control dependency crosses as a dummy constant that waits for the op
            is_dependency = value.op == "Const" and list(value.input) == [f"^{op}"]
            if not is_dependency:
                yield key, op


def _rendezvous_key(node: Any) -> Tuple[str, str, str]:
    """Return the sender, the receiver and the tensor, which a ``_Send`` and its ``_Recv`` share."""
    src = node.attr["send_device"].s.decode()
    dst = node.attr["recv_device"].s.decode()
    return src, dst, node.attr["tensor_name"].s.decode()
