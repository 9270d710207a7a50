"""Compare what TensorFlow executed with the plan.

A session returns the partition graphs of a step on request: see :mod:`~hier_allreduce.graph.partitions`. ::

    asked, seen = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
    session.run(train_op, options=asked, run_metadata=seen)
    print(hier_allreduce.audit(seen, session.graph))

    copies between the devices, from row to column
               0  1  2  3
    0  /cpu:0  .  1  1  .
    1  /cpu:1  1  .  .  .
    2  /cpu:2  1  .  .  1
    3  /cpu:3  .  .  1  .
    total 6
    hier_allreduce/: hierarchical, 1 chunk, 6 copies, planned = executed

On several hosts, each host audits its own devices and what it sends to the others::

    hier_allreduce/: hierarchical, 1 chunk, 6 copies, 1 collective over 2 hosts (400 kB), planned = executed

Where a plan was made for a machine's links, each sender's copies leave in the plan's order, and the line says so::

    hier_allreduce/: exchange, 8 chunks, 112 copies, planned = executed, 112 of them in the plan's order

With lanes, the table has a row and a column for each of them too: 2.0 is lane 0 of tower 2.

TensorFlow copies no constants, and what several all-reduces have in common only once. The line says so too::

    mean/: hierarchical, 1 chunk, 3 copies and 3 not needed, planned = executed
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from ..errors import AuditError
from ..formatting import amount, count, table
from ..graph import TURN, Emitted, emitted_in, tf1
from ..planning import THIS_MACHINE, Plan
from ..topology import Topology, load, this_machine
from .built_sums import wrong_sums
from .executed import ChunkOf, DeviceFinder, Pair, Place, chunk_copies, chunk_finder, planned_copies
from .partitions import Edge, edges_between, overtaken
from .trace import Trace
from .tracing import trace_calls
from .unneeded import copies_done

_COLLECTIVE = "CollectiveReduce"  # and CollectiveReduceV2, in TensorFlow 2
_OTHER_HOSTS = "other hosts"
_LISTED = 5  # chunks that an error message lists


@dataclass(frozen=True)
class Audited:
    """One all-reduce of the run, executed as planned.

    Attributes:
        scope: its name scope.
        plan: what it does inside this host.
        devices: the devices of this host's towers, and of their lanes.
        copies: the number of tensors that went from device i to device j, in the plan's numbering:
            ``{(i, j): count}``. Devices 0 to K-1 are the towers'.
        hosts: the number of hosts.
        collectives: the number of tensors that crossed between the hosts; each counts once, on every host.
        bytes_across: the bytes of these tensors; None where a shape was not known when the graph was built.
        in_order: the number of copies that waited for those before them in the plan; 0 where the order does not matter.
        unneeded: the number of planned copies that were left out: of constants, or of what another chunk has copied.
    """

    scope: str
    plan: Plan
    devices: Tuple[Any, ...]
    copies: Counter
    hosts: int = 1
    collectives: int = 0
    bytes_across: Optional[int] = None
    in_order: int = 0
    unneeded: int = 0

    def __str__(self) -> str:
        total = sum(self.copies.values())
        parts = [self.plan.algorithm, count(self.plan.chunks, "chunk"), f"{total} copies"]
        if self.plan.lanes:
            tower = self.plan.tower
            inside = sum(times for (src, dst), times in self.copies.items() if tower(src) == tower(dst))
            parts[-1] += f" ({inside} between a tower and its lanes)"
        if self.unneeded:
            parts[-1] += f" and {self.unneeded} not needed"
        if self.hosts > 1:
            size = "" if self.bytes_across is None else f" ({amount(self.bytes_across)})"
            parts.append(f"{count(self.collectives, 'collective')} over {self.hosts} hosts{size}")
        order = f", {self.in_order} of them in the plan's order" if self.in_order else ""
        return f"{self.scope}: {', '.join(parts)}, planned = executed{order}"


@dataclass(frozen=True)
class Audit:
    """The all-reduces of one run. Prints as a K×K table of copies and a line for each all-reduce.

    Attributes:
        calls: the all-reduces that ran.
        not_run: the name scopes of all-reduces that are in the graph, but took no part in this run.
        not_audited: the name scopes of those in a ``tf.compat.v1.cond`` or ``while_loop``: partition graphs have all
            branches, and do not show which one was taken, or how often.
    """

    calls: Tuple[Audited, ...]
    not_run: Tuple[str, ...] = ()
    not_audited: Tuple[str, ...] = ()
    _step: Any = field(default=None, repr=False, compare=False)  # the metadata, the graph, and the calls as built

    @property
    def copies(self) -> Counter:
        """The number of tensors that went from tower i's device to tower j's, over all calls: ``{(i, j): count}``.

        Towers that share a device are counted as the first of them. With lanes, devices K and up are lanes.
        What several all-reduces read counts for each.
        """
        return sum((call.copies for call in self.calls), Counter())

    def trace(self, path: str, topology: Union[Topology, str, None] = None) -> Trace:
        """Write when each copy and each sum happened, beside the plan's prediction, and return the trace.

        The file is Chrome's JSON trace, for ui.perfetto.dev or chrome://tracing. Bars are named by chunk, variable and
        from → to; their ``op`` is the name under which TensorBoard's profiler lists them. ``print`` the result for a
        summary: GB/s of each link used, the busiest sender, the share of the bound, and what was exposed after the
        last gradient.

        Args:
            path: of the JSON file.
            topology: the machine whose links the prediction takes: a ``Topology``, a name, a file, or
                ``"this machine"``. By default it is the strategy's; without one nothing is predicted.

        Raises:
            AuditError: the step was run without ``trace_level=FULL_TRACE``.
            HierAllreduceError: no such machine, or it lacks some of the devices; or the file cannot be written.
        """
        metadata, graph, built = self._step
        if topology == THIS_MACHINE:
            # where calls differ in their devices, each takes its own from the whole machine
            devices = {tuple(f"/gpu:{gpu}" for gpu in c.gpus) or c.devices[: c.plan.towers] for c in built}
            topology = this_machine(list(map(str, *devices)) if len(devices) == 1 else None)
        elif isinstance(topology, str):
            topology = load(topology)
        traced = trace_calls(metadata, graph, built, topology)
        traced.write(path)
        return traced

    def __str__(self) -> str:
        lines = ["copies between the devices, from row to column"]
        for devices, plan in {call.devices: call.plan for call in self.calls}.items():
            copies: Counter = sum((call.copies for call in self.calls if call.devices == devices), Counter())
            names = [plan.device_name(device) for device in range(plan.devices)]
            lines += [_copies_table(devices, names, copies), f"total {sum(copies.values())}"]
        lines += [str(call) for call in self.calls]
        lines += [f"{scope}: not part of this run" for scope in self.not_run]
        lines += [f"{scope}: in control flow, not audited" for scope in self.not_audited]
        return "\n".join(lines)


def _copies_table(devices: Sequence[Any], names: Sequence[str], copies: Counter) -> str:
    numbers = range(len(devices))
    rows = [[f"{names[src]}  {devices[src]}", *(copies[src, dst] or "." for dst in numbers)] for src in numbers]
    return table([["", *names], *rows], all_right=True)


def audit(run_metadata: Any, graph: Optional[Any] = None) -> Audit:
    """Compare the copies of an executed step with the plans of the all-reduces in it.

    For every chunk each planned transfer must have been executed, and no other tensor may come in. A transfer that is
    in the graph may be left out if its value is constant, or was copied there for another chunk. What is done with
    the results on other devices is not compared. Towers that share a device need no transfer between them. On several
    hosts each chunk with elements must also cross between them exactly once, from its main. Every result must hold each
    tower's gradient once: this is counted in the graph as it was built, since TensorFlow's optimizers merge additions.

    Args:
        run_metadata: of a ``session.run`` with ``RunOptions(output_partition_graphs=True)``.
        graph: the session's graph, by default the current one.

    Returns:
        The copies by pair of towers; ``print`` it.

    Raises:
        AuditError: the step did not move what was planned (the message names chunks and copies), or not in the plan's
            order where that matters, or its ops add up something else; it ran no all-reduce outside of control flow, or
            the metadata has no partition graphs.
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
            f"no all-reduce was built in {graph}; pass graph=, the graph that the session ran (for a tf.function"
            " there is audit_first_step; an all-reduce inside TensorFlow 2's tf.cond or tf.while_loop has other names"
            " when it runs and cannot be audited)"
        )
    edges = edges_between(partitions)
    nodes = [node for part in partitions for node in part.node]
    collected, not_run, not_audited = [], [], []
    for call in built:
        if _in_control_flow(call, graph):
            not_audited.append(call.scope)
            continue
        traffic = _collect(call, graph, edges, nodes)
        if traffic is None:
            not_run.append(call.scope)
            continue
        collected.append((call, traffic))
    audited = [_audited(call, traffic, graph, partitions) for call, traffic in _with_done(collected, graph, edges)]
    if not_audited and not audited:
        raise AuditError(
            f"{', '.join(not_audited)}: in a tf.cond or tf.while_loop, and the run's metadata do not show what was"
            " executed there; audit the same all-reduce outside of it"
        )
    if not audited:
        raise AuditError(f"the run has none of the graph's all-reduces ({', '.join(not_run)}); fetch their results")
    ran = tuple(call for call, _ in collected)
    return Audit(tuple(audited), tuple(not_run), tuple(not_audited), (run_metadata, graph, ran))


