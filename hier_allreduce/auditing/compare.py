"""Compare the copies that TensorFlow executed with the schedules."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

from ..compat import collected_graphs, tf1
from ..errors import AuditError
from ..formatting import count, table
from ..graph.record import Call, recorded_graphs, recorded_in
from .executed import OTHER_HOSTS, Step, Traffic

_LISTED = 5  # tensors that an error message lists
_FETCH = (
    "fetch the results of all towers and variables: TensorFlow executes nothing else; and build tower k's"
    " gradients under tf.device(devices[k]): one that is on its main already is not copied there"
)
_PLACE = (
    "build tower k's gradients under tf.device(devices[k]): a gradient on another device (a fed placeholder is on the"
    " client's CPU:0) needs one more copy"
)


class Audited(NamedTuple):
    """One all-reduce of the step, executed as planned.

    Attributes:
        call: as it was built: its scope, algorithm, devices and tensors.
        copies: the number of tensors that went from tower i's device to tower j's: ``{(i, j): count}``.
        collectives: the number of tensors that crossed between the hosts; each counts once, on every host.
        unneeded: the number of planned copies that were left out: of constants, or of values copied already.
    """

    call: Call
    copies: Counter
    collectives: int
    unneeded: int

    def __str__(self) -> str:
        copies = f"{sum(self.copies.values())} copies" + (
            f" and {self.unneeded} not needed" if self.unneeded else ""
        )
        across = (
            f", {count(self.collectives, 'collective')} over {self.call.hosts} hosts"
            if self.collectives
            else ""
        )
        chunks = count(len(self.call.tensors), "chunk")
        return f"{self.call.scope}: {self.call.algorithm}, {chunks}, {copies}{across}, planned = executed"


class Audit(NamedTuple):
    """The all-reduces of one step. Prints as a K×K table of copies and a line for each all-reduce.

    Attributes:
        calls: the all-reduces that ran.
        skipped: the others in the graph, by name scope, with the reason.
    """

    calls: Tuple[Audited, ...]
    skipped: Tuple[Tuple[str, str], ...] = ()

    @property
    def copies(self) -> Counter:
        """The sum over all calls. Towers that share a device are counted as the first of them."""
        return sum((audited.copies for audited in self.calls), Counter())

    def __str__(self) -> str:
        lines = ["copies between the devices, from row to column"]
        for devices in dict.fromkeys(audited.call.devices for audited in self.calls):
            copies = Audit(
                tuple(audited for audited in self.calls if audited.call.devices == devices)
            ).copies
            towers = range(len(devices))
            rows = [
                [f"{src}  {devices[src]}", *(copies[src, dst] or "." for dst in towers)]
                for src in towers
            ]
            lines += [
                table([["", *towers], *rows], all_right=True),
                f"total {sum(copies.values())}",
            ]
        return "\n".join([*lines, *map(str, self.calls), *map(": ".join, self.skipped)])


def audit(step: Any, graph: Optional[Any] = None) -> Audit:
    """Compare the copies of an executed step with the schedules of the all-reduces in it.

    ::

        asked, seen = tf.compat.v1.RunOptions(output_partition_graphs=True), tf.compat.v1.RunMetadata()
        session.run(train_op, options=asked, run_metadata=seen)
        print(audit(seen, session.graph))
        print(audit(lambda: model.fit(dataset, steps_per_epoch=1)))    # Keras, before any other fit

    For every chunk each planned copy must have been executed, and no other tensor may come in. A planned copy may be
    left out if its value is constant, or was copied there for another chunk. Where results go afterwards is not
    compared. On several hosts, every host audits its devices and the sums over the hosts.

    Args:
        step: the RunMetadata of a ``session.run`` with ``RunOptions(output_partition_graphs=True)``; or a function that
            runs the first step of a program with ``tf.function``s, such as Keras ``fit``. Of several functions the one
            with most all-reduces is audited.
        graph: the session's graph, by default the current one.

    Returns:
        The copies by pair of towers; ``print`` it.

    Raises:
        AuditError: copies are missing or too many (the message names chunks and pairs, the reason, and the remedy); or
            the step ran no all-reduce outside of a ``tf.compat.v1.cond`` or ``while_loop``; or the metadata has no
            partition graphs; or no ``tf.function`` with an all-reduce ran for the first time.
    """
    prefix, partitions = "", getattr(step, "partition_graphs", ())
    if callable(step):
        partitions, prefix, graph = _first_step(step)
    graph = graph or tf1.get_default_graph()
    if not partitions:
        raise AuditError(
            f"the {type(step).__name__} has no partition graphs; run the step with"
            " options=tf.compat.v1.RunOptions(output_partition_graphs=True), run_metadata=…"
        )
    if not recorded_in(graph):
        raise AuditError(
            f"no all-reduce was built in {graph}; pass graph=, the graph that the session ran (for a tf.function pass a"
            " function that runs its first step; an all-reduce inside TensorFlow 2's tf.cond or tf.while_loop has other"
            " names when it runs and cannot be audited)"
        )
    executed = Step(graph, partitions, prefix)
    ran, skipped = [], []
    for call in recorded_in(graph):
        traffics = [traffic for traffic in executed.traffics if traffic.call is call]
        if _in_control_flow(
            call, graph
        ):  # partition graphs do not show which branch was taken, or how often
            skipped.append(
                (
                    call.scope,
                    "in a tf.cond or tf.while_loop, which metadata do not show: not audited",
                )
            )
        elif any(traffic.planned for traffic in traffics) and not any(
            traffic.ran for traffic in traffics
        ):
            skipped.append((call.scope, "not in this run"))
        else:
            ran.append((call, traffics))
    if not ran:
        reasons = "; ".join(map(": ".join, skipped))
        raise AuditError(
            f"the run has none of the graph's all-reduces ({reasons}); fetch their results"
        )
    if any(traffic.planned - traffic.executed for _, traffics in ran for traffic in traffics):
        executed.find_unneeded()
    audited = (_audited(call, traffics, executed.idle(call)) for call, traffics in ran)
    return Audit(tuple(audited), tuple(skipped))


def _first_step(step: Callable[[], Any]) -> Tuple[Sequence[Any], str, Any]:
    """Return the partition graphs of the function with most all-reduces, the prefix of names there, and its graph.

    It must not have run before ``step``: TensorFlow tells only once which nodes it executes.
    """
    before = recorded_graphs()
    with collected_graphs() as functions:
        step()
    new = [graph for graph in recorded_graphs() if all(graph is not other for other in before)]
    for graph in sorted(new, key=lambda graph: -len(recorded_in(graph))):
        for partitions in (function.partition_graphs for function in functions):
            for node in (node for part in partitions for node in part.node):
                prefix, found, _ = node.name.partition(recorded_in(graph)[0].scope)
                if found and (not prefix or prefix.endswith("/")):
                    return partitions, prefix, graph
    raise AuditError(
        "no tf.function with an all-reduce ran for the first time; audit the first step of a program, before any other"
        " call of its function. For a session, pass the RunMetadata of a step"
    )


def _in_control_flow(call: Call, graph: Any) -> bool:
    """Return whether a call's ops are in a TensorFlow 1 cond or while_loop, whose branches are in the same graph."""
    contexts = (
        op._get_control_flow_context()
        for op in graph.get_operations()
        if op.name.startswith(call.scope)
    )
    return any(
        context and (context.IsCondContext() or context.IsWhileContext()) for context in contexts
    )


