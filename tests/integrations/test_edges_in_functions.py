"""Control edges in a ``tf.function``, under MirroredStrategy: kept, and no bit of a weight differs.

Emulated GPUs delay each copy and each kernel at random.
"""

import logging
import re
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import XPU, gpus_or_cpus

from hier_allreduce import Strategy, audit
from hier_allreduce.graph.record import log_once
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

pytestmark = [
    pytest.mark.tf2,
    pytest.mark.skipif(XPU == "cpu", reason="towers on CPU devices have no control edges"),
]
REPLICAS, LAYERS, SIZE, BATCH, STEPS = 3, 8, 32, 4, 3


class Model:
    """Layers with a weight and an offset, and what they count, on three replicas."""

    def __init__(self, edges):
        strategy = Strategy("flat", chunk_bytes=4 * SIZE * SIZE, edges=edges)
        self.strategy = tf.distribute.MirroredStrategy(
            gpus_or_cpus(REPLICAS), cross_device_ops=HierarchicalAllReduce(strategy)
        )
        numbers = np.random.RandomState(0)
        on_read = tf.VariableSynchronization.ON_READ
        with self.strategy.scope():
            self.variables = []
            for _ in range(LAYERS):
                weight = numbers.normal(size=[SIZE, SIZE]).astype("float32") / 4
                self.variables += [tf.Variable(weight), tf.Variable(tf.zeros([SIZE]))]
            self.means = []
            for _ in range(LAYERS):
                mean = tf.Variable(tf.zeros([SIZE]), trainable=False, synchronization=on_read)
                self.means.append(mean)

    def layer(self, number, value):
        weight, offset = self.variables[2 * number : 2 * number + 2]
        return tf.tanh(value @ weight + offset)

    def loss(self, value):
        for number in range(LAYERS):
            value = self.layer(number, value)
        return tf.reduce_sum(value**2)

    def gradients(self, loss=None, variables=None, scale=1.0):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        start = tf.reshape(tf.range(BATCH * SIZE, dtype="float32"), [BATCH, SIZE])
        with tf.GradientTape() as tape:
            value = (loss or self.loss)(start * scale * 0.01 * (1.0 + tf.cast(replica, "float32")))
        return tape.gradient(value, variables or self.variables)

    def update(self, grads, variables=None):
        reduced = tf.distribute.get_replica_context().all_reduce("mean", grads)
        for variable, grad in zip(variables or self.variables, reduced):
            variable.assign_sub(0.01 * tf.convert_to_tensor(grad))

    def train(self, loss=None, variables=None, change=lambda grads: grads):
        """Take a step, in a replica."""
        self.update(change(self.gradients(loss, variables)), variables)

    def weights(self):
        """Return the values of all variables on all replicas."""
        values: list = []
        for variable in [*self.variables, *self.means]:
            values += map(np.asarray, self.strategy.experimental_local_results(variable))
        return values


# ---- losses, and what happens around a step ------------------------------------------------------


def recomputed(model, value):
    for number in range(0, LAYERS, 2):

        def block(value, number=number):
            return model.layer(number + 1, model.layer(number, value))

        value = tf.recompute_grad(block)(value)
    return tf.reduce_sum(value**2)


def of_functions(model, value):
    for number in range(LAYERS):
        layer = tf.function(lambda value, number=number: model.layer(number, value))
        value = layer(value)
    return tf.reduce_sum(value**2)


def with_means(model, value):
    for number in range(LAYERS):
        value = model.layer(number, value)
        mean = model.means[number]
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(value, 0))
    return tf.reduce_sum(value**2)


def with_random_numbers(model, value):
    for number in range(LAYERS):
        value = model.layer(number, tf.nn.dropout(value, 0.0))
        value += 0.1 * tf.random.stateless_normal(tf.shape(value), [1, number])
    return tf.reduce_sum(value**2)


def in_sixteen_bits(model, value):
    for number in range(LAYERS):
        weight = tf.cast(model.variables[2 * number], "float16")
        value = tf.tanh(tf.cast(value, "float16") @ weight)
        value += tf.cast(model.variables[2 * number + 1], "float16")
    return tf.reduce_sum(tf.cast(value, "float32") ** 2)


def with_loops(model, value):
    for number in range(LAYERS):
        if number % 3 == 0:

            def again(count, value, number=number):
                return count + 1, model.layer(number, value)

            _, value = tf.while_loop(lambda n, _: n < 2, again, [0, value], maximum_iterations=2)
        else:
            value = model.layer(number, value)
    return tf.reduce_sum(value**2)


LOSSES = [recomputed, of_functions, with_means, with_random_numbers, in_sixteen_bits, with_loops]
CHANGES = {
    "scaled": lambda grads: [0.5 * grad for grad in grads],
    "clipped": lambda grads: [tf.clip_by_norm(grad, 0.1) for grad in grads],
    "printed": lambda grads: [printed(grad) for grad in grads],
}


def printed(grad):
    tf.print(tf.norm(grad), output_stream="file:///dev/null")
    return grad


def step_of(model, loss=None, **options):
    """Return a function that trains one step."""

    @tf.function
    def step():
        model.strategy.run(lambda: model.train(loss and partial(loss, model), **options))

    return step


def looped(model):
    step = step_of(model)

    @tf.function
    def steps():
        tf.while_loop(lambda n: n < 2, lambda n: (step(), n + 1)[1:], [0])

    return steps


def retraced(model):
    @tf.function
    def step(factor):
        loss = lambda value: model.loss(value * tf.reduce_sum(factor))  # noqa: E731
        model.strategy.run(lambda: model.train(loss))

    sizes = iter(range(1, 9))
    return lambda: step(tf.ones([next(sizes)]))


def twice(model):
    step = step_of(model)

    @tf.function
    def steps():
        step()
        step()

    return steps


STEPS_OF = {
    "plain": step_of,
    **{loss.__name__: partial(step_of, loss=loss) for loss in LOSSES},
    **{name: partial(step_of, change=change) for name, change in CHANGES.items()},
    "looped": looped,
    "retraced": retraced,
    "twice": twice,
}


def logged(caplog):
    """Return how many edges the log says there are, in each traced all-reduce."""
    counts = re.findall(r"; (\d+) control edges?$", caplog.text, re.MULTILINE)
    return list(map(int, counts))


@pytest.mark.parametrize("step_of_model", STEPS_OF.values(), ids=STEPS_OF)
def test_weights_are_the_same_bits_as_without_edges(caplog, step_of_model):
    tf.config.set_soft_device_placement(True)
    caplog.set_level(logging.INFO, logger="hier_allreduce")
    log_once.cache_clear()
    weights = []
    for edges in (False, True):
        model = Model(edges)
        step = step_of_model(model)
        for _ in range(STEPS):
            step()
        weights.append(model.weights())
    assert any(logged(caplog))
    for without, with_edges in zip(*weights):
        assert np.isfinite(with_edges).all()
        np.testing.assert_array_equal(without, with_edges)


def test_tensorflow_keeps_all_edges_of_a_step():
    tf.config.set_soft_device_placement(True)
    for loss in (None, recomputed, of_functions):
        audited = audit(step_of(Model(edges=True), loss)).calls
        assert audited[0].edges == len(audited[0].all_reduce.edges) > 0
