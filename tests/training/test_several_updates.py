"""Several train ops in a graph, and variables created after them: all towers' variables are known and kept equal."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import cpus, started

from hier_allreduce import HierAllreduceError, TowerOptimizer

tf1 = tf.compat.v1
train = tf1.train
UPDATES = pytest.mark.parametrize("update", ["replicated", "main"])
SCOPES = pytest.mark.parametrize("scoped", [True, False], ids=["scopes", "no scopes"])


def towers(names=("d", "g"), scoped=True, count=3, **options):
    """Return, for each name, K rows with one variable of that name, which is k on tower k, and its gradient 1."""
    rows = {name: [] for name in names}
    for k, device in enumerate(cpus(count)):
        with tf.device(device), tf1.variable_scope(f"tower{k}") if scoped else contextlib.nullcontext():
            for name in names:
                var = tf1.Variable([float(k), 0.0], name=name, use_resource=True, **options)
                rows[name].append([(tf.ones([2]), var)])
    return list(rows.values())


def momentum(count=3, **options):
    return TowerOptimizer(train.MomentumOptimizer(1.0, 0.5), cpus(count), **options)


def spoil(rows):
    """Return an op that changes the variable of the last tower."""
    return rows[-1][0][1].assign([7.0, 7.0])


# ---- several train ops ------------------------------------------------------------------------------


@UPDATES
@SCOPES
def test_a_second_call_adds_to_what_the_first_one_knows(graph, update, scoped):
    optimizer = momentum(update=update, broadcast=2)
    rows = towers(scoped=scoped)
    ops = [optimizer.apply_gradients(each) for each in rows]
    with started(optimizer.init_op) as sess:
        assert str(optimizer.check_replicas(sess)) == "all towers are equal"
        sess.run(ops)
        sess.run(ops[0])
        assert sess.run([row[0][1] for row in rows[0]]) == pytest.approx(np.array([[-2.5, -2.5]] * 3))
        assert sess.run([row[0][1] for row in rows[1]]) == pytest.approx(np.array([[-1.0, -1.0]] * 3))
        assert str(optimizer.check_replicas(sess)) == "all towers are equal"
        sess.run(spoil(rows[0]))
        assert optimizer.check_replicas(sess).difference > 0
        sess.run(optimizer.broadcast_op)
        assert str(optimizer.check_replicas(sess)) == "all towers are equal"


@SCOPES
def test_each_train_op_counts_its_runs_and_copies_what_it_trains(graph, scoped):
    """Not what the other one trains, which in one step with it could be copied in part before its update."""
    optimizer, rows = momentum(broadcast=2), towers(scoped=scoped)
    ops = [optimizer.apply_gradients(each) for each in rows]
    spoils, firsts = [spoil(each) for each in rows], [[row[0][1] for row in each] for each in rows]
    with started(optimizer.init_op) as sess:
        sess.run(spoils)
        are_equal = []
        for op in (ops[0], ops[1], ops[0], ops[1]):
            sess.run(op)
            are_equal.append([len(np.unique(values, axis=0)) == 1 for values in sess.run(firsts)])
    assert are_equal == [[False, False], [False, False], [True, False], [True, True]]


@UPDATES
@SCOPES
def test_optimizers_know_each_others_variables(graph, update, scoped):
    how = [{"check_replicas_every": 1}, {}]
    optimizers = [TowerOptimizer(train.AdamOptimizer(0.1), cpus(3), update=update, **options) for options in how]
    rows = towers(scoped=scoped)
    ops = [optimizer.apply_gradients(each) for optimizer, each in zip(optimizers, rows)]
    spoilt = spoil(rows[1])
    with started(optimizers[0].init_op) as sess:
        graph.finalize()  # all ops are there
        sess.run(ops)
        assert [str(optimizer.check_replicas(sess)) for optimizer in optimizers] == ["all towers are equal"] * 2
        sess.run(spoilt)
        assert all(optimizer.check_replicas(sess).tower == 2 for optimizer in optimizers)


def test_a_scope_of_one_loss_counts_for_the_others(graph):
    """The second one's variables have no scopes; the statistics are the first one's."""
    optimizer, (scoped,), (free,) = momentum(), towers(["d"]), towers(["g"], scoped=False)
    statistics = [tf1.get_variable(f"tower{k}/mean", [], use_resource=True, trainable=False) for k in range(3)]
    for rows in (scoped, free):
        optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        assert optimizer.left_out == [] and len(set(sess.run(statistics))) == 1


def test_in_a_new_graph_an_optimizer_starts_anew():
    optimizer = momentum(broadcast=1)
    for _ in range(2):
        with tf.Graph().as_default():
            op = optimizer.apply_gradients(towers(["d"])[0])
            with started(optimizer.init_op) as sess:
                sess.run(op)
                assert str(optimizer.check_replicas(sess)) == "all towers are equal"


def test_one_adam_for_two_train_ops_is_refused_but_at_the_mains(graph):
    first, second, third = towers(["d", "g", "h"])
    adam = train.AdamOptimizer(0.1)
    TowerOptimizer(adam, cpus(3)).apply_gradients(first)
    before = len(graph.get_operations())
    with pytest.raises(HierAllreduceError, match=r"AdamOptimizer: .*beta powers.*optimizer of its own.*update='main'"):
        TowerOptimizer(adam, cpus(3)[::-1]).apply_gradients(second[::-1])
    assert len(graph.get_operations()) == before
    at_mains = TowerOptimizer(train.AdamOptimizer(0.1), cpus(3), update="main")
    ops = [at_mains.apply_gradients(rows) for rows in (second, third)]
    with started(at_mains.init_op) as sess:
        for _ in range(3):
            sess.run(ops)
        assert str(at_mains.check_replicas(sess)) == "all towers are equal"


def test_other_copies_of_a_trained_variable_are_refused(graph):
    optimizer, (first, second) = momentum(), towers()
    optimizer.apply_gradients(first)
    with pytest.raises(
        HierAllreduceError, match=r"tower 1: 'tower1/d' is listed as a copy of tower 0's 'tower0/g', but .*"
    ):
        optimizer.apply_gradients([second[0], first[1], second[2]])


def test_variables_of_two_train_ops_come_with_advice(graph):
    """In one step their updates could come in another order on each tower; in turn they are right."""
    optimizer, (first, second) = momentum(), towers()
    optimizer.apply_gradients(first)
    with pytest.warns(UserWarning, match=r"trains 'tower0/d' too.*in different steps") as seen:
        optimizer.apply_gradients([a + b for a, b in zip(first, second)])
    assert seen[-1].filename == __file__


# ---- variables created later ---------------------------------------------------------------------------


def averaged(rows, op, places):
    """Return a train op that also averages each tower's variable, in one variable scope each."""
    averages = train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([op]):
        updates = []
        for place, row in zip(places, rows):
            with tf1.variable_scope(place or tf1.get_variable_scope()):
                updates.append(averages.apply([row[0][1]]))
    return tf.group(*updates), [averages.average(row[0][1]) for row in rows]