def _audited(call: Call, traffics: Sequence[Traffic], idle: Sequence[str]) -> Audited:
    """Return a call that was executed as planned.

    Raises:
        AuditError: copies are missing or too many.
    """
    faults, advice = [], _FETCH
    for traffic in traffics:
        missing = traffic.planned - traffic.executed - traffic.unneeded
        extra = traffic.executed - traffic.planned
        parts = [f"missing {_arrows(missing)}"] if missing else []
        if extra:
            sources = sorted(set().union(*(traffic.sources.get(pair, ()) for pair in extra)))
            parts.append(f"not planned {_arrows(extra)} (of {', '.join(map(repr, sources))})")
            advice = _PLACE
        if parts:
            first, *others = traffic.tensor.variables
            more = f" and {len(others)} more" if others else ""
            faults.append(f"{traffic.tensor.name} (variable {first!r}{more}): {', '.join(parts)}")
    if faults:
        title = f"{call.scope}: the step's copies are not those of the {call.algorithm} plan, by tower number"
        if len(faults) > _LISTED:
            faults[_LISTED:] = [f"and {len(faults) - _LISTED} more chunks"]
        if idle:
            advice = f"no op ran on {', '.join(idle)}: soft placement put its ops elsewhere; choose devices that exist"
        raise AuditError("\n".join([title, *faults, advice]))
    total: Counter = sum((traffic.executed for traffic in traffics), Counter())
    copies = Counter({pair: times for pair, times in total.items() if pair[1] != OTHER_HOSTS})
    unneeded = sum(sum(traffic.unneeded.values()) for traffic in traffics)
    return Audited(call, copies, sum(total.values()) - sum(copies.values()), unneeded)


def _arrows(pairs: Counter) -> str:
    return " ".join(f"{src}→{dst}" for src, dst in sorted(pairs, key=str))
