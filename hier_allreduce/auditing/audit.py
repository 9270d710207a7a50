"""Compare the copies that TensorFlow executed with the schedules."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from ..compat import collected_graphs, tf1
from ..errors import AuditError
from ..formatting import amount, count, table
from ..graph.record import AllReduce, all_reduces
from ..graphs import graphs_with_all_reduces
from .traffic import OTHER_HOSTS, ExecutedStep, Traffic

# An error message lists that many tensors or updates, because a model may have hundreds.
_LISTED = 5
_REMEDY = (
    "fetch the results of all towers and variables: TensorFlow executes nothing else. And build"
    " tower k's gradients under tf.device(devices[k]), which has to exist: one on another device (a"
    " fed placeholder is on the client's CPU:0) needs one more copy, and one that is on its root"
    " already is not copied there"
)
_KERNEL = (
    "that device has no kernel for it, and soft placement moved it, with its variable. Take"
    " Strategy(sparse='dense') if the gradient is sparse, or another optimizer; with"
    " allow_soft_placement=False TensorFlow names the kernel that is missing"
)


class Audited(NamedTuple):
    """One all-reduce of the step, executed as planned.

    Attributes:
        all_reduce: as it was built: its scope, algorithm, devices and tensors.
        copies: ``{(i, j): count}``, the number of tensors that tower i's device sent to tower j's.
        bytes: ``{"float16": 1024}``, the bytes that crossed, by the dtype in which they did.
        unknown: the number of tensors that crossed and are not in ``bytes``, because their size is
            known in the step only, as that of sparse gradients is.
        collectives: the number of tensors that crossed between hosts, each counted once.
        left_out: the number of planned copies that did not run, because nobody reads the value, or
            it is a constant, or it was copied for another all-reduce. TensorFlow runs nothing else.
        edges: the number of control edges that TensorFlow kept, of those in ``all_reduce.edges``.
    """

    all_reduce: AllReduce
    copies: Counter
    bytes: Counter
    unknown: int
    collectives: int
    left_out: int
    edges: int

    def __str__(self) -> str:
        built = self.all_reduce
        left_out = f" and {self.left_out} left out" if self.left_out else ""
        findings = [built.algorithm, count(len(built.tensors), "chunk")]
        findings.append(f"{sum(self.copies.values())} copies{left_out}")
        for dtype, size in sorted(self.bytes.items()):
            findings.append(f"{amount(size)} in {dtype}")
        if self.unknown:
            findings.append(f"{count(self.unknown, 'tensor')} of unknown size")
        if self.collectives:
            findings.append(f"{count(self.collectives, 'collective')} over {built.hosts} hosts")
        if built.edges:
            findings.append(f"{self.edges} of {count(len(built.edges), 'control edge')}")
        return f"{built.scope}: {', '.join(findings)}, planned = executed by pair of towers"


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
            lines += [table(cells, all_right=True), f"total {sum(copies.values())}"]
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
    gradient they hold, nor where results go afterwards. An update of a variable must have run on
    the tower for which it was built. On several hosts, every host audits its devices and the sums
    over hosts.

    Args:
        step: the RunMetadata of a ``session.run`` with
            ``RunOptions(output_partition_graphs=True)``; or a function that runs the first step of
            a program with ``tf.function``s, such as Keras ``fit``. Of several functions the one
            with most all-reduces is audited.
        graph: the session's graph, by default the current one.

    Returns:
        The copies by pair of towers, and their bytes by dtype; ``print`` it.

    Raises:
        AuditError: copies are missing or too many (the message names chunks and pairs, and the
            remedy); or an update left its tower; or the step ran no all-reduce outside of a
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
    executed = ExecutedStep(graph, partitions, prefix)
    calls: List[Audited] = []
    skipped: List[Tuple[str, str]] = []
    for built in all_reduces(graph):
        traffics = [traffic for traffic in executed.traffics if traffic.all_reduce is built]
        reason = _reason_to_skip(built, traffics, graph)
        if reason:
            skipped.append((built.scope, reason))
        else:
            calls.append(_audited(built, traffics, executed))
    if not calls:
        reasons = "; ".join(map(": ".join, skipped)) or "there is none"
        raise AuditError(
            f"the run has none of the all-reduces in {graph} ({reasons}). Fetch their results; of"
            " constants they are computed before the step. Or pass graph=, the one that the session"
            " ran. Those in TensorFlow 2's tf.cond or tf.while_loop cannot be audited"
        )
    return Audit(tuple(calls), tuple(skipped))


def _reason_to_skip(built: AllReduce, traffics: Sequence[Traffic], graph: Any) -> str:
    """Return why an all-reduce cannot be audited; empty if it can."""
    # TensorFlow 1 has the branches of a cond or while_loop in the same graph, and partition graphs
    # do not show which branch was taken, or how often.
    ops = [op for op in graph.get_operations() if op.name.startswith(built.scope)]
    if any(op._get_control_flow_context() for op in ops):
        return "in a tf.cond or tf.while_loop, which metadata do not show: not audited"
    is_planned = any(traffic.planned for traffic in traffics)
    has_run = any(traffic.ran_at or traffic.executed for traffic in traffics)
    return "" if has_run or not is_planned else "not in this run"


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


def _audited(built: AllReduce, traffics: Sequence[Traffic], executed: ExecutedStep) -> Audited:
    """Return an all-reduce that was executed as planned.

    Raises:
        AuditError: copies are missing or too many, or an update left its tower.
    """
    # Copies come first, because a device that does not exist moves copies and updates.
    _check_copies(built, traffics, executed.strayed[built.scope])
    moved = list(executed.moved_updates(built))
    if moved:
        raise _error(f"{built.scope}: an update left its tower", moved, "updates", _KERNEL)
    copies: Counter = Counter()
    bytes_by_dtype: Counter = Counter()
    unknown = collectives = left_out = 0
    for traffic in traffics:
        elements = traffic.tensor.elements
        if elements is None or traffic.tensor.is_sparse:
            unknown += any(traffic.executed.values())
        else:
            bytes_by_dtype.update(traffic.bytes_by_dtype(elements))  # unlike +, this keeps zeros
        left_out += sum((traffic.planned - traffic.executed).values())
        for (src, dst), times in traffic.executed.items():
            if dst == OTHER_HOSTS:
                collectives += times
            else:
                copies[src, dst] += times
    edges = executed.edges_kept(built)
    return Audited(built, copies, bytes_by_dtype, unknown, collectives, left_out, edges)


def _check_copies(built: AllReduce, traffics: Sequence[Traffic], strayed: Sequence[str]) -> None:
    """Raise an AuditError that lists the copies that are missing or too many."""
    faults = list(strayed)
    ran_at = set().union(*(traffic.ran_at for traffic in traffics))
    for traffic in traffics:
        missing = traffic.planned - traffic.executed
        extra = traffic.executed - traffic.planned
        # Where an op of ours ran, TensorFlow has brought it all that it reads.
        if not extra:
            missing = Counter({pair: n for pair, n in missing.items() if pair[1] not in ran_at})
        if not missing and not extra:
            continue
        faults_of_tensor = [f"missing {_arrows(missing)}"] if missing else []
        if extra:
            sources = sorted(set().union(*(traffic.sources[pair] for pair in extra)))
            listed = ", ".join(map(repr, sources))
            faults_of_tensor.append(f"not planned {_arrows(extra)} (of {listed})")
        variable, *more_variables = traffic.tensor.variables
        more = f" and {len(more_variables)} more" if more_variables else ""
        tensor = f"{traffic.tensor.name} (variable {variable!r}{more})"
        faults.append(f"{tensor}: {', '.join(faults_of_tensor)}")
    if not faults:
        return
    title = (
        f"{built.scope}: the step's copies are not those of the {built.algorithm} plan, by tower"
        " number"
    )
    raise _error(title, faults, "chunks", _REMEDY)


def _error(title: str, faults: List[str], noun: str, remedy: str) -> AuditError:
    """Return the error that lists the first faults, and the number of those that it leaves out."""
    if len(faults) > _LISTED:
        faults = [*faults[:_LISTED], f"and {len(faults) - _LISTED} more {noun}"]
    return AuditError("\n".join([title, *faults, remedy]))


def _arrows(pairs: Counter) -> str:
    return " ".join(f"{src}→{dst}" for src, dst in sorted(pairs, key=str))
