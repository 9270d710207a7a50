"""Optimizers and wrappers on K towers train like one device, or an error says why they cannot.

A separate optimizer for each tower would train most of them wrong in silence.
"""

import collections
import re
from contextlib import nullcontext

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, XPU, gpu_or_cpu, gpus_or_cpus, started
from helpers.optimizers import (
    FIRST,
    SGD,
    AveragesTrainable,
    BeginsAtRandom,
    CallingPython,
    Chooses,
    Clipped,
    Clipping,
    Counting,
    CountingInACondition,
    CountingSinceInit,
    KeepingFunctions,
    Lamb,
    LooksUp,
    Noisy,
    OwnSlots,
    Polyak,
    Timed,
    Velocity,
    WithoutState,
    Wrapper,
    by_get_variable,
    by_slot_creator,
    by_variable,
    changed_later,
    patched_outside,
)
from helpers.rows import for_each, variables_of

from hier_allreduce import HierAllreduceError, Strategy, TowerOptimizer

tf1 = tf.compat.v1
train = tf1.train


UPDATES = ("replicated", "once", "sharded")
adam = lambda: train.AdamOptimizer(0.1)  # noqa: E731
# functions that make an optimizer
TRAINS = {
    "momentum": lambda: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: train.AdamOptimizer(0.1),
    "rmsprop": lambda: train.RMSPropOptimizer(0.01, centered=True),
    "adagrad DA": lambda: train.AdagradDAOptimizer(0.1, tf.constant(1, tf.int64)),
    "ftrl": lambda: train.FtrlOptimizer(0.1),
    "counter": lambda: Counting(0.1),
    "counter in a condition": lambda: CountingInACondition(0.1),
    "clips at the end": lambda: Clipping(0.1),
    "counter in the constructor": CountingSinceInit,
    "noise": lambda: Noisy(0.1),
    "state with a random start": lambda: BeginsAtRandom(0.1),
    "hash table": lambda: LooksUp(0.1),
    "clock": lambda: Timed(0.1),
    "Python": lambda: CallingPython(0.1),
    "rate in a callable": lambda: train.MomentumOptimizer(lambda: tf.constant(0.1), 0.9),
    "rate in a variable": lambda: SGD(
        tf1.get_variable("rate", initializer=0.1, trainable=False, use_resource=True)
    ),
    "changed later": changed_later,
    "keeps functions": KeepingFunctions,
    "patched from outside": patched_outside,
    "wrapped": lambda: Wrapper(Wrapper(train.AdamOptimizer(0.1)), lambda grad: grad * 0.5),
    "wrapped without a state": lambda: WithoutState(train.MomentumOptimizer(0.1, 0.9)),
    # Grappler multiplies the constants of a mean and of a wrapper, and so drops the mean's op
    "decays first, in a wrapper": lambda: Wrapper(
        Chooses(lambda var: True), lambda grad: grad * 0.5
    ),
    "state of a fixed name": lambda: Lamb(0.1),
    "free names of slots": Velocity,
    "clips by the global norm": lambda: Clipped(0.1),
}

# ---- tests ---------------------------------------------------------------------------------------


def towers(optimizer, count, names=("w", "b"), targets=None, scope="tower{}"):
    """Return rows of gradients of the distance of variables to a target, 3k on tower k.

    Tower 0 has no scope in "tensorpack".
    """
    rows = []
    for k in range(count):
        inside = scope.format(k)
        if scope == "tensorpack":
            inside = f"tower{k}" if k else ""
        with tf.device(gpu_or_cpu(k)), tf1.variable_scope(inside or tf1.get_variable_scope()):
            ones = tf1.ones_initializer()
            variables = [
                tf1.get_variable(name, [3], initializer=ones, use_resource=True) for name in names
            ]
            target = 3.0 * k if targets is None else targets[k]
            loss = tf.add_n([0.05 * tf.reduce_sum((var - target) ** 2) for var in variables])
            rows.append(optimizer.compute_gradients(loss, var_list=variables))
    return rows


