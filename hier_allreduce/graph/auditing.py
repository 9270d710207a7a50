"""What TensorFlow really executed, held against the plan.

TensorFlow cuts a graph into one part for each device and puts a ``_Send`` and a ``_Recv`` wherever a tensor
crosses. After Grappler, pruning and placement these pairs are the copies that were made, and a session hands the parts
out on request::

    asked, seen = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
    session.run(train_op, options=asked, run_metadata=seen)
    print(hier_allreduce.audit(seen, session.graph))

    copies between the devices, from row to column
                0   1   2   3
    0  /cpu:0   .   1   1   .
    1  /cpu:1   1   .   .   .
    2  /cpu:2   1   .   .   1
    3  /cpu:3   .   .   1   .
    total 6
    hier_allreduce/: hierarchical, 1 chunk, 6 copies, planned = executed

On several hosts each looks at its own devices, and at what it sends to the others::

    hier_allreduce/: hierarchical, 1 chunk, 6 copies, 1 collective over 2 hosts (400 kB), planned = executed
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from ..errors import AuditError
from ..formatting import amount, count
from ..planning import Plan
from .compat import tf1
from .devices import device_fields, fits
from .emit import Emitted, emitted_in

_SENDS = ("_Send", "_HostSend")
_RECVS = ("_Recv", "_HostRecv")
_COLLECTIVE = "CollectiveReduce"  # and CollectiveReduceV2, in TensorFlow 2
_HOSTS = "other hosts"
_LISTED = 5  # so many chunks does an error name

Place = Union[int, str]  # the first tower on a device; where it belongs to no tower its name; or ``_HOSTS``
Pair = Tuple[Place, Place]
_ChunkOf = Callable[[str], Any]  # an op by its name → its chunk, or None


@dataclass(frozen=True)
class Audited:
    """One all-reduce of the run, executed as planned.

    Attributes:
        scope: its name scope.
        plan: what it does inside this host.
        devices: of the towers of this host.
        copies: how many tensors went from tower i's device to tower j's: ``{(i, j): count}``.
        hosts: how many there are.
        collectives: how many tensors crossed between the hosts; each counts once, on every host.
        bytes_across: what these hold; None where a shape was not known when the graph was built.
    """

    scope: str
    plan: Plan
    devices: Tuple[Any, ...]
    copies: Counter
    hosts: int = 1
    collectives: int = 0
    bytes_across: Optional[int] = None

    def __str__(self) -> str:
        total = sum(self.copies.values())
        parts = [self.plan.algorithm, count(self.plan.chunks, "chunk"), f"{total} copies"]
        if self.hosts > 1:
            size = "" if self.bytes_across is None else f" ({amount(self.bytes_across)})"
            parts.append(f"{count(self.collectives, 'collective')} over {self.hosts} hosts{size}")
        return f"{self.scope}: {', '.join(parts)}, planned = executed"


@dataclass(frozen=True)
class Audit:
    """The all-reduces of one run. Prints as a K×K table of copies, then a line for each all-reduce.

    Attributes:
        calls: the all-reduces that ran.
        not_run: the name scopes of those that are in the graph, but took no part in this run.
        not_audited: of those in a ``tf.compat.v1.cond`` or ``while_loop``: partition graphs have all branches, and do
            not tell which one was taken, or how often.
    """

    calls: Tuple[Audited, ...]
    not_run: Tuple[str, ...] = ()
    not_audited: Tuple[str, ...] = ()

    @property
    def copies(self) -> Counter:
        """How many tensors went from tower i's device to tower j's, over all calls: ``{(i, j): count}``.

        Towers that share a device are counted as the first of them.
        """
        return sum((call.copies for call in self.calls), Counter())

    def __str__(self) -> str:
        lines = ["copies between the devices, from row to column"]
        for devices in dict.fromkeys(call.devices for call in self.calls):
            lines += _table(devices, sum((call.copies for call in self.calls if call.devices == devices), Counter()))
        lines += [str(call) for call in self.calls]
        lines += [f"{scope}: not part of this run" for scope in self.not_run]
        return "\n".join(lines + [f"{scope}: in control flow, not audited" for scope in self.not_audited])


def _table(devices: Sequence[Any], copies: Counter) -> List[str]:
    towers = range(len(devices))
    rows = [["", *towers]]
    rows += [[f"{i}  {devices[i]}", *(copies[i, j] or "." for j in towers)] for i in towers]
    first, *others = (max(len(str(cell)) for cell in column) for column in zip(*rows))
    width = max(others) + 3
    lines = [str(head).ljust(first) + "".join(str(cell).rjust(width) for cell in row) for head, *row in rows]
    return [*lines, f"total {sum(copies.values())}"]


def audit(run_metadata: Any, graph: Optional[Any] = None) -> Audit:
    """Hold the copies of an executed step against the plans of the all-reduces in it.

    For every chunk each planned transfer must be there, and nothing else may come in; reading a result on another
    device afterwards is the caller's business. Towers that share a device need no transfer between them. On several
    hosts each chunk with elements must also cross between them exactly once, from its main.

    Args:
        run_metadata: of a ``session.run`` with ``RunOptions(output_partition_graphs=True)``.
        graph: the session's graph, by default the current one.

    Returns:
        The copies by pair of towers; ``print`` it.

    Raises:
        AuditError: the step moved something else than planned (the message names chunks and copies), ran no all-reduce
            outside of control flow, or the metadata has no partition graphs.
    """
    graph = graph or tf1.get_default_graph()
    partitions = list(run_metadata.partition_graphs)
    if not partitions:
        raise AuditError(
            "the RunMetadata has no partition graphs; run the step with"
            " options=tf.compat.v1.RunOptions(output_partition_graphs=True), run_metadata=…"
        )
    built = emitted_in(graph)
    if not built:
        raise AuditError(
            f"no all-reduce was built in {graph}; pass graph= the one that the session ran (what is built inside of a"
            " tf.function, or of TensorFlow 2's tf.cond and tf.while_loop, has other names when it runs: no audit)"
        )
    edges = _edges(partitions)
    ran = [node for part in partitions for node in part.node]
    audited, not_run, not_audited = [], [], []
    for call in built:
        if _in_control_flow(call, graph):
            not_audited.append(call.scope)
            continue
        found = _audited(call, graph, edges, ran)
        if found:
            audited.append(found)
        else:
            not_run.append(call.scope)
    if not_audited and not audited:
        raise AuditError(
            f"{', '.join(not_audited)}: in a tf.cond or tf.while_loop, of which the run's metadata do not tell what"
            " was executed; audit the same all-reduce outside of it"
        )
    if not audited:
        raise AuditError(f"the run has none of the graph's all-reduces ({', '.join(not_run)}); fetch their results")
    return Audit(tuple(audited), tuple(not_run), tuple(not_audited))


def _in_control_flow(call: Emitted, graph: Any) -> bool:
    """Whether a call's ops are in a cond or while_loop of TensorFlow 1, whose branches are parts of the same graph."""
    contexts = (op._get_control_flow_context() for op in graph.get_operations() if op.name.startswith(call.scope))
    return any(context and (context.IsCondContext() or context.IsWhileContext()) for context in contexts)


