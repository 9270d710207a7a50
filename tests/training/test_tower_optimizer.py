"""TowerOptimizer: both updates, equal towers, names in checkpoints, hooks, and errors."""

import collections
import contextlib
import gc
import threading
import warnings
import weakref
from typing import Counter, Dict, List, Tuple

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import XPU, chain, config, gpus_or_cpus, session, started
from helpers.optimizers import Clipped
from helpers.rows import for_each

from hier_allreduce import HierAllreduceError, Strategy, TowerOptimizer
from hier_allreduce.configs import is_step_to_compare
from hier_allreduce.graph.record import log_once
from hier_allreduce.training.equality import comparison

tf1 = tf.compat.v1
train = tf1.train
UPDATES = pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
SCOPES = pytest.mark.parametrize("scope", ["tower{}", ""], ids=["scopes", "no scopes"])
NOT_EQUAL = pytest.raises(tf.errors.NotFoundError, match="towers_are_not_equal_run_init_op")
sgd = lambda rate=1.0: train.GradientDescentOptimizer(rate)  # noqa: E731
momentum = lambda: train.MomentumOptimizer(1.0, 0.5)  # noqa: E731
adam = lambda: train.AdamOptimizer(0.1)  # noqa: E731


def towers(names=("d", "g"), scope="tower{}", count=3, shape=(2,), **options):
    """Return K rows of (1, variable); on tower k the variable begins with k.

    With the scope "tensorpack", tower 0 has none.
    """
    rows = []
    for k, device in enumerate(gpus_or_cpus(count)):
        inside = scope.format(k)
        if scope == "tensorpack":
            inside = f"tower{k}" if k else ""
        with tf.device(device), tf1.variable_scope(inside) if inside else contextlib.nullcontext():
            values = np.full(shape, float(k), "float32")
            variables = [
                tf1.Variable(values, name=name, use_resource=True, **options) for name in names
            ]
            rows.append([(tf.ones(shape), var) for var in variables])
    return rows


def later(name, scopes=("tower0/", "tower1/", "tower2/"), **options):
    """Return a variable in the scopes of some towers; it begins with the number of the scope."""
    return [
        tf1.get_variable(
            scope + name, initializer=float(k), trainable=False, use_resource=True, **options
        )
        for k, scope in enumerate(scopes)
    ]


def monitored(folder, scaffold, hooks):
    """Return a session that restores the checkpoint of a folder, if it has one, and saves there."""
    return train.MonitoredTrainingSession(
        checkpoint_dir=str(folder),
        scaffold=scaffold,
        hooks=hooks,
        config=config(),
        log_step_count_steps=None,
    )


def spoil(rows, n=0):
    """Return an op that changes a variable of the last tower."""
    return rows[-1][n][1].assign([7.0, 7.0])


def differing(words):
    """Return a context that ends with the error about towers that differ."""
    return pytest.raises(HierAllreduceError, match=words)


def state(sess, rows):
    """Return the first number of the first variable on each tower."""
    values = sess.run([row[0][1] for row in rows])
    return [float(value.flat[0]) for value in values]


# ---- all updates ---------------------------------------------------------------------------------


def read_plainly(var):
    return var.read_value()


def read_in_a_branch(var):
    return tf.cond(tf.equal(tf1.placeholder_with_default(1, []), 1), lambda: var * 1.0, lambda: 0.0)


def read_in_a_loop(var):
    return tf.while_loop(lambda n, _: n < 1, lambda n, _: (n + 1, var * 1.0), (0, 0.0))[1]


def read_in_a_function(var):
    return tf.function(lambda: var * 1.0)()


READS = pytest.mark.parametrize(
    "read", [read_plainly, read_in_a_branch, read_in_a_loop, read_in_a_function]
)


def rows_that_read(read, variables):
    """Return two rows of gradients, which read one of the variables each."""
    rows = []
    for row, var in zip(towers("w", count=2), variables):
        (_, own), *_ = row
        with tf.device(own.device):
            rows.append([(tf1.gradients(tf.reduce_sum(own) * read(var), [own])[0], own)])
    return rows


@pytest.mark.tf2  # control flow 2
@READS
def test_a_frozen_layer_has_to_be_equal_wherever_it_is_read(graph, read):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    optimizer.apply_gradients(rows_that_read(read, later("frozen", ("tower0/", "tower1/"))))
    with started() as sess, pytest.raises(tf.errors.InvalidArgumentError, match="tower0/frozen"):
        sess.run(optimizer.init_op)


@pytest.mark.tf2  # control flow 2
@READS
def test_the_step_may_be_read_by_the_model(graph, read):
    step = tf1.get_variable("step", initializer=3.0, trainable=False, use_resource=True)
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    rows = rows_that_read(read, [step, step])
    op = optimizer.apply_gradients(rows, global_step=step)
    with started(optimizer.init_op, op) as sess:
        assert (state(sess, rows), sess.run(step)) == ([-3.0, -3.0], 4.0)


def test_init_op_that_is_read_again_knows_a_later_update(graph):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    (first, second), (third, fourth) = towers("ab", count=2)
    one = optimizer.apply_gradients([[first], [third]])
    early = optimizer.init_op
    other = TowerOptimizer(sgd(), gpus_or_cpus(2)).apply_gradients([[second], [fourth]])
    with started(early, optimizer.init_op, one, other) as sess:
        assert sess.run([first[1], fourth[1]])[1].tolist() == [-1.0, -1.0]


@UPDATES
def test_a_table_that_all_towers_share_needs_no_copies(graph, update):
    """As in DLRM: another optimizer trains it, and the gradients of all towers read it."""
    with tf.device(gpus_or_cpus(2)[1]):
        table = tf1.get_variable("table", initializer=[3.0, 5.0], use_resource=True)
    rows = []
    for row in towers("w", count=2):
        (_, var), *_ = row
        rows.append([(tf1.gradients(tf.reduce_sum(var * table), [var])[0], var)])
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2), update=update)
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        assert state(sess, rows) == [-3.0, -3.0]


@UPDATES
@pytest.mark.parametrize("strategy", [None, "tensorpack", "tree", Strategy(chain, chunk_bytes=0)])
def test_a_step_is_applied_and_counted_once_with_any_strategy(graph, update, strategy):
    optimizer = TowerOptimizer(momentum(), gpus_or_cpus(3), update=update, strategy=strategy)
    rows = [[*row, (None, unused)] for row, unused in zip(towers(), later("unused"))]
    steps = train.get_or_create_global_step()
    op = optimizer.apply_gradients(rows, global_step=steps, name="step")
    with started(optimizer.init_op) as sess:
        for _ in range(2):
            sess.run(op)
        assert state(sess, rows) == [-2.5] * 3 and sess.run(rows[2][2][1]) == 0
        assert (sess.run(steps), op.name) == (2, "step")
        optimizer.check_replicas(sess)


@UPDATES
@pytest.mark.parametrize("scope", ["tower{}", "tensorpack"])
def test_the_collection_train_op_has_the_whole_step(update, scope, tmp_path):
    """Programs run what they find there, most of them after import_meta_graph."""
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(adam(), gpus_or_cpus(3), update=update)
        steps = train.get_or_create_global_step()
        rows = towers(["w"], scope)
        op = optimizer.apply_gradients(rows, global_step=steps, name="step")
        assert tf1.get_collection(tf1.GraphKeys.TRAIN_OP) == [op]
        tf1.add_to_collection("start", optimizer.init_op)
        tf1.train.export_meta_graph(str(tmp_path / "model.meta"))
    with tf.Graph().as_default():
        tf1.train.import_meta_graph(str(tmp_path / "model.meta"))
        (imported,) = tf1.get_collection(tf1.GraphKeys.TRAIN_OP)
        with started(*tf1.get_collection("start")) as sess:
            sess.run(imported)
            values = sess.run([var for var in tf1.global_variables() if var.op.name[-1] == "w"])
            assert len(values) == 3 and np.ptp(values) == 0 and values[0][0] < 0
            assert sess.run(train.get_global_step()) == 1


@UPDATES
def test_summaries_can_read_the_rate_of_the_last_update(graph, update):
    theirs = train.AdamOptimizer(lambda: 0.25)
    TowerOptimizer(theirs, gpus_or_cpus(3), update=update).apply_gradients(towers(["w"]))
    with session() as sess:
        assert sess.run([theirs._lr_t, theirs._beta1_t]) == pytest.approx([0.25, 0.9])


@UPDATES
def test_variables_do_not_travel_in_16_bits(graph, update):
    """Only gradients do. The variable is too large for float16."""
    optimizer, rows = (
        TowerOptimizer(sgd(), gpus_or_cpus(3), update=update, strategy="sixteen_bit"),
        towers(["w"]),
    )
    op = optimizer.apply_gradients(rows)
    with started(rows[0][0][1].assign([70001.0, 0]), optimizer.init_op) as sess:
        sess.run(op)
        assert state(sess, rows) == [70000.0] * 3


@pytest.mark.no_gpu_kernel("ResourceSparseApplyMomentum")
@UPDATES
def test_embedding_rows_that_a_step_did_not_read_are_not_changed(graph, update):
    """Momentum would move them if the gradient were made dense, although that is fewer bytes."""
    optimizer = TowerOptimizer(train.MomentumOptimizer(0.1, 0.9), gpus_or_cpus(3), update=update)
    rows = []
    read = tf1.placeholder_with_default([1] * 4, [4])
    for _, table in [row[0] for row in towers(["table"], shape=(3, 4))]:
        rows.append(
            optimizer.compute_gradients(tf.reduce_mean(tf.gather(table, read)), var_list=[table])
        )
    assert isinstance(rows[0][0][0], tf.IndexedSlices)
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        sess.run(op, {read: [0] * 4})
        sess.run(op)
        assert sess.run(rows[1][0][1])[:, 0] == pytest.approx([-0.1 / 4, -0.1 / 4, 0])
        optimizer.check_replicas(sess)


@UPDATES
def test_a_transform_may_make_slices_dense(graph, update):
    """The shape of one tower's table is right for an update of all."""
    dense = lambda grads: list(map(tf.convert_to_tensor, grads))  # noqa: E731
    optimizer = TowerOptimizer(momentum(), gpus_or_cpus(2), update=update, transform=dense)
    rows = []
    for [(_, table)] in towers(["table"], count=2, shape=(3, 4)):
        height = tf.cast(tf.shape(table), tf.int64)
        rows.append([(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([1]), height), table)])
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        assert sess.run(rows[1][0][1])[:, 0].tolist() == [0, -1, 0]


