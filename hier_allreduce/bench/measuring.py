"""Contenders side by side: the same gradients, the same consumers, one all-reduce each.

Each contender is first measured in a graph and session of its own (build, first run, copies, memory, error). Then all
of them read the same gradient variables in one session, so that they fit into memory, and take one step each in turn,
in a new order every round, so that a busy machine disturbs all alike. A session executes only what is fetched: a step
there runs the same nodes as alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..graph import data_sends, tf1
from .case import Case, Rows, consumed, placeholders, session, variables
from .contenders import CannotRun, Contender, is_ours
from .floor import Floor
from .models import DTYPE_BYTES

BASELINE = Contender("baseline", lambda grads, devices, average: grads)
_BUILDS = 3
WARM_UP = 2
_SHORTEST = 1e-6  # seconds; a round in which ours was below the baseline's median counts as this
_SAMPLES = 4096  # elements of each result that are compared with float64
# Relative. Half precision is within it; a tower that is left out is off by its number, which is up to 1 of about K/2.
_TOLERANCE = 0.05
_SMALLEST = 1e-3  # relative to this where the result itself is smaller
Tick = Callable[[str], None]


@dataclass
class Measured:
    """What was found about one contender. Node counts and copies are those over the baseline's.

    Attributes:
        status: "ok", "wrong" (it ran, and its results are not the sum) or "cannot run".
        error: in the contender's own words.
        nodes_built: ops that its build function added.
        nodes_executed: nodes of all devices after pruning, Grappler and partitioning, sends and receives included.
        build_seconds: the median of three builds, each in a fresh graph.
        first_run_seconds: the first ``session.run``: placement, Grappler, executors and one step.
        peak_bytes: the most that was allocated at one time during a step: what the ops had allocated and not freed yet,
            from the allocation records of a traced step (on GPUs without the buffers that copies land in).
        copies: tensors and bytes that crossed from device to device, as executed.
        max_error: the largest relative difference to the float64 result, over 4096 elements of every result.
        step_seconds: one for each round, the baseline not subtracted.
    """

    name: str
    status: str = "ok"
    error: str = ""
    nodes_built: int = 0
    nodes_executed: int = 0
    build_seconds: float = 0.0
    first_run_seconds: float = 0.0
    peak_bytes: int = 0
    copies: Dict[Tuple[str, str], Tuple[int, int]] = field(default_factory=dict)
    max_error: float = 0.0
    step_seconds: List[float] = field(default_factory=list)

    @property
    def copied_bytes(self) -> int:
        """Over all pairs of devices."""
        return sum(size for _, size in self.copies.values())

    @property
    def copied_tensors(self) -> int:
        """Over all pairs of devices."""
        return sum(count for count, _ in self.copies.values())


@dataclass
class Report:
    """One case: the baseline, and the contenders in the order asked for."""

    case: Case
    baseline: Measured
    contenders: List[Measured]

    def net_seconds(self, measured: Measured) -> List[float]:
        """What each step took over the baseline's median step; the floor has no baseline."""
        idle = 0.0 if measured.name == Floor.name else statistics.median(self.baseline.step_seconds)
        return [seconds - idle for seconds in measured.step_seconds]

    @property
    def ours(self) -> Optional[Measured]:
        """What the others are compared with: this package's first contender."""
        return next((m for m in self.contenders if is_ours(m.name) and m.step_seconds), None)

    def ratio(self, measured: Measured) -> Optional[float]:
        """How many times ours it takes: the median over the rounds of the ratio within each round.

        None where nothing can be said: not measured, or ours took no longer than the baseline.
        """
        if self.ours is None or not measured.step_seconds:
            return None
        ours = self.net_seconds(self.ours)
        if statistics.median(ours) <= 0:
            return None
        return statistics.median(a / max(b, _SHORTEST) for a, b in zip(self.net_seconds(measured), ours))

    def as_dict(self) -> Dict[str, Any]:
        """Everything, for JSON: seconds, bytes, and ``copies`` as ``{"cpu:0→cpu:1": [tensors, bytes]}``."""
        towers = len(self.case.devices)
        return {
            "devices": list(self.case.devices),
            "average": self.case.average,
            "gradients": len(self.case.shapes),
            "tower_bytes": self.case.tower_bytes,
            "tensorflow": tf.__version__,
            "cores": cores(),
            "baseline": self._one(self.baseline, towers),
            "contenders": [self._one(measured, towers) for measured in self.contenders],
        }

    def _one(self, measured: Measured, towers: int) -> Dict[str, Any]:
        fields = dataclasses.asdict(measured)
        fields["copies"] = {f"{i}→{j}": list(what) for (i, j), what in measured.copies.items()}
        if measured.step_seconds:
            fields["net_seconds"] = dict(zip(("q1", "median", "q3"), quartiles(self.net_seconds(measured))))
            fields["ratio_to_ours"] = self.ratio(measured)
            fields["peak_to_gradients"] = measured.peak_bytes / max(1, towers * self.case.tower_bytes)
        return fields