# ---- the executed side: edges between devices ------------------------------------------------------


class _Edge(NamedTuple):
    """A tensor that crossed from device ``src`` to ``dst``: the op it comes from, and the ops that read it."""

    src: str
    dst: str
    source: str
    readers: FrozenSet[str]


def _edges(partitions: Sequence[Any]) -> List[_Edge]:
    """All tensors that crossed between devices of the run; control dependencies and fetches are none."""
    sent = {_key(node) for part in partitions for node in data_sends(part)}
    edges = []
    for part in partitions:
        readers: Dict[str, List[str]] = {}
        for node in part.node:
            if node.op != "_Retval":  # brings a fetched result to the client
                for tensor in node.input:
                    readers.setdefault(tensor.split(":")[0], []).append(node.name)
        for node in part.node:
            if node.op in _RECVS and node.name in readers and _key(node) in sent:
                edges.append(_Edge(*_key(node)[:2], _source(node), frozenset(readers[node.name])))
    return edges


def data_sends(part: Any) -> Iterable[Any]:
    """The nodes of one device's partition graph by which tensors leave it for other devices; no control edges."""
    nodes = {node.name: node for node in part.node}
    for node in part.node:
        if node.op not in _SENDS or node.attr["client_terminated"].b:
            continue
        value = nodes[node.input[0].split(":")[0]]
        # a control dependency crosses as a dummy constant that waits for the op
        if not (value.op == "Const" and list(value.input) == [f"^{_source(node)}"]):
            yield node