@pytest.mark.parametrize("cond", [False, True])
@UPDATES
@SCOPES
def test_towers_start_equal_also_in_a_condition_and_without_scopes(graph, update, scope, cond):
    """Without scopes the variables are d and d_1; the rows tell their towers."""
    optimizer, rows = TowerOptimizer(adam(), gpus_or_cpus(3), update=update), towers(scope=scope)
    wanted = tf1.placeholder_with_default(True, [])
    build = lambda: optimizer.apply_gradients(rows)  # noqa: E731
    op = tf.cond(wanted, build, tf.no_op) if cond else build()
    with started() as sess:
        with differing(f"such as '{'tower0/d'[0 if scope else 7 :]}'"):
            optimizer.check_replicas(sess)
        sess.run(optimizer.init_op)
        sess.run(op, {wanted: False})
        assert not cond or state(sess, rows) == [0] * 3
        sess.run(op)
        assert len(set(state(sess, rows))) == 1 and state(sess, rows) != [0] * 3
        optimizer.check_replicas(sess)


# ---- names in checkpoints ------------------------------------------------------------------------


def created(update, count, scope, losses=((0, 2),)):
    """Return the names of all variables but those of towers 1 and 2, with their device's number."""
    with tf.Graph().as_default():
        with tf1.variable_scope(scope) if scope else contextlib.nullcontext():
            rows = towers(("w", "b"), "tensorpack", count)
            for first, last in losses:
                optimizer = TowerOptimizer(
                    adam(), gpus_or_cpus(count), update=update, strategy=Strategy(chunk_bytes=0)
                )
                optimizer.apply_gradients([row[first:last] for row in rows])
        return {
            v.op.name: v.device[-1:] for v in tf1.global_variables() if "tower" not in v.op.name
        }


@pytest.mark.parametrize("scope", ["", "train"])
def test_slots_have_the_same_names_as_on_one_device(scope):
    one, roots = created("replicated", 1, scope), created("sharded", 3, scope)
    assert set(roots) == set(one) == set(created("replicated", 3, scope))
    assert set(one) == set(created("once", 3, scope))
    slots = {name: device for name, device in roots.items() if "Adam" in name}
    assert len(slots) == 4 and len(set(slots.values())) == 2  # once, on the roots of two variables


def test_two_optimizers_number_slots_as_tensorflow_does():
    names = set(created("sharded", 3, "", losses=[(0, 2), (1, 2)]))
    assert (
        names == set(created("replicated", 1, "", losses=[(0, 2), (1, 2)])) and "b/Adam_3" in names
    )


@UPDATES
def test_pieces_of_a_partitioned_variable_are_saved_as_one(graph, tmp_path, update):
    optimizer, rows = (
        TowerOptimizer(adam(), gpus_or_cpus(2), update=update, strategy=Strategy(chunk_bytes=0)),
        [],
    )
    for k, device in enumerate(gpus_or_cpus(2)):
        with tf.device(device), tf1.variable_scope(f"tower{k}" if k else tf1.get_variable_scope()):
            cut = {
                "partitioner": tf1.fixed_size_partitioner(2),
                "initializer": tf1.zeros_initializer(),
            }
            rows.append(
                [
                    (tf.ones([2, 3]), p)
                    for p in tf1.get_variable("p", [4, 3], use_resource=True, **cut)
                ]
            )
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        saved = [var for var in tf1.global_variables() if "tower" not in var.op.name]
        reader = train.load_checkpoint(train.Saver(saved).save(sess, str(tmp_path / "model")))
    for name, value in (("p", -0.1), ("p/Adam", 0.1)):
        np.testing.assert_allclose(reader.get_tensor(name), np.full([4, 3], value), rtol=1e-4)


@UPDATES
def test_another_number_of_towers_goes_on_from_a_checkpoint_of_tower_0(tmp_path, update):
    seen = []
    for count in (2, 3, 1):
        with tf.Graph().as_default():
            optimizer, rows = (
                TowerOptimizer(momentum(), gpus_or_cpus(count), update=update),
                towers(scope="tensorpack", count=count),
            )
            op = optimizer.apply_gradients(rows, global_step=train.get_or_create_global_step())
            scaffold, hooks = optimizer.scaffold(), [optimizer.hook()] if count > 1 else []
            with monitored(tmp_path, scaffold, hooks) as sess:
                sess.run(op)
                seen.append(state(sess, rows))
    assert seen == [[-1.0] * 2, [-2.5] * 3, [-4.25]]


@UPDATES
@pytest.mark.parametrize("given", ["local_init_op", "init_op", "ready_op"])
def test_a_restored_run_has_the_scaffolds_ops_beside_those_of_the_program(tmp_path, update, given):
    for steps in (1, 2):
        with tf.Graph().as_default():
            optimizer, rows = TowerOptimizer(adam(), gpus_or_cpus(3), update=update), towers(["w"])
            op = optimizer.apply_gradients(rows, global_step=train.get_or_create_global_step())
            keys = [tf1.GraphKeys.LOCAL_VARIABLES]
            mine = tf1.get_variable("mine", initializer=5.0, collections=keys, use_resource=True)
            ops = {
                "local_init_op": tf1.local_variables_initializer,
                "init_op": tf1.global_variables_initializer,
                "ready_op": tf1.report_uninitialized_variables,
            }
            scaffold = optimizer.scaffold(**{given: ops[given]()})
            with monitored(tmp_path, scaffold, [optimizer.hook()]) as sess:
                sess.run(op)
                assert sess.run([mine, train.get_global_step()]) == [5, steps]
                assert len(set(state(sess, rows))) == 1


@UPDATES
def test_a_run_is_restored_with_a_saver_of_the_program(tmp_path, update):
    """Of all towers' variables, which then have what they had; one of the scaffold is no other."""
    seen = []
    for _ in range(2):
        with tf.Graph().as_default():
            optimizer, rows = (
                TowerOptimizer(adam(), gpus_or_cpus(2), update=update),
                towers("w", count=2),
            )
            op = optimizer.apply_gradients(rows, global_step=train.get_or_create_global_step())
            own = later("own", ("tower0/", "tower1/"))
            changes = [var.assign(var + 10.0) for var in own]
            saver = train.Saver(max_to_keep=100)
            with pytest.raises(TypeError, match=r"multiple values for .*'saver'"):
                optimizer.scaffold(saver=saver)
            with monitored(tmp_path, train.Scaffold(saver=saver), [optimizer.hook()]) as sess:
                for fetched in (op, changes):
                    sess.run(fetched)
                values = sess.run([train.get_global_step(), *own])
                seen.append([*values, *np.round(state(sess, rows), 2)])
    assert seen == [[1, 10, 11, -0.1, -0.1], [2, 20, 21, -0.2, -0.2]]


@UPDATES
def test_each_share_of_the_data_with_rows_of_its_own_is_in_the_file(tmp_path, update):
    for steps in (1, 2):
        with tf.Graph().as_default():
            optimizer, rows = TowerOptimizer(adam(), gpus_or_cpus(3), update=update), towers(["w"])
            shares = []
            for k in range(3):
                share = np.full([5 - k], k * steps, "float32")
                name = f"tower{k}/share"
                shares.append(tf1.get_variable(name, initializer=share, use_resource=True))
            op = optimizer.apply_gradients(rows, global_step=train.get_or_create_global_step())
            with monitored(tmp_path, optimizer.scaffold(), [optimizer.hook()]) as sess:
                sess.run(op)
                assert [list(share) for share in sess.run(shares)] == [[0] * 5, [1] * 4, [2] * 3]
                assert sess.run(train.get_global_step()) == steps
    names = [name for name, _ in tf.train.list_variables(str(tmp_path))]
    assert "tower2/share" in names and "tower1/w" not in names


def with_target(count, update="replicated"):
    """Return a TowerOptimizer, its step, and K rows of: w, a frozen layer, and a target network.

    The program copies w to the target now and then, and nobody said whose the others are. On tower
    k they begin with k.
    """
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(count), update=update)
    rows: list = []
    variables: list = []
    syncs: list = []
    for k, device in enumerate(gpus_or_cpus(count)):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            w, frozen, target = [
                tf1.Variable(start, trainable, name=name, use_resource=True)
                for start, trainable, name in (
                    (float(k), True, "w"),
                    (0.0, False, "frozen"),
                    (float(k), False, "target"),
                )
            ]
            loss = w * (frozen.read_value() + 1.0 + 0.0 * target.read_value())
            rows.append(optimizer.compute_gradients(loss, [w]))
            variables.append([w, frozen, target])
            syncs.append(target.assign(w.read_value()))
    op = optimizer.apply_gradients(rows, global_step=train.get_or_create_global_step())
    return optimizer, op, variables, syncs


@UPDATES
@pytest.mark.parametrize("is_monitored", [True, False])
def test_all_towers_go_on_as_they_were_saved(tmp_path, update, is_monitored):
    """Also what is only read, and what the program computes: the file has one tower's of it."""
    seen: list = []
    for count in (2, 2, 3, 1):
        with tf.Graph().as_default():
            optimizer, op, variables, syncs = with_target(count, update)
            layers = [row[1].assign(4.0) for row in variables]
            scaffold, hook = optimizer.scaffold(), optimizer.hook()
            start = None if is_monitored else optimizer.init_op
            with monitored(tmp_path, scaffold, [hook]) if is_monitored else started() as sess:
                if seen and not is_monitored:
                    scaffold.saver.restore(sess, str(tmp_path / "model"))
                if not is_monitored:
                    sess.run(start)
                if not seen:
                    sess.run(layers)
                seen.append(sess.run(variables))
                for fetched in (op, syncs, op):
                    sess.run(fetched)
                if not is_monitored:
                    scaffold.saver.save(sess, str(tmp_path / "model"))
    assert seen[0] == [[0, 4, 0], [0, 4, 1]]
    assert seen[1:] == [[[-10, 4, -5]] * 2, [[-20, 4, -15]] * 3, [[-30, 4, -25]]]


