"""Compare the copies that TensorFlow executed with the schedules."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..compat import collected_graphs, tf1
from ..errors import AuditError
from ..formatting import table
from ..graph.record import all_reduces
from ..graphs import graphs_with_all_reduces
from .traffic import Audited, executed_in

# An error message lists that many copies, because a model may have hundreds of tensors.
_LISTED = 5
_REMEDY = (
    "fetch the results of all towers and variables: TensorFlow executes nothing else. And build"
    " tower k's gradients under tf.device(devices[k]), which has to exist: one on another device (a"
    " fed placeholder is on the client's CPU:0) needs one more copy, and one that is on its root"
    " already is not copied there"
)
_SKIPPED = "not audited: not in this run, or in a tf.cond or tf.while_loop, which metadata hide"


class Audit(NamedTuple):
    """The all-reduces of one step. Prints as a K×K table of copies and a line for each all-reduce.

    Attributes:
        calls: the all-reduces that ran.
        skipped: the name scopes of the others in the graph, which are not audited: they did not
            run, or are in a ``tf.compat.v1.cond`` or ``while_loop``.
    """

    calls: Tuple[Audited, ...]
    skipped: Tuple[str, ...] = ()

    @property
    def copies(self) -> Counter:
        """The sum over all calls. Towers that share a device are counted as one of them."""
        return sum((audited.copies for audited in self.calls), Counter())

    def __str__(self) -> str:
        # All-reduces over the same devices share a table, because their copies share the links.
        copies_by_devices: Dict[Tuple[str, ...], Counter] = defaultdict(Counter)
        for audited in self.calls:
            copies_by_devices[audited.all_reduce.devices].update(audited.copies)
        lines = ["copies between the devices, from row to column"]
        for devices, copies in copies_by_devices.items():
            cells: List[List[object]] = [["", *range(len(devices))]]
            for src, device in enumerate(devices):
                counts = [copies[src, dst] or "." for dst in range(len(devices))]
                cells.append([f"{src}  {device}", *counts])
            lines.append(table(cells))
        skipped = [f"{scope}: {_SKIPPED}" for scope in self.skipped]
        return "\n".join([*lines, *map(str, self.calls), *skipped])


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
    devices; sums over hosts are not counted.

    Args:
        step: the RunMetadata of a ``session.run`` with
            ``RunOptions(output_partition_graphs=True)``; or a function that runs the first step of
            a program with ``tf.function``s, such as Keras ``fit``. Of several functions the one
            with most all-reduces is audited.
        graph: the session's graph, by default the current one.

    Returns:
        The copies by pair of towers; ``print`` it.

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
    skipped: List[str] = []
    for call in executed_in(graph, partitions, prefix):
        scope = call.all_reduce.scope
        # TensorFlow 1 has the branches of a cond or while_loop in the same graph, and partition
        # graphs do not show which branch was taken, or how often.
        ops = [op for op in graph.get_operations() if op.name.startswith(scope)]
        has_run = call.ran_at or call.sources or not call.planned
        if has_run and not any(op._get_control_flow_context() for op in ops):
            _check_copies(call)
            calls.append(call)
        else:
            skipped.append(scope)
    if not calls:
        listed = ", ".join(skipped) or "there is none"
        raise AuditError(
            f"the run has none of the all-reduces in {graph} ({listed}). Fetch their results; of"
            " constants they are computed before the step. Or pass graph=, the one that the session"
            " ran. Those in a tf.cond or tf.while_loop cannot be audited"
        )
    return Audit(tuple(calls), tuple(skipped))


def _first_step(step: Callable[[], Any]) -> Tuple[Sequence[Any], str, Any]:
    """Return partition graphs, the prefix of names there, and the graph as it was built.

    They are those of the function with most all-reduces. It must not have run before ``step``,
    because TensorFlow tells only once which nodes it executes.
    """
    graphs_before = graphs_with_all_reduces()
    with collected_graphs() as functions:
        step()
    new_graphs = [graph for graph in graphs_with_all_reduces() if graph not in graphs_before]
    # The training step has most all-reduces, because others only add up metrics.
    for graph in sorted(new_graphs, key=lambda graph: -len(all_reduces(graph))):
        scopes = "|".join(re.escape(built.scope) for built in all_reduces(graph))
        # The prefix ends a level. It is the shortest one: of adam/hier_allreduce/ another scope,
        # hier_allreduce/, is the end.
        pattern = re.compile(f"(|.*?/)({scopes})")
        for function in functions:
            nodes = [node for partition in function.partition_graphs for node in partition.node]
            matches = filter(None, (pattern.match(node.name) for node in nodes))
            prefix = min((match.group(1) for match in matches), key=len, default=None)
            if prefix is not None:
                return function.partition_graphs, prefix, graph
    raise AuditError(
        "no tf.function with an all-reduce ran for the first time; audit the first step of a"
        " program, before any other call of its function. For a session, pass the RunMetadata of a"
        " step"
    )


def _check_copies(call: Audited) -> None:
    """Raise an AuditError that lists the copies that are missing or too many."""
    built = call.all_reduce
    not_planned = sorted(call.executed - call.planned, key=str)
    other_tensors = {name for name, _, _ in not_planned}
    missing = set()
    for name, src, dst in call.planned - call.executed:
        # Where an op of ours ran, TensorFlow has brought it all that it reads.
        if name in other_tensors or dst not in call.ran_at:
            missing.add(f"{src}→{dst}")
    if not not_planned and not missing:
        return
    lines = [
        f"{built.scope}: the step's copies are not those of the {built.algorithm} plan, by tower"
        " number",
        f"missing: {' '.join(sorted(missing)) or 'none'}",
        f"not planned: {len(not_planned)}",
    ]
    described = {"": "before it is cut", **{tensor.name: str(tensor) for tensor in built.tensors}}
    for copy in not_planned[:_LISTED]:
        name, src, dst = copy
        ops = ", ".join(map(repr, call.sources[copy]))
        lines.append(f"{src}→{dst} of {ops}: {described[name]}")
    raise AuditError("\n".join([*lines, _REMEDY]))