def _key(node: Any) -> Tuple[str, str, str]:
    """The name under which a ``_Send`` and its ``_Recv`` find each other."""
    src, dst, tensor = (node.attr[name].s.decode() for name in ("send_device", "recv_device", "tensor_name"))
    return src, dst, tensor


def _source(node: Any) -> str:
    """``edge_12_hier_allreduce/v0/sum`` → ``hier_allreduce/v0/sum``."""
    return _key(node)[2].split("_", 2)[2]


# ---- the planned side: towers and chunks -----------------------------------------------------------


class _Places:
    """Which tower's device an executed device is: compared by what the tower's device says, be it only ``/gpu:0``."""

    def __init__(self, devices: Sequence[Any]):
        for tower, device in enumerate(devices):
            if callable(device):
                raise AuditError(f"tower {tower}: its device is a function; an audit needs devices by name")
        self._devices = devices
        self._given = [device_fields(device) for device in devices]

    def first_tower(self, tower: int) -> int:
        """The first tower that has ``tower``'s device."""
        return self._given.index(self._given[tower])

    def find(self, device: str) -> Place:
        """The tower whose device says most of what ``device`` is."""
        fitting = [
            (len([field for field in given if field is not None]), -tower)
            for tower, given in enumerate(self._given)
            if fits(device, self._devices[tower])
        ]
        return -max(fitting)[1] if fitting else device


def _planned(call: Emitted, places: _Places) -> List[Counter]:
    """For each chunk the pairs of places between which the plan moves it."""
    steps: List[List[Any]] = [[] for _ in range(call.plan.chunks)]
    for step in call.plan.steps:
        steps[step.chunk].append(step)
    planned = []
    for chunk_steps in steps:
        pairs: Counter = Counter()
        for (src, dst), times in replace(call.plan, steps=tuple(chunk_steps)).transfers().items():
            pair = places.first_tower(src), places.first_tower(dst)
            pairs[pair] += times if pair[0] != pair[1] else 0
        planned.append(+pairs)
    return planned


def _executed(
    chunk_of: _ChunkOf, graph: Any, edges: Sequence[_Edge], places: _Places, planned: Sequence[Counter]
) -> List[Counter]:
    """For each chunk the pairs of places between which its tensors crossed."""
    copied = _copied(graph, chunk_of)
    executed: List[Counter] = [Counter() for _ in planned]
    for edge in edges:
        for chunk in {chunk_of(reader) for reader in edge.readers} - {None}:
            executed[chunk][places.find(edge.src), places.find(edge.dst)] += 1
    # A copy's own op may be pruned where its reader is on the same device; the tensor then goes straight to the
    # reader. Anything else that leaves is a result being read elsewhere.
    for edge in edges:
        pair = places.find(edge.src), places.find(edge.dst)
        for chunk in {chunk_of(edge.source), *copied.get(edge.source, ())} - {None}:
            if planned[chunk][pair] and not executed[chunk][pair]:
                executed[chunk][pair] += 1
    return executed


def _copied(graph: Any, chunk_of: _ChunkOf) -> Dict[str, Set[int]]:
    """The ops whose results a call copies, as they were built: by name, with the chunks that do."""
    copied: Dict[str, Set[int]] = {}
    for op in graph.get_operations():
        chunk = chunk_of(op.name)
        if chunk is not None and op.type == "Identity":
            copied.setdefault(op.inputs[0].op.name, set()).add(chunk)
    return copied


def _crossing(call: Emitted, chunk_of: _ChunkOf, graph: Any, places: _Places) -> Dict[int, Pair]:
    """The chunks that cross to the other hosts, from where: all but those without elements."""
    if call.hosts == 1:
        return {}
    empty = {
        chunk_of(op.name) for op in graph.get_operations() if op.outputs and op.outputs[0].shape.num_elements() == 0
    }
    roots = enumerate(call.plan.roots)
    return {chunk: (places.first_tower(root), _HOSTS) for chunk, root in roots if chunk not in empty}


