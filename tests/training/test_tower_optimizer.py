"""TowerOptimizer: both updates, broadcasts, drift, savers and hooks, without tensorpack."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, cpus, session, started

from hier_allreduce import (
    HierAllreduceError,
    Strategy,
    TowerOptimizer,
    audit,
    gpu_lanes,
)
from hier_allreduce.graph.emit import emitted_in
from hier_allreduce.training import Replicas, drift

tf1 = tf.compat.v1
train = tf1.train
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(24, 6).astype("float32"), RANDOM.randn(24, 3).astype("float32")

NEWER_DTYPES = ("int4", "uint4", "float8_e5m2", "uint64") if IS_TF2 else ("uint16",)

OPTIMIZERS = {
    "sgd": lambda: train.GradientDescentOptimizer(0.1),
    "momentum": lambda: train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: train.AdamOptimizer(0.01),
    "rmsprop": lambda: train.RMSPropOptimizer(0.01),
}


def towers(optimizer, devices, scope="tower{}", sparse=False, resource=True):
    """Return K rows of (gradient, variable) pairs and K losses of a small regression; towers share 24 examples."""
    rows, losses = [], []
    for k, device in enumerate(devices):
        share = slice(k * 24 // len(devices), (k + 1) * 24 // len(devices))
        with tf.device(device), tf1.variable_scope(scope.format(k) if scope else f"tower{k}" if k else ""):
            get = lambda name, shape: tf1.get_variable(  # noqa: E731
                name,
                initializer=np.random.RandomState(len(name) + sum(shape)).randn(*shape).astype("float32"),
                use_resource=resource,
            )
            w, b, u, unused = get("w", [6, 5]), get("bias", [5]), get("u", [5, 3]), get("unused", [2])
            read = tf1.placeholder_with_default([1, 2, 2], [3])
            x = tf.nn.embedding_lookup(w, read) if sparse else tf.matmul(X[share], w)
            target = Y[:3] if sparse else Y[share]
            losses.append(tf.reduce_mean((tf.matmul(tf.tanh(x + b), u) - target) ** 2))
            rows.append(optimizer.compute_gradients(losses[-1], var_list=[w, b, u, unused]))
    return rows, losses


def trained(make, devices, steps=8, scope="tower{}", **options):
    """Train from the start; return the mean loss of each step, tower 0's weights, and the graph."""
    with tf.Graph().as_default() as graph:
        optimizer = TowerOptimizer(make(), devices, **options)
        rows, losses = towers(optimizer, devices, scope)
        op = optimizer.apply_gradients(rows, global_step=train.get_or_create_global_step())
        with started(optimizer.init_op) as sess:
            mean = tf.add_n([tf.identity(loss) for loss in losses]) / len(losses)
            values = [sess.run([mean, op])[0] for _ in range(steps)]
            assert sess.run(train.get_global_step()) == steps
            assert optimizer.check_replicas(sess).difference == 0
            return values, sess.run([var for _, var in rows[0]]), graph


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_both_updates_and_one_tower_train_alike(make):
    alone, weights, _ = trained(make, cpus(1))
    for update in ("replicated", "main"):
        for strategy in (None, "tensorpack"):
            losses, got, _ = trained(make, cpus(3), update=update, strategy=strategy)
            assert np.abs(np.subtract(losses, alone)).max() <= 1e-6
            assert max(np.abs(a - b).max() for a, b in zip(weights, got)) <= 1e-6


@pytest.mark.parametrize("update", ["replicated", "main"])
def test_variables_do_not_travel_in_16_bits(graph, update):
    """Only gradients do. The variable is too large for float16."""
    optimizer = TowerOptimizer(train.GradientDescentOptimizer(1.0), cpus(3), update=update, strategy="half")
    rows = []
    for tower, device in enumerate(cpus(3)):
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            w = tf1.get_variable("w", initializer=[0.0 if tower else 70001.0], use_resource=True)
            rows.append([(tf.ones([1]), w)])
    op = optimizer.apply_gradients(rows)
    with started(optimizer.init_op) as sess:
        sess.run(op)
        assert np.array_equal(sess.run([row[0][1] for row in rows]), [[70000]] * 3)


