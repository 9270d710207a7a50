"""A training step as a ``tf.function`` under MirroredStrategy, as Keras builds it.

The all-reduce is that of ``HierarchicalAllReduce``. Such a graph takes no control edges.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional

import tensorflow as tf
from baselines import Build, Matrix
from emulation import plugin
from training_step import Pass, Variable, add_step

from hier_allreduce.integrations.distribute import HierarchicalAllReduce


def mirrored(devices: List[str]) -> Build:
    """Return the all-reduce of a MirroredStrategy with ``HierarchicalAllReduce``."""
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=HierarchicalAllReduce())

    def reduce(grads: Matrix, devices: Any, average: bool) -> Matrix:
        from tensorflow.python.distribute.values import PerReplica  # it is not public

        values = [PerReplica(tuple(column)) for column in zip(*grads)]
        operation = tf.distribute.ReduceOp.MEAN if average else tf.distribute.ReduceOp.SUM
        with strategy.scope():
            reduced = strategy.extended.batch_reduce_to(
                operation, [(value, value) for value in values]
            )
        return list(zip(*(value.values for value in reduced)))

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