def _in_control_flow(call: Emitted, graph: Any) -> bool:
    """Return whether a call's ops are in a TensorFlow 1 cond or while_loop, whose branches are in the same graph."""
    contexts = (op._get_control_flow_context() for op in graph.get_operations() if op.name.startswith(call.scope))
    return any(context and (context.IsCondContext() or context.IsWhileContext()) for context in contexts)


# ---- collect: what was planned, and what was executed ----------------------------------------------


class _Traffic(NamedTuple):
    """What one call moved.

    Attributes:
        planned: for each chunk the pairs of places between which the plan moves it.
        executed: for each chunk the pairs of places between which its tensors crossed.
        shares_devices: whether towers share a device.
        idle: the devices on which no op ran, but should have.
        bytes_across: the bytes that cross to the other hosts; None where that is not known.
        done: from :func:`.copies_done`, where a call has fewer copies than planned.
    """

    planned: List[Counter]
    executed: List[Counter]
    shares_devices: bool
    idle: List[Any]
    bytes_across: Optional[int]
    done: Sequence[Counter] = ()

    def sides(self) -> Iterator[Tuple[Counter, Counter]]:
        """Yield what is planned and what was executed, chunk by chunk, such that it can be compared."""
        for planned, executed in zip(self.planned, self.executed):
            # how often a tensor crosses to a device with two towers depends on pruning
            yield (_once(planned), _once(executed)) if self.shares_devices else (planned, executed)