def _bytes_across(chunk_of: _ChunkOf, graph: Any) -> Optional[int]:
    """The bytes of the tensors that cross to the other hosts; None if a shape is not known."""
    total = 0
    for op in graph.get_operations():
        if op.type.startswith(_COLLECTIVE) and chunk_of(op.name) is not None:
            elements = op.outputs[0].shape.num_elements()
            if elements is None:
                return None
            total += elements * op.outputs[0].dtype.size
    return total


def _chunk_finder(call: Emitted) -> _ChunkOf:
    """A function from an op's name to the chunk in whose scope it is, or None."""
    scopes = {call.scope + name: chunk for chunk, name in enumerate(call.names)}

    def chunk_of(op: str) -> Optional[int]:
        while "/" in op:
            op = op.rpartition("/")[0]
            if op in scopes:
                return scopes[op]
        return None

    return chunk_of


# ---- both sides ------------------------------------------------------------------------------------


def _audited(call: Emitted, graph: Any, edges: Sequence[_Edge], ran: Sequence[Any]) -> Optional[Audited]:
    """One call's copies, or None if it took no part in the run."""
    places = _Places(call.devices)
    planned = _planned(call, places)
    chunk_of = _chunk_finder(call)
    executed = _executed(chunk_of, graph, edges, places, planned)
    crossing = _crossing(call, chunk_of, graph, places)
    for chunk, pair in crossing.items():
        planned[chunk][pair] = 1
    for node in ran:
        if node.op.startswith(_COLLECTIVE) and chunk_of(node.name) is not None:
            executed[chunk_of(node.name)][places.find(node.device), _HOSTS] += 1
    if any(planned) and not any(executed) and all(chunk_of(node.name) is None for node in ran):
        return None
    shared = len({places.first_tower(tower) for tower in range(call.plan.devices)}) < call.plan.devices
    faults = []
    for chunk, (plan, seen) in enumerate(zip(planned, executed)):
        missing, strange = _difference(plan, seen, shared)
        if missing or strange:
            faults.append((chunk, missing, strange))
    if faults:
        used = {places.find(node.device) for node in ran}
        idle = {places.first_tower(tower) for tower in range(call.plan.devices)} - used
        raise AuditError(_message(call, faults, [call.devices[tower] for tower in sorted(idle)]))
    total = sum(executed, Counter())
    copies = Counter({pair: times for pair, times in total.items() if pair[1] != _HOSTS})
    size = _bytes_across(chunk_of, graph) if crossing else 0
    return Audited(call.scope, call.plan, call.devices, copies, call.hosts, len(crossing), size)


def _difference(planned: Counter, executed: Counter, shared: bool) -> Tuple[Counter, Counter]:
    """The copies that are missing, and those that are not planned."""
    if shared:  # how often a tensor crosses to a device with two towers depends on what was pruned
        planned, executed = (
            Counter({pair: times if pair[1] == _HOSTS else 1 for pair, times in pairs.items()})
            for pairs in (planned, executed)
        )
    return planned - executed, executed - planned


def _message(call: Emitted, faults: Sequence[Tuple[int, Counter, Counter]], idle: Sequence[Any]) -> str:
    lines = [f"{call.scope}: the run moved something else than the {call.plan.algorithm} plan says, by tower number"]
    for chunk, *kinds in faults[:_LISTED]:
        found = [f"{word} {_arrows(pairs)}" for word, pairs in zip(("missing", "not planned"), kinds) if pairs]
        lines.append(f"chunk {chunk} ({call.names[chunk]!r}): {', '.join(found)}")
    if len(faults) > _LISTED:
        lines.append(f"and {len(faults) - _LISTED} more chunks")
    if idle:
        lines.append(f"no op ran on {', '.join(map(str, idle))}: soft placement put that tower's ops elsewhere")
    elif any(dst != _HOSTS for _, _, strange in faults for _, dst in strange):
        lines.append(
            "build tower k's gradients under tf.device(devices[k]): one that lives elsewhere (a fed placeholder is on"
            " the client's CPU:0) is copied once more"
        )
    elif any(missing for _, missing, _ in faults):
        lines.append(
            "fetch the results of all towers and variables: what nobody asks for is not executed, and what is constant"
            " is not copied"
        )
    return "\n".join(lines)


def _arrows(pairs: Counter) -> str:
    return " ".join(f"{src}→{dst}" for src, dst in sorted(pairs, key=str))