def after(make, count, steps=4, targets=None, **options):
    """Return each tower's variables after some steps, after which all are equal."""
    with tf.Graph().as_default():
        strategy = Strategy(chunk_bytes=0)  # so that variables have several roots
        optimizer = TowerOptimizer(make(), gpus_or_cpus(count), strategy=strategy, **options)
        rows = towers(optimizer, count, targets=targets)
        op = optimizer.apply_gradients(rows)
        with started(tf1.tables_initializer(), optimizer.init_op) as sess:
            for _ in range(steps):
                sess.run(op)
            values = sess.run(variables_of(rows))
            optimizer.check_replicas(sess)
            return np.array(values)


WITHOUT_KERNEL = {
    "adagrad DA": "ResourceApplyAdagradDA",
    "clock": "Timestamp",
    "hash table": "HashTableV2",
    "Python": "PyFunc",
}


def marked(name):
    """Return a case, with a marker if GPUs have no kernel for one of its ops."""
    op = WITHOUT_KERNEL.get(name)
    return pytest.param(name, marks=[pytest.mark.no_gpu_kernel(op)] if op else [])


def check_training(make, update):
    """Three towers train like one device, and the steps change something."""
    (alone,) = after(make, 1, targets=[3.0])
    values = after(make, 3, update=update)
    assert np.abs(values - alone).max() <= 1e-6
    assert np.abs(alone - 1).max() > 1e-4


@pytest.mark.parametrize("name", map(marked, TRAINS))
@pytest.mark.parametrize("update", UPDATES)
def test_towers_train_like_one_device(name, update):
    check_training(TRAINS[name], update)


@pytest.mark.parametrize("update", UPDATES)
def test_an_update_that_uses_another_towers_variables_is_an_error(update):
    with pytest.raises(HierAllreduceError, match=r"uses 'tower2/b', of tower 2 .*Use the vari"):
        after(AveragesTrainable, 3, update=update)


@pytest.mark.parametrize("where", ["attribute", "object", "collection", "variable", "slot"])
def test_an_update_that_uses_what_one_tower_left_is_an_error(graph, where):
    optimizer = TowerOptimizer(Polyak(where), gpus_or_cpus(3))
    rows = towers(optimizer, 3)
    words = "Polyak: the update uses '.*', of tower . .* for that of all. .*before the towers"
    with pytest.raises(HierAllreduceError, match=words):
        optimizer.apply_gradients(rows)
    with tf.Graph().as_default():
        alone = TowerOptimizer(Polyak(where), gpus_or_cpus(1))
        alone.apply_gradients(towers(alone, 1))


@pytest.mark.parametrize("where", ["mean", "nothing"])
def test_an_optimizer_may_keep_what_it_does_not_use_or_takes_of_all_towers(graph, where):
    optimizer = TowerOptimizer(Polyak(where), gpus_or_cpus(3))
    op = optimizer.apply_gradients(towers(optimizer, 3))
    with started(optimizer.init_op, op) as sess:
        optimizer.check_replicas(sess)


class Resets(tf.compat.v1.train.GradientDescentOptimizer):
    """Builds an op that resets its variables, for the user to run."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        self.reset = tf.group(*(var.assign(tf.zeros_like(var)) for _, var in pairs))
        with tf.control_dependencies(None):
            return super().apply_gradients(pairs, global_step, name)


@pytest.mark.parametrize("update", UPDATES)
def test_an_op_that_an_optimizer_builds_for_the_user_is_no_part_of_the_step(graph, update):
    theirs = Resets(0.1)
    optimizer = TowerOptimizer(theirs, gpus_or_cpus(2), update=update)
    rows = towers(optimizer, 2, targets=[0.0, 0.0])
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        assert sess.run(rows[1][0][1]) == pytest.approx([0.99] * 3)


class ReturnsNothingOfIt(tf.compat.v1.train.GradientDescentOptimizer):
    """Halves its variables, and returns an op that does not wait for that."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for _, var in grads_and_vars:
            var.assign(0.5 * var.read_value())
        return tf.no_op()


