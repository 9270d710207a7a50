"""A comparison of the two updates: the optimizer's slots on each device, and the step time.

Every tower has its own copy of the model's variables. A variable's gradient is its own value, so that a step consists
of the all-reduce, the update and the copies only.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..errors import BenchError
from ..formatting import table
from ..graph import tf1
from ..presets import nearest
from ..training import UPDATES, TowerOptimizer
from .case import Case, session
from .measuring import Tick, interleaved
from .optimizers import OPTIMIZERS, make_optimizer
from .results import quartiles

_RATE = 1e-3


class UpdateComparison(NamedTuple):
    """By update: the bytes of slots on each of the K devices, and the seconds of each step."""

    devices: Tuple[str, ...]
    slot_bytes: Dict[str, List[int]]
    step_seconds: Dict[str, List[float]]

    def text(self) -> str:
        """Return a table of the K devices, the totals and the step times."""
        rows = [["slot bytes on", *UPDATES]]
        for k, device in enumerate(self.devices):
            rows.append([device, *(f"{self.slot_bytes[update][k] / 1e6:.1f} MB" for update in UPDATES)])
        rows.append(["all", *(f"{sum(self.slot_bytes[update]) / 1e6:.1f} MB" for update in UPDATES)])
        replicated, main = (np.array(self.step_seconds[update]) for update in UPDATES)
        low, median, high = quartiles(main / replicated)
        rows.append(["median step", *(f"{np.median(seconds) * 1e3:.1f} ms" for seconds in (replicated, main))])
        ratio = f"a step with update='main' takes {median:.2f} times one with 'replicated' ({low:.2f} to {high:.2f})"
        return "\n".join([table(rows, all_right=True), ratio])


def compare_updates(case: Case, optimizer: str, rounds: int, tick: Tick = lambda stage: None) -> UpdateComparison:
    """Measure both updates with one optimizer.

    Args:
        case: the variables' shapes, the devices, and mean or sum.
        optimizer: a name in :data:`OPTIMIZERS`.
        rounds: the number of timed steps of each update.
        tick: called with a short text at each stage.

    Raises:
        BenchError: an unknown optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise BenchError(f"optimizer {optimizer!r} is unknown{nearest(optimizer, sorted(OPTIMIZERS))}")
    slots: Dict[str, List[int]] = {}
    steps: Dict[str, Any] = {}
    with contextlib.ExitStack() as until_done:
        for update in UPDATES:
            tick(f"building {update}")
            slots[update], steps[update] = _built(case, optimizer, update, until_done)
        return UpdateComparison(case.devices, slots, interleaved(steps, rounds, tick))


def _built(case: Case, name: str, update: str, until_done: contextlib.ExitStack) -> Tuple[List[int], Any]:
    """Return the bytes of slots on each device, as executed, and a function that runs a step ``until_done``."""
    with tf.Graph().as_default() as graph:
        optimizer = TowerOptimizer(make_optimizer(name, _RATE), case.devices, case.average, update=update)
        rows = [_tower(case, tower) for tower in range(len(case.devices))]
        weights = {var.op.name for row in rows for _, var in row}
        train_op = optimizer.apply_gradients(rows)
        running = until_done.enter_context(contextlib.closing(session(graph, case)))
        running.run(tf1.global_variables_initializer())
        running.run(optimizer.init_op)
        metadata = tf1.RunMetadata()
        options = tf1.RunOptions(output_partition_graphs=True)
        running.run(train_op, options=options, run_metadata=metadata)
        return _slot_bytes(metadata, case.devices, weights), running.make_callable(train_op)


def _tower(case: Case, tower: int) -> List[Tuple[Any, Any]]:
    pairs = []
    with tf1.device(case.devices[tower]), tf1.variable_scope(f"tower{tower}"):
        for shape in case.shapes:
            initializer = tf1.constant_initializer(0.01)
            var = tf1.get_variable(shape.name, shape.shape, shape.dtype, initializer, use_resource=True)
            pairs.append((var.read_value(), var))
    return pairs


def _slot_bytes(metadata: Any, devices: Sequence[str], weights: Any) -> List[int]:
    """Return the bytes of all variables but the weights on each device, from an executed step's partition graphs."""
    slot_bytes = [0] * len(devices)
    towers = {tf.DeviceSpec.from_string(device).device_index: k for k, device in enumerate(devices)}
    for part in metadata.partition_graphs:
        for node in part.node:
            if node.op == "VarHandleOp" and node.attr["shared_name"].s.decode() not in weights:
                size = int(np.prod([dim.size for dim in node.attr["shape"].shape.dim]))
                tower = towers[tf.DeviceSpec.from_string(node.device).device_index]
                slot_bytes[tower] += size * tf.as_dtype(node.attr["dtype"].type).size
    return slot_bytes
