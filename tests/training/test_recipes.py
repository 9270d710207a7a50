"""Recipes of the pages: shared variables, statistics over towers, another number of towers."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import gpu_or_cpu, gpus_or_cpus, started

from hier_allreduce import TowerOptimizer, allreduce_grads, allreduce_grads_and_vars

tf1 = tf.compat.v1
train = tf1.train


def test_towers_that_share_variables_apply_one_row(graph):
    """cifar10_multi_gpu_train does so. All rows would apply the mean K times."""
    sgd, rows = train.GradientDescentOptimizer(0.1), []
    for k in range(3):
        with tf.device(gpu_or_cpu(k)), tf1.variable_scope("model", reuse=tf1.AUTO_REUSE):
            ones = tf1.ones_initializer()
            w = tf1.get_variable("w", [1], initializer=ones, use_resource=True)
            rows.append(sgd.compute_gradients((k + 1) * w * w, [w]))
    grads = allreduce_grads_and_vars(rows, gpus_or_cpus(3), average=True)[0]
    op = sgd.apply_gradients(grads)
    with started(op) as sess:
        assert sess.run(w) == pytest.approx([1 - 0.1 * 4])


def normalized(towers, batch, goal, of_sum):
    """Return the mean gradient of a layer that is normalized over all towers.

    It is the gradient of the summed losses, or without ``of_sum`` that of each tower's loss.
    """
    weights, outputs = [], []
    share = len(batch) // towers
    for k in range(towers):
        with tf.device(gpu_or_cpu(k)), tf1.variable_scope(f"tower{k}"):
            start = tf1.constant_initializer(np.eye(3) * 0.5 + 0.1)
            weights.append(tf1.get_variable("w", [3, 3], initializer=start, use_resource=True))
            outputs.append(tf.matmul(batch[k * share : (k + 1) * share], weights[-1]))
    moments = [[tf.reduce_mean(out, 0), tf.reduce_mean(out * out, 0)] for out in outputs]
    reduced = allreduce_grads(moments, gpus_or_cpus(towers), average=True)
    losses = []
    for k in range(towers):
        with tf.device(gpu_or_cpu(k)):
            mean, square = reduced[k]
            scaled = (outputs[k] - mean) / tf.sqrt(square - mean * mean + 1e-3)
            losses.append(tf.reduce_mean((scaled - goal[k * share : (k + 1) * share]) ** 2))
    total = tf.add_n(losses)
    rows = [tf.gradients(total if of_sum else loss, [w]) for loss, w in zip(losses, weights)]
    with started() as sess:
        return sess.run(allreduce_grads(rows, gpus_or_cpus(towers), average=True)[0][0])


def test_statistics_over_towers_need_gradients_of_the_summed_losses():
    random = np.random.RandomState(0)
    batch, goal = random.rand(2, 6, 3).astype("float32")
    got = {}
    for towers, of_sum in ((1, True), (2, True), (2, False)):
        with tf.Graph().as_default():
            got[towers, of_sum] = normalized(towers, batch, goal, of_sum)
    np.testing.assert_allclose(got[2, True], got[1, True], rtol=1e-3, atol=1e-5)
    assert np.abs(got[2, False] - got[1, True]).max() > 0.01


@pytest.mark.parametrize(
    "updates",
    [("replicated", "sharded", "once"), ("sharded", "once", "replicated"), ("once",) * 3],
)
def test_a_checkpoint_of_tower_0_goes_on_with_other_towers_and_another_update(tmp_path, updates):
    """docs/how-to/towers.md: the saver of the scaffold, and init_op after each restore."""

    def trained(count, update, path):
        with tf.Graph().as_default():
            optimizer = TowerOptimizer(train.AdamOptimizer(0.1), gpus_or_cpus(count), update=update)
            rows = []
            for k in range(count):
                with tf.device(gpu_or_cpu(k)), tf1.variable_scope(f"tower{k}"):
                    zeros = tf1.zeros_initializer()
                    names = ("w", "b")
                    row = [
                        tf1.get_variable(name, [2], initializer=zeros, use_resource=True)
                        for name in names
                    ]
                loss = tf.add_n([tf.reduce_sum((var - [1.0, 7.0]) ** 2) for var in row])
                rows.append(optimizer.compute_gradients(loss, row))
            op = optimizer.apply_gradients(rows, train.get_or_create_global_step())
            saver = optimizer.scaffold().saver
            with started() as sess:
                if path:
                    saver.restore(sess, path)
                sess.run(optimizer.init_op)
                for _ in range(2):
                    sess.run(op)
                optimizer.check_replicas(sess)
                return saver.save(sess, str(tmp_path / f"{count}{update}{bool(path)}"))

    path = parted = None
    for count, update in zip((3, 2, 1), updates):
        parted = trained(count, update, parted)
    for _ in range(3):
        path = trained(1, "replicated", path)
    whole, others = train.load_checkpoint(path), train.load_checkpoint(parted)
    names = whole.get_variable_to_shape_map()
    assert set(names) == set(others.get_variable_to_shape_map()) and "beta1_power" in names
    for name in names:
        np.testing.assert_allclose(whole.get_tensor(name), others.get_tensor(name), rtol=1e-5)


def two_losses(towers, scope, update):
    """Return two TowerOptimizers with Adam, with their train ops; tower k has a statistic k."""
    goals, ops, variables = ([1.0, 7.0], [3.0, -2.0]), [], []
    for k in range(towers):
        inside = f"tower{k}" if scope == "towers" or (scope == "tensorpack" and k) else ""
        with tf.device(gpu_or_cpu(k)), tf1.variable_scope(inside or tf1.get_variable_scope()):
            row = [tf1.Variable(np.zeros(2, "float32"), name=n, use_resource=True) for n in "vw"]
            if scope != "none":
                tf1.Variable(float(k), trainable=False, name="moving_mean", use_resource=True)
        variables.append(row)
    optimizers = [
        TowerOptimizer(train.AdamOptimizer(0.1), gpus_or_cpus(towers), update=update) for _ in goals
    ]
    for number, optimizer in enumerate(optimizers):
        rows = []
        for row in variables:
            loss = tf.reduce_sum((row[number] - goals[number]) ** 2)
            rows.append(optimizer.compute_gradients(loss, [row[number]]))
        ops.append(optimizer.apply_gradients(rows))
    return optimizers, ops


@pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
@pytest.mark.parametrize("scope", ["towers", "tensorpack", "none"])
def test_a_checkpoint_of_several_optimizers_fits_any_number_of_towers(tmp_path, scope, update):
    """And one init_op, of either of them, is for all variables."""

    def trained(towers, number, path):
        with tf.Graph().as_default():
            optimizers, ops = two_losses(towers, scope, update)
            saver = optimizers[number].scaffold().saver
            with started() as sess:
                if path:
                    saver.restore(sess, path)
                sess.run(optimizers[number].init_op)
                for _ in range(2):
                    sess.run(ops)
                for optimizer in optimizers:
                    optimizer.check_replicas(sess)
                return saver.save(sess, str(tmp_path / f"{towers}{number}{bool(path)}"))

    parted, whole = None, None
    for towers in (3, 2, 1):
        parted = trained(towers, towers % 2, parted)
        whole = trained(1, 0, whole)
    got, expected = train.load_checkpoint(parted), train.load_checkpoint(whole)
    names = set(expected.get_variable_to_shape_map())
    assert set(got.get_variable_to_shape_map()) == names and "beta1_power_1" in names
    for name in names:
        np.testing.assert_allclose(got.get_tensor(name), expected.get_tensor(name), rtol=1e-5)


class CountsLast(tf.compat.v1.train.MomentumOptimizer):
    """Creates its count of steps after all slots, so that an update makes this name last."""

    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        self._create_non_slot_variable(0.0, "steps", colocate_with=var_list[0])


def test_a_state_without_a_scope_hides_no_statistics(graph):
    optimizer, rows = TowerOptimizer(CountsLast(0.1, 0.9), gpus_or_cpus(3)), []
    for k in range(3):
        with tf.device(gpu_or_cpu(k)), tf1.variable_scope(f"tower{k}"):
            w = tf1.get_variable("w", [2], use_resource=True)
            mean = tf1.get_variable("bn/moving_mean", initializer=float(k), use_resource=True)
            rows.append(optimizer.compute_gradients(tf.reduce_sum(w * w), [w]))
    optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        assert sess.run(mean) == 0
        optimizer.check_replicas(sess)