def _collect(call: Emitted, graph: Any, edges: Sequence[Edge], nodes: Sequence[Any]) -> Optional[_Traffic]:
    """Return what one call moved, or None if it took no part in the run."""
    places = DeviceFinder(call.devices)
    chunk_of = chunk_finder(call)
    planned = planned_copies(call, places)
    executed: List[Counter] = [Counter() for _ in planned]
    for chunk, pair, _ in chunk_copies(chunk_of, graph, edges, places, planned):
        executed[chunk][pair] += 1
    to_other_hosts = _planned_collectives(call, chunk_of, graph, places)
    for chunk, pair in to_other_hosts.items():
        planned[chunk][pair] = 1
    for node in nodes:
        if node.op.startswith(_COLLECTIVE) and chunk_of(node.name) is not None:
            executed[chunk_of(node.name)][places.find(node.device), _OTHER_HOSTS] += 1
    if any(planned) and not any(executed) and all(chunk_of(node.name) is None for node in nodes):
        return None
    homes = {places.first_tower(tower) for tower in range(call.plan.towers)}
    relaying = {device for pair in call.plan.transfers() for device in pair if device >= call.plan.towers}
    idle = (homes | relaying) - {places.find(node.device) for node in nodes}
    return _Traffic(
        planned,
        executed,
        shares_devices=len(homes) < call.plan.towers,
        idle=[call.devices[device] for device in sorted(idle)],
        bytes_across=_bytes_across(chunk_of, graph) if to_other_hosts else 0,
    )