@UPDATES
@pytest.mark.parametrize("is_of_towers", [False, True])
def test_only_a_restore_of_what_updates_write_asks_for_init_op(
    graph, tmp_path, update, is_of_towers
):
    """A saver of another network, or of averages for an evaluation, leaves the towers equal."""
    other = tf1.get_variable("best", initializer=3.0, trainable=False, use_resource=True)
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(2), update=update), towers(count=2)
    saver = train.Saver([rows[0][0][1] if is_of_towers else other])
    op, start = optimizer.apply_gradients(rows), optimizer.init_op
    with started(start, op) as sess:
        path = saver.save(sess, str(tmp_path / "model"))
        saver.restore(sess, path)
        with NOT_EQUAL if is_of_towers else contextlib.nullcontext():
            sess.run(op)


@pytest.mark.parametrize("key", [tf1.GraphKeys.MODEL_VARIABLES, None], ids=["model", "not said"])
def test_a_backbone_that_is_restored_after_init_op_asks_for_it_again(graph, tmp_path, key):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    rows, frozen = reading(["tower0/backbone/w", "tower1/backbone/w"], optimizer, key)
    op, saver = optimizer.apply_gradients(rows), train.Saver([frozen[0]])
    start, loaded = optimizer.init_op, frozen[0].assign(5.0)
    with started(frozen[1].assign(0.0), start, op, loaded) as sess:
        path = saver.save(sess, str(tmp_path / "model"))
        saver.restore(sess, path)
        with NOT_EQUAL:
            sess.run(op)


def test_a_session_may_be_opened_before_the_towers_are_built(graph):
    """As in notebooks; it takes up ops when it runs."""
    with session() as sess:
        optimizer, rows = TowerOptimizer(momentum(), gpus_or_cpus(2)), towers(count=2)
        op, start = optimizer.apply_gradients(rows), optimizer.init_op
        anew = tf1.global_variables_initializer()
        for fetched in (anew, start, op, anew):
            sess.run(fetched)
        with NOT_EQUAL:
            sess.run(op)


def test_a_restore_through_another_handle_of_the_variable_counts(graph, tmp_path):
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(2)), towers(["w"], count=2)
    op, path = optimizer.apply_gradients(rows), str(tmp_path / "model")
    handle = rows[0][0][1].handle
    name = handle.op.get_attr("shared_name")
    read = tf.raw_ops.RestoreV2(
        prefix=path, tensor_names=["tower0/w"], shape_and_slices=[""], dtypes=[tf.float32]
    )
    with tf.device(handle.device):
        other = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name=name)
        loaded = tf.raw_ops.AssignVariableOp(resource=other, value=read[0])
    saver = train.Saver([rows[0][0][1]])
    with started(optimizer.init_op) as sess:
        saver.save(sess, path)
        for fetched in (op, loaded):
            sess.run(fetched)
        with NOT_EQUAL:
            sess.run(op)


def test_a_value_that_is_changed_on_its_way_from_a_file_is_a_restore_too(graph, tmp_path):
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(2)), towers(count=2)
    path = str(tmp_path / "model")
    read = tf.raw_ops.RestoreV2(
        prefix=path, tensor_names=["tower0/d"], shape_and_slices=[""], dtypes=[tf.float32]
    )
    loaded = rows[1][0][1].assign(tf.reverse(read[0], [0]) * 2.0)
    op, start = optimizer.apply_gradients(rows), optimizer.init_op
    with started(start) as sess:
        train.Saver([rows[0][0][1]]).save(sess, path)
        for fetched in (op, loaded):
            sess.run(fetched)
        with NOT_EQUAL:
            sess.run(op)


# ---- copies --------------------------------------------------------------------------------------


def test_differences_are_reported_and_broadcast_away(graph):
    optimizer, rows = TowerOptimizer(sgd(0.0), gpus_or_cpus(3)), towers()
    optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        sess.run(spoil(rows))
        with differing(r"^tower 2 differs from tower 0 in 1 variable, such as 'tower0/d'$"):
            optimizer.check_replicas(sess)
        sess.run(spoil(rows, 1))
        with differing(r"^tower 2 differs from tower 0 in 2 variables, such as 'tower0/d'$"):
            optimizer.check_replicas(sess)
        sess.run(rows[1][1][1].assign([1.0, 0.0]))
        with differing(r"^tower 1 differs from tower 0 in 1 variable, such as 'tower0/g'$"):
            optimizer.check_replicas(sess)
        sess.run(optimizer.init_op)
        optimizer.check_replicas(sess)
    assert {var.op.name for var in tf1.global_variables()} == {
        f"tower{k}/{n}" for k in range(3) for n in "dg"
    }


def test_flags_counts_and_texts_are_copied(graph):
    optimizer, rows = TowerOptimizer(sgd(0.0), gpus_or_cpus(2)), towers(count=2)
    optimizer.apply_gradients(rows)
    values: dict = {"flag": [True, False], "seed": [1, 3], "text": ["a", "b"]}
    variables: list = [[], []]
    model = [tf1.GraphKeys.GLOBAL_VARIABLES, tf1.GraphKeys.MODEL_VARIABLES]
    for name, of_towers in values.items():
        for tower, value in enumerate(of_towers):
            variable = tf1.get_variable(
                f"tower{tower}/{name}", initializer=value, use_resource=True, collections=model
            )
            variables[tower].append(variable)
    init_op = optimizer.init_op  # TensorFlow places the variables later, some of them on the CPU
    with started() as sess:
        sess.run(init_op)
        first, second = sess.run(variables)
        assert first == second


BITS = {
    "int64": (tf.int64, 2**53, 2**53 + 1),
    "complex": (tf.complex64, 1 + 2j, 1 + 2.0000002j),
    "bfloat16": (tf.bfloat16, 1.0, 1.0078125),
    "bool": (tf.bool, True, False),
    "nan": (tf.float32, np.nan, 0.5),
    "sign": (tf.float64, 0.0, -0.0),
    "text": (tf.string, "ab", "abc"),
}


NO_KERNEL = {"text": pytest.mark.no_gpu_kernel("VarIsInitializedOp of strings")}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=NO_KERNEL.get(kind, [])) for kind in BITS]
)
def test_towers_are_compared_to_the_bit(graph, kind):
    dtype, value, other = BITS[kind]
    rows = []
    for k, device in enumerate(gpus_or_cpus(2)):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            w = tf1.get_variable("w", [2], use_resource=True)
            options = {"initializer": tf.constant([value, value], dtype), "use_resource": True}
            rows.append([w, tf1.get_variable("w/own", trainable=False, **options)])
    compare = comparison(list(zip(*rows)))
    with started(rows[1][0].assign(rows[0][0])) as sess:
        assert compare(sess) == ""
        sess.run(rows[1][1].assign([value, other]))
        assert "in 1 variable, such as 'tower0/w/own'" in compare(sess)


def test_elements_that_change_places_are_seen(graph):
    optimizer, rows = TowerOptimizer(sgd(0.0), gpus_or_cpus(2)), towers(count=2)
    optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        sess.run([rows[0][0][1].assign([1.0, 2.0]), rows[1][0][1].assign([2.0, 1.0])])
        with differing("in 1 variable, such as 'tower0/d'"):
            optimizer.check_replicas(sess)


@pytest.mark.parametrize(
    "scopes", [("tower0/", "tower1/"), ("", "tower1/")], ids=["scopes", "tensorpack's"]
)
def test_averages_of_batch_normalization_are_copied(graph, scopes):
    optimizer, rows = (
        TowerOptimizer(adam(), gpus_or_cpus(2)),
        towers(scope="tower{}" if scopes[0] else "tensorpack", count=2),
    )
    statistics, alone = later("bn/moving_mean", scopes), later("only_here", scopes[1:])
    steps = train.get_or_create_global_step()  # exists once, and belongs to no tower
    optimizer.apply_gradients(rows, global_step=steps)
    with started(alone[0].assign(5.0), optimizer.init_op) as sess:
        assert sess.run([*statistics, *alone]) == [0, 0, 5]
        optimizer.check_replicas(sess)


@UPDATES
@pytest.mark.parametrize("scopes", [("v0", "v1"), ("left", "right")])
def test_a_model_may_have_scopes_that_are_called_as_towers(graph, update, scopes):
    optimizer, rows, statistics = TowerOptimizer(momentum(), gpus_or_cpus(2), update=update), [], []
    for k, (tower, device) in enumerate(zip(scopes, gpus_or_cpus(2))):
        with tf.device(device), tf1.variable_scope(tower):
            inside = [tf1.get_variable(f"{scope}/w", [2], use_resource=True) for scope in scopes]
            statistics += [
                tf1.Variable(9.0 * k, False, name=f"{scope}/moving_mean", use_resource=True)
                for scope in scopes
            ]
            rows.append([(tf.fill([2], n + 1.0), var) for n, var in enumerate(inside)])
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        before = sess.run([var for _, var in rows[0]])
        for _ in range(2):
            sess.run([op])
            sess.run(optimizer.init_op)
        after = sess.run([var for _, var in rows[0]])
        assert [float((old - new)[0]) for old, new in zip(before, after)] == pytest.approx(
            [2.5, 5.0]
        )
        assert sess.run(statistics) == [0, 0, 0, 0]
        optimizer.check_replicas(sess)


def test_metrics_are_not_copied_but_variables_local_on_other_towers_are(graph):
    """tensorpack makes the variables of other towers local, so that they are not saved."""
    local = [tf1.GraphKeys.LOCAL_VARIABLES]
    metrics = later("seen", ("tower0/", "tower1/"), collections=local)
    mean = [
        *later("moving_mean", ["tower0/"]),
        tf1.get_variable(
            "tower1/moving_mean", initializer=9.0, collections=local, use_resource=True
        ),
    ]
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    optimizer.apply_gradients(
        towers(count=2, collections=local)
    )  # trained, so copied though they are local
    with started(tf1.local_variables_initializer(), mean[0].assign(9.0), optimizer.init_op) as sess:
        assert sess.run(metrics) == [0, 1] and sess.run(mean) == [9, 9]
        optimizer.check_replicas(sess)