@pytest.mark.tf2
def test_in_a_function_all_writes_count_whatever_an_optimizer_returns(graph):
    """As on one device, where a function runs all of its ops that have state."""
    optimizer = TowerOptimizer(ReturnsNothingOfIt(0.1), gpus_or_cpus(2), update="once")
    rows = towers(optimizer, 2, targets=[0.0, 0.0])

    @tf.function(autograph=False)
    def step():
        optimizer.apply_gradients(rows)
        return tf.constant(0)

    op = step()
    variables = [variables_of(row) for row in rows]
    with started(optimizer.init_op) as sess:
        before = sess.run(variables)[0]
        sess.run(op)
        for row in sess.run(variables):
            np.testing.assert_allclose(row, np.multiply(before, 0.5))


def test_an_adam_that_has_trained_elsewhere_and_one_that_is_applied_twice(graph):
    """TensorFlow's own tests do both; there tower 0's variable has no device of its own."""
    theirs = adam()
    with tf.Graph().as_default():
        w = tf1.get_variable("w", [3], use_resource=True)
        theirs.apply_gradients([(tf.ones([3]), w)])
    theirs._non_slot_dict["beta1_power", None] = object()  # of an eager training
    optimizer = TowerOptimizer(theirs, gpus_or_cpus(2))
    optimizer.apply_gradients(towers(optimizer, 2))
    for update in UPDATES:
        with tf.Graph().as_default():
            a = tf1.get_variable("tower0/w", [1], use_resource=True)
            with tf.device(gpu_or_cpu(1)):
                b = tf1.get_variable("tower1/w", [1], use_resource=True)
            theirs = train.MomentumOptimizer(0.1, 0.9)
            twice = TowerOptimizer(theirs, gpus_or_cpus(2), update=update)
            for _ in range(2):
                twice.apply_gradients([[(tf.ones([1]), var)] for var in (a, b)])


def test_functions_that_a_user_keeps_on_an_optimizer_are_not_called(graph):
    optimizer = SGD(0.1)
    optimizer.on_step = lambda step: 1 / 0
    wrapped = TowerOptimizer(optimizer, gpus_or_cpus(2))
    wrapped.apply_gradients(towers(wrapped, 2))


@pytest.mark.parametrize("update", UPDATES)
def test_a_class_whose_method_was_replaced_is_called_once(graph, monkeypatch, update):
    calls = []

    def apply(self, grad, var, *more):
        calls.append(var.op.name)
        return var.assign_sub(0.5 * grad, read_value=False)

    monkeypatch.setattr(SGD, "_resource_apply_dense", apply)
    optimizer = TowerOptimizer(SGD(0.1), gpus_or_cpus(2), update=update)
    rows = towers(optimizer, 2, targets=[0.0, 0.0])
    words = "_resource_apply_dense of this GradientDescentOptimizer was replaced: tower 0 updates"
    with pytest.warns(UserWarning, match=words) if update != "once" else nullcontext():
        op = optimizer.apply_gradients(rows)
    assert calls and all(name.startswith("tower0/") for name in calls)
    with started(optimizer.init_op, op) as sess:
        np.testing.assert_array_equal(*sess.run([variables_of(row) for row in rows]))


def test_adams_beta_powers_advance_once_a_step_also_in_a_wrapper():
    for wrapped in (False, True):
        with tf.Graph().as_default():
            adam = train.AdamOptimizer(0.1)
            optimizer = TowerOptimizer(Wrapper(adam) if wrapped else adam, gpus_or_cpus(3))
            op = optimizer.apply_gradients(towers(optimizer, 3))
            with started(optimizer.init_op) as sess:
                for _ in range(4):
                    sess.run(op)
                assert sess.run(adam._get_beta_accumulators()[0]) == pytest.approx(0.9**5)