def test_over_lanes_towers_train_as_without():
    how = {"steps": 2, "strategy": Strategy(pack_below=0)}
    _, alone, _ = trained(OPTIMIZERS["momentum"], cpus(3), **how)
    for update in ("replicated", "main"):
        lanes = gpu_lanes(cpus(3), 2).lanes
        _, got, graph = trained(OPTIMIZERS["momentum"], cpus(3), lanes=lanes, update=update, **how)
        assert max(np.abs(a - b).max() for a, b in zip(alone, got)) <= 1e-6
        updated = {op.device for op in graph.get_operations() if op.type == "ResourceApplyMomentum"}
        assert updated == {f"/device:CPU:{tower}" for tower in range(3)}
        calls = [call for call in emitted_in(graph) if call.plan.lanes]
        assert len(calls) == (2 if update == "main" else 1)  # the broadcast goes without lanes
        assert all(set(call.plan.roots) <= set(range(3)) for call in calls) == (update == "main")


def test_adam_advances_its_beta_powers_once_a_step():
    for update in ("replicated", "main"):
        with tf.Graph().as_default():
            optimizer = TowerOptimizer(train.AdamOptimizer(0.01), cpus(3), update=update)
            op = optimizer.apply_gradients(towers(optimizer, cpus(3))[0])
            with started(optimizer.init_op) as sess:
                for _ in range(5):
                    sess.run(op)
                power = next(var for var in tf1.global_variables() if "beta2_power" in var.op.name)
                assert sess.run(power) == pytest.approx(0.999**6, rel=1e-6)


def needed(op):
    """Return all ops that run before ``op``."""
    ancestors, waiting = set(), [op]
    while waiting:
        current = waiting.pop()
        new = {*(tensor.op for tensor in current.inputs), *current.control_inputs} - ancestors
        ancestors |= new
        waiting += new
    return ancestors


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_beta_powers_change_after_every_towers_update(graph, wrapped):
    """All towers read them, so the last one's update waits for the others."""
    adam = train.AdamOptimizer(0.01)
    optimizer = TowerOptimizer(Halving(adam) if wrapped else adam, cpus(3))
    step = optimizer.apply_gradients(towers(optimizer, cpus(3))[0])
    updates = {op for op in graph.get_operations() if op.type == "ResourceApplyAdam"}
    powers = {op for power in adam._get_beta_accumulators() for op in power.op.outputs[0].consumers()}
    changes = [op for op in powers & needed(step) if op.type in ("Assign", "AssignVariableOp")]
    assert len(updates) == 3 * 3 and len(changes) == 2
    assert all(updates <= needed(change) for change in changes)


def test_main_updates_keep_slots_once_named_as_tower_0s():
    _, _, graph = trained(
        OPTIMIZERS["adam"], cpus(4), steps=1, update="main", strategy=Strategy(pack_below=0), scope=""
    )
    with graph.as_default():
        slots = {v.op.name: v.device[-1] for v in tf1.global_variables() if "Adam" in v.op.name}
    assert sorted(slots) == ["bias/Adam", "bias/Adam_1", "u/Adam", "u/Adam_1", "w/Adam", "w/Adam_1"]
    assert len({slots["w/Adam"], slots["u/Adam"], slots["bias/Adam"]}) == 3
    _, _, graph = trained(OPTIMIZERS["adam"], cpus(4), steps=1)
    with graph.as_default():
        assert len([v for v in tf1.global_variables() if "Adam" in v.op.name]) == 4 * 6


