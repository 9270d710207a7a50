"""Compare the copies that TensorFlow executed with the schedules."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from ..compat import collected_graphs, tf1
from ..errors import AuditError
from ..formatting import table
from ..graph.record import all_reduces
from ..graphs import graphs_with_all_reduces
from .traffic import Audited, Copy, executed_in

# An error message lists that many tensors, because a model may have hundreds.
_LISTED = 5
_REMEDY = (
    "fetch the results of all towers and variables: TensorFlow executes nothing else. And build"
    " tower k's gradients under tf.device(devices[k]), which has to exist: one on another device (a"
    " fed placeholder is on the client's CPU:0) needs one more copy, and one that is on its root"
    " already is not copied there"
)


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
        # All-reduces over the same devices share a table, because their copies share the links.
        for devices in dict.fromkeys(audited.all_reduce.devices for audited in self.calls):
            calls = [audited for audited in self.calls if audited.all_reduce.devices == devices]
            copies = Audit(tuple(calls)).copies
            towers = range(len(devices))
            cells: List[List[object]] = [["", *towers]]
            for src in towers:
                counts = [copies[src, dst] or "." for dst in towers]
                cells.append([f"{src}  {devices[src]}", *counts])
            lines.append(table(cells, all_right=True))
        return "\n".join([*lines, *map(str, self.calls), *map(": ".join, self.skipped)])


def audit(step: Any, graph: Optional[Any] = None) -> Audit:
    """Compare the copies of an executed step with the schedules of the all-reduces in it.

    ::

        asked = tf.compat.v1.RunOptions(output_partition_graphs=True)
        seen = tf.compat.v1.RunMetadata()
        session.run(train_op, options=asked, run_metadata=seen)
        print(audit(seen, session.graph))
        print(audit(lambda: model.fit(dataset, steps_per_epoch=1)))    # Keras, before any other fit

    The ops of every chunk may read nothing from another device but what was planned. A planned copy
    that did not run is counted as left out; it is missing only where no op of the all-reduce ran on
    its destination. Copies are compared by their number for each pair of towers: not which
    gradient they hold, nor where results go afterwards. On several hosts, every host audits its
    devices and the sums over hosts.

    Args:
        step: the RunMetadata of a ``session.run`` with
            ``RunOptions(output_partition_graphs=True)``; or a function that runs the first step of
            a program with ``tf.function``s, such as Keras ``fit``. Of several functions the one
            with most all-reduces is audited.
        graph: the session's graph, by default the current one.

    Returns:
        The copies by pair of towers, and their dtypes; ``print`` it.

    Raises:
        AuditError: copies are missing or too many (the message names chunks and pairs, and the
            remedy); or the step ran no all-reduce outside of a
            ``tf.compat.v1.cond`` or ``while_loop``; or a device has no number; or the metadata has
            no partition graphs; or no ``tf.function`` with an all-reduce ran for the first time.
    """
    prefix = ""
    partitions = getattr(step, "partition_graphs", ())
    if callable(step):
        partitions, prefix, graph = _first_step(step)
    graph = graph or tf1.get_default_graph()
    if not partitions:
        raise AuditError(
            f"the {type(step).__name__} has no partition graphs; run the step with"
            " options=tf.compat.v1.RunOptions(output_partition_graphs=True), run_metadata=…"
        )
    calls: List[Audited] = []
    skipped: List[Tuple[str, str]] = []
    for call in executed_in(graph, partitions, prefix):
        reason = _reason_to_skip(call, graph)
        if reason:
            skipped.append((call.all_reduce.scope, reason))
        else:
            _check_copies(call)
            calls.append(call)
    if not calls:
        reasons = "; ".join(map(": ".join, skipped)) or "there is none"
        raise AuditError(
            f"the run has none of the all-reduces in {graph} ({reasons}). Fetch their results; of"
            " constants they are computed before the step. Or pass graph=, the one that the session"
            " ran. Those in TensorFlow 2's tf.cond or tf.while_loop cannot be audited"
        )
    return Audit(tuple(calls), tuple(skipped))


def _reason_to_skip(call: Audited, graph: Any) -> str:
    """Return why an all-reduce cannot be audited; empty if it can."""
    # TensorFlow 1 has the branches of a cond or while_loop in the same graph, and partition graphs
    # do not show which branch was taken, or how often.
    scope = call.all_reduce.scope
    ops = [op for op in graph.get_operations() if op.name.startswith(scope)]
    if any(op._get_control_flow_context() for op in ops):
        return "in a tf.cond or tf.while_loop, which metadata do not show: not audited"
    has_run = call.ran_at or call.executed
    return "" if has_run or not call.planned else "not in this run"


def _first_step(step: Callable[[], Any]) -> Tuple[Sequence[Any], str, Any]:
    """Return partition graphs, the prefix of names there, and the graph as it was built.

    They are those of the function with most all-reduces. It must not have run before ``step``,
    because TensorFlow tells only once which nodes it executes.
    """
    graphs_before = graphs_with_all_reduces()
    ids_before = set(map(id, graphs_before))
    with collected_graphs() as functions:
        step()
    new_graphs = [graph for graph in graphs_with_all_reduces() if id(graph) not in ids_before]
    # The training step has most all-reduces, because others only add up metrics.
    for graph in sorted(new_graphs, key=lambda graph: -len(all_reduces(graph))):
        scopes = [built.scope for built in all_reduces(graph)]
        for function in functions:
            prefix = _prefix_of(scopes, function.partition_graphs)
            if prefix is not None:
                return function.partition_graphs, prefix, graph
    raise AuditError(
        "no tf.function with an all-reduce ran for the first time; audit the first step of a"
        " program, before any other call of its function. For a session, pass the RunMetadata of a"
        " step"
    )


def _prefix_of(scopes: Sequence[str], partitions: Sequence[Any]) -> Optional[str]:
    """Return the text before name scopes in a function's partitions; None if none is there."""
    prefixes = set()
    for node in chain.from_iterable(partition.node for partition in partitions):
        for scope in scopes:
            prefix, is_there, _ = node.name.partition(scope)
            # The prefix ends a level, because a scope may be the end of a longer name.
            if is_there and (not prefix or prefix.endswith("/")):
                prefixes.add(str(prefix))
    # Of adam/hier_allreduce/ another scope, hier_allreduce/, is the end: that prefix is too long.
    return min(prefixes, key=len, default=None)


