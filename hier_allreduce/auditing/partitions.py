"""Partition graphs: the tensors that crossed between devices in one executed step.

TensorFlow cuts a graph into one partition for each device. Where a tensor crosses, it puts a
``_Send`` into the sender's partition and a ``_Recv`` into the receiver's::

    partition of cpu:0                     partition of cpu:1
    sum ─► _Send ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ► _Recv ─► copy

After placement, pruning and Grappler these pairs are exactly the copies that the step makes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Dict, FrozenSet, Iterator, NamedTuple, Sequence, Set

_SENDS = ("_Send", "_HostSend")
_RECVS = ("_Recv", "_HostRecv")


class Crossing(NamedTuple):
    """One tensor that crossed between two devices."""

    src: str
    dst: str
    tensor: str  # such as edge_12_hier_allreduce/v0/sum
    readers: FrozenSet[str] = frozenset()  # the nodes that read it on dst

    @property
    def op(self) -> str:
        """The op whose result it is."""
        return self.tensor.split("_", 2)[-1]


def crossings(partitions: Sequence[Any]) -> Iterator[Crossing]:
    """Yield each tensor that crossed in one step. Control dependencies and fetches are left out."""
    sent: Set[Crossing] = set()
    for partition in partitions:
        nodes = {node.name: node for node in partition.node}
        for node in partition.node:
            if node.op not in _SENDS:
                continue
            # A control dependency crosses as a dummy constant that waits for the op.
            crossing = _crossing_of(node)
            if f"^{crossing.op}" not in nodes[_op_of(node.input[0])].input:
                sent.add(crossing)
    for partition in partitions:
        # A _Retval is no reader, because it brings a result to the client.
        readers: Dict[str, Set[str]] = defaultdict(set)
        nodes_that_read = [node for node in partition.node if node.op != "_Retval"]
        for node in nodes_that_read:
            for tensor in node.input:
                readers[_op_of(tensor)].add(node.name)
        for node in partition.node:
            if node.op in _RECVS and node.name in readers and _crossing_of(node) in sent:
                yield _crossing_of(node)._replace(readers=frozenset(readers[node.name]))


def _op_of(tensor: str) -> str:
    return tensor.partition(":")[0]


def _crossing_of(node: Any) -> Crossing:
    """Return what a ``_Send`` and its ``_Recv`` have in common."""
    src = node.attr["send_device"].s.decode()
    dst = node.attr["recv_device"].s.decode()
    return Crossing(src, dst, node.attr["tensor_name"].s.decode())