@UPDATES
@pytest.mark.parametrize("places", [[""] * 3, ["ema"] * 3, ["tower0", "tower1", "tower2"]])
def test_moving_averages_created_later_are_kept_equal(graph, update, places):
    """In the scope of tower 1, one is called tower1/tower1/d/ExponentialMovingAverage."""
    optimizer, (rows,) = momentum(update=update, check_replicas_every=1), towers(["d"])
    op, averages = averaged(rows, optimizer.apply_gradients(rows), places)
    config = tf1.ConfigProto(device_count={"CPU": 16})
    with train.MonitoredTrainingSession(config=config, hooks=[optimizer.hook()]) as sess:
        sess.run(op)
        assert str(optimizer.last_drift) == "all towers are equal"
        assert len(np.unique(sess.run(averages), axis=0)) == 1
    assert optimizer.left_out == []


def test_an_average_on_one_tower_only_is_listed(graph):
    optimizer, (rows,) = momentum(), towers(["d"])
    averaged(rows[:1], optimizer.apply_gradients(rows), ["tower0"])
    assert optimizer.left_out == ["tower0/tower0/d/ExponentialMovingAverage"]
    with started(optimizer.init_op) as sess:
        assert "except for 1 variable without a copy" in str(optimizer.check_replicas(sess))


def test_later_variables_in_a_finalized_graph_are_told(graph):
    optimizer, (rows,) = momentum(), towers(["d"])
    averaged(rows, optimizer.apply_gradients(rows), [""] * 3)
    graph.finalize()
    with pytest.raises(HierAllreduceError, match=r"finalized.*created after apply_gradients.*hook\(\)"):
        optimizer.init_op  # noqa: B018


def test_trained_variables_are_copied_even_if_they_are_local(graph):
    optimizer, (rows,) = momentum(), towers(["d"], collections=[tf1.GraphKeys.LOCAL_VARIABLES])
    optimizer.apply_gradients(rows)
    with started(tf1.local_variables_initializer()) as sess:
        assert optimizer.check_replicas(sess)[:3] == ("tower0/d", 2, 2.0)
        sess.run(optimizer.init_op)
        assert optimizer.check_replicas(sess).difference == 0
