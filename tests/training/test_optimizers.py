"""Optimizers and wrappers: on K towers they train like one device, or an error says why they cannot."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, cpus, started
from helpers.optimizers import CASES, Velocity, Wrapper

from hier_allreduce import HierAllreduceError, TowerOptimizer

tf1 = tf.compat.v1
train = tf1.train


def towers(optimizer, count, names=("w", "b"), targets=None):
    """Return rows of gradients of the distance of variables to a target, 3k on tower k."""
    rows = []
    for k in range(count):
        with tf.device(f"/cpu:{k}"), tf1.variable_scope(f"tower{k}"):
            ones = tf1.ones_initializer()
            variables = [tf1.get_variable(name, [3], initializer=ones, use_resource=True) for name in names]
            target = 3.0 * k if targets is None else targets[k]
            loss = tf.add_n([0.05 * tf.reduce_sum((var - target) ** 2) for var in variables])
            rows.append(optimizer.compute_gradients(loss, var_list=variables))
    return rows


def after(make, count, steps=4, targets=None, **options):
    """Return each tower's variables after some steps, with their largest difference."""
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(make(), cpus(count), **options)
        rows = towers(optimizer, count, targets=targets)
        op = optimizer.apply_gradients(rows)
        with started(optimizer.init_op) as sess:
            for _ in range(steps):
                sess.run(op)
            values = sess.run([[var for _, var in row] for row in rows])
            return np.array(values), optimizer.check_replicas(sess).difference


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("update", ["replicated", "main"])
def test_towers_train_like_one_device_or_the_error_says_why_not(name, update):
    make, *errors = CASES[name]
    words = errors[update == "main"]
    if words:
        with pytest.raises(HierAllreduceError, match=words.replace("(", r"\(").replace(")", r"\)")):
            after(make, 3, update=update)
        return
    (alone,), _ = after(make, 1, targets=[3.0])
    values, difference = after(make, 3, update=update)
    assert difference == 0 and np.abs(values - alone).max() <= 1e-6
    assert np.abs(alone - 1).max() > 1e-4


def test_adams_beta_powers_advance_once_a_step_also_in_a_wrapper():
    for wrapped in (False, True):
        with tf.Graph().as_default():
            adam = train.AdamOptimizer(0.1)
            optimizer = TowerOptimizer(Wrapper(adam) if wrapped else adam, cpus(3))
            op = optimizer.apply_gradients(towers(optimizer, 3))
            with started(optimizer.init_op) as sess:
                for _ in range(4):
                    sess.run(op)
                assert sess.run(adam._get_beta_accumulators()[0]) == pytest.approx(0.9**5)


def needed(op):
    """Return all ops that run before ``op``."""
    ancestors: set = set()
    waiting = [op]
    while waiting:
        current = waiting.pop()
        new = {*(tensor.op for tensor in current.inputs), *current.control_inputs} - ancestors
        ancestors |= new
        waiting += new
    return ancestors


def test_the_beta_powers_change_after_every_towers_update(graph):
    """All towers read them, so the last one's update waits for the others."""
    adam = train.AdamOptimizer(0.01)
    optimizer = TowerOptimizer(adam, cpus(3))
    step = optimizer.apply_gradients(towers(optimizer, 3))
    updates = {op for op in graph.get_operations() if op.type == "ResourceApplyAdam"}
    powers = {op for power in adam._get_beta_accumulators() for op in power.op.outputs[0].consumers()}
    changes = [op for op in powers & needed(step) if op.type in ("Assign", "AssignVariableOp")]
    assert len(updates) == 3 * 2 and len(changes) == 2
    assert all(updates <= needed(change) for change in changes)


