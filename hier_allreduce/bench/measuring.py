"""The measurement: the same gradients and consumers for all contenders, one all-reduce each.

1. Each contender is measured in a graph and session of its own: build, first run, copies, memory, error.
2. All contenders read the same gradient variables in one session, so that they fit into memory. They take one step
   each in turn, in a new order every round, so that other load on the machine affects all of them alike.

A session executes only what is fetched, so a step in the shared session runs the same nodes as in its own.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import tensorflow as tf

from ..graph import tf1
from ..inspect import executed_copies
from ..sampling import Tick, in_turn, timed
from .case import Case, Rows, consumed, placeholders, session, variables
from .contenders import CannotRun, Contender
from .correctness import TOLERANCE, exact_result, largest_error
from .floor import Floor
from .results import Measured, Report
from .tracing import write_trace

BASELINE = Contender("baseline", lambda grads, devices, average: grads)
WARM_UP = 2  # rounds that are not timed
_BUILDS = 3


def measure(
    case: Case,
    contenders: Sequence[Contender],
    rounds: int = 15,
    floor: bool = True,
    tick: Optional[Tick] = None,
    traces: Optional[str] = None,
) -> Report:
    """Measure the contenders, and if ``floor`` is true the plain sum of the same bytes.

    Args:
        case: the gradients.
        contenders: in the order of the report.
        rounds: the number of timed steps of each, after two untimed ones.
        floor: measure the floor too; it exists on CPU devices only.
        tick: called with a short text before each contender and before each round.
        traces: the folder for a trace of one step of each contender.
    """
    tick = tick or (lambda stage: None)
    tick("baseline")
    exact = exact_result(case)
    baseline = _measure_alone(BASELINE, case, exact, None)
    results = []
    for contender in contenders:
        tick(contender.name)
        results.append(_measure_alone(contender, case, exact, baseline, traces))
    running = [contender for contender, measured in zip(contenders, results) if measured.status != "cannot run"]
    scales: Dict[str, float] = {}
    with contextlib.ExitStack() as until_done:
        steps = _shared_steps([BASELINE, *running], case, until_done)
        if floor:
            results.append(Measured(Floor.name, *_floor_status(case)))
            if results[-1].status == "ok":
                plain = until_done.enter_context(contextlib.closing(Floor(case)))
                steps[Floor.name], scales[Floor.name] = timed(plain.step), plain.scale
        seconds = in_turn(steps, rounds, WARM_UP, tick)
    for measured in (baseline, *results):
        scale = scales.get(measured.name, 1.0)
        measured.step_seconds = [scale * step_seconds for step_seconds in seconds.get(measured.name, [])]
    return Report(case, baseline, results)


def _floor_status(case: Case) -> Tuple[str, str]:
    if all("cpu" in device.lower() for device in case.devices):
        return "ok", ""
    return "cannot run", "it is the sum in the host's memory, which says nothing about GPUs"


# ---- all contenders in turn ------------------------------------------------------------------------


def _shared_steps(
    contenders: Sequence[Contender], case: Case, until_done: contextlib.ExitStack
) -> Dict[str, Callable[[], float]]:
    """Return each contender's step, timed, by name: all in one session and on the same gradients."""
    graph = tf.Graph()
    with graph.as_default():
        grads, fill = variables(case)
        ops = {c.name: consumed(c.build(grads, case.devices, case.average), case) for c in contenders}
    shared = until_done.enter_context(session(graph, case))
    shared.run(fill)
    return {name: timed(shared.make_callable(op)) for name, op in ops.items()}


# ---- one contender in its own graph ----------------------------------------------------------------


def _measure_alone(
    contender: Contender,
    case: Case,
    exact: Sequence[Any],
    baseline: Optional[Measured],
    traces: Optional[str] = None,
) -> Measured:
    measured = Measured(contender.name)
    try:
        measured.build_seconds = statistics.median(_build_seconds(contender, case) for _ in range(_BUILDS))
        _run_alone(contender, case, exact, measured, traces)
    except Exception as error:  # a peer may raise anything; the report shows it
        kind = "" if isinstance(error, CannotRun) else f"{type(error).__name__}: "
        measured.status, measured.error = "cannot run", f"{kind}{error}".strip()
        return measured
    if baseline:
        measured.nodes_executed -= baseline.nodes_executed
    if not measured.max_error <= TOLERANCE:  # also if it is NaN
        operation = "mean" if case.average else "sum"
        measured.status, measured.error = "wrong", f"up to {measured.max_error:.0%} off the {operation}"
    return measured


def _build_seconds(contender: Contender, case: Case) -> float:
    with tf.Graph().as_default():
        grads = placeholders(case)
        start = time.perf_counter()
        contender.build(grads, case.devices, case.average)
        return time.perf_counter() - start


def _run_alone(
    contender: Contender, case: Case, exact: Sequence[Any], measured: Measured, traces: Optional[str]
) -> None:
    """Build and run one contender, and fill in ``measured``."""
    graph = tf.Graph()
    with graph.as_default():
        grads, fill = variables(case)
        with session(graph, case) as alone:
            alone.run(fill)
            ops_before = len(graph.get_operations())
            reduced = contender.build(grads, case.devices, case.average)
            measured.nodes_built = len(graph.get_operations()) - ops_before
            _check_rows(grads, reduced)
            _check_memory(grads, reduced, case)
            step = consumed(reduced, case)
            start = time.perf_counter()
            alone.run(step)
            measured.first_run_seconds = time.perf_counter() - start
            metadata = _trace_step(alone, step, measured)
            if traces:
                write_trace(traces, contender.name, case, metadata, graph)
            if contender is not BASELINE:
                measured.max_error = largest_error(alone, grads, reduced, case, exact)


def _check_rows(grads: Rows, reduced: Rows) -> None:
    expected, returned = ([len(row) for row in rows] for rows in (grads, reduced))
    if returned != expected:
        raise CannotRun(f"it returned rows of {returned} for rows of {expected} gradients")


def _check_memory(grads: Rows, reduced: Rows, case: Case) -> None:
    densified = [
        shape
        for shape, grad, result in zip(case.shapes, grads[0], reduced[0])
        if isinstance(grad, tf.IndexedSlices) and not isinstance(result, tf.IndexedSlices)
    ]
    needed = len(case.devices) * sum(shape.dense_bytes for shape in densified)
    if needed > case.memory:
        raise CannotRun(f"it makes {len(densified)} sparse gradients dense, which takes {needed / 2**30:.1f} GiB")


def _trace_step(alone: Any, step: Any, measured: Measured) -> Any:
    """Trace one step: executed nodes, copies between devices, and the peak of allocated memory; return its metadata."""
    options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True)
    metadata = tf1.RunMetadata()
    alone.run(step, options=options, run_metadata=metadata)
    measured.nodes_executed = sum(len(part.node) for part in metadata.partition_graphs)
    measured.copies = executed_copies(metadata)
    measured.peak_bytes = _peak_bytes(metadata)
    return metadata


def _peak_bytes(metadata: Any) -> int:
    records = [
        record
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
        for record in memory.allocation_records
    ]
    peak = held = 0
    for record in sorted(records, key=lambda r: (r.alloc_micros, r.alloc_bytes)):
        held += record.alloc_bytes  # negative when it is freed
        peak = max(peak, held)
    return peak