def _planned_collectives(call: Emitted, chunk_of: ChunkOf, graph: Any, places: DeviceFinder) -> Dict[int, Pair]:
    """Return the chunks that cross to the other hosts, with their pair of places: all but those without elements."""
    if call.hosts == 1:
        return {}
    empty = {
        chunk_of(op.name) for op in graph.get_operations() if op.outputs and op.outputs[0].shape.num_elements() == 0
    }
    roots = enumerate(call.plan.roots)
    return {chunk: (places.first_tower(root), _OTHER_HOSTS) for chunk, root in roots if chunk not in empty}


def _bytes_across(chunk_of: ChunkOf, graph: Any) -> Optional[int]:
    """Return the bytes of the tensors that cross to the other hosts; None if a shape is not known."""
    total = 0
    for op in graph.get_operations():
        if op.type.startswith(_COLLECTIVE) and chunk_of(op.name) is not None:
            elements = op.outputs[0].shape.num_elements()
            if elements is None:
                return None
            total += elements * op.outputs[0].dtype.size
    return total


# ---- compare ---------------------------------------------------------------------------------------


class _Difference(NamedTuple):
    """The copies of one chunk that are missing, and those that were executed without being planned."""

    chunk: int
    missing: Counter
    unplanned: Counter


def _compare(traffic: _Traffic) -> List[_Difference]:
    """Return the chunks whose executed copies are not the planned ones."""
    differences = []
    for chunk, (planned, executed) in enumerate(traffic.sides()):
        if traffic.done:
            executed = executed | planned & traffic.done[chunk]
        difference = _Difference(chunk, planned - executed, executed - planned)
        if difference.missing or difference.unplanned:
            differences.append(difference)
    return differences


def _with_done(
    collected: Sequence[Tuple[Emitted, _Traffic]], graph: Any, edges: Sequence[Edge]
) -> Sequence[Tuple[Emitted, _Traffic]]:
    """Return the calls and what they moved, with what else is done if one of them has fewer copies than planned."""
    if not any(_compare(traffic) for _, traffic in collected):
        return collected
    done = copies_done([call for call, _ in collected], graph, edges)
    return [(call, traffic._replace(done=counts)) for (call, traffic), counts in zip(collected, done)]


def _once(pairs: Counter) -> Counter:
    """Return ``pairs`` with each pair of devices counted once; what crosses between hosts counts as it is."""
    return Counter({pair: times if pair[1] == _OTHER_HOSTS else 1 for pair, times in pairs.items()})


def _in_order(call: Emitted, graph: Any, partitions: Sequence[Any]) -> int:
    """Return how many executed copies took their turn among those of their sender.

    Raises:
        AuditError: one did not wait for those before it.
    """
    chunk_of = chunk_finder(call)
    turns = {
        op.name: [before.name for before in op.control_inputs]
        for op in graph.get_operations()
        if op.type == TURN and chunk_of(op.name) is not None
    }
    if not turns:
        return 0
    pairs = overtaken(partitions, turns)
    if pairs:
        first, other = pairs[0]
        raise AuditError(
            f"{call.scope}: copies left out of the plan's order ({count(len(pairs), 'pair')}), the first is {first!r},"
            f" which did not wait for {other!r}; TensorFlow's graph optimizers have dropped a control edge"
        )
    executed = {node.name for part in partitions for node in part.node}
    return len(executed & turns.keys())


