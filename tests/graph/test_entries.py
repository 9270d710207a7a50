"""Gradients as they really come: sparse, missing, half precision, packed, and shapes known only at run time."""

import re

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    checked,
    consumed_in_place,
    cpus,
    evaluate,
    executed,
    gradients_on,
    held,
    on_towers,
    same_bits,
    session,
    sparse,
    started,
    traced,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hier_allreduce import HierAllreduceError, Strategy, allreduce_grads, allreduce_grads_and_vars, audit
from hier_allreduce.graph.layout import lay_out
from hier_allreduce.graph.names import op_names
from hier_allreduce.inspect import executed_copies
from hier_allreduce.planning import Bucketing
from hier_allreduce.planning.algorithms import BY_NAME

tf1 = tf.compat.v1
ALGORITHMS = tuple(BY_NAME)


# ---- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "complex64", "complex128", "int32", "int64", "uint8"]
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_of_every_dtype(dtype, algorithm):
    values = [[np.full([2, 3], k + v, dtype) for v in range(3)] for k in range(5)]
    rows = executed(values, cpus(5), strategy=algorithm)
    assert same_bits(rows)
    for v, total in enumerate(rows[4]):
        assert total.dtype == dtype and (total == 10 + 5 * v).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bfloat16_sums(graph, algorithm):
    rows = gradients_on(cpus(3), [[np.float32([1, 2, 3])] for _ in range(3)])
    rows = [[tf.cast(grad, tf.bfloat16) for grad in row] for row in rows]
    result = allreduce_grads(rows, cpus(3), strategy=algorithm)
    assert result[0][0].dtype == tf.bfloat16
    assert np.array_equal(evaluate(tf.cast(result[2][0], tf.float32)), [3, 6, 9])


def test_a_mixed_batch_is_packed_dtype_by_dtype():
    values = [[np.full([4], k, dtype) for dtype in ("float32", "float16", "float32", "int64")] for k in range(3)]
    for strategy in (Strategy(), Strategy(splits=2)):
        for row in executed(values, cpus(3), strategy=strategy):
            assert [value.dtype.name for value in row] == ["float32", "float16", "float32", "int64"]
            assert all((value == 3).all() for value in row)


@pytest.mark.parametrize("towers", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float16_means_are_finite_where_sums_overflow(towers, algorithm):
    values = [[np.full([3], 60000 + 32 * k, "float16")] for k in range(towers)]
    rows = executed(values, cpus(towers), average=True, strategy=algorithm)
    expected = np.mean([row[0].astype("float64") for row in values], 0)
    assert same_bits(rows)
    most = 32 * (1 + max(3, hops_to_root(algorithm, towers)))  # half a unit in the last place a hop
    assert np.abs(rows[0][0].astype("float64") - expected).max() <= most


def hops_to_root(algorithm, towers):
    return {"flat": 1, "hierarchical": 2, "tree": int(np.ceil(np.log2(towers)))}.get(algorithm, towers - 1)


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 8]), st.booleans(), st.sampled_from(ALGORITHMS))
def test_the_wire_dtype_keeps_its_error_bound(seed, towers, average, algorithm):
    random = np.random.RandomState(seed)
    values = [[random.randn(50).astype("float32")] for _ in range(towers)]
    exact = np.sum([row[0].astype("float64") for row in values], 0) / (towers if average else 1)
    sizes = np.sum([np.abs(row[0]).astype("float64") for row in values], 0) / (towers if average else 1)
    hops = hops_to_root(algorithm, towers)
    for wire, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-7)):
        strategy = Strategy(algorithm=algorithm, wire_dtype=wire)
        rows = executed(values, cpus(towers), average=average, strategy=strategy)
        assert rows[0][0].dtype == np.float32 and same_bits(rows)
        assert (np.abs(rows[0][0] - exact) <= (hops + 1) * unit * sizes * 1.01 + (hops + 1) * 2.0**-24).all()