def test_a_loss_scale_is_adapted_once_a_step():
    kinds = getattr(tf1, "mixed_precision", None) or train.experimental
    with tf.Graph().as_default():
        scale = kinds.DynamicLossScale(initial_loss_scale=1024.0, increment_period=2)
        wrapped = kinds.MixedPrecisionLossScaleOptimizer(train.AdamOptimizer(0.01), scale)
        optimizer = TowerOptimizer(wrapped, cpus(3))
        rows = towers(optimizer, 3)
        infinite, now = tf1.placeholder_with_default(1.0, []), scale()
        op = optimizer.apply_gradients([[(g * infinite, v) for g, v in row] for row in rows])
        with started(optimizer.init_op) as sess:
            before = sess.run(rows[2][0][1])
            sess.run(op, {infinite: np.inf})
            assert sess.run(now) == 512 and (sess.run(rows[2][0][1]) == before).all()
            for _ in range(2):
                sess.run(op)
            assert sess.run(now) == 1024 and (sess.run(rows[2][0][1]) != before).all()
            assert optimizer.check_replicas(sess).difference == 0


@pytest.mark.skipif(IS_TF2, reason="tf.contrib")
def test_an_optimizer_that_contribs_multitask_wrapper_patches_trains_alike():
    from tensorflow.contrib.opt import MultitaskOptimizerWrapper

    make = lambda: MultitaskOptimizerWrapper(train.MomentumOptimizer(0.1, 0.9))._opt  # noqa: E731
    (alone,), _ = after(make, 1, targets=[3.0])
    values, difference = after(make, 3)
    assert difference == 0 and np.abs(values - alone).max() <= 1e-6


def test_one_adam_in_two_train_ops_is_refused_but_at_the_mains(graph):
    adam = train.AdamOptimizer(0.1)
    first, second, third = (towers(adam, 3, names) for names in ("ab", "cd", "ef"))
    TowerOptimizer(adam, cpus(3)).apply_gradients(first)
    with pytest.raises(HierAllreduceError, match=r"AdamOptimizer: .*beta powers.*another optimizer.*update='main'"):
        TowerOptimizer(adam, cpus(3)).apply_gradients(second)
    at_mains = TowerOptimizer(train.AdamOptimizer(0.1), cpus(3), update="main")
    ops = [at_mains.apply_gradients(rows) for rows in (second, third)]
    with started(at_mains.init_op) as sess:
        for _ in range(3):
            sess.run(ops)
        assert str(at_mains.check_replicas(sess)) == "all towers are equal"


class OtherOrder(tf.compat.v1.train.MomentumOptimizer):
    """Creates the slots of every second tower in another order, as a restored program may."""

    calls = 0

    def _create_slots(self, var_list):
        super()._create_slots(var_list[:: 1 if self.calls % 2 else -1])
        self.calls += 1


@pytest.mark.parametrize("make", [lambda: OtherOrder(0.1, 0.9), lambda: train.AdamOptimizer(0.1), Velocity])
@pytest.mark.parametrize("scope", [None, "model"])
def test_slots_are_made_equal_whatever_their_names_and_order(make, scope):
    with tf.Graph().as_default():
        with tf1.variable_scope(scope or tf1.get_variable_scope()):
            optimizer = TowerOptimizer(make(), cpus(2))
            rows = towers(optimizer, 2) if not isinstance(make(), Velocity) else velocities(2)
            op = optimizer.apply_gradients(rows)
        trained = {var.op.name for row in rows for _, var in row}
        slots = [var for var in tf1.global_variables() if var.op.name not in trained and "beta" not in var.op.name]
        with started() as sess:
            sess.run([var.assign(var + index) for index, var in enumerate(slots)])
            assert optimizer.check_replicas(sess).difference > 0
            sess.run(optimizer.init_op)
            assert optimizer.check_replicas(sess).difference == 0
            by_name = {var.op.name.replace("tower1", "tower0"): sess.run(var).tolist() for var in slots}
            if "velocity" not in slots[0].op.name:
                assert all(sess.run(var).tolist() == by_name[var.op.name] for var in slots if "tower0" in var.op.name)
            sess.run(op)
            assert (sess.run(rows[0][0][1]) == sess.run(rows[1][0][1])).all()


def velocities(count):
    return [[(0.1 * var, var) for _, var in row] for row in towers(train.GradientDescentOptimizer(1.0), count)]