@pytest.mark.parametrize("sparse, there", [(False, 9), (True, 12)])
def test_the_executed_copies_are_the_two_halves_of_one_plan(sparse, there):
    """K−1 copies each way for each of 3 variables; for sparse rows, values and indices go, the new variable returns."""
    with tf.Graph().as_default() as graph:
        optimizer = TowerOptimizer(train.AdamOptimizer(0.01), cpus(4), update="main", strategy="tensorpack")
        op = optimizer.apply_gradients(towers(optimizer, cpus(4), sparse=sparse)[0])
        metadata = tf1.RunMetadata()
        with started(optimizer.init_op) as sess:
            sess.run(op, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        seen = audit(metadata, graph)
    assert [sum(call.copies.values()) for call in seen.calls] == [there, 9]


@pytest.mark.parametrize("update", ["replicated", "main"])
@pytest.mark.parametrize("devices", [cpus(2), [None, None]], ids=["CPUs", "unknown"])
def test_embedding_rows_that_a_step_did_not_read_stay_unchanged(devices, update):
    """Momentum would move them if the gradient were made dense. It is not, even where that is fewer bytes."""
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.MomentumOptimizer(0.1, 0.9), devices, update=update)
        read, rows = tf1.placeholder_with_default([1] * 4, [4]), []
        for k, device in enumerate(devices):
            with tf1.device(device), tf1.variable_scope(f"tower{k}"):
                table = tf1.get_variable("table", [3, 4], initializer=tf1.ones_initializer(), use_resource=True)
                rows.append(optimizer.compute_gradients(tf.reduce_mean(tf.gather(table, read)), var_list=[table]))
        op = optimizer.apply_gradients(rows)
        with started() as sess:
            sess.run(op, {read: [0] * 4})
            sess.run(op)
            assert sess.run(rows[1][0][1])[0] == pytest.approx([1 - 0.1 / 4] * 4)


def test_sparse_gradients_are_updated_at_their_mains():
    results = []
    for update in ("replicated", "main"):
        with tf.Graph().as_default():
            optimizer = TowerOptimizer(train.MomentumOptimizer(0.1, 0.9), cpus(3), update=update)
            rows, _ = towers(optimizer, cpus(3), sparse=True)
            assert isinstance(rows[0][0][0], tf.IndexedSlices)
            op = optimizer.apply_gradients(rows)
            with started(optimizer.init_op) as sess:
                for _ in range(4):
                    sess.run(op)
                assert optimizer.check_replicas(sess).difference == 0
                results.append(sess.run(rows[1][0][1]))
    assert np.abs(results[0] - results[1]).max() <= 1e-6


@pytest.mark.parametrize("update", ["replicated", "main"])
@pytest.mark.parametrize("names", [["W", "b"], ["W"]])
def test_towers_without_a_scope_are_kept_equal_too(names, update):
    """Their variables are W and W_1; the rows tell whose they are."""
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.AdamOptimizer(0.1), cpus(3), update=update)
        rows = []
        for k, device in enumerate(cpus(3)):
            with tf.device(device):
                variables = [tf1.Variable([1.0 * k], use_resource=True, name=name) for name in names]
                rows.append(optimizer.compute_gradients(tf.add_n([v * v for v in variables]), var_list=variables))
        op = optimizer.apply_gradients(rows)
        with started() as sess:
            assert optimizer.check_replicas(sess).difference == 2
            sess.run(optimizer.init_op)
            sess.run(op)
            assert optimizer.check_replicas(sess).difference == 0
            assert len(set(np.concatenate(sess.run([row[0][1] for row in rows])))) == 1
    assert optimizer.left_out == []
    with_slots = {"replicated": 3, "main": 1}[update]  # Adam has two slots; at the mains they exist once
    assert len(optimizer._copies.replicas().rows[0]) == len(names) * with_slots


