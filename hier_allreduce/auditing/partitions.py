"""Partition graphs: the ops of one executed step, and the tensors that crossed between devices.

TensorFlow cuts a graph into one partition for each device. Where a tensor crosses, it puts a ``_Send`` into the
sender's partition and a ``_Recv`` into the receiver's::

    partition of cpu:0                     partition of cpu:1
    sum ─► _Send ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ► _Recv ─► copy

After placement, pruning and Grappler these pairs are exactly the copies that the step makes.
"""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Sequence, Set, Tuple

_SENDS = ("_Send", "_HostSend")
_RECVS = ("_Recv", "_HostRecv")


class Op(NamedTuple):
    """An executed op."""

    name: str
    type: str
    device: str


class Edge(NamedTuple):
    """A tensor that crossed from device ``src`` to ``dst``: the op that made it, and the ops that read it there."""

    src: str
    dst: str
    source: str
    readers: FrozenSet[str]


def executed_in(partitions: Sequence[Any], prefix: str = "") -> Tuple[List[Op], List[Edge]]:
    """Return the executed ops, and the tensors that crossed: without control dependencies and fetches.

    Args:
        partitions: of one step.
        prefix: the scope of a function's caller, which is left out of names.
    """

    def plain(name: str) -> str:
        return name[len(prefix) :] if name.startswith(prefix) else name

    sent = {_rendezvous_key(node) for part in partitions for node in _data_sends(part)}
    ops, edges = [], []
    for part in partitions:
        readers: Dict[str, Set[str]] = {}
        for node in part.node:
            ops.append(Op(plain(node.name), node.op, node.device))
            for tensor in node.input if node.op != "_Retval" else ():  # a _Retval brings a result to the client
                readers.setdefault(tensor.split(":")[0], set()).add(plain(node.name))
        for node in part.node:
            key = _rendezvous_key(node)
            if node.op in _RECVS and key in sent and node.name in readers:
                edges.append(Edge(key[0], key[1], plain(_source(node)), frozenset(readers[node.name])))
    return ops, edges


def _data_sends(part: Any) -> Iterator[Any]:
    """Yield the nodes of one partition that send a tensor to another device."""
    nodes = {node.name: node for node in part.node}
    for node in part.node:
        src, dst, _ = _rendezvous_key(node)
        # on GPUs a tensor goes from device to host memory, or back, as if to another device
        if node.op in _SENDS and src != dst and not node.attr["client_terminated"].b:
            value = nodes[node.input[0].split(":")[0]]
            # a control dependency crosses as a dummy constant that waits for the op
            if not (value.op == "Const" and list(value.input) == [f"^{_source(node)}"]):
                yield node


def _rendezvous_key(node: Any) -> Tuple[str, str, str]:
    """Return the sender, the receiver and the tensor, which a ``_Send`` and its ``_Recv`` have in common."""
    src, dst, tensor = (node.attr[name].s.decode() for name in ("send_device", "recv_device", "tensor_name"))
    return src, dst, tensor


def _source(node: Any) -> str:
    """Return the op whose result crosses: ``edge_12_hier_allreduce/v0/sum`` → ``hier_allreduce/v0/sum``."""
    return _rendezvous_key(node)[2].split("_", 2)[2]