def test_a_towers_update_reads_nothing_from_another_towers_device(graph):
    """Not even the beta powers, which the others would wait for at the end of a step."""
    optimizer = TowerOptimizer(train.AdamOptimizer(0.1), gpus_or_cpus(3))
    op = optimizer.apply_gradients(towers(optimizer, 3))
    options, metadata = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    with started(optimizer.init_op) as sess:
        sess.run(op, options=options, run_metadata=metadata)
    sent = {
        re.sub(r"edge_\d+_", "", node.attr["tensor_name"].s.decode())
        for partition in metadata.partition_graphs
        for node in partition.node
        if node.op in ("_Send", "_HostSend")
    }
    # The ends of the updates are sent, and nothing else of them; from GPUs that of the step, too,
    # because the CPU knows that towers are equal.
    ends = {"apply_grad_1", "apply_grad_2", *(["group_deps"] if XPU == "gpu" else [])}
    assert {name for name in sent if "hier_allreduce" not in name} == ends


def test_a_loss_scale_is_adapted_once_a_step():
    kinds = getattr(tf1, "mixed_precision", None) or train.experimental
    with tf.Graph().as_default():
        scale = kinds.DynamicLossScale(initial_loss_scale=1024.0, increment_period=2)
        wrapped = kinds.MixedPrecisionLossScaleOptimizer(train.AdamOptimizer(0.01), scale)
        optimizer = TowerOptimizer(wrapped, gpus_or_cpus(3))
        rows = towers(optimizer, 3)
        factor = tf1.placeholder_with_default(1.0, [])
        now = scale()
        scaled = for_each(lambda pair: (pair[0] * factor, pair[1]), rows)
        op = optimizer.apply_gradients(scaled)
        with started(optimizer.init_op) as sess:
            before = sess.run(rows[2][0][1])
            sess.run(op, {factor: np.inf})
            assert sess.run(now) == 512 and (sess.run(rows[2][0][1]) == before).all()
            for _ in range(2):
                sess.run(op)
            assert sess.run(now) == 1024 and (sess.run(rows[2][0][1]) != before).all()
            optimizer.check_replicas(sess)


@pytest.mark.skipif(IS_TF2, reason="tf.contrib")
def test_an_optimizer_of_contribs_other_protocol_trains_alike():
    from tensorflow.contrib.optimizer_v2 import momentum

    check_training(lambda: Wrapper(momentum.MomentumOptimizer(0.1, 0.9)), "once")


@pytest.mark.skipif(IS_TF2, reason="tf.contrib")
def test_an_optimizer_that_contribs_multitask_wrapper_patches_trains_alike():
    from tensorflow.contrib.opt import MultitaskOptimizerWrapper

    make = lambda: MultitaskOptimizerWrapper(train.MomentumOptimizer(0.1, 0.9))._opt  # noqa: E731
    (alone,) = after(make, 1, targets=[3.0])
    assert np.abs(after(make, 3) - alone).max() <= 1e-6


def test_one_adam_in_two_train_ops_is_refused_but_trains_once(graph):
    adam = train.AdamOptimizer(0.1)
    first, second, third = (towers(adam, 3, names) for names in ("ab", "cd", "ef"))
    TowerOptimizer(adam, gpus_or_cpus(3)).apply_gradients(first)
    with pytest.raises(
        HierAllreduceError,
        match=r"AdamOptimizer: .*powers of beta.*another optimizer.*update='once'",
    ):
        TowerOptimizer(adam, gpus_or_cpus(3)).apply_gradients(second)
    once = TowerOptimizer(train.AdamOptimizer(0.1), gpus_or_cpus(3), update="once")
    ops = [once.apply_gradients(rows) for rows in (second, third)]
    with started(once.init_op) as sess:
        for _ in range(3):
            sess.run(ops)
        once.check_replicas(sess)