def test_init_op_and_broadcasts_make_and_keep_towers_equal():
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.0), cpus(3), broadcast=3)
        rows, _ = towers(optimizer, cpus(3))
        op = optimizer.apply_gradients(rows)
        saved = {var.op.name for var in train.Saver()._var_list}
        with started() as sess:
            spoil = rows[2][1][1].assign_add(np.ones([5], "float32"))
            sess.run(spoil)
            largest = optimizer.check_replicas(sess)
            assert (largest.variable, largest.tower, largest.difference) == ("tower0/bias", 2, 1.0)
            assert "'tower0/bias' differs by 1 between tower 0 and tower 2" in str(largest)
            sess.run(optimizer.init_op)
            assert str(optimizer.check_replicas(sess)) == "all towers are equal"
            sess.run(spoil)
            equal = []
            for _ in range(4):
                sess.run(op)
                equal.append(optimizer.check_replicas(sess).difference == 0)
            assert equal == [False, False, True, True]
    assert saved == {f"tower{k}/{name}" for k in range(3) for name in ("w", "bias", "u", "unused")}


class Halving(train.Optimizer):
    """A wrapper, like those for loss scaling and clipping."""

    def __init__(self, inside):
        super().__init__(False, "Halving")
        self._inside = inside

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self._inside.apply_gradients(
            [(g if g is None else g / 2, v) for g, v in grads_and_vars], global_step, name
        )


def test_an_optimizer_in_a_wrapper_works_once_a_step_too():
    with tf.Graph().as_default():
        adam = train.AdamOptimizer(0.01)
        optimizer = TowerOptimizer(Halving(Halving(adam)), cpus(3))
        op = optimizer.apply_gradients(towers(optimizer, cpus(3))[0])
        with started(optimizer.init_op) as sess:
            for _ in range(4):
                sess.run(op)
            assert sess.run(adam._get_beta_accumulators()[0]) == pytest.approx(0.9**5)


def test_a_loss_scale_is_adapted_once_a_step():
    kinds = getattr(tf1, "mixed_precision", None) or train.experimental
    with tf.Graph().as_default():
        scale = kinds.DynamicLossScale(initial_loss_scale=1024.0, increment_period=2)
        wrapped = kinds.MixedPrecisionLossScaleOptimizer(train.AdamOptimizer(0.01), scale)
        optimizer = TowerOptimizer(wrapped, cpus(3))
        rows, _ = towers(optimizer, cpus(3))
        infinite, now = tf1.placeholder_with_default(1.0, []), scale()
        op = optimizer.apply_gradients([[(g if g is None else g * infinite, v) for g, v in row] for row in rows])
        with started(optimizer.init_op) as sess:
            before = sess.run(rows[2][0][1])
            sess.run(op, {infinite: np.inf})
            assert sess.run(now) == 512 and (sess.run(rows[2][0][1]) == before).all()
            for _ in range(2):
                sess.run(op)
            assert sess.run(now) == 1024 and (sess.run(rows[2][0][1]) != before).all()
            assert optimizer.check_replicas(sess).difference == 0


def of_dtype(dtype, number):
    """Return 0 or 1 in any dtype; a bitcast makes the quantized ones."""
    dtype = tf.as_dtype(dtype)
    if dtype.is_quantized:
        return tf.bitcast(tf.constant(number, {1: tf.uint8, 4: tf.int32}[dtype.size]), dtype)
    return tf.cast(float(number) if dtype.is_floating else number, dtype)


@pytest.mark.parametrize("dtype", ["complex64", "string", "bool", "qint8", "qint32", *NEWER_DTYPES])
def test_variables_of_any_dtype_are_copied_and_compared(dtype):
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.0), cpus(2))
        rows, _ = towers(optimizer, cpus(2))
        for k in range(2):
            with tf.device(cpus(2)[k]), tf1.variable_scope(f"tower{k}"):
                value = tf.constant("ab"[k]) if dtype == "string" else of_dtype(dtype, k)
                for name in ("other", "another"):  # small ones of most dtypes share a bucket
                    tf1.get_variable(name, initializer=value, use_resource=True, trainable=False)
        optimizer.apply_gradients(rows)
        with started() as sess:
            sess.run([row[n][1].assign(rows[0][n][1]) for row in rows for n in range(4)])
            assert optimizer.check_replicas(sess)[:3] == ("tower0/other", 1, 1)
            sess.run(optimizer.init_op)
            assert optimizer.check_replicas(sess).difference == 0


