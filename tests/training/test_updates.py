"""Optimizers with more state than slots: what the towers share, what each one has, and the names in checkpoints."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, cpus, evaluate, started

from hier_allreduce import HierAllreduceError, Strategy, TowerOptimizer, allreduce_grads
from hier_allreduce.training import held_by

tf1 = tf.compat.v1
train = tf1.train
UPDATES = pytest.mark.parametrize("update", ["replicated", "main"])


def towers(count, scope="tower0", names=("w", "b"), **options):
    """Return rows of gradients and variables; tower 0's are in ``scope``."""
    rows = []
    for k in range(count):
        with tf.device(f"/cpu:{k}"), tf1.variable_scope(f"tower{k}" if k else scope):
            initial = tf1.ones_initializer()
            variables = [tf1.get_variable(n, [3], initializer=initial, use_resource=True, **options) for n in names]
            if "partitioner" in options:
                variables = [piece for var in variables for piece in var]
            rows.append([(0.1 * (var - 3.0 * k), var) for var in variables])
    return rows


def run(optimizer, rows, steps=3):
    """Train; return the first variable on every tower, and whether the towers are equal."""
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        for _ in range(steps):
            sess.run(op)
        return [sess.run(row[0][1])[0] for row in rows], optimizer.check_replicas(sess).difference == 0


class Clipping(train.AdamOptimizer):
    """Adam that clips its variables after all updates."""

    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        self.variables_to_clip = list(var_list)

    def _finish(self, update_ops, name_scope):
        with tf.control_dependencies([super()._finish(update_ops, None)]):
            clipped = [var.assign(tf.clip_by_value(var, -1.1, 1.1)) for var in self.variables_to_clip]
        return tf.group(*clipped, name=name_scope)


class Counting(train.GradientDescentOptimizer):
    """A learning rate that falls with the optimizer's own count of steps."""

    def _create_slots(self, var_list):
        self.steps = self._create_non_slot_variable(0.0, "steps", colocate_with=var_list[0])

    def _prepare(self):
        self._learning_rate_tensor = 0.1 / self.steps.assign_add(1.0)


class CountingInACondition(Counting):
    """A learning rate that falls with a count of steps in a tf.cond."""

    def _prepare(self):
        steps = tf.cond(
            self.steps > -1.0, lambda: self.steps.assign_add(1.0, read_value=True), lambda: self.steps + 0.0
        )
        self._learning_rate_tensor = 0.1 / steps


class ByName(train.Optimizer):
    """A wrapper that chooses an optimizer by the variable's name."""

    def __init__(self, **optimizers):
        super().__init__(False, "ByName")
        self._optimizers = {"all": [optimizers]}

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        chosen = self._optimizers["all"][0].items()
        pairs = {end: [pair for pair in grads_and_vars if pair[1].op.name.endswith(end)] for end, _ in chosen}
        return tf.group(*[optimizer.apply_gradients(pairs[end]) for end, optimizer in chosen], name=name)


class Scaled(train.Optimizer):
    """A fixed loss scale, as users write it."""

    def __init__(self, inside):
        super().__init__(False, "Scaled")
        self._inside, self._loss_scale = inside, 8.0

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self._inside.apply_gradients([(g / self._loss_scale, v) for g, v in grads_and_vars], global_step, name)


class Velocity(train.Optimizer):
    """Momentum whose slots all have the same name, in all towers."""

    def __init__(self):
        super().__init__(False, "Velocity")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        done = []
        for grad, var in grads_and_vars:
            velocity = tf1.Variable(tf.zeros(var.shape), trainable=False, name="velocity", use_resource=True)
            done.append(var.assign_sub(0.1 * velocity.assign(0.9 * velocity + grad)).op)
        return tf.group(*done, name=name)


# ---- once a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, message",
    [
        (Clipping, "writes 'tower2/w' 2 times"),
        (Counting, "both write 'steps'"),
        (CountingInACondition, "both write 'steps'"),
    ],
)
def test_work_that_towers_would_repeat_is_done_once_by_mains(make, message):
    with tf.Graph().as_default(), pytest.raises(
        HierAllreduceError, match=f"{make.__name__}: .*{message}.*update='main'"
    ):
        TowerOptimizer(make(0.1), cpus(3)).apply_gradients(towers(3))
    with tf.Graph().as_default():
        alone = run(TowerOptimizer(make(0.1), cpus(1)), [[(0.1 * (var - 3.0), var) for _, var in towers(1)[0]]])[0]
    with tf.Graph().as_default():
        values, equal = run(TowerOptimizer(make(0.1), cpus(3), update="main"), towers(3))
    assert equal and values == pytest.approx(alone * 3)


