"""apply_gradients: gradients that do not fit, failed calls, warnings, and other arguments."""

import warnings

import pytest
import tensorflow as tf
from helpers.graphs import config, gpus_or_cpus, started
from helpers.rows import for_each

from hier_allreduce import HierAllreduceError, TowerOptimizer
from hier_allreduce.graphs import memory_of

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


# ---- a call that fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
def test_a_call_with_a_typo_can_be_made_again(graph, update):
    inner = train.AdamOptimizer(0.1)
    optimizer = TowerOptimizer(inner, gpus_or_cpus(2), update=update)
    rows = towers(optimizer)
    with pytest.raises(TypeError, match="step"):
        optimizer.apply_gradients(rows, step=tf1.train.get_or_create_global_step())
    assert inner.variables() == []
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        optimizer.check_replicas(sess)


def test_a_call_with_another_order_can_be_made_again(graph):
    optimizer = TowerOptimizer(train.AdamOptimizer(0.1), gpus_or_cpus(2))
    rows = towers(optimizer)
    with pytest.raises(HierAllreduceError, match="in one order on every tower"):
        optimizer.apply_gradients([rows[0], rows[1][::-1]])
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        optimizer.check_replicas(sess)


def test_a_call_that_fails_at_its_end_leaves_no_train_op(graph):
    class Fails(tf.compat.v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            applied = super().apply_gradients(grads_and_vars, global_step, name)
            raise RuntimeError(applied.name)

    optimizer = TowerOptimizer(Fails(0.1), gpus_or_cpus(2), update="once")
    with pytest.raises(RuntimeError, match="GradientDescent"):
        optimizer.apply_gradients(towers(optimizer))
    assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == []


def test_an_optimizer_that_returns_nothing_is_refused_by_name(graph):
    class Forgets(tf.compat.v1.train.GradientDescentOptimizer):
        def apply_gradients(self, *args, **options):
            super().apply_gradients(*args, **options)

    optimizer = TowerOptimizer(Forgets(0.1), gpus_or_cpus(2), update="once")
    with pytest.raises(HierAllreduceError, match=r"Forgets.* returned None"):
        optimizer.apply_gradients(towers(optimizer))


# ---- an optimizer with other arguments -----------------------------------------------------------


class Scaled(tf.compat.v1.train.GradientDescentOptimizer):
    """Gradient descent whose apply_gradients has an argument."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None, given=None):
        self.seen = given
        return super().apply_gradients(grads_and_vars, global_step, name)


@pytest.mark.parametrize(
    "update, count, warned", [("replicated", 2, 1), ("once", 2, 0), ("replicated", 1, 0)]
)
def test_an_update_that_is_once_warns_whatever_the_arguments(graph, update, count, warned):
    optimizer = TowerOptimizer(Scaled(0.1), gpus_or_cpus(count), update=update)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.apply_gradients(towers(optimizer, count), given=1.0)
    texts = [str(warning.message) for warning in caught]
    assert len([text for text in texts if "tower 0 updates" in text]) == warned


@pytest.mark.parametrize(
    "make, wanted",
    [
        (lambda w, b: {b[1]: 2.0}, lambda w, b: {b[0]: 2.0}),
        (lambda w, b: {None: w[1], "bias": 0.1}, lambda w, b: {None: w[0], "bias": 0.1}),
        (lambda w, b: {w[1], b[1]}, lambda w, b: {w[0], b[0]}),
        (lambda w, b: (w[1], [b[1]]), lambda w, b: (w[0], [b[0]])),
        (lambda w, b: {w[1]: 0.5}.keys(), lambda w, b: [w[0]]),
        (lambda w, b: iter(w), lambda w, b: [w[0], w[0]]),
    ],
)
def test_arguments_may_have_variables_of_any_tower(graph, make, wanted):
    """Tower 0's stand in their places, because the optimizer is called there."""
    inner = Scaled(0.1)
    optimizer = TowerOptimizer(inner, gpus_or_cpus(2), update="once")
    rows = towers(optimizer)
    w, b = [[row[n][1] for row in rows] for n in range(2)]
    optimizer.apply_gradients(rows, given=make(w, b))
    assert inner.seen == wanted(w, b)


# ---- the hook ------------------------------------------------------------------------------------


def test_a_hook_counts_the_steps_of_each_session(graph):
    optimizer = sgd()
    rows = towers(optimizer)
    op, hook = optimizer.apply_gradients(rows), optimizer.hook()
    spoiled = rows[1][0][1].assign([5.0] * 3)
    with train.MonitoredTrainingSession(config=config(), hooks=[hook]) as sess:
        sess.run(op)
    second = train.MonitoredTrainingSession(config=config(), hooks=[hook])
    with pytest.raises(HierAllreduceError, match=r"after step 1 .*equal after step 0\."), second:
        second.run(spoiled)


def test_hosts_compare_nothing_if_the_update_in_a_branch_says_so(graph):
    """Hosts look at the graph of the session, not at that of the branch."""
    optimizer = sgd(check_replicas_every=0)
    rows = towers(optimizer)

    def update():
        with tf.control_dependencies([optimizer.apply_gradients(rows)]):
            return tf.constant(1.0)

    tf.cond(tf1.placeholder_with_default(True, []), update, lambda: tf.constant(0.0))
    assert not memory_of(graph).compares_hosts