@UPDATES
@pytest.mark.parametrize("places", [[""] * 3, ["ema"] * 3, ["tower0", "tower1", "tower2"]])
def test_moving_averages_created_later_are_kept_equal(graph, update, places):
    """In the scope of tower 1, one is called tower1/tower1/d/ExponentialMovingAverage."""
    optimizer, rows = TowerOptimizer(momentum(), gpus_or_cpus(3), update=update), towers(["d"])
    ema = train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([optimizer.apply_gradients(rows)]):
        updates = []
        for place, row in zip(places, rows):
            with tf1.variable_scope(place) if place else contextlib.nullcontext():
                updates.append(ema.apply([row[0][1]]))
    with started(optimizer.init_op) as sess:
        sess.run(updates)
        optimizer.check_replicas(sess)
        assert len(np.unique(sess.run([ema.average(row[0][1]) for row in rows]), axis=0)) == 1


# ---- several train ops, graphs and sessions ------------------------------------------------------


@UPDATES
@pytest.mark.parametrize("scopes", [("tower{}", "tower{}"), ("", ""), ("tower{}", "")])
def test_a_second_call_adds_to_the_copies_of_the_first_one(graph, update, scopes):
    optimizer = TowerOptimizer(momentum(), gpus_or_cpus(3), update=update)
    losses = [towers([name], scope) for name, scope in zip("dg", scopes)]
    statistics = later("moving_mean") if scopes[0] else []
    ops = [optimizer.apply_gradients(rows) for rows in losses]
    with started(optimizer.init_op) as sess:
        sess.run(ops)
        sess.run(ops[0])
        assert (state(sess, losses[0]), state(sess, losses[1])) == ([-2.5] * 3, [-1.0] * 3)
        assert len(set(sess.run(statistics))) <= 1
        optimizer.check_replicas(sess)
        sess.run(spoil(losses[0]))
        with differing("tower 2 differs from tower 0"):
            optimizer.check_replicas(sess)


def test_one_init_op_is_for_all_spellings_of_the_devices(graph):
    spelled = [f"/device:{XPU.upper()}:{k}" for k in range(3)]
    optimizers = [TowerOptimizer(sgd(), devices) for devices in (gpus_or_cpus(3), spelled)]
    losses = [towers(["d"]), towers(["g"], "other{}")]
    for optimizer, rows in zip(optimizers, losses):
        optimizer.apply_gradients(rows)
    with started(optimizers[0].init_op) as sess:
        assert [state(sess, rows) for rows in losses] == [[0, 0, 0], [0, 0, 0]]
        for optimizer in optimizers:
            optimizer.check_replicas(sess)


@UPDATES
def test_a_second_call_on_the_same_variables_has_the_same_slots(graph, update):
    optimizer, rows = TowerOptimizer(momentum(), gpus_or_cpus(3), update=update), towers(["d"])
    ops = [optimizer.apply_gradients(rows) for _ in range(2)]
    with started(optimizer.init_op) as sess:
        values = []
        for op in ops:
            sess.run(op)
            values.append(state(sess, rows))
    assert values == [[-1.0] * 3, [-2.5] * 3]


@UPDATES
def test_a_second_call_that_pairs_other_copies_is_an_error(graph, update):
    optimizer, rows = TowerOptimizer(momentum(), gpus_or_cpus(3), update=update), towers()
    optimizer.apply_gradients(rows)
    words = (
        r"tower 0 .*'tower0/d'\): its copies here are tower0/d, tower1/g, tower2/g, and"
        r" .*earlier apply_gradients, it is that of tower 0 .* among tower0/d, tower1/d, tower2/d"
    )
    with pytest.raises(HierAllreduceError, match=words):
        optimizer.apply_gradients([rows[0][:1], rows[1][1:], rows[2][1:]])


def test_optimizers_that_the_program_has_dropped_are_no_later_ones(graph):
    """Python gives the id of a dropped object to a new one."""
    rows = towers(["d"])
    for update in ["replicated", "once", "sharded"] * 4:
        TowerOptimizer(momentum(), gpus_or_cpus(3), update=update).apply_gradients(rows)
        gc.collect()


@UPDATES
def test_an_optimizer_may_have_no_hash(graph, update):
    """A dataclass has none, because two of them are compared by their fields."""
    compared = {"__eq__": lambda one, other: one is other, "__hash__": None}
    inner = type("Compared", (train.MomentumOptimizer,), compared)(1.0, 0.5)
    rows = towers(["d"])
    optimizer = TowerOptimizer(inner, gpus_or_cpus(3), update=update)
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        assert state(sess, rows) == [-1] * 3


@pytest.mark.parametrize("main", [0, None])
def test_a_root_that_moves_away_from_its_slots_is_an_error(graph, main):
    rows = [[*longer, *short] for longer, short in zip(towers(["a"], shape=(9,)), towers(["b"]))]
    strategy = Strategy(main=main, chunk_bytes=0)
    optimizer = TowerOptimizer(momentum(), gpus_or_cpus(3), update="sharded", strategy=strategy)
    optimizer.apply_gradients(rows)
    optimizer.apply_gradients(rows)  # the same variables have the same roots
    before = len(graph.get_operations())
    words = r"tower 0 .*'tower0_1/b'\): this tower would .* its slots on tower 1; choose"
    refused = pytest.raises(HierAllreduceError, match=words)
    with contextlib.nullcontext() if main == 0 else refused:
        optimizer.apply_gradients([row[1:] for row in rows])
    assert main == 0 or len(graph.get_operations()) == before


def test_in_a_new_graph_an_optimizer_starts_anew_and_another_graph_does_not_disturb():
    optimizer = TowerOptimizer(momentum(), gpus_or_cpus(3))
    for _ in range(2):
        with tf.Graph().as_default():
            op = optimizer.apply_gradients(towers(["d"]))
            start, sess = tf1.global_variables_initializer(), session()
        with tf.Graph().as_default():
            with pytest.raises(HierAllreduceError, match="2 rows of gradients for 3 devices"):
                optimizer.apply_gradients(towers(["d"])[:2])
            for fetched in (start, optimizer.init_op, op):
                sess.run(fetched)
            optimizer.check_replicas(sess)
        sess.close()


@UPDATES
def test_a_graph_that_nobody_holds_is_freed(update):
    with tf.Graph().as_default() as graph:
        optimizer = TowerOptimizer(adam(), gpus_or_cpus(3), update=update)
        optimizer.apply_gradients(towers())
        assert optimizer.init_op.graph is graph
    held = weakref.ref(graph)
    del graph, optimizer
    gc.collect()
    assert held() is None


def test_a_finalized_graph_is_not_added_to(graph):
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(3)), towers()
    optimizer.apply_gradients(rows)
    built = optimizer.init_op
    graph.finalize()
    with session() as sess, pytest.raises(RuntimeError, match="finalized"):
        optimizer.check_replicas(sess)
    assert optimizer.init_op is built


def test_the_hook_starts_compares_and_broadcasts(graph):
    options: dict = {"check_replicas_every": np.uint8(2), "broadcast_every": np.array(3)}
    optimizer, rows = TowerOptimizer(sgd(0.0), gpus_or_cpus(2), **options), towers(count=2)
    op, spoilt = optimizer.apply_gradients(rows), spoil(rows, 1)
    with train.MonitoredTrainingSession(config=config(), hooks=[optimizer.hook()]) as sess:
        for fetches in (op, op, [op, spoilt], op, [op, spoilt]):
            sess.run(fetches)  # the third step is followed by a broadcast
        words = r"after step 6 tower 1 differs .*, such as 'tower0/g'; .* after step 4\."
        with pytest.raises(HierAllreduceError, match=words):
            sess.run(op)


def test_by_default_the_hook_compares_in_steps_1_2_4_8(graph):
    optimizer, rows = TowerOptimizer(sgd(0.0), gpus_or_cpus(2)), towers(count=2)
    op, spoilt = optimizer.apply_gradients(rows), spoil(rows, 1)
    with train.MonitoredTrainingSession(config=config(), hooks=[optimizer.hook()]) as sess:
        for fetches in (op, op, op, op, [op, spoilt], op, op):
            sess.run(fetches)
        with pytest.raises(HierAllreduceError, match=r"after step 8 .* equal after step 4\."):
            sess.run(op)


def test_towers_are_compared_often_at_first_and_then_each_thousand_steps():
    steps = [step for step in range(1, 4097) if is_step_to_compare(step)]
    powers = [2**power for power in range(13)]
    assert steps == sorted([*powers, 1000, 2000, 3000, 4000])
    assert [step for step in range(1, 10) if is_step_to_compare(step, 3)] == [3, 6, 9]
    assert not any(is_step_to_compare(step, 0) for step in range(1, 10))


@UPDATES
def test_a_constraint_is_applied_once_and_a_warning_tells(graph, update):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(3), update=update)
    clip = lambda value: tf.clip_by_value(value, -0.25, 0.25)  # noqa: E731
    rows = towers(constraint=clip)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        assert state(sess, rows) == [-0.25] * 3
        optimizer.check_replicas(sess)
    said = "'tower0/d' has a constraint: tower 0 updates, and its new values are copied"
    assert any(said in str(warning.message) for warning in caught) == (update != "once")


@UPDATES
def test_a_step_before_init_op_ends_with_an_error_that_names_it(graph, update):
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(2), update=update), towers(count=2)
    op = optimizer.apply_gradients(rows)
    start = optimizer.init_op
    with started() as sess:
        with pytest.raises(tf.errors.NotFoundError, match="towers_are_not_equal_run_init_op"):
            sess.run(op)
        assert state(sess, rows) == [0, 1]
        sess.run(start)
        sess.run(op)


@UPDATES
@pytest.mark.parametrize("how", ["initializer", "all initializers", "restore", "load", "failure"])
def test_a_step_on_towers_that_may_differ_trains_nothing(graph, tmp_path, update, how):
    optimizer, rows = TowerOptimizer(momentum(), gpus_or_cpus(2), update=update), towers(count=2)
    bad = tf1.placeholder_with_default(False, [])
    if how == "failure":
        fail = lambda: tf1.Assert(tf.logical_not(bad), ["a bad batch"])  # noqa: E731
        with tf.control_dependencies([fail()]):
            late = tf.identity(rows[1][0][0])
        rows[1][0] = late, rows[1][0][1]
    saver = train.Saver()
    op, first = optimizer.apply_gradients(rows), rows[1][0][1]
    spoil = {
        "initializer": lambda sess: sess.run(first.initializer),
        "all initializers": lambda sess: sess.run(tf1.global_variables_initializer()),
        "restore": lambda sess: saver.restore(sess, str(tmp_path / "model")),
        "load": lambda sess: first.load(np.ones(2, "float32"), sess),
    }
    start = optimizer.init_op
    with started() as sess:
        saver.save(sess, str(tmp_path / "model"))
        for fetched in (start, op, op):
            sess.run(fetched)
        if how == "failure":
            with pytest.raises(tf.errors.InvalidArgumentError):
                sess.run(op, {bad: True})
            before = state(sess, rows)
            with contextlib.nullcontext() if len(set(before)) == 1 else NOT_EQUAL:
                sess.run(op)
        else:
            spoil[how](sess)
            before = state(sess, rows)
            with NOT_EQUAL:
                sess.run(op)
            assert state(sess, rows) == before
        sess.run(start)
        sess.run(op)
        assert len(set(state(sess, rows))) == 1


