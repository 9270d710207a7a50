"""MirroredStrategy with each ``cross_device_ops`` object: step time and graph size for the same model.

The model is a table of shapes. A variable's gradient on replica k is (k + 1) times the variable. A step subtracts the
scaled reduced gradient from every replica's copy. Contenders differ in the all-reduce only.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np
import tensorflow as tf

from ..errors import BenchError
from ..formatting import table
from ..graph import IS_TF2, make_logical_cpus
from ..integrations.distribute import HierarchicalAllReduce
from .case import Case
from .measuring import Tick, interleaved
from .results import quartiles

_RATE = 1e-3  # small, so that the variables keep their magnitude over the rounds
OURS, BASELINE = "HierarchicalAllReduce", "no reduction"
MIRRORED_CONTENDERS: Dict[str, Callable[[], Any]] = {
    OURS: HierarchicalAllReduce,
    "ReductionToOneDevice": tf.distribute.ReductionToOneDevice,
    "HierarchicalCopyAllReduce": tf.distribute.HierarchicalCopyAllReduce,
    "HierarchicalCopyAllReduce(num_packs=0)": lambda: tf.distribute.HierarchicalCopyAllReduce(num_packs=0),
    "default (NCCL on GPUs, ring on CPUs)": lambda: None,
}


class MirroredComparison(NamedTuple):
    """By contender: the ops in the step's graph, whether its sums are right, and the seconds of each step."""

    devices: Tuple[str, ...]
    ops: Dict[str, int]
    is_right: Dict[str, bool]
    step_seconds: Dict[str, List[float]]

    def net_seconds(self, name: str) -> Any:
        """Return the seconds of a contender's steps minus the median step without reduction."""
        return np.array(self.step_seconds[name]) - np.median(self.step_seconds[BASELINE])

    def text(self) -> str:
        """Return a table with a line for each contender."""
        rows = [["", "ms over no reduction", "quartiles", "times ours", "ops in the graph", ""]]
        for name in MIRRORED_CONTENDERS:
            low, median, high = quartiles(1e3 * self.net_seconds(name))
            ratio = np.median(self.net_seconds(name) / self.net_seconds(OURS))
            cells = [f"{median:.1f}", f"{low:.1f}–{high:.1f}", f"{ratio:.2f}", f"{self.ops[name]}"]
            rows.append([name, *cells, "" if self.is_right[name] else "WRONG"])
        idle = 1e3 * float(np.median(self.step_seconds[BASELINE]))
        baseline = f"without reduction a step takes {idle:.1f} ms and its graph has {self.ops[BASELINE]} ops"
        return "\n".join([table(rows, all_right=True), baseline])


def compare_mirrored(case: Case, rounds: int, tick: Tick = lambda stage: None) -> MirroredComparison:
    """Measure all contenders in turn.

    Args:
        case: the variables' shapes, the devices, and mean or sum.
        rounds: the number of timed steps of each contender.
        tick: called with a short text at each stage.

    Raises:
        BenchError: this is TensorFlow 1; TensorFlow has already started with fewer devices; or a gradient is sparse
            or not float32.
    """
    unsupported = [shape.name for shape in case.shapes if shape.sparse or shape.dtype != "float32"]
    if unsupported:
        names = ", ".join(unsupported)
        raise BenchError(f"only dense float32 gradients are measured under MirroredStrategy, not {names}")
    _make_cpus(case.devices)
    ops: Dict[str, int] = {}
    is_right: Dict[str, bool] = {}
    steps: Dict[str, Callable[[], Any]] = {}
    for name, make in {BASELINE: lambda: None, **MIRRORED_CONTENDERS}.items():
        tick(name)
        steps[name], ops[name], variable = _built(case, make(), reduces=name != BASELINE)
        is_right[name] = _is_right(steps[name], variable, len(case.devices))
    return MirroredComparison(case.devices, ops, is_right, interleaved(steps, rounds, tick))


def _make_cpus(devices: Tuple[str, ...]) -> None:
    if not IS_TF2:
        raise BenchError(f"MirroredStrategy is measured on TensorFlow 2 only; this is {tf.__version__}")
    if all("gpu" in device for device in devices):
        return
    try:
        make_logical_cpus(len(devices))
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) < len(devices):
            raise BenchError(
                f"{len(devices)} CPU devices must be created before TensorFlow starts; run this in a new process"
            ) from None


def _built(case: Case, cross_device_ops: Any, reduces: bool) -> Tuple[Callable[[], Any], int, Any]:
    """Return a step, the number of ops in its graph, and the last variable."""
    strategy = tf.distribute.MirroredStrategy(case.devices, cross_device_ops=cross_device_ops)
    with strategy.scope():
        variables = [tf.Variable(tf.fill(shape.shape, 0.01)) for shape in case.shapes]
    operation = tf.distribute.ReduceOp.MEAN if case.average else tf.distribute.ReduceOp.SUM
    scale = _RATE * (len(case.devices) if case.average else 1)

    def update(strategy: Any, *values: Any) -> None:
        for variable, value in zip(variables, values):
            strategy.extended.update(variable, lambda v, g: v.assign_sub(scale * g), args=(value,))

    def replica() -> None:
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        grads = [number * variable for variable in variables]
        context.merge_call(update, context.all_reduce(operation, grads) if reduces else grads)

    step = tf.function(lambda: strategy.run(replica), autograph=False)
    return step, len(step.get_concrete_function().graph.get_operations()), variables[-1]


def _is_right(step: Callable[[], Any], variable: Any, count: int) -> bool:
    """Return whether one step changes a variable by the sum of the replicas' gradients: 1, 2, … K times its value."""
    before = np.mean(variable.numpy().astype(np.float64))
    step()
    change = 1 - np.mean(variable.numpy().astype(np.float64)) / before
    return math.isclose(change, _RATE * count * (count + 1) / 2, rel_tol=1e-3)