@pytest.mark.no_lanes
def test_the_wire_dtype_halves_the_bytes_that_travel(graph):
    devices = cpus(4)
    rows = gradients_on(devices, [[np.ones([1000], "float32"), np.ones([3], "int32")] for _ in devices])
    result = allreduce_grads(rows, devices, strategy=Strategy(wire_dtype="float16", pack_below=0))
    metadata = traced(consumed_in_place(result))
    audit(metadata, graph)
    received = [
        tf.as_dtype(node.attr["tensor_type"].type).name
        for part in metadata.partition_graphs
        for node in part.node
        if "Recv" in node.op and node.attr["recv_device"].s != node.attr["send_device"].s
    ]
    assert received.count("float16") == 6 == received.count("int32"), "2(K-1) copies each"


def test_one_tower_is_returned_exactly_even_in_half_precision():
    value = np.float32([1.0001, 1e-9])
    strategy = Strategy(wire_dtype="float16")
    assert np.array_equal(executed([[value]], cpus(1), strategy=strategy)[0][0], value)


# ---- packing ---------------------------------------------------------------------------------------

PACKED = {
    "buckets": Strategy(pack_below=1 << 20),
    "small buckets": Strategy(pack_below=400),
    "tensorpack's splits": Strategy(splits=8),
    "one buffer": Strategy(splits=1, algorithm="flat", mains=0),
}