@UPDATES
def test_of_two_threads_that_train_at_once_one_fails_and_towers_stay_equal(graph, update):
    """The first step waits for its rate, with the flag, until another step has failed."""
    began, released = threading.Event(), threading.Event()

    def wait(is_first):
        if is_first:
            began.set()
            assert released.wait(60)
        return np.float32(1)

    is_first = tf1.placeholder_with_default(False, [])
    with tf.device("/cpu:0"):
        rate = tf.reshape(tf1.py_func(wait, [is_first], tf.float32), [])
    optimizer = TowerOptimizer(sgd(rate), gpus_or_cpus(2), update=update)
    rows = towers(count=2)
    op, start = optimizer.apply_gradients(rows), optimizer.init_op
    with session(inter_op_parallelism_threads=16) as sess:
        sess.run(tf1.global_variables_initializer())
        sess.run(start)
        thread = threading.Thread(target=sess.run, args=(op, {is_first: True}), daemon=True)
        thread.start()
        try:
            assert began.wait(60)
            # Steps that come before the first one has taken the flag train.
            with NOT_EQUAL:
                for _ in range(1000):
                    sess.run(op)
        finally:
            released.set()
            thread.join()
        assert len(set(state(sess, rows))) == 1
        sess.run(op)


@pytest.mark.parametrize("use_resource", [True, False])
def test_a_rate_that_changes_during_a_step_is_one_for_all_towers(graph, use_resource):
    """What TensorFlow gives of a reference variable is its memory. Tower 1 updates last."""
    rate = tf1.get_variable("rate", initializer=1.0, trainable=False, use_resource=use_resource)
    released, calls = threading.Event(), []

    def wait(grad):
        assert released.wait(60)
        return grad

    def later_on_tower_1(grads):
        calls.append(grads)
        if len(calls) == 1:
            return grads
        # Another device, because ops of one may share a thread.
        with tf.device("/cpu:9"):
            waited = [tf1.py_func(wait, [grad], tf.float32, stateful=False) for grad in grads]
        return [tf.reshape(grad, [2]) for grad in waited]

    optimizer = TowerOptimizer(sgd(rate), gpus_or_cpus(2), transform=later_on_tower_1)
    # No constant, of which TensorFlow would compute all before the step.
    grad = tf1.get_variable("grad", initializer=[1.0, 1.0], trainable=False, use_resource=True)
    rows = [[(grad.read_value(), var) for _, var in row] for row in towers("w", count=2)]
    op, start, change = optimizer.apply_gradients(rows), optimizer.init_op, rate.assign(100.0)
    first = rows[0][0][1].read_value()
    with session(inter_op_parallelism_threads=16) as sess:
        for fetched in (tf1.global_variables_initializer(), start):
            sess.run(fetched)
        thread = threading.Thread(target=sess.run, args=(op,), daemon=True)
        thread.start()
        try:
            while sess.run(first)[0] == 0:
                assert thread.is_alive()
            sess.run(change)
        finally:
            released.set()
            thread.join()
        assert state(sess, rows) == [-1, -1]


def test_a_loss_that_is_added_after_init_op_needs_it_again(graph):
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(2)), towers(["body"], count=2)
    first, start = optimizer.apply_gradients(rows), optimizer.init_op
    head = towers(["head"], count=2)
    second = optimizer.apply_gradients(head)
    with started(start, first) as sess:
        with NOT_EQUAL:
            sess.run(second)
        sess.run(optimizer.init_op)
        sess.run([first, second])


@UPDATES
@pytest.mark.parametrize("tower", [0, 1])
def test_each_towers_own_step_is_counted(graph, update, tower):
    """Model classes make one each, and the loss may depend on it."""
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(2), update=update), towers(count=2)
    steps = later("step", ("tower0/", "tower1/"))
    op = optimizer.apply_gradients(rows, global_step=steps[tower])
    with started(*(step.assign(0.0) for step in steps), optimizer.init_op, op, op) as sess:
        assert sess.run(steps) == [2, 2]


def test_all_optimizers_of_a_graph_have_the_same_devices(graph):
    TowerOptimizer(sgd(), gpus_or_cpus(2)).apply_gradients(towers(count=2))
    rows = towers("w", "other{}", 3)
    before = len(graph.get_operations())
    words = r"devices=\[.*:2'\]: an earlier apply_gradients .* for \[.*:1'\].*the same devices"
    with pytest.raises(HierAllreduceError, match=words):
        TowerOptimizer(sgd(), gpus_or_cpus(3)).apply_gradients(rows)
    assert len(graph.get_operations()) == before


@UPDATES
def test_a_step_that_reads_what_another_one_trains_needs_both_equal(graph, update):
    """A head on a body: initializers of the body part the towers for the head, too."""
    bodies = towers(["body"], count=2)
    heads: list = []
    for row in towers(["head"], count=2):
        (_, head), (_, body) = row[0], bodies[len(heads)][0]
        heads.append([(tf1.gradients(tf.reduce_sum(head * body), [head])[0], head)])
    steps = []
    for rows in (bodies, heads):
        optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2), update=update)
        steps.append(optimizer.apply_gradients(rows))
    anew = [row[0][1].initializer for row in bodies]
    with started(optimizer.init_op, *steps, anew) as sess:
        with NOT_EQUAL:
            sess.run(steps[1])
        sess.run(optimizer.init_op)
        sess.run(steps[1])


def test_a_step_without_a_name_is_called_train_op(graph):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    assert optimizer.apply_gradients(towers(count=2), name=None).name == "train_op"


def test_a_monitored_session_without_the_hook_ends_with_the_same_error(graph):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    op = optimizer.apply_gradients(towers(count=2))
    words = "towers_are_not_equal_run_init_op"
    with train.MonitoredTrainingSession(config=config()) as sess, pytest.raises(
        tf.errors.NotFoundError, match=words
    ):
        sess.run(op)


@pytest.mark.parametrize("dtype, height", [("float32", 6), ("float64", 4)])
def test_variables_of_another_dtype_or_shape_are_no_copies(graph, dtype, height):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    optimizer.apply_gradients(towers(count=2))
    states = []
    for k, (dtype_there, height_there) in enumerate([("float32", 4), (dtype, height)]):
        start = np.full([height_there], k, dtype_there)
        states.append(tf1.get_variable(f"tower{k}/state", initializer=start, use_resource=True))
        tf1.add_to_collection(tf1.GraphKeys.MODEL_VARIABLES, states[k])
    with started(optimizer.init_op) as sess:
        assert [value.max() for value in sess.run(states)] == [0, 1]


def test_what_a_tower_has_of_its_own_is_left_alone(graph):
    """Its share of the data, or the state of its recurrent layers, of any shape."""
    rows, data = [], []
    optimizer = TowerOptimizer(sgd(0.05), gpus_or_cpus(2))
    for k, device in enumerate(gpus_or_cpus(2)):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            w = tf1.get_variable("w", [1], use_resource=True)
            share = tf1.Variable([1.0 + k] * (2 + k), False, name="data", use_resource=True)
            data.append(share)
            loss = tf.reduce_mean((share.read_value() - w) ** 2)
            rows.append(optimizer.compute_gradients(loss, [w]))
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        for _ in range(100):
            sess.run(op)
        assert [list(share) for share in sess.run(data)] == [[1, 1], [2, 2, 2]]
        optimizer.check_replicas(sess)
        assert sess.run(rows[1][0][1]) == pytest.approx([1.5], rel=1e-4)


def reading(names, optimizer, key=None, dense="dense", **options):
    """Return K rows of a variable as Keras names it, and K others that the gradients read.

    The others begin with k, and tower 0's is in a collection.
    """
    rows, others = [], []
    for k, (name, device) in enumerate(zip(names, gpus_or_cpus(len(names)))):
        with tf.device(device):
            keys = [tf1.GraphKeys.GLOBAL_VARIABLES, *([key] if key else [])]
            other = tf1.Variable(float(k), False, name=name, collections=keys, use_resource=True)
            layer = f"tower{k}/{dense}_{k}/kernel" if k else f"tower0/{dense}/kernel"
            w = tf1.get_variable(layer, initializer=[1.0, 1.0], use_resource=True)
            rows.append(optimizer.compute_gradients(tf.reduce_sum(w * other.read_value()), [w]))
            others.append(other)
    return rows, others


@pytest.mark.parametrize("dense", ["dense", "tower"])
@UPDATES
def test_a_frozen_layer_is_copied_whatever_keras_calls_the_trained_ones(graph, update, dense):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2), update=update)
    names = ["tower0/backbone/w", "tower1/backbone/w"]
    key = tf1.GraphKeys.TRAINABLE_VARIABLES
    rows, frozen = reading(names, optimizer, key, dense)
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        assert sess.run(frozen) == [0, 0]
        optimizer.check_replicas(sess)


def test_what_gradients_only_read_is_equal_or_somebody_says_whose_it_is(graph):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    rows, others = reading(["tower0/mean", "tower1/mean"], optimizer)
    optimizer.apply_gradients(rows)
    with started() as sess:
        words = r"(?s)MODEL_VARIABLES.*LOCAL_VARIABLES.*tower0/mean"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            sess.run(optimizer.init_op)
        sess.run(others[0].assign(1.0))
        sess.run(optimizer.init_op)
    tf1.add_to_collection(tf1.GraphKeys.LOCAL_VARIABLES, others[0])
    with started(optimizer.init_op) as sess:
        assert sess.run(others) == [0, 1]
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
        key = tf1.GraphKeys.MODEL_VARIABLES
        rows, others = reading(["tower0/mean", "tower1/mean"], optimizer, key)
        optimizer.apply_gradients(rows)
        with started(optimizer.init_op) as sess:
            assert sess.run(others) == [0, 0]