@pytest.mark.parametrize("make", [lambda: train.MomentumOptimizer(0.1, 0.9), adam])
@pytest.mark.parametrize("scope", [None, "model"])
def test_slots_of_all_towers_are_made_equal(make, scope):
    with tf.Graph().as_default():
        with tf1.variable_scope(scope or tf1.get_variable_scope()):
            optimizer = TowerOptimizer(make(), gpus_or_cpus(2))
            rows = towers(optimizer, 2)
            op = optimizer.apply_gradients(rows)
        trained = {var.op.name for row in rows for _, var in row}
        state = [var for var in tf1.global_variables() if var.op.name not in trained]
        names = {var.op.name for var in state}
        first = {name for name in names if "tower1" not in name}
        assert len(names) == 2 * len(first)
        with started() as sess:
            slots = [var for var in state if "beta" not in var.op.name]
            sess.run([var.assign(var + index) for index, var in enumerate(slots)])
            with pytest.raises(HierAllreduceError, match="tower 1 differs from tower 0 in"):
                optimizer.check_replicas(sess)
            sess.run(optimizer.init_op)
            optimizer.check_replicas(sess)
            sess.run(op)
            assert (sess.run(rows[0][0][1]) == sess.run(rows[1][0][1])).all()


# ---- an optimizer that chooses by names ----------------------------------------------------------

LAYERS = ("norm/gamma", "dense/w", "norm/beta")


class CountsCalls(tf.compat.v1.train.GradientDescentOptimizer):
    """A learning rate for each position among the variables, which it never counts anew."""

    position = 0

    def _resource_apply_dense(self, grad, var):
        self.position += 1
        return super()._resource_apply_dense(grad * float(self.position), var)


class Remembers(tf.compat.v1.train.GradientDescentOptimizer):
    """Decays the variable that it has first seen under a name, which is tower 0's."""

    def __init__(self):
        super().__init__(0.1)
        self.seen = {}

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = []
        for grad, var in grads_and_vars:
            first = self.seen.setdefault(var.op.name, var)
            pairs.append((grad + 0.1 * len(self.seen) * first.read_value(), var))
        return super().apply_gradients(pairs, global_step, name)


class Changes(tf.compat.v1.train.GradientDescentOptimizer):
    """Gradient descent with changed gradients."""

    def __init__(self, change):
        super().__init__(0.1)
        self.change = change

    def _resource_apply_dense(self, grad, var):
        return super()._resource_apply_dense(self.change(grad, var), var)


def two_rates(slow, fast):
    return Changes(lambda grad, var: grad * (fast if is_norm(var) else slow))


def rate_in_variable(name):
    value = {"slow": 0.1, "fast": 0.5}[name]
    rate = tf1.get_variable(name, initializer=value, use_resource=True, trainable=False)
    return rate.read_value()


def norms():
    return [var for var in tf1.trainable_variables() if re.match(FIRST + "norm/", var.op.name)]


def is_norm(var):
    return any(var is norm for norm in norms())


CHOICES = {
    "match of op.name": lambda: Chooses(lambda var: re.match(FIRST + "norm/", var.op.name)),
    "prefix": lambda: Chooses(lambda var: var.op.name.startswith(("tower0/norm", "norm"))),
    "set of names": lambda: Chooses(lambda var: var.name in {"dense/w:0", "tower0/dense/w:0"}),
    "list of op names": lambda: Chooses(
        lambda var: var.op.name in ["norm/beta", "tower0/norm/beta"]
    ),
    "shared name": lambda: Chooses(lambda var: re.match(FIRST + "dense/", var._shared_name)),
    "first variable": lambda: Chooses(lambda var: var in set(tf1.trainable_variables()[:1])),
    "get_variable": lambda: OwnSlots(by_get_variable),
    "Variable": lambda: OwnSlots(by_variable),
    "slot creator": lambda: OwnSlots(by_slot_creator),
    "is": lambda: Chooses(is_norm),
    "id": lambda: Chooses(lambda var: id(var) in set(map(id, norms()))),
    "ref": lambda: Chooses(
        lambda var: var.experimental_ref() in {norm.experimental_ref() for norm in norms()}
    ),
    "name of the handle": lambda: Chooses(lambda var: re.match(FIRST + "norm/", var.handle.name)),
    "counts its calls": lambda: CountsCalls(0.1),
    "another op": lambda: Changes(
        lambda grad, var: tf.sign(grad) if is_norm(var) else tf.square(grad)
    ),
    "rates in variables": lambda: two_rates(*map(rate_in_variable, ("slow", "fast"))),
    "rates of one op": lambda: two_rates(*tf.unstack([0.1, 0.5])),
    "remembers tower 0's variables": Remembers,
}