@pytest.mark.parametrize("first, second, largest", [(np.nan, 0.5, np.inf), (np.nan, np.nan, 0), (np.inf, np.inf, 0)])
def test_nan_differs_from_everything_but_nan(first, second, largest):
    """Also in the first of several variables."""
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.0), cpus(2))
        rows, _ = towers(optimizer, cpus(2))
        optimizer.apply_gradients(rows)
        with started(optimizer.init_op) as sess:
            sess.run([row[0][1].assign(np.full([6, 5], v, "float32")) for row, v in zip(rows, (first, second))])
            assert optimizer.check_replicas(sess).difference == largest


def test_replicas_are_checked_in_the_graph_of_the_session():
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2))
        optimizer.apply_gradients(towers(optimizer, cpus(2))[0])
        start, sess = tf1.global_variables_initializer(), session()
    sess.run(start)
    sess.run(optimizer.init_op)
    with tf.Graph().as_default():
        assert optimizer.check_replicas(sess).difference == 0
    sess.close()


def test_a_finalized_graph_is_not_added_to():
    with tf.Graph().as_default() as graph:
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2))
        optimizer.apply_gradients(towers(optimizer, cpus(2))[0])
        graph.finalize()
        with session() as sess, pytest.raises(HierAllreduceError, match=r"finalized.*check_replicas_every"):
            optimizer.check_replicas(sess)


def test_a_broadcast_goes_out_from_tower_0_once():
    with tf.Graph().as_default() as graph:
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(3))
        optimizer.apply_gradients(towers(optimizer, cpus(3))[0])
        metadata = tf1.RunMetadata()
        with started() as sess:
            asked = tf1.RunOptions(output_partition_graphs=True)
            sess.run(optimizer.broadcast_op, options=asked, run_metadata=metadata)
        (call,) = audit(metadata, graph).calls
    assert call.copies == {(0, 1): 1, (0, 2): 1}  # all variables in a bucket


def test_never_means_no_broadcast_at_all():
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.0), cpus(2), broadcast="never")
        rows, _ = towers(optimizer, cpus(2))
        optimizer.apply_gradients(rows)
        with started() as sess:
            sess.run(rows[1][1][1].assign_add(np.ones([5], "float32")))
            sess.run(optimizer.init_op)
            assert optimizer.check_replicas(sess).difference == 1


@pytest.mark.parametrize(
    "scopes", [("tower0/", "tower1/"), ("", "tower1/")], ids=["scopes", "as tensorpack names them"]
)
def test_statistics_are_equal_and_left_out_ones_are_listed(scopes):
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.AdamOptimizer(0.1), cpus(2))
        rows, _ = towers(optimizer, cpus(2), scope="tower{}" if scopes[0] else "")
        for scope in scopes:
            tf1.get_variable(f"{scope}bn/mean", [3], trainable=False, use_resource=True)
        tf1.get_variable(f"{scopes[0]}only_here", [3], trainable=False, use_resource=True)
        train.get_or_create_global_step()  # exists once, and belongs to no tower
        optimizer.apply_gradients(rows)
        for scope, row in zip(scopes, optimizer._copies.replicas().rows):
            assert {f"{scope}bn/mean", f"{scope}w/Adam"} <= {var.op.name for var in row}
        with started(optimizer.init_op) as sess:
            equal = "all towers are equal, except for 1 variable without a copy on every tower, not compared"
            assert str(optimizer.check_replicas(sess)) == equal
    assert optimizer.left_out == [f"{scopes[0]}only_here"]


