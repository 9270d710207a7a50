"""A training step as a ``tf.function`` under MirroredStrategy, as Keras builds it.

The all-reduce is that of ``HierarchicalAllReduce``, behind an identity of each gradient, as
``ReplicaContext.all_reduce`` makes them after the pass.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional

import tensorflow as tf
from baselines import Build, Matrix, by_distribute
from emulation import plugin
from training_step import Pass, Variable, add_step

from hier_allreduce import Strategy
from hier_allreduce.integrations.distribute import HierarchicalAllReduce


def mirrored(devices: List[str], choice: Strategy) -> Build:
    """Return the all-reduce of a MirroredStrategy with ``HierarchicalAllReduce(choice)``."""
    ours = HierarchicalAllReduce(choice)
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=ours)

    def reduce(grads: Matrix, devices: Any, average: bool) -> Matrix:
        rows = []
        for device, row in zip(devices, grads):
            with tf.device(device):
                rows.append(list(map(tf.identity, row)))
        with strategy.scope():
            return by_distribute(strategy.extended.batch_reduce_to, rows, average)

    return reduce


def function_step(
    work: Pass, devices: List[str], reduce: Optional[Build], average: bool
) -> Callable[[], Any]:
    """Return a function that runs a step and waits for its end; the variables are filled."""
    variables: List[Variable] = []

    @tf.function
    def step() -> None:
        variables.extend(add_step(work, devices, reduce, average)[1])

    @tf.function
    def fill() -> None:
        for variable in variables:
            variable.fill()

    traced = step.get_concrete_function()
    fill()

    def run() -> None:
        traced()
        plugin.wait()

    return run