def test_optimizers_inside_a_wrappers_containers_are_found():
    adam, adagrad = train.AdamOptimizer(0.1), train.AdagradOptimizer(0.1)
    wrapper = ByName(w=adam, b=adagrad)
    assert held_by(wrapper) == [wrapper, adam, adagrad]
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(wrapper, cpus(3))
        op = optimizer.apply_gradients(towers(3))
        with started() as sess:
            for _ in range(4):
                sess.run(op)
            assert sess.run(adam._get_beta_accumulators()[0]) == pytest.approx(0.9**5)


def test_a_loss_scale_that_is_a_number_is_left_alone():
    with tf.Graph().as_default():
        values, equal = run(TowerOptimizer(Scaled(train.GradientDescentOptimizer(8.0)), cpus(2)), towers(2), steps=1)
    assert equal and values == pytest.approx([1 - 0.1 * (1 - 1.5)] * 2)


@pytest.mark.skipif(IS_TF2, reason="tf.contrib")
def test_contribs_loss_scale_is_adapted_once_a_step():
    from tensorflow.contrib import mixed_precision

    with tf.Graph().as_default():
        manager = mixed_precision.ExponentialUpdateLossScaleManager(8.0, incr_every_n_steps=2, incr_ratio=2)
        wrapped = mixed_precision.LossScaleOptimizer(train.GradientDescentOptimizer(0.1), manager)
        op = TowerOptimizer(wrapped, cpus(3)).apply_gradients(towers(3))
        with started() as sess:
            for _ in range(4):
                sess.run(op)
            assert sess.run(manager.get_loss_scale()) == 32


@pytest.mark.skipif(IS_TF2, reason="tf.contrib")
def test_optimizers_for_distribution_strategies_are_refused():
    from tensorflow.contrib import optimizer_v2

    with pytest.raises(HierAllreduceError, match=r"GradientDescentOptimizer is made for tf\.distribute"):
        TowerOptimizer(optimizer_v2.GradientDescentOptimizer(0.1), cpus(2))


# ---- copies of the same variable --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: train.AdamOptimizer(0.1), Velocity], ids=["Adam", "free names"])
@pytest.mark.parametrize("scope", [None, "model"])
def test_slots_are_made_equal_whatever_their_names(make, scope):
    with tf.Graph().as_default():
        with tf1.variable_scope(scope or tf1.get_variable_scope()):
            optimizer = TowerOptimizer(make(), cpus(2))
            rows = towers(2)
            op = optimizer.apply_gradients(rows)
        trained = {var.op.name for row in rows for _, var in row}
        slots = [var for var in tf1.global_variables() if var.op.name not in trained and "beta" not in var.op.name]
        with started() as sess:
            sess.run([var.assign(var + index) for index, var in enumerate(slots)])
            assert optimizer.check_replicas(sess).difference > 0
            sess.run(optimizer.init_op)
            assert optimizer.check_replicas(sess).difference == 0
            sess.run(op)
            assert (sess.run(rows[0][0][1]) == sess.run(rows[1][0][1])).all()
    assert optimizer.left_out == []


def test_each_tower_keeps_its_own_metrics():
    with tf.Graph().as_default():
        rows, counts = towers(2), []
        for k in range(2):
            with tf1.variable_scope(f"tower{k}", reuse=tf1.AUTO_REUSE):
                counts.append(
                    tf1.get_local_variable("seen", [], initializer=tf1.zeros_initializer(), use_resource=True)
                )
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2))
        optimizer.apply_gradients(rows)
        with started() as sess:
            sess.run(optimizer.init_op)  # the local variables have no value yet
            sess.run([var.assign(k) for k, var in enumerate(counts)])
            assert optimizer.check_replicas(sess).difference == 0


