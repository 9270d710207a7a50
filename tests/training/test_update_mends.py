"""apply_gradients: gradients that do not fit, failed calls, warnings, and other arguments."""

import pytest
import tensorflow as tf
from helpers.graphs import gpus_or_cpus
from helpers.rows import for_each

from hier_allreduce import HierAllreduceError, TowerOptimizer

tf1 = tf.compat.v1
train = tf1.train


def towers(optimizer, count=2):
    """Return K rows of the gradients 1 and 1 of w and b."""
    rows = []
    for k, device in enumerate(gpus_or_cpus(count)):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            variables = []
            for name, size in (("w", 3), ("b", 2)):
                variables.append(tf1.get_variable(name, [size], use_resource=True))
            loss = sum(map(tf.reduce_sum, variables))
            rows.append(optimizer.compute_gradients(loss, var_list=variables))
    return rows


def sgd(**options):
    """Return an optimizer of two towers."""
    return TowerOptimizer(train.GradientDescentOptimizer(0.1), gpus_or_cpus(2), **options)


@pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
def test_a_gradient_of_another_dtype_is_refused_by_name(graph, update):
    optimizer = sgd(update=update)
    rows = towers(optimizer)
    halves = for_each(lambda pair: (tf.cast(pair[0], tf.float16), pair[1]), rows)
    with pytest.raises(HierAllreduceError, match=r"tower 0.*'tower0/w'.*cast it to this dtype"):
        optimizer.apply_gradients(halves)
    optimizer.apply_gradients(rows)


@pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
def test_a_transform_that_casts_is_refused_by_name(graph, update):
    halved = lambda grads: [tf.cast(grad, tf.float16) for grad in grads]  # noqa: E731
    optimizer = sgd(update=update, transform=halved)
    with pytest.raises(HierAllreduceError, match=r"'tower0/w'\): transform returned .*float32"):
        optimizer.apply_gradients(towers(optimizer))