def _check_copies(call: Audited) -> None:
    """Raise an AuditError that lists the copies that are missing or too many."""
    built = call.all_reduce
    left_out = call.planned - call.executed
    not_planned = call.executed - call.planned
    faults = list(call.strayed)
    for tensor in built.tensors:
        extra = [copy for copy in not_planned if copy[0] == tensor.name]
        missing = [copy for copy in left_out if copy[0] == tensor.name]
        # Where an op of ours ran, TensorFlow has brought it all that it reads.
        if not extra:
            missing = [copy for copy in missing if copy[2] not in call.ran_at]
        if not missing and not extra:
            continue
        faults_of_tensor = [f"missing {_arrows(missing)}"] if missing else []
        if extra:
            sources = sorted(set().union(*(call.sources[copy] for copy in extra)))
            listed = ", ".join(map(repr, sources))
            faults_of_tensor.append(f"not planned {_arrows(extra)} (of {listed})")
        variable, *more_variables = tensor.variables
        more = f" and {len(more_variables)} more" if more_variables else ""
        faults.append(f"{tensor.name} (variable {variable!r}{more}): {', '.join(faults_of_tensor)}")
    if not faults:
        return
    # Only the first ones are listed.
    if len(faults) > _LISTED:
        faults = [*faults[:_LISTED], f"and {len(faults) - _LISTED} more chunks"]
    title = (
        f"{built.scope}: the step's copies are not those of the {built.algorithm} plan, by tower"
        " number"
    )
    raise AuditError("\n".join([title, *faults, _REMEDY]))


def _arrows(copies: Sequence[Copy]) -> str:
    return " ".join(f"{src}→{dst}" for _, src, dst in sorted(copies, key=str))