def quartiles(values: Sequence[float]) -> Tuple[float, float, float]:
    """The first quartile, the median and the third."""
    return tuple(float(q) for q in np.percentile(values, (25, 50, 75)))  # type: ignore[return-value]


def cores() -> int:
    """How many cores this process may use; on Windows and macOS, which do not tell, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_here(count: Optional[int] = None) -> Tuple[str, ...]:
    """``count`` GPUs (all, if there are two) where there are so many, else ``count`` logical CPU devices (8)."""
    gpus = len(tf.config.experimental.list_physical_devices("GPU"))
    if gpus >= (count or 2):
        return tuple(f"/gpu:{k}" for k in range(count or gpus))
    return tuple(f"/cpu:{k}" for k in range(count or 8))


def measure(
    case: Case, contenders: Sequence[Contender], rounds: int = 15, floor: bool = True, tick: Optional[Tick] = None
) -> Report:
    """Measure the contenders, and the plain sum of the same bytes if ``floor``.

    Args:
        case: the gradients.
        contenders: in the order of the report.
        rounds: how many steps of each are timed, after two that are not.
        floor: measure it too; only on CPU devices.
        tick: called with a few words before each part of the work: once for each contender, once for each round.
    """
    tick = tick or (lambda words: None)
    tick("baseline")
    exact = exact_result(case)
    baseline = _alone(BASELINE, case, exact, None)
    results = []
    for contender in contenders:
        tick(contender.name)
        results.append(_alone(contender, case, exact, baseline))
    running = [c for c, found in zip(contenders, results) if found.status != "cannot run"]
    scale = {}
    with contextlib.ExitStack() as until_done:
        steps = _all_steps([BASELINE, *running], case, until_done)
        if floor:
            results.append(Measured(Floor.name, *_floor_status(case)))
            if results[-1].status == "ok":
                plain = until_done.enter_context(contextlib.closing(Floor(case)))
                steps[Floor.name], scale[Floor.name] = plain.step, plain.scale
        seconds = interleaved(steps, rounds, tick)
    for found in (baseline, *results):
        found.step_seconds = [taken * scale.get(found.name, 1.0) for taken in seconds.get(found.name, [])]
    return Report(case, baseline, results)


def _all_steps(
    contenders: Sequence[Contender], case: Case, until_done: contextlib.ExitStack
) -> Dict[str, Callable[[], Any]]:
    """One step of each, all of them on the same gradients."""
    graph = tf.Graph()
    with graph.as_default():
        grads, fill = variables(case)
        ops = {c.name: consumed(c.build(grads, case.devices, case.average), case) for c in contenders}
    shared = until_done.enter_context(session(graph, case))
    shared.run(fill)
    return {name: shared.make_callable(op) for name, op in ops.items()}


def _floor_status(case: Case) -> Tuple[str, str]:
    on_cpu = all("cpu" in device.lower() for device in case.devices)
    return ("ok", "") if on_cpu else ("cannot run", "it is the sum in the host's memory, which says nothing about GPUs")


def interleaved(steps: Dict[str, Callable[[], Any]], rounds: int, tick: Tick) -> Dict[str, List[float]]:
    """Seconds of each of ``rounds`` steps, by name: all take one in turn, in a new order every round.

    ``tick`` is called before each round, and before each of two that are not timed.
    """
    seconds: Dict[str, List[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    for number in range(WARM_UP + rounds):
        tick(f"round {number - WARM_UP + 1} of {rounds}" if number >= WARM_UP else "warming up")
        shuffle(order)
        for name in order:
            begin = time.perf_counter()
            steps[name]()
            taken = time.perf_counter() - begin
            if number >= WARM_UP:
                seconds[name].append(taken)
    return seconds


# ---- one contender in its own graph ----------------------------------------------------------------


def _alone(contender: Contender, case: Case, exact: Sequence[Any], baseline: Optional[Measured]) -> Measured:
    found = Measured(contender.name)
    try:
        found.build_seconds = statistics.median(_build_seconds(contender, case) for _ in range(_BUILDS))
        _run_alone(contender, case, exact, found)
    except Exception as error:  # whatever a peer raises is what is reported
        kind = "" if isinstance(error, CannotRun) else f"{type(error).__name__}: "
        found.status, found.error = "cannot run", f"{kind}{error}".strip()
        return found
    found.nodes_executed -= baseline.nodes_executed if baseline else 0
    if not found.max_error <= _TOLERANCE:
        found.status, found.error = "wrong", f"up to {found.max_error:.0%} off the {'mean' if case.average else 'sum'}"
    return found


def _build_seconds(contender: Contender, case: Case) -> float:
    with tf.Graph().as_default():
        grads = placeholders(case)
        begin = time.perf_counter()
        contender.build(grads, case.devices, case.average)
        return time.perf_counter() - begin


def _run_alone(contender: Contender, case: Case, exact: Sequence[Any], found: Measured) -> None:
    graph = tf.Graph()
    with graph.as_default():
        grads, fill = variables(case)
        with session(graph, case) as alone:
            alone.run(fill)
            before = len(graph.get_operations())
            reduced = contender.build(grads, case.devices, case.average)
            found.nodes_built = len(graph.get_operations()) - before
            _refuse_odd(grads, reduced)
            _refuse_huge(grads, reduced, case)
            step = consumed(reduced, case)
            begin = time.perf_counter()
            alone.run(step)
            found.first_run_seconds = time.perf_counter() - begin
            _look_inside(alone, step, found)
            if contender is not BASELINE:
                found.max_error = _max_error(alone, grads, reduced, case, exact)


def _refuse_odd(grads: Rows, reduced: Rows) -> None:
    given, returned = ([len(row) for row in rows] for rows in (grads, reduced))
    if returned != given:
        raise CannotRun(f"it returned rows of {returned} for rows of {given} gradients")


def _refuse_huge(grads: Rows, reduced: Rows, case: Case) -> None:
    made_dense = [
        shape
        for shape, given, result in zip(case.shapes, grads[0], reduced[0])
        if isinstance(given, tf.IndexedSlices) and not isinstance(result, tf.IndexedSlices)
    ]
    needed = len(case.devices) * sum(shape.dense_bytes for shape in made_dense)
    if needed > case.memory:
        raise CannotRun(f"it makes {len(made_dense)} sparse gradients dense, which takes {needed / 2**30:.1f} GiB")


def _look_inside(alone: Any, step: Any, found: Measured) -> None:
    """One traced step: executed nodes, copies between devices, and the peak of what was allocated."""
    asked = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True)
    seen = tf1.RunMetadata()
    alone.run(step, options=asked, run_metadata=seen)
    found.nodes_executed = sum(len(part.node) for part in seen.partition_graphs)
    found.copies = executed_copies(seen)
    records = [
        record
        for device in seen.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
        for record in memory.allocation_records
    ]
    found.peak_bytes = held = 0
    for record in sorted(records, key=lambda r: (r.alloc_micros, r.alloc_bytes)):
        held += record.alloc_bytes
        found.peak_bytes = max(found.peak_bytes, held)


def executed_copies(run_metadata: Any) -> Dict[Tuple[str, str], Tuple[int, int]]:
    """Tensors and bytes from device to device: ``{("cpu:0", "cpu:1"): (count, bytes)}``.

    Args:
        run_metadata: of a step with FULL_TRACE and ``output_partition_graphs=True``.
    """
    sizes = {
        (device.device, node.node_name, output.slot): _bytes(output.tensor_description)
        for device in run_metadata.step_stats.dev_stats
        for node in device.node_stats
        for output in node.output
    }
    counts: Counter = Counter()
    volumes: Counter = Counter()
    for send in (send for part in run_metadata.partition_graphs for send in data_sends(part)):
        sender, receiver = (send.attr[end].s.decode() for end in ("send_device", "recv_device"))
        source, _, slot = send.input[0].partition(":")
        pair = sender.rpartition("device:")[2].lower(), receiver.rpartition("device:")[2].lower()
        counts[pair] += 1
        volumes[pair] += sizes[sender, source, int(slot or 0)]
    return {pair: (counts[pair], volumes[pair]) for pair in sorted(counts)}


def _bytes(description: Any) -> int:
    elements = 1
    for dim in description.shape.dim:
        elements *= dim.size
    return elements * DTYPE_BYTES.get(tf.as_dtype(description.dtype).name, 0)


# ---- right or wrong --------------------------------------------------------------------------------


def exact_result(case: Case) -> List[Any]:
    """Some numbers of each variable's sum (or mean), N vectors, added up in float64."""
    graph = tf.Graph()
    with graph.as_default():
        grads, fill = variables(case)
        with session(graph, case) as alone:
            alone.run(fill)
            given = alone.run(_samples(grads, grads, case))
    divisor = len(case.devices) if case.average else 1
    return [sum(vector.astype(np.float64) for vector in column) / divisor for column in zip(*given)]