KEYS = [tf1.GraphKeys.TRAINABLE_VARIABLES, None]


@pytest.mark.parametrize("key", KEYS, ids=["in the model", "not said"])
@pytest.mark.parametrize(
    "names", [["tower0/frozen/w", "tower1/frozen_1/w"], ["frozen/left/w", "frozen/right/w"]]
)
def test_a_layer_whose_names_tell_no_copies_has_to_be_equal(graph, names, key):
    """Keras numbers layers over all towers; one without trained weights shows no scope."""
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    rows, frozen = reading(names, optimizer, key)
    op = optimizer.apply_gradients(rows)
    with started() as sess:
        words = rf"(?s)LOCAL_VARIABLES.*in the rows, with the gradient None.*{names[0]}"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            sess.run(optimizer.init_op)
        sess.run(frozen[1].assign(0.0))
        sess.run(optimizer.init_op)
        sess.run(op)
    # Each tower may have its own, or the rows list the copies.
    tf1.add_to_collection(tf1.GraphKeys.LOCAL_VARIABLES, frozen[0])
    with started(optimizer.init_op, op) as sess:
        assert sess.run(frozen) == [0, 1]
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    optimizer.apply_gradients([[*row, (None, var)] for row, var in zip(rows, frozen)])
    with started(optimizer.init_op) as sess:
        assert sess.run(frozen) == [0, 0]


@pytest.mark.parametrize(
    "names", [["tower0/frozen/w", "tower1/frozen/w"], ["frozen/left/w", "frozen/right/w"]]
)
def test_a_frozen_layer_has_to_be_equal_also_if_other_towers_have_it_locally(graph, names):
    """Some programs keep the variables of all towers but the first out of their checkpoints."""
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    rows, frozen = reading(names, optimizer)
    tf1.get_collection_ref(tf1.GraphKeys.GLOBAL_VARIABLES).remove(frozen[1])
    tf1.add_to_collection(tf1.GraphKeys.LOCAL_VARIABLES, frozen[1])
    optimizer.apply_gradients(rows)
    error = pytest.raises(tf.errors.InvalidArgumentError, match=names[0])
    with started(tf1.local_variables_initializer()) as sess, error:
        sess.run(optimizer.init_op)


def test_a_frozen_layer_has_to_be_equal_also_if_a_tower_does_not_read_it(graph):
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    frozen = later("frozen", ("tower0/", "tower1/"))
    optimizer.apply_gradients(rows_that_read(read_plainly, [frozen[0], tf.Variable(0.0)]))
    with started() as sess, pytest.raises(tf.errors.InvalidArgumentError, match="tower0/frozen"):
        sess.run(optimizer.init_op)


@pytest.mark.parametrize("towers_with_it", [1, 2])
def test_a_layer_that_is_computed_of_constants_has_to_be_equal(graph, towers_with_it):
    """A pretrained one, which is transposed, or scaled, on its way from a file to tower 0.

    Model classes build the op on each tower.
    """
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    rows, frozen = reading(["tower0/body/w", "tower1/body/w"], optimizer)
    loaded, *_ = [var.assign(tf.negative(tf.constant(3.0))) for var in frozen[:towers_with_it]]
    optimizer.apply_gradients(rows)
    error = pytest.raises(tf.errors.InvalidArgumentError, match="tower0/body/w")
    with started(loaded) as sess, error:
        sess.run(optimizer.init_op)


def test_what_each_tower_draws_anew_is_its_own(graph):
    """Such as a mask of dropout for a whole sequence, which the program draws between steps."""
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    rows, masks = reading(["tower0/mask", "tower1/mask"], optimizer)
    draws = tf.group(*[mask.assign(tf.random.uniform([])) for mask in masks])
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, draws, op, optimizer.init_op, op) as sess:
        first, second = sess.run(masks)
        assert first != second


def test_the_hook_copies_what_a_later_hook_restores(graph):
    class Restores(tf.compat.v1.train.SessionRunHook):
        def after_create_session(self, session, coord):
            session.run(loaded)

    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    key = tf1.GraphKeys.MODEL_VARIABLES
    rows, layers = reading(["tower0/body/w", "tower1/body/w"], optimizer, key)
    loaded = layers[0].assign(5.0)
    op, hooks = optimizer.apply_gradients(rows), [optimizer.hook(), Restores()]
    with train.MonitoredTrainingSession(config=config(), hooks=hooks) as sess:
        sess.run(op)
        assert sess.run(layers) == [5, 5]


@UPDATES
def test_a_file_has_one_frozen_layer_whatever_keras_calls_it(tmp_path, update):
    path = ""
    for count in (2, 3, 1):
        with tf.Graph().as_default():
            optimizer = TowerOptimizer(sgd(), gpus_or_cpus(count), update=update)
            names = [f"random_{k}/w" if k else "random/w" for k in range(count)]
            rows, frozen = reading(names, optimizer)
            op, saver, start = (
                optimizer.apply_gradients(rows),
                optimizer.scaffold().saver,
                optimizer.init_op,
            )
            with started(*(var.assign(4.0) for var in frozen)) as sess:
                if path:
                    sess.run([var.initializer for var in frozen])
                    saver.restore(sess, path)
                for fetched in (start, op):
                    sess.run(fetched)
                assert sess.run(frozen) == [4.0] * count
                path = saver.save(sess, str(tmp_path / f"model{count}"))
        names = [name for name, _ in tf.train.list_variables(path)]
        assert [name for name in names if "random" in name] == ["random/w"]


@UPDATES
def test_a_train_op_in_a_branch_has_a_hook(graph, update):
    optimizer, rows = TowerOptimizer(sgd(), gpus_or_cpus(2), update=update), towers(count=2)
    wanted = tf1.placeholder_with_default(True, [])
    op = tf.cond(wanted, lambda: optimizer.apply_gradients(rows), tf.no_op)
    with train.MonitoredTrainingSession(config=config(), hooks=[optimizer.hook()]) as sess:
        sess.run(op)
        assert state(sess, rows) == [-1, -1]


def test_a_layer_that_tower_0_reads_is_no_copy_whatever_its_name_is(graph):
    """Without scopes, the heads are dense and dense_1, as tower 0's layers of the backbone are."""
    layers, rows, averages = [], [], []
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    for device, scope, head in zip(gpus_or_cpus(2), ["body", "body_1"], ["dense", "dense_1"]):
        averages += later("moving_mean", [f"{scope}/dense/", f"{scope}/dense_1/"])
        with tf.device(device):
            names = [f"{scope}/dense/w", f"{scope}/dense_1/w", f"{head}/w"]
            *frozen, trained = [
                tf1.get_variable(name, initializer=float(n), use_resource=True)
                for n, name in enumerate(names)
            ]
            layers.append(frozen)
            loss = trained * tf.add_n([layer.read_value() for layer in frozen])
            rows.append(optimizer.compute_gradients(loss, [trained]))
    op = optimizer.apply_gradients(rows)
    with started() as sess:
        sess.run(layers[1][1].assign(7.0))
        with pytest.raises(tf.errors.InvalidArgumentError, match="body/dense_1/w"):
            sess.run(optimizer.init_op)
        sess.run(layers[1][1].assign(1.0))
        sess.run(optimizer.init_op)
        sess.run(op)
        assert sess.run(layers) == [[0, 1], [0, 1]] and sess.run(averages) == [0, 1, 0, 1]


def test_scopes_that_are_given_tell_the_copies(graph):
    names, key = ["frozen/left/w", "frozen/right/w"], tf1.GraphKeys.TRAINABLE_VARIABLES
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2), scopes=["left", "right"])
    rows, frozen = reading(names, optimizer, key)
    optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        assert sess.run(frozen) == [0, 0]


def test_scopes_that_are_given_hold_whoever_reads_a_variable(graph):
    """Tower 0 looks at one of tower 1's."""
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2), scopes=["tower0", "tower1"])
    averages = later("moving_mean", ("tower0/", "tower1/"))
    rows = rows_that_read(read_plainly, [*later("peer", ["tower1/"]), tf.Variable(0.0)])
    optimizer.apply_gradients(rows)
    with started(averages[1].assign(9.0), optimizer.init_op) as sess:
        assert sess.run(averages) == [0, 0]