def test_a_hook_initialises_and_reports_drift(caplog):
    caplog.set_level("INFO", "hier_allreduce")
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.AdamOptimizer(0.1), cpus(2), check_replicas_every=2, broadcast=5)
        rows, _ = towers(optimizer, cpus(2))
        op, spoil = optimizer.apply_gradients(rows), rows[1][3][1].assign_add([0.0, 0.5])
        config = tf1.ConfigProto(device_count={"CPU": 16})
        with train.MonitoredTrainingSession(config=config, hooks=[optimizer.hook()]) as sess:
            sess.run(op)
            assert optimizer.last_drift is None
            sess.run(op)
            assert optimizer.last_drift.difference == 0
            sess.run([op, spoil])
            sess.run(op)
            assert optimizer.last_drift[:3] == ("tower0/unused", 1, 0.5)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "step 2: all towers are equal"),
        ("WARNING", "step 4: 'tower0/unused' differs by 0.5 between tower 0 and tower 1"),
    ]


def test_a_variable_without_gradients_is_not_changed():
    _, weights, _ = trained(OPTIMIZERS["sgd"], cpus(2), update="main")
    assert np.array_equal(weights[3], np.random.RandomState(len("unused") + 2).randn(2).astype("float32"))


@pytest.mark.parametrize("name, advice", [("adam", "multiply its epsilon by 4"), ("momentum", "learning rate by 4")])
def test_a_sum_of_gradients_comes_with_advice(name, advice):
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(OPTIMIZERS[name](), cpus(4), average=False, update="main")
        rows, _ = towers(optimizer, cpus(4))
        with pytest.warns(UserWarning, match=advice) as seen:
            optimizer.apply_gradients(rows)
        assert seen[-1].filename == __file__


# ---- bad input -------------------------------------------------------------------------------------


def refused(error, match, change=lambda rows: rows, devices=2, optimizer=None, **options):
    """Check that an error is raised, and that ``apply_gradients`` adds no op before it."""
    with tf.Graph().as_default() as graph:
        before = None
        with pytest.raises(error, match=match):
            towers_optimizer = TowerOptimizer(optimizer or train.MomentumOptimizer(0.1, 0.9), cpus(devices), **options)
            rows = change(towers(towers_optimizer, cpus(devices))[0])
            before = len(graph.get_operations())
            towers_optimizer.apply_gradients(rows)
        assert before is None or len(graph.get_operations()) == before


@pytest.mark.parametrize("update", ["replicated", "main"])
def test_variables_that_do_not_match_are_refused(update):
    refused(
        HierAllreduceError, r"tower 1 \(/cpu:1\).*'tower0/w'.*own copy", lambda rows: [rows[0], rows[0]], update=update
    )
    refused(HierAllreduceError, "not on every tower: unused", lambda rows: [rows[0], rows[1][:3]], update=update)
    refused(
        HierAllreduceError,
        r"tower 1 \(/cpu:1\), variable 0.*'tower0/w', float32 \(6, 5\).*same model",
        lambda rows: [rows[0], [rows[1][1], *rows[1][1:]]],
        update=update,
    )


@pytest.mark.parametrize("update", ["replicated", "main"])
@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda grad: tf.concat([grad, grad], 0), r"float32 \(12, 5\) for float32 \(6, 5\)"),
        (lambda grad: tf.cast(grad, tf.float64), r"float64 \(6, 5\) for float32 \(6, 5\)"),
    ],
)
def test_gradients_that_do_not_fit_their_variables_are_refused(update, wrong, words):
    def change(rows):
        return [[(wrong(row[0][0]), row[0][1]), *row[1:]] for row in rows]

    match = rf"tower 0 \(/cpu:0\), variable 0 \('tower0/w'\): a gradient of {words}"
    refused(HierAllreduceError, match, change, update=update)


@pytest.mark.parametrize("update", ["replicated", "main"])
def test_variables_without_any_gradient_are_refused(update):
    def change(rows):
        return [[(None, var) for _, var in row] for row in rows]

    refused(HierAllreduceError, "no variable has a gradient on any tower", change, update=update)