def _check_sums(call: Emitted, graph: Any) -> None:
    """Raise an AuditError if a result misses a tower's contribution, or has it more than once."""
    wrong = list(wrong_sums(call, chunk_finder(call), graph))
    if wrong:
        lines = [f"chunk {result.chunk} ({call.names[result.chunk]!r}), {result}" for result in wrong[:_LISTED]]
        raise AuditError(
            f"{call.scope}: the copies are those of the {call.plan.algorithm} plan, but the ops add up something else"
            f" ({count(len(wrong), 'result')})\n"
            + "\n".join(lines)
            + "\nthis is a bug of hier_allreduce, or something has changed the graph: please report it"
        )


def _audited(call: Emitted, traffic: _Traffic, graph: Any, partitions: Sequence[Any]) -> Audited:
    """Return what one call did.

    Raises:
        AuditError: it is not what was planned.
    """
    differences = _compare(traffic)
    if differences:
        raise AuditError(_explain(call, differences, traffic.idle))
    _check_sums(call, graph)
    total: Counter = sum(traffic.executed, Counter())
    return Audited(
        call.scope,
        call.plan,
        call.devices,
        copies=Counter({pair: times for pair, times in total.items() if pair[1] != _OTHER_HOSTS}),
        hosts=call.hosts,
        collectives=sum(times for pair, times in total.items() if pair[1] == _OTHER_HOSTS),
        bytes_across=traffic.bytes_across,
        in_order=_in_order(call, graph, partitions),
        unneeded=sum(sum((planned - executed).values()) for planned, executed in traffic.sides()),
    )


# ---- explain ---------------------------------------------------------------------------------------


def _explain(call: Emitted, differences: Sequence[_Difference], idle: Sequence[Any]) -> str:
    """Return the error message: the differences of the first chunks, and what probably causes them."""
    numbers = "by tower and lane (2.0 is lane 0 of tower 2)" if call.plan.lanes else "by tower number"
    lines = [f"{call.scope}: the run did not move what the {call.plan.algorithm} plan says, {numbers}"]
    for chunk, missing, unplanned in differences[:_LISTED]:
        moved = {"missing": missing, "not planned": unplanned}
        parts = [f"{word} {_arrows(pairs, call.plan)}" for word, pairs in moved.items() if pairs]
        lines.append(f"chunk {chunk} ({call.names[chunk]!r}): {', '.join(parts)}")
    if len(differences) > _LISTED:
        lines.append(f"and {len(differences) - _LISTED} more chunks")
    lines += _advice(differences, idle)
    return "\n".join(lines)


def _advice(differences: Sequence[_Difference], idle: Sequence[Any]) -> List[str]:
    if idle:
        return [f"no op ran on {', '.join(map(str, idle))}: soft placement put its ops elsewhere"]
    if any(dst != _OTHER_HOSTS for difference in differences for _, dst in difference.unplanned):
        return [
            "build tower k's gradients under tf.device(devices[k]): a gradient on another device (a fed placeholder is"
            " on the client's CPU:0) needs one more copy"
        ]
    if any(difference.missing for difference in differences):
        return [
            "fetch the results of all towers and variables: TensorFlow does not execute what is not fetched; and build"
            " tower k's gradients under tf.device(devices[k]): one that is on its main already is not copied there"
        ]
    return []


def _arrows(pairs: Counter, plan: Plan) -> str:
    def name(place: Place) -> str:
        return plan.device_name(place) if isinstance(place, int) else place

    return " ".join(f"{name(src)}→{name(dst)}" for src, dst in sorted(pairs, key=str))