@UPDATES
def test_scopes_may_have_several_levels(graph, tmp_path, update):
    """Keras numbers a layer without trained weights, and contrib.quantize repeats the scope."""
    scopes = ["tower0/norm", "tower1/norm_1"]
    optimizer = TowerOptimizer(adam(), gpus_or_cpus(2), update=update, scopes=scopes)
    optimizer.apply_gradients(towers(count=2))
    averages = later("moving_mean", [f"{scope}/" for scope in scopes])
    saver = optimizer.scaffold().saver
    with started(optimizer.init_op) as sess:
        assert sess.run(averages) == [0, 0]
        path = saver.save(sess, str(tmp_path / "model"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert "tower0/norm/moving_mean" in names and not [name for name in names if "tower1" in name]


@UPDATES
@pytest.mark.parametrize("named", ["gd", "g", "d"])
def test_scopes_of_one_optimizer_are_not_those_of_another(graph, update, named):
    devices, starts, models = gpus_or_cpus(2), [], []
    for loss in "gd":
        scopes = [f"{loss}{k}" for k in range(2)]
        given = scopes if loss in named else None
        optimizer = TowerOptimizer(sgd(), devices, update=update, scopes=given)
        optimizer.apply_gradients(towers(["w"], loss + "{}", 2))
        for name in ("moving_mean", "frozen"):
            model = later(name, [f"{scope}/" for scope in scopes])
            tf1.add_to_collection(tf1.GraphKeys.MODEL_VARIABLES, model[0])
            models.append(model)
        starts.append(optimizer)
    for optimizer in starts:
        with started(optimizer.init_op) as sess:
            assert sess.run(models) == [[0, 0]] * 4


@UPDATES
def test_what_towers_need_not_share_is_no_layer(graph, update):
    """A share of the data with other rows, a count that one tower reads, a state, a table."""
    devices, rows, states = gpus_or_cpus(2), [], []
    count = tf1.get_variable("count", initializer=1.0, trainable=False, use_resource=True)
    batches = tf1.data.make_one_shot_iterator(tf1.data.Dataset.range(99))
    optimizer = TowerOptimizer(sgd(0.1), devices, update=update)
    for k, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            w = tf1.get_variable("w", [1], use_resource=True)
            share = tf1.Variable([1.0 + k] * (2 + k), False, name=f"data_{k}", use_resource=True)
            state = tf1.Variable(float(k), False, name=f"state_{k}", use_resource=True)
            states.append(state.assign(0.5 * state))
            factor = count.read_value() if k == 0 else 1.0
            with tf.device("/cpu:0"):
                batch = tf.cast(batches.get_next(), tf.float32)
            distance = tf.reduce_mean((share.read_value() - w) ** 2) * factor
            loss = distance + 0.0 * (state.read_value() + batch)
            rows.append(optimizer.compute_gradients(loss, [w]))
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        for _ in range(40):
            sess.run([op, *states])
        assert sess.run(rows[1][0][1]) == pytest.approx([1.5], rel=1e-3)


def test_a_scaffold_saves_tables_too(graph, tmp_path):
    table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, 0, -7)
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    optimizer.apply_gradients(towers(count=2))
    saver = optimizer.scaffold().saver
    key = tf.constant(5, tf.int64)
    insert, found = table.insert(key, tf.constant(50, tf.int64)), table.lookup(key)
    with started(optimizer.init_op) as sess:
        sess.run(insert)
        path = saver.save(sess, str(tmp_path / "model"))
    with started() as sess:
        assert sess.run(found) == -1
        saver.restore(sess, path)
        assert sess.run(found) == 50


def test_one_tower_has_nothing_to_copy_or_to_compare(graph, caplog):
    caplog.set_level("INFO", "hier_allreduce")
    log_once.cache_clear()
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(1))
    steps = train.get_or_create_global_step()
    optimizer.apply_gradients(towers(count=1), global_step=steps)
    with started(optimizer.init_op) as sess:
        optimizer.check_replicas(sess)
    assert "not copied" not in caplog.text


# ---- transform -----------------------------------------------------------------------------------


@UPDATES
@pytest.mark.parametrize("make", [momentum, lambda: Clipped(1.0)])
def test_a_transform_changes_the_reduced_gradients_of_each_tower(graph, update, make):
    """Of one (1, 1) and one (1, 1), scaled to the norm 1, each becomes 0.5."""
    clip = lambda grads: tf.clip_by_global_norm(grads, 1.0)[0]  # noqa: E731
    optimizer = TowerOptimizer(make(), gpus_or_cpus(3), update=update, transform=clip)
    rows = towers()
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        sess.run(op)
        assert state(sess, rows) == pytest.approx([-0.5 if make is momentum else -0.005] * 3)
        optimizer.check_replicas(sess)


@pytest.mark.parametrize(
    "transform, error",
    [(lambda grads: grads[:1], HierAllreduceError), (lambda grads: grads[0], TypeError)],
)
def test_a_transform_that_does_not_return_the_gradients_is_an_error(graph, transform, error):
    words = "a list of 2 gradients and must return as many|[Ii]tera"
    optimizer = TowerOptimizer(momentum(), gpus_or_cpus(3), transform=transform)
    with pytest.raises(error, match=words):
        optimizer.apply_gradients(towers())


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_transform_that_writes_a_variable_may_be_called_once_only(graph, update):
    """Called for each of 3 towers, it would count three steps, and towers would part."""

    def count_steps(grads):
        with tf1.variable_scope("", reuse=tf1.AUTO_REUSE):
            steps = tf1.get_variable("steps", initializer=0.0, trainable=False, use_resource=True)
        counted = steps.assign_add(1.0)
        return [grad * counted for grad in grads]

    words = r"tower 1 .*called for each tower, and '.*AssignAdd.*' in it .* use update='once'"
    with pytest.raises(HierAllreduceError, match=words):
        TowerOptimizer(
            sgd(), gpus_or_cpus(3), update=update, transform=count_steps
        ).apply_gradients(towers())


@pytest.mark.parametrize("make", [sgd, lambda: Clipped(1.0)])
def test_a_transform_that_is_called_once_may_write_a_variable(graph, make):
    steps = tf1.get_variable("steps", initializer=0.0, trainable=False, use_resource=True)
    counted = lambda grads: [grad * steps.assign_add(1.0) for grad in grads]  # noqa: E731
    update = "once" if make is sgd else "replicated"
    optimizer = TowerOptimizer(make(), gpus_or_cpus(3), update=update, transform=counted)
    op = optimizer.apply_gradients(towers(["w"]))
    with started(optimizer.init_op) as sess:
        sess.run(op)
        assert sess.run(steps) == 1


def test_a_scaffold_leaves_variables_of_no_collection_to_the_program(graph, tmp_path):
    optimizers = []
    for model in "ab":
        optimizer = TowerOptimizer(sgd(), gpus_or_cpus(3))
        rows = towers(["w"], f"model{model}_{{}}", collections=[])
        optimizer.apply_gradients(rows)
        optimizers.append(optimizer)
    (kept,) = later("kept", [""])
    savers = [optimizer.scaffold().saver for optimizer in optimizers]
    with started() as sess:
        for saver in savers:
            path = saver.save(sess, str(tmp_path / "model"))
            assert [name for name, _ in tf.train.list_variables(path)] == ["kept"]
            sess.run(kept.assign(5.0))
            saver.restore(sess, path)
            assert sess.run(kept) == 0


def weights_after_a_step(update, transform):
    """Return the weight of each of three towers."""
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(3), update=update, transform=transform)
    rows = towers(["w"])
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        return state(sess, rows)


@UPDATES
def test_a_transform_may_read_variables_of_its_own(graph, update):
    def halved(grads):
        half = tf1.Variable(0.5, trainable=False, use_resource=True)
        return [grad * half for grad in grads]

    assert weights_after_a_step(update, halved) == [-0.5] * 3


@UPDATES
def test_a_transform_may_have_a_loop(graph, update):
    clip = lambda grads: [tf.map_fn(lambda one: one * 0.5, grad) for grad in grads]  # noqa: E731
    assert weights_after_a_step(update, clip) == [-0.5] * 3


@pytest.mark.tf2  # control flow 2
@UPDATES
def test_a_transform_may_read_and_assert_in_a_branch(graph, update):
    """As a schedule of TensorFlow's and its assertions do."""
    half = tf1.get_variable("half", initializer=0.5, trainable=False, use_resource=True)

    def halved(grads):
        norm = tf.linalg.global_norm(grads)
        with tf.device("/cpu:0"):  # a GPU has no kernel for the text of an assertion
            is_finite = tf.debugging.assert_less(norm, 1e6)
        with tf.control_dependencies([is_finite]):
            factor = tf.cond(norm > 0.0, half.read_value, lambda: 1.0)
        return [grad * tf.function(lambda: factor * half)() for grad in grads]

    assert weights_after_a_step(update, halved) == [-0.25] * 3


@pytest.mark.tf2  # control flow 2
@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_transform_that_writes_in_a_branch_may_be_called_once_only(graph, update):
    steps = tf1.get_variable("steps", initializer=0.0, trainable=False, use_resource=True)

    def counted(grads):
        step = tf.cond(
            tf.linalg.global_norm(grads) > 0.0, lambda: steps.assign_add(1.0), lambda: 0.0
        )
        return [grad * step for grad in grads]

    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(3), update=update, transform=counted)
    with pytest.raises(HierAllreduceError, match="'transform_1/cond' in it has state"):
        optimizer.apply_gradients(towers(["w"]))


@UPDATES
def test_all_state_of_an_optimizer_can_be_reset(graph, update):
    """A warm restart initializes optimizer.variables(), the powers of beta of all towers too."""
    theirs = adam()
    optimizer, rows = TowerOptimizer(theirs, gpus_or_cpus(3), update=update), towers(["w"])
    op = optimizer.apply_gradients(rows)
    reset = tf1.variables_initializer(theirs.variables())
    with started(optimizer.init_op) as sess:
        for _ in range(2):
            sess.run(op)
        before = state(sess, rows)[0]
        sess.run(reset)
        sess.run(op)
        # Adam's first step is as long as the rate.
        assert state(sess, rows) == pytest.approx([before - 0.1] * 3)
        optimizer.check_replicas(sess)


def test_a_scaffold_leaves_out_all_towers_of_all_optimizers(graph, tmp_path):
    optimizers = []
    for model in "ab":
        with tf1.variable_scope(f"model{model}"):
            optimizer = TowerOptimizer(adam(), gpus_or_cpus(3))
            optimizer.apply_gradients(towers(["w"], f"model{model}_{{}}"))
            optimizers.append(optimizer)
    savers = [optimizer.scaffold().saver for optimizer in optimizers]
    with started(*(optimizer.init_op for optimizer in optimizers)) as sess:
        for saver in savers:
            path = saver.save(sess, str(tmp_path / "model"))
            saved = [name for name, _ in tf.train.list_variables(path)]
            assert not [name for name in saved if "_1/" in name or "_2/" in name or "tower" in name]
            assert len([name for name in saved if name.endswith("_0/w")]) == 2


@UPDATES
def test_a_transform_may_add_a_gradient_where_no_tower_has_one(graph, update):
    """One device would apply it."""
    optimizer = TowerOptimizer(
        sgd(1.0), gpus_or_cpus(3), update=update, transform=lambda grads: [grads[0], tf.ones([2])]
    )
    rows = [[(grad, d), (None, g)] for (grad, d), (_, g) in towers()]
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        before = sess.run([row[1][1] for row in rows])
        sess.run(op)
        np.testing.assert_allclose(sess.run([row[1][1] for row in rows]), np.array(before) - 1)


# ---- advice and errors ---------------------------------------------------------------------------


@UPDATES
def test_after_an_error_or_an_update_the_optimizer_is_as_it_was(graph, update):
    optimizer = train.AdamOptimizer(0.1)
    optimizer._resource_apply_dense = lambda grad, var: 1 / 0
    wrapped, rows = TowerOptimizer(optimizer, gpus_or_cpus(3), update=update), towers()
    with pytest.raises(ZeroDivisionError):
        wrapped.apply_gradients(rows)
    assert "_finish" not in vars(optimizer)
    TowerOptimizer(momentum(), gpus_or_cpus(3), update=update).apply_gradients(rows)