def test_variables_local_on_other_towers_are_kept_equal():
    """tensorpack makes the variables of other towers local, so that they are not saved."""
    with tf.Graph().as_default():
        rows = towers(2)
        for k in range(2):
            collection = tf1.GraphKeys.LOCAL_VARIABLES if k else tf1.GraphKeys.GLOBAL_VARIABLES
            initial = tf.constant(1.0 + k)
            tf1.get_variable(f"tower{k}/mean", initializer=initial, collections=[collection], use_resource=True)
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2))
        optimizer.apply_gradients(rows)
        assert optimizer.left_out == []
        with started(tf1.local_variables_initializer()) as sess:
            assert optimizer.check_replicas(sess)[:3] == ("tower0/mean", 1, 1.0)


def test_large_whole_numbers_that_differ_are_seen():
    with tf.Graph().as_default():
        rows = towers(2)
        for k in range(2):
            tf1.get_variable(f"tower{k}/seed", initializer=tf.constant(2**60 + k, tf.int64), use_resource=True)
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2))
        optimizer.apply_gradients(rows)
        with started() as sess:
            assert optimizer.check_replicas(sess)[:3] == ("tower0/seed", 1, 1.0)


# ---- names in checkpoints ---------------------------------------------------------------------------


def saved(update, count, scope):
    """Return the names of tower 0's variables, slots and other state."""
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(
            train.AdamOptimizer(0.1), cpus(count), update=update, strategy=Strategy(pack_below=0)
        )
        with tf1.variable_scope(scope or tf1.get_variable_scope()):
            optimizer.apply_gradients(towers(count))
        names = [var.op.name for var in tf1.global_variables()]
        return sorted(name for name in names if "tower1" not in name and "tower2" not in name)


@pytest.mark.parametrize("scope", ["", "train"])
def test_slots_at_the_mains_have_the_same_names_as_on_one_device(scope):
    assert saved("main", 3, scope) == saved("replicated", 3, scope)


def test_two_optimizers_number_slots_as_tensorflow_does():
    names = []
    for count, update in ((1, "replicated"), (3, "main")):
        with tf.Graph().as_default():
            rows = towers(count, scope="")
            for part in (slice(0, 2), slice(1, 2)):
                optimizer = TowerOptimizer(
                    train.AdamOptimizer(0.1), cpus(count), update=update, strategy=Strategy(pack_below=0)
                )
                optimizer.apply_gradients([row[part] for row in rows])
            created = {var.op.name for var in tf1.global_variables()}
            names.append({name for name in created if "tower" not in name})
    assert names[0] == names[1] and "b/Adam_3" in names[0]


def test_pieces_of_variables_are_refused_at_the_mains():
    with tf.Graph().as_default():
        rows = towers(2, partitioner=tf1.fixed_size_partitioner(3))
        with pytest.raises(HierAllreduceError, match=r"tower 0 .*'w/part_0'\): a piece of a partitioned variable"):
            TowerOptimizer(train.AdamOptimizer(0.1), cpus(2), update="main").apply_gradients(rows)
    with tf.Graph().as_default():
        rows = towers(2, partitioner=tf1.fixed_size_partitioner(3))
        assert run(TowerOptimizer(train.AdamOptimizer(0.1), cpus(2)), rows)[1]


# ---- other places ------------------------------------------------------------------------------------


@pytest.mark.tf2
@pytest.mark.parametrize("how", [tf.function, lambda step, autograph: step], ids=["in a function", "eagerly"])
def test_without_a_graph_and_session_there_is_no_train_op(how):
    optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2))
    variables = [tf.Variable([1.0, 2.0]) for _ in range(2)]

    def step():
        optimizer.apply_gradients([[(tf.ones([2]), var)] for var in variables])

    with pytest.raises(HierAllreduceError, match="builds the train op of a graph"):
        how(step, autograph=False)()


def test_equal_indices_of_16_bits_are_added_in_float32(graph):
    rows = []
    for _ in range(2):
        ones = tf.ones([5000, 1], tf.float16)
        rows.append([tf.IndexedSlices(ones, tf.zeros([5000], tf.int64), tf.constant([4, 1], tf.int64))])
    result = allreduce_grads(rows, cpus(2), average=True, strategy=Strategy(sparse="dense"))
    assert np.array_equal(evaluate(result[1][0]), [[5000], [0], [0], [0]])