@pytest.mark.parametrize("scope", ["tower{}", "tensorpack"])
@pytest.mark.parametrize("name", CHOICES)
def test_whatever_an_optimizer_chooses_is_as_on_one_device(name, scope):
    """And its state has one device's names, once."""
    make = CHOICES[name]
    variables, names = {}, {}
    for count in (1, 3):
        with tf.Graph().as_default():
            optimizer = TowerOptimizer(make(), gpus_or_cpus(count))
            rows = towers(optimizer, count, LAYERS, targets=[3.0] * count, scope=scope)
            op = optimizer.apply_gradients(rows)
            with started(optimizer.init_op) as sess:
                for _ in range(3):
                    sess.run(op)
                variables[count] = np.array(sess.run(variables_of(rows)))
                optimizer.check_replicas(sess)
            names[count] = {var.op.name for var in tf1.global_variables()}
    np.testing.assert_allclose(variables[3], np.repeat(variables[1], 3, axis=0), rtol=1e-6)
    assert len(np.unique(variables[1][0, :, 0])) > 1  # the choice matters
    trained = {f"{tower}/{name}" for tower in ("tower1", "tower2") for name in LAYERS}
    assert names[3] == names[1] | trained


Pair = collections.namedtuple("Pair", "first last")
CONTAINERS: dict = {
    "set": set,
    "iterator": iter,
    "values": lambda variables: dict(enumerate(variables)).values(),
    "Pair": lambda variables: Pair(variables[0], variables[-1]),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("update", UPDATES)
def test_arguments_of_the_optimizer_name_each_towers_variables(update, container):
    """An argument may list variables of any towers: each tower takes its own copies of them."""
    for listed in ([0, 1, 2], [0], [2]):
        with tf.Graph().as_default():
            chooses, whole = Chooses(lambda var: False), Strategy(chunk_bytes=0)
            optimizer = TowerOptimizer(chooses, gpus_or_cpus(3), update=update, strategy=whole)
            rows = towers(optimizer, 3, LAYERS, targets=[3.0] * 3)
            also = CONTAINERS[container]([rows[k][1][1] for k in listed])
            op = optimizer.apply_gradients(rows, also=also)
            with started(optimizer.init_op, op) as sess:
                gamma, dense, _ = sess.run([var for _, var in rows[1]])
                # The gradient is 0.1 (1 - 3) = -0.2 and the rate 0.1. dense/w is halved first.
                assert gamma[0] == pytest.approx(1.02) and dense[0] == pytest.approx(0.52)
                optimizer.check_replicas(sess)


@pytest.mark.parametrize("make", [lambda: train.AdamOptimizer(0.1), lambda: Lamb(0.1)])
@pytest.mark.parametrize("outer", ["m", ""])
def test_a_scope_set_to_reuse_does_not_forbid_slots(graph, make, outer):
    with tf1.variable_scope(outer or tf1.get_variable_scope()):
        optimizer = TowerOptimizer(make(), gpus_or_cpus(2))
        rows = towers(optimizer, 2)
        tf1.get_variable_scope().reuse_variables()
        op = optimizer.apply_gradients(rows)
        with pytest.raises(ValueError, match="does not exist"):
            tf1.get_variable("another", [])  # the scope is as it was
    with started(optimizer.init_op, op) as sess:
        optimizer.check_replicas(sess)