@pytest.mark.parametrize("strategy", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("towers", [1, 3, 8])
def test_packing_changes_no_result_and_no_shape(monkeypatch, strategy, towers):
    monkeypatch.setattr(Bucketing, "bucket_bytes", 500)  # buckets of the strategy's size, if it is larger
    shapes = [(3, 4), (), (7,), (0, 5), (50, 3), (1, 1, 1), (128,)]
    random = np.random.RandomState(0)
    values = [[random.randint(-99, 99, shape).astype("float32") for shape in shapes] for _ in range(towers)]
    rows = executed(values, cpus(towers), strategy=strategy)
    assert same_bits(rows)
    for variable, total in enumerate(rows[-1]):
        assert np.array_equal(total, np.sum([row[variable] for row in values], 0))


def test_only_what_travels_is_packed():
    assert [chunk.alone for chunk in laid_out(1, [5, 9]).chunks] == [True, True]
    assert [chunk.alone for chunk in laid_out(2, [5, 9]).chunks] == [False]


def test_sums_keep_shapes_and_slopes(graph):
    values = [[np.full([60, 50], 2.0**k, "float32"), np.float32(2.0**k)] for k in range(4)]
    rows = gradients_on(cpus(4), values)
    result = allreduce_grads(rows, cpus(4), strategy=Strategy(algorithm="flat", pack_below=0))
    assert [[grad.shape.as_list() for grad in row] for row in result] == [[[60, 50], []]] * 4
    back = tf.gradients(tf.reduce_sum(result[3][0]) + result[0][1], [grad for row in rows for grad in row])
    got, slopes = evaluate([result[2], back])
    assert all((total == 15).all() for total in got) and all((slope == 1).all() for slope in slopes)


@pytest.mark.parametrize("strategy", PACKED.values(), ids=PACKED)
def test_static_shapes_and_places_survive_packing(graph, strategy):
    rows = gradients_on(cpus(3), [[np.ones([40, 3], "float32"), np.ones([], "float32")]] * 3)
    for tower, row in enumerate(allreduce_grads(rows, cpus(3), strategy=strategy)):
        assert [grad.shape.as_list() for grad in row] == [[40, 3], []]
        assert {tf.DeviceSpec.from_string(grad.device).device_index for grad in row} == {tower}


@given(st.lists(st.sampled_from(["a", "a.2", "a/2", "a.2.2", "a.3", "/", "", "b"]), max_size=9))
def test_names_of_ops_are_unique_and_those_that_are_keep_theirs(names):
    safe = op_names(names)
    assert len(set(safe)) == len(safe) == len(names)
    assert all(re.match(r"[A-Za-z0-9][A-Za-z0-9_.-]*$", name) for name in safe)
    assert op_names(safe) == safe


@pytest.mark.no_lanes
def test_a_name_like_a_second_ones_is_audited_as_itself(graph):
    devices, rows = cpus(2), []
    for device in devices:
        with tf.device(device):
            first, second = tf.split(held(np.ones([4], "float32")), 2, name="ab" + device[-1])
            rows.append([first, second, tf.add(held(np.ones([2], "float32")), 1, name=f"ab{device[-1]}.2")])
    result = allreduce_grads(rows, devices, strategy=Strategy(algorithm="flat", pack_below=0))
    (call,) = audit(traced(consumed_in_place(result)), graph).calls
    assert sum(call.copies.values()) == 6


@pytest.mark.no_lanes
@pytest.mark.parametrize("mains", ["rotate", "balance", 2])
def test_mains_are_where_they_were_asked_for(graph, mains):
    rows = gradients_on(cpus(3), [[np.ones([8 + v], "float32") for v in range(3)] for _ in range(3)])
    allreduce_grads(rows, cpus(3), strategy=Strategy(algorithm="flat", mains=mains, pack_below=0))
    adders = {tf.DeviceSpec.from_string(op.device).device_index for op in graph.get_operations() if op.type == "AddN"}
    assert adders == ({2} if mains == 2 else {0, 1, 2})


def test_a_main_that_is_no_tower_is_refused():
    assert laid_out(3, [5], mains=2).plan.roots == (2,)
    with pytest.raises(HierAllreduceError, match=r"mains=3: sums end on towers \[0, 1, 2\] only"):
        laid_out(3, [5], mains=3)


UNEVEN = [*((towers, None) for towers in range(2, 10)), (4, ((0, 1, 2), (3,))), (4, ((0, 1), (2,), (3,)))]
UNEVEN += [(6, ((5, 1, 3), (0,), (2, 4))), (7, ((6, 0, 1, 2, 3), (4, 5)))]


def laid_out(towers, sizes, **how):
    """The layout of gradients of these sizes."""
    devices = tuple(cpus(towers))
    row = [tf.zeros([size]) for size in sizes]  # one for all towers: a layout needs shapes and dtypes only
    grads = checked([row] * towers, devices, False)
    return lay_out(grads, Strategy(algorithm="hierarchical", **how))


@pytest.mark.parametrize("towers, groups", UNEVEN)
def test_one_main_for_all_is_that_tower_also_on_two_levels(graph, towers, groups):
    for main in range(towers):
        layout = laid_out(towers, [1, 70000, 20000], groups=groups, mains=main)
        assert layout.plan.roots == (main,) * 3 and set(layout.mains().values()) == {main}


@pytest.mark.parametrize("towers, groups", UNEVEN)
@pytest.mark.parametrize("variables", [1, 13, 36])
def test_mains_by_bytes_carry_equal_gradients_evenly(graph, towers, groups, variables):
    roots = laid_out(towers, [20000] * variables, groups=groups).plan.roots
    counts = [roots.count(tower) for tower in range(towers)]
    assert sum(counts) == variables and max(counts) - min(counts) <= 1


def test_sparse_values_and_indices_have_one_main(graph):
    rows = [[tf.IndexedSlices(tf.zeros([k + 2, 3]), tf.zeros([k + 2], tf.int64)) for _ in range(4)] for k in range(3)]
    layout = lay_out(checked(rows, cpus(3), False), Strategy(algorithm="hierarchical", pack_below=0))
    assert len(layout.chunks) == 4 and sorted(layout.mains()) == [0, 1, 2, 3]


# ---- sparse ----------------------------------------------------------------------------------------


def densified(slices, rows=100):
    table = np.zeros([rows, 2])
    np.add.at(table, slices.indices, slices.values)
    return table


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dense_shape", [(100, 2), None], ids=["shape", "no shape"])
@pytest.mark.parametrize("average", [False, True])
def test_sparse_gradients_stay_sparse_on_every_tower(graph, algorithm, dense_shape, average):
    devices = cpus(5)
    rows = on_towers(devices, lambda tower: [sparse(tower, tower, dense_shape)])  # tower 0 has no rows at all
    result = allreduce_grads(rows, devices, average, strategy=algorithm)
    for device, (grad,) in zip(devices, result):
        assert isinstance(grad, tf.IndexedSlices)
        assert (grad.dense_shape is None) == (dense_shape is None)
        for tensor in (grad.values, grad.indices):
            assert tf.DeviceSpec.from_string(tensor.device).device_index == int(device[-1])
    assert all(grad.dense_shape is own.dense_shape for (grad,), (own,) in zip(result, rows))
    got, given_rows = evaluate([[row[0] for row in result], [row[0] for row in rows]])
    expected = np.sum([densified(slices) for slices in given_rows], 0) / (5 if average else 1)
    assert all(len(slices.indices) == 0 + 1 + 2 + 3 + 4 for slices in got)
    assert same_bits([[slices.values, slices.indices] for slices in got])
    assert np.allclose(densified(got[3]), expected, rtol=1e-6)


@pytest.mark.parametrize("towers", [1, 3])
def test_rows_from_elsewhere_end_on_their_towers(graph, towers):
    devices = cpus(towers)
    with tf.device("/cpu:7"):
        rows = [[sparse(tower, 2)] for tower in range(towers)]
    for device, (grad,) in zip(devices, allreduce_grads(rows, devices, average=True)):
        for tensor in (grad.values, grad.indices):
            assert tf.DeviceSpec.from_string(tensor.device).device_index == int(device[-1])


def test_gathering_moves_only_the_rows_touched(graph):
    devices = cpus(4)
    rows = [[tf.IndexedSlices(held(np.ones([3, 2], "float32")), held(np.int64([1, 2, 3])), None)] for _ in devices]
    allreduce_grads(rows, devices, strategy=Strategy(sparse="gather"))
    sizes = [op.outputs[0].shape.num_elements() for op in graph.get_operations() if op.name.startswith("hier")]
    assert max(size for size in sizes if size) <= 4 * 3 * 2


def test_dense_adds_up_sparse_gradients(graph):
    rows = [[sparse(tower, 4)] for tower in range(3)]
    result = allreduce_grads(rows, cpus(3), strategy=Strategy(sparse="dense"))
    assert [grad.shape.as_list() for (grad,) in result] == [[100, 2]] * 3
    got, slices = evaluate([result[2][0], [row[0] for row in rows]])
    assert np.array_equal(got, np.sum([densified(s) for s in slices], 0))


@pytest.mark.parametrize(("kind", "rows", "gathered"), [("gpu", 25, True), ("gpu", 26, False), ("cpu", 26, True)])
def test_auto_gathers_few_rows_and_adds_up_many_where_bytes_cost(graph, kind, rows, gathered):
    """Of 16 bytes a row, index included: a tower sends its own and gets those of three, or twice 800 bytes travel."""
    devices = [f"/{kind}:{k}" for k in range(3)]
    result = allreduce_grads([[sparse(k, rows)] for k in range(3)], devices)
    assert isinstance(result[0][0], tf.IndexedSlices) == gathered


def test_dense_without_a_known_shape_is_refused(graph):
    rows = [[sparse(k, 2, None)] for k in range(2)]
    before = len(graph.get_operations())
    with pytest.raises(HierAllreduceError, match=r"tower 0 \(/cpu:0\), variable 0 .*no dense_shape.*sparse='gather'"):
        allreduce_grads(rows, cpus(2), strategy=Strategy(sparse="dense"))
    assert len(graph.get_operations()) == before


def test_sparse_on_one_tower_and_dense_on_another(graph):
    table = np.ones([100, 2], "float32")
    rows = [[sparse(0, 4, None)], [held(table)], [sparse(2, 3)]]
    result = allreduce_grads(rows, cpus(3))
    got, first, third = evaluate([[row[0] for row in result], rows[0][0], rows[2][0]])
    assert np.array_equal(got[0], table + densified(first) + densified(third))
    assert same_bits([[value] for value in got])


def test_sparse_indices_of_different_dtypes_are_refused(graph):
    rows = [[tf.IndexedSlices(held(np.ones([1, 2], "float32")), held(np.array([0], t)))] for t in ("int32", "int64")]
    with pytest.raises(HierAllreduceError, match=r"dtype of the indices differs.*int32.*int64"):
        allreduce_grads(rows, cpus(2))


def test_sparse_and_dense_gradients_of_one_model(graph):
    """Tables, kernels and biases together, through the pairs function."""
    devices, rows = cpus(2), []
    for tower, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            table = tf1.get_variable("table", [50, 4], use_resource=True)
            kernel = tf1.get_variable("kernel", [4, 3], use_resource=True)
            loss = tf.reduce_sum(tf.matmul(tf.nn.embedding_lookup(table, [1, 2, 2, tower]), kernel))
            rows.append(list(zip(tf.gradients(loss, [table, kernel]), [table, kernel])))
    result = allreduce_grads_and_vars(rows, devices, average=True)
    (sparse_grad, table), (dense_grad, _) = result[1]
    assert isinstance(sparse_grad, tf.IndexedSlices) and table.name == "tower1/table:0"
    with started() as sess:
        assert sorted(sess.run(sparse_grad.indices)) == [0, 1, 1, 1, 2, 2, 2, 2]
        assert sess.run(dense_grad).shape == (4, 3)


# ---- missing ---------------------------------------------------------------------------------------


def test_none_on_every_tower_stays_none(graph):
    grads = [[None, held(np.float32([1])), None] for _ in range(3)]
    result = allreduce_grads(grads, cpus(3))
    assert [[g is None for g in row] for row in result] == [[True, False, True]] * 3
    assert evaluate(result[0][1]) == 3


def test_none_on_some_towers_is_an_error_that_names_them(graph):
    rows = [[held(np.float32([1])), None if tower in (1, 2) else held(np.float32([1]))] for tower in range(4)]
    before = len(graph.get_operations())
    with pytest.raises(HierAllreduceError, match=r"tower 1 \(/cpu:1\), variable 1 .*towers \[1, 2\].*missing='zeros'"):
        allreduce_grads(rows, cpus(4))
    assert len(graph.get_operations()) == before


@pytest.mark.parametrize("static", [True, False], ids=["static shape", "unknown shape"])
def test_missing_gradients_count_as_zeros_if_asked(graph, static):
    grads = gradients_on(cpus(4), [[np.float32([[2, 4]])] for _ in range(4)], static)
    grads[2:] = [None], [None]
    result = allreduce_grads(grads, cpus(4), average=True, strategy=Strategy(missing="zeros", algorithm="tree"))
    assert np.array_equal(evaluate(result[2][0]), [[1, 2]])
    audit(traced(consumed_in_place(result)), graph)  # TensorFlow does not copy zeros to be added to zeros


def test_missing_sparse_gradients_add_no_rows(graph):
    rows = [[None if tower == 1 else sparse(tower, 2)] for tower in range(3)]
    result = allreduce_grads(rows, cpus(3), strategy=Strategy(missing="zeros"))
    assert len(evaluate(result[1][0].indices)) == 4
    assert evaluate(result[1][0].dense_shape).tolist() == [100, 2]  # another tower's


@pytest.mark.no_lanes
@pytest.mark.parametrize("shape", [[5, 2], [None, None], None], ids=str)
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_only_a_shape_is_copied_for_a_missing_gradient(graph, kind, shape):
    def row(tower):
        fill = tf.fill(held(np.int32([5, 2])), held(np.float32(1)))  # of a shape that Grappler does not find out
        fill.set_shape(shape)
        slices = tf.IndexedSlices(fill, held(np.arange(5)), tf.constant([5, 2], tf.int64))
        return [None if tower == 1 else fill if kind == "dense" else slices]

    rows = on_towers(cpus(3), row)
    results = allreduce_grads(
        rows, cpus(3), strategy=Strategy(algorithm="flat", mains=0, missing="zeros", sparse="gather")
    )
    parts = results if kind == "dense" else [[grad.values, grad.indices] for (grad,) in results]
    copies = executed_copies(traced(consumed_in_place(parts), trace_level=tf1.RunOptions.FULL_TRACE))
    size = 5 * 2 * 4 if kind == "dense" else 2 * 5 * (2 * 4 + 8)
    assert copies["cpu:0", "cpu:1"][1] - size == (0 if shape == [5, 2] else 2 * 4)


# ---- shapes known only at run time -----------------------------------------------------------------

no_grappler = tf1.GraphOptions()
no_grappler.rewrite_options.disable_meta_optimizer = True
OPTIMIZERS = {"grappler": {}, "no grappler": {"graph_options": no_grappler}}


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("towers", [2, 3, 8])
@pytest.mark.parametrize("average", [False, True])
def test_shapes_that_disagree_raise_with_the_variables_name(graph, options, algorithm, towers, average):
    devices, rows = cpus(towers), []
    for tower, device in enumerate(devices):
        with tf.device(device):
            shape = [1, 4] if tower >= (towers + 1) // 2 else [3, 1]  # each half agrees, and the two would broadcast
            var = tf1.get_variable(f"tower{tower}/conv1/W", [1], use_resource=True)
            rows.append([(tf1.placeholder_with_default(np.ones(shape, "float32"), [None, None]), var)])
    result = allreduce_grads_and_vars(rows, devices, average, strategy=algorithm)
    with session(**options) as sess, pytest.raises(tf.errors.InvalidArgumentError, match=r"conv1\.W"):
        sess.run([grad for row in result for grad, _ in row])


@pytest.mark.parametrize("known", [[None, (2, 3), None], [(2, 3), None, (2, None)], [(2, None), (None, 3), (2, 3)]])
def test_shapes_that_the_towers_know_in_part_are_one_shape(known):
    with tf.Graph().as_default():
        value = np.ones([2, 3], "float32")
        rows = [[tf1.placeholder_with_default(value, shape)] for shape in known]
        result = allreduce_grads(rows, cpus(3))
        assert all((total == 3).all() for (total,) in evaluate(result))


def test_unknown_shapes_are_reduced_when_they_agree():
    values = [[np.full([2, 3], k, "float32"), np.full([4], k, "float32")] for k in range(3)]
    for strategy in (Strategy(), Strategy(splits=4), Strategy(wire_dtype="float16")):
        for row in executed(values, cpus(3), static=False, strategy=strategy):
            assert (row[0] == 3).all() and (row[1] == 3).all()


# ---- what TensorFlow calls the same ----------------------------------------------------------------


@pytest.mark.parametrize("average", [True, False])
def test_accumulated_references_are_added_in_float32(graph, average):
    """Its dtype is float16_ref."""
    rows = []
    for k, device in enumerate(cpus(3)):
        with tf.device(device):
            total = tf1.get_variable(f"total{k}", initializer=np.float16([0]), use_resource=False)
            rows.append([tf1.assign_add(total, np.float16([60000 if average else 20000]))])
    with started() as sess:
        assert sess.run(allreduce_grads(rows, cpus(3), average)) == [(60000,)] * 3


def test_float32_ref_and_float32_are_one_dtype(graph):
    total = tf1.get_variable("total", initializer=np.float32([0]), use_resource=False)
    rows = [[tf1.assign_add(total, [1.0])], [tf.constant([2.0])]]
    with started() as sess:
        assert sess.run(allreduce_grads(rows, cpus(2))) == [(3,)] * 2


def test_rows_of_unknown_and_known_rank_are_gathered(graph):
    def slices(shape):
        values = tf1.placeholder_with_default(np.float32([[1, 2]]), shape)
        return tf.IndexedSlices(values, tf.constant([0]), tf.constant([3, 2]))

    got = allreduce_grads([[slices([None, 2])], [slices(None)]], cpus(2))
    assert got[0][0].values.shape.as_list() == [None, 2]
    assert evaluate(got)[1][0].values.tolist() == [[1, 2], [1, 2]]


def test_zeros_take_their_shape_from_who_has_one(graph):
    values = tf1.placeholder_with_default(np.float32([[1, 2]]), [None, None])
    dense = tf1.placeholder_with_default(np.ones([5, 2], "float32"), [5, None])
    rows = [[tf.IndexedSlices(values, tf.constant([4]), None)], [dense], [None]]
    got = allreduce_grads(rows, cpus(3), strategy=Strategy(missing="zeros"))
    assert evaluate(got)[2][0].tolist() == [[1, 1]] * 4 + [[2, 3]]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_integers_are_added_where_tensorflow_can(graph, dtype):
    rows = [[held(np.ones([2], dtype))] for _ in range(2)]
    if tf.__version__ < "2":
        with pytest.raises(HierAllreduceError, match=f"{dtype} has no sum in this TensorFlow"):
            allreduce_grads(rows, cpus(2))
    else:
        assert evaluate(allreduce_grads(rows, cpus(2)))[1][0].tolist() == [2, 2]