def changed(change):
    """Return a function that changes the first pair of the last tower's row."""

    def change_first_pair(rows):
        *others, (first, *rest) = rows
        return [*others, [change(*first), *rest]]

    return change_first_pair


@UPDATES
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda rows: [rows[0]] * 3, r"tower 1 \(/.pu:1\).*'tower0/d'.*give every tower a copy"),
        (lambda rows: [*rows[:2], rows[2][:1]], r"tower 2 \(/.pu:2\) has 1"),
        (
            changed(lambda g, v: (g, tf1.Variable([0.0] * 2, name="old", use_resource=False))),
            r"'old'\): a reference variable.*use_resource=True",
        ),
        (
            changed(lambda g, v: (tf.ones([4]), v)),
            r"tower 2 \(/.pu:2\), variable 0 \('tower2/d'\): .*\(4,\)",
        ),
        (
            lambda rows: for_each(lambda pair: (1.0, pair[1]), rows),
            r"tower 0 \(/.pu:0\).*expected a tf.Tensor, or tf.IndexedSlices of tensors, not float",
        ),
        (
            lambda rows: for_each(
                lambda pair: (tf.IndexedSlices(*pair[:1], [0, 1]), pair[1]), rows
            ),
            r"tower 0 \(/.pu:0\).*tf.IndexedSlices of tensors, not list",
        ),
    ],
)
def test_wrong_rows_are_refused_before_anything_is_built(graph, update, change, words):
    optimizer, rows = TowerOptimizer(momentum(), gpus_or_cpus(3), update=update), change(towers())
    before = len(graph.get_operations())
    with pytest.raises(HierAllreduceError, match=words):
        optimizer.apply_gradients(rows)
    assert len(graph.get_operations()) == before


class WithoutStep(tf.compat.v1.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, name=None):
        return super().apply_gradients(grads_and_vars, name=name)


class NeedsLoss(tf.compat.v1.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, loss, global_step=None, name=None):
        return super().apply_gradients(grads_and_vars, global_step, name)


@UPDATES
@pytest.mark.parametrize(
    "make, arguments, words",
    [
        (WithoutStep, {"global_step": None}, "unexpected keyword argument 'global_step'"),
        (NeedsLoss, {}, "missing .*'loss'"),
        (train.GradientDescentOptimizer, {"loss": 0.0}, "unexpected keyword argument 'loss'"),
    ],
)
def test_an_argument_that_the_optimizer_lacks_or_needs_is_pythons_error(
    graph, update, make, arguments, words
):
    rows, step = towers(), train.get_or_create_global_step()
    given = {key: value or step for key, value in arguments.items()}
    with pytest.raises(TypeError, match=words):
        TowerOptimizer(make(1.0), gpus_or_cpus(3), update=update).apply_gradients(rows, **given)


@UPDATES
def test_a_variable_twice_in_a_row_is_updated_on_one_tower(graph, update):
    rows = [[*row, *row] for row in towers(["d"])]
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(3), update=update)
    said = pytest.warns(UserWarning, match="'tower0/d' is twice in its row: tower 0 updates")
    with said if update != "once" else contextlib.nullcontext():
        op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        sess.run(op)
        assert state(sess, rows) == [-2.0] * 3


@UPDATES
def test_two_handles_of_one_variable_in_a_row_are_one(graph, update):
    """As import_meta_graph, and whoever makes a variable from its proto, gets them."""
    rows = towers(["d"])
    for row in rows:
        (grad, var), *_ = row
        row.append((grad, type(var).from_proto(var.to_proto())))
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(3), update=update)
    said = pytest.warns(UserWarning, match="'tower0/d' is twice in its row: tower 0 updates")
    with said if update != "once" else contextlib.nullcontext():
        op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, op) as sess:
        assert state(sess, rows) == [-2.0] * 3
        optimizer.check_replicas(sess)


@UPDATES
def test_towers_have_their_own_devices_whatever_the_program_colocates_the_update_with(
    graph, update
):
    steps = train.get_or_create_global_step()
    optimizer, rows = TowerOptimizer(adam(), gpus_or_cpus(3), update=update), towers()
    with tf1.colocate_with(steps):
        op = optimizer.apply_gradients(rows, global_step=steps)
        start = optimizer.init_op
    with started(start, op, op) as sess:
        assert len(set(state(sess, rows))) == 1 and sess.run(steps) == 2
        optimizer.check_replicas(sess)


@UPDATES
def test_without_any_gradient_there_is_no_training(graph, update):
    optimizer = TowerOptimizer(momentum(), gpus_or_cpus(3), update=update)
    with pytest.raises(ValueError, match=r"No (gradients|variables) provided"):
        optimizer.apply_gradients(for_each(lambda pair: (None, pair[1]), towers()))


@pytest.mark.parametrize("all_towers_first", [False, True])
def test_without_var_list_the_error_asks_for_it(graph, all_towers_first):
    """TensorFlow then differentiates by the variables of all towers that exist by now."""
    optimizer, rows, losses = TowerOptimizer(sgd(), gpus_or_cpus(2)), [], []
    for tower in range(2):
        losses.append(tf.reduce_sum(tf1.get_variable(f"tower{tower}/w", [3], use_resource=True)))
        if not all_towers_first:
            rows.append(optimizer.compute_gradients(losses[-1]))
    rows = rows or [optimizer.compute_gradients(loss) for loss in losses]
    with pytest.raises(
        HierAllreduceError, match=r"without var_list=, compute_gradients .* its own tower"
    ):
        optimizer.apply_gradients(rows)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"update": "mian"}, "update='mian': expected one of replicated, once, sharded"),
        ({"average": "sum"}, "average='sum': expected one of True, False"),
        ({"broadcast_every": -2}, "broadcast_every=-2: expected a whole number of 0 or more"),
        ({"broadcast_every": None}, "broadcast_every=None: expected a whole number of 0 or more"),
        ({"check_replicas_every": -1}, "check_replicas_every=-1: expected"),
        ({"check_replicas_every": True}, "check_replicas_every=True: expected"),
        ({"check_replicas_every": np.bool_(True)}, "check_replicas_every=.*True.*: expected"),
        ({"broadcast_every": np.float32(2)}, r"broadcast_every=.*2\.0.*: expected"),
        ({"optimizer": "adam"}, r"optimizer='adam': expected a tf\.compat\.v1\.train\.Optimizer"),
        ({"strategy": "flatt"}, "there are "),
        ({"cluster": "hosts.yaml"}, "cluster='hosts.yaml': expected a hier_allreduce.Cluster"),
        ({"devices": []}, "devices is empty"),
    ],
)
def test_wrong_options_are_refused_at_once(options, words):
    with pytest.raises(HierAllreduceError, match=words):
        TowerOptimizer(**{"optimizer": momentum(), "devices": gpus_or_cpus(2), **options})


def test_copies_are_known_only_after_apply_gradients():
    optimizer = TowerOptimizer(sgd(), gpus_or_cpus(2))
    for ask in (
        lambda: optimizer.check_replicas(None),
        lambda: optimizer.init_op,
        optimizer.scaffold,
    ):
        with pytest.raises(HierAllreduceError, match="call apply_gradients first"):
            ask()


@pytest.mark.tf2
@pytest.mark.parametrize(
    "how", [tf.function, lambda step, autograph: step], ids=["in a function", "eagerly"]
)
def test_without_a_graph_and_session_there_is_no_train_op(how):
    optimizer, variables = (
        TowerOptimizer(sgd(), gpus_or_cpus(2)),
        [tf.Variable([1.0, 2.0]) for _ in range(2)],
    )

    def step():
        optimizer.apply_gradients([[(tf.ones([2]), var)] for var in variables])

    with pytest.raises(HierAllreduceError, match="builds the train op of a graph"):
        how(step, autograph=False)()


# ---- slots on the roots --------------------------------------------------------------------------


def bytes_of_slots():
    """Return the bytes of all Adam slots of the graph on each device."""
    sizes: Counter = collections.Counter()
    for var in tf1.global_variables():
        if "/Adam" in var.op.name:
            sizes[var.device] += var.dtype.size * var.shape.num_elements()
    return sizes


LAYERS: Dict[str, List[Tuple[int, ...]]] = {
    "large and small": [(512, 128), (128, 256), (256, 512), (512,), (64, 1024), (1024, 8)] * 4,
    "small": [(64, 128)] * 80,
}


@pytest.mark.parametrize("layers", LAYERS)
def test_slots_are_balanced(graph, layers):
    """Variables that share a chunk have their slots on one device, so that chunks must be small."""
    variables = []
    for k, device in enumerate(gpus_or_cpus(8)):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            zeros = tf1.zeros_initializer()
            row = [
                tf1.get_variable(f"v{n}", shape, initializer=zeros, use_resource=True)
                for n, shape in enumerate(LAYERS[layers])
            ]
        variables.append(row)
    optimizer = TowerOptimizer(adam(), gpus_or_cpus(8), update="sharded")
    rows = for_each(lambda var: (tf.zeros(var.shape), var), variables)
    optimizer.apply_gradients(rows)
    sizes = bytes_of_slots()
    total = 2 * sum(4 * np.prod(shape) for shape in LAYERS[layers])
    assert sum(sizes.values()) == total and len(sizes) == 8
    assert max(sizes.values()) <= total / 8 + 2 * 4 * 512 * 256  # two slots of the largest layer
    optimizer.apply_gradients(rows)  # the same variables again have the same roots
    assert bytes_of_slots() == sizes


def test_a_table_with_sparse_gradients_counts_among_the_slots(graph):
    rows = towers(["table", "w"], shape=(1000, 8), count=2)
    for row in rows:
        rows_read = tf.IndexedSlices(tf.ones([1, 8]), tf.constant([0]), tf.constant([1000, 8]))
        row[0] = (rows_read, row[0][1])
    optimizer = TowerOptimizer(
        adam(), gpus_or_cpus(2), update="sharded", strategy=Strategy(chunk_bytes=0)
    )
    optimizer.apply_gradients(rows)
    assert sorted(bytes_of_slots().values()) == [2 * 4 * 8000] * 2