def _max_error(alone: Any, grads: Rows, reduced: Rows, case: Case, exact: Sequence[Any]) -> float:
    worst = 0.0
    for row in alone.run(_samples(reduced, grads, case)):
        for result, expected in zip(row, exact):
            if result.shape != expected.shape:
                return float("inf")
            error = np.abs(result.astype(np.float64) - expected) / np.maximum(np.abs(expected), _SMALLEST)
            worst = max(worst, float(np.max(error, initial=0.0)))
    return worst


def _samples(rows: Rows, grads: Rows, case: Case) -> List[List[Any]]:
    """Of each of the K×N values some numbers: evenly spaced ones if dense, all touched rows if sparse."""
    with tf.device(case.devices[0]):
        touched = [_union(column) for column in zip(*grads)]
        everything = tf.constant([-1])
        ranges = [[tf.constant([x]) for x in (0, 0, max(1, s.elements // _SAMPLES))] for s in case.shapes]
    samples = []
    for device, row in zip(case.devices, rows):
        with tf.device(device):
            flat = [
                tf.reshape(v, everything) if seen is None else _touched_rows(v, seen) for v, seen in zip(row, touched)
            ]
            samples.append(
                [
                    tf.raw_ops.StridedSlice(input=v, begin=begin, end=end, strides=stride, end_mask=1)
                    if seen is None
                    else v
                    for v, seen, (begin, end, stride) in zip(flat, touched, ranges)
                ]
            )
    return samples


def _union(column: Sequence[Any]) -> Any:
    """The rows that any tower has, sorted; None for a dense gradient."""
    if not isinstance(column[0], tf.IndexedSlices):
        return None
    return tf.sort(tf.unique(tf.concat([grad.indices for grad in column], 0))[0])


def _touched_rows(value: Any, touched: Any) -> Any:
    if not isinstance(value, tf.IndexedSlices):
        return tf.gather(value, touched)
    places = tf.searchsorted(touched, tf.cast(value.indices, touched.dtype))
    return tf.math.unsorted_segment_sum(tf.cast(value.values, tf.float64), places, tf.size(touched))