def test_reference_variables_are_refused():
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(train.MomentumOptimizer(0.1, 0.9), cpus(2))
        rows, _ = towers(optimizer, cpus(2), resource=False)
        with pytest.raises(
            HierAllreduceError, match=r"variable 0 \('tower0/w'\).*reference variable.*use_resource=True"
        ):
            optimizer.apply_gradients(rows)


@pytest.mark.parametrize("all_towers_first", [False, True])
def test_without_var_list_the_error_asks_for_it(graph, all_towers_first):
    """TensorFlow then differentiates by the variables of all towers that exist by now."""
    optimizer, rows, losses = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2)), [], []
    for tower in range(2):
        losses.append(tf.reduce_sum(tf1.get_variable(f"tower{tower}/w", [3], use_resource=True)))
        if not all_towers_first:
            rows.append(optimizer.compute_gradients(losses[-1]))
    rows = rows or [optimizer.compute_gradients(loss) for loss in losses]
    with pytest.raises((HierAllreduceError), match=r"without var_list=, compute_gradients .* its own tower"):
        optimizer.apply_gradients(rows)


def test_choices_are_checked_before_anything_is_built():
    refused(HierAllreduceError, "update='mian' is unknown", update="mian")
    refused(
        HierAllreduceError, "tower 1, lane 0 .* is also the device of tower 0", lanes=[("/cpu:2", 0), ("/cpu:0", 1)]
    )
    refused(HierAllreduceError, "average='sum': it is True for the mean", average="sum")
    refused(HierAllreduceError, "broadcast=-2: expected", broadcast=-2)
    refused(HierAllreduceError, "check_replicas_every=-1: expected", check_replicas_every=-1)
    refused(HierAllreduceError, "expected a tf.compat.v1.train.Optimizer", optimizer="adam")
    refused(HierAllreduceError, "cuts gradients over several mains", update="main", strategy=Strategy(splits=2))


def test_the_mains_refuse_optimizers_that_do_more():
    class Clipping(train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            return super().apply_gradients(grads_and_vars, global_step, name)

    refused(HierAllreduceError, "Clipping does more than.*update='replicated'", optimizer=Clipping(0.1), update="main")


@pytest.mark.parametrize("update", ["replicated", "main"])
def test_towers_start_equal_if_the_train_op_is_in_a_condition(graph, update):
    """The ops of init_op and broadcast are built outside the condition."""
    optimizer = TowerOptimizer(train.MomentumOptimizer(0.1, 0.9), cpus(2), update=update, broadcast=2)
    rows, _ = towers(optimizer, cpus(2))
    wanted = tf1.placeholder_with_default(True, [])
    op = tf.cond(wanted, lambda: optimizer.apply_gradients(rows), tf.no_op)
    with started() as sess:
        sess.run(rows[1][0][1].assign(tf.zeros([6, 5])))
        assert optimizer.check_replicas(sess).difference > 0
        sess.run(optimizer.init_op)
        before = sess.run(rows[0][0][1])
        sess.run(op, {wanted: False})
        assert np.array_equal(sess.run(rows[0][0][1]), before)
        sess.run(op)
        assert not np.array_equal(sess.run(rows[0][0][1]), before)
        assert optimizer.check_replicas(sess).difference == 0


def test_a_check_reports_on_the_towers_of_its_own_host():
    var = type("Variable", (), {"op": type("Op", (), {"name": "w"})})
    pair = Replicas([[var], [var]], [])
    assert str(drift(pair, [[0.0]], hosts=3)) == "all towers of this host are equal"
    assert drift(pair, [[0.5]], hosts=3)[:3] == ("w", 1, 0.5)


def test_the_hook_and_the_check_need_a_train_op():
    optimizer = TowerOptimizer(train.GradientDescentOptimizer(0.1), cpus(2))
    with pytest.raises(HierAllreduceError, match="call apply_gradients first"):
        optimizer.check_replicas(None)
