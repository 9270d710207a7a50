"""Partition graphs: the tensors that crossed between devices in one executed step.

TensorFlow cuts a graph into one partition for each device. Where a tensor crosses, it puts a ``_Send`` into the
sender's partition and a ``_Recv`` into the receiver's::

    partition of cpu:0                     partition of cpu:1
    sum ─► _Send ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ► _Recv ─► copy

After placement, pruning and Grappler these pairs are exactly the copies that the step makes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Dict, Iterator, Sequence, Set, Tuple

_SENDS = ("_Send", "_HostSend")
_RECVS = ("_Recv", "_HostRecv")


def edges_in(partitions: Sequence[Any]) -> Iterator[Tuple[str, str, str, Set[str]]]:
    """Yield the sender, the receiver, the op and the readers of each tensor that crossed in one step.

    Control dependencies and fetches are left out. Sender and receiver are devices.
    """
    sent = dict(send for part in partitions for send in _sends(part))
    for part in partitions:
        readers: Dict[str, Set[str]] = defaultdict(set)
        for node in part.node:
            for tensor in (
                node.input if node.op != "_Retval" else ()
            ):  # a _Retval brings a result to the client
                readers[tensor.split(":")[0]].add(node.name)
        for node in part.node:
            key = _rendezvous_key(node)
            if node.op in _RECVS and key in sent and node.name in readers:
                yield key[0], key[1], sent[key], readers[node.name]


def _sends(part: Any) -> Iterator[Tuple[Tuple[str, str, str], str]]:
    """Yield the rendezvous key and the op of each tensor that one partition sends."""
    nodes = {node.name: node for node in part.node}
    for node in part.node:
        if node.op in _SENDS and not node.attr["client_terminated"].b:
            key = _rendezvous_key(node)
            source = key[2].split("_", 2)[2]  # edge_12_hier_allreduce/v0/sum
            value = nodes[node.input[0].split(":")[0]]
            # a control dependency crosses as a dummy constant that waits for the op
            if not (value.op == "Const" and list(value.input) == [f"^{source}"]):
                yield key, source


def _rendezvous_key(node: Any) -> Tuple[str, str, str]:
    """Return the sender, the receiver and the tensor, which a ``_Send`` and its ``_Recv`` have in common."""
    src, dst, tensor = (
        node.attr[name].s.decode() for name in ("send_device", "recv_device", "tensor_name")
    )
    return src, dst, tensor
