"""Unusual gradients: sparse, missing, of 16 bits, of shapes known in part; and short memory."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    ALGORITHMS,
    chain,
    dense,
    evaluate,
    executed,
    gpu_or_cpu,
    gpus_or_cpus,
    gradients_on,
    held,
    on_towers,
    same_bits,
    sparse,
    started,
)
from helpers.rows import for_each

from hier_allreduce import Cluster, HierAllreduceError, Strategy, allreduce_grads
from hier_allreduce.cluster.environment import Job
from hier_allreduce.cluster.shared_ops import SharedOps

tf1 = tf.compat.v1


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.mark.tf2
@pytest.mark.cpu_only("GPUs add up two of them, and not three")
@pytest.mark.parametrize("towers", [2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_uint16_is_added(algorithm, towers):
    values = [[np.full([3], 1 + tower, "uint16")] for tower in range(towers)]
    rows = executed(values, gpus_or_cpus(towers), strategy=Strategy(algorithm))
    for (total,) in rows:
        assert total.dtype == np.uint16
        assert total.tolist() == [towers * (towers + 1) // 2] * 3


def test_a_bool_of_numpy_asks_for_the_mean():
    values = [[np.full([3], tower, "float32")] for tower in range(3)]
    ((mean,), *_) = executed(values, gpus_or_cpus(3), average=np.bool_(True))
    assert mean.tolist() == [1.0, 1.0, 1.0]


# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("towers", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shapes", [[(5, 2), (1, 2)], [(1, 2), (5, 2)]])
def test_shapes_that_differ_when_the_step_runs_fail(graph, algorithm, towers, shapes):
    values = [[np.ones(shapes[min(tower, 1)], "float32")] for tower in range(towers)]
    result = allreduce_grads(
        gradients_on(gpus_or_cpus(towers), values, static=False),
        gpus_or_cpus(towers),
        strategy=Strategy(algorithm),
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluate(result)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("towers", [2, 3])
def test_a_dense_gradient_and_rows_of_a_smaller_one_are_never_broadcast(graph, towers, is_known):
    shape = (
        tf.constant([1, 2], tf.int64)
        if is_known
        else tf1.placeholder_with_default(np.array([1, 2]), [2])
    )
    rows = [[held(np.ones([5, 2], "float32"))] for _ in range(towers)]
    rows[1] = [tf.IndexedSlices(held(np.ones([1, 2], "float32")), held(np.array([0])), shape)]
    if is_known:
        with pytest.raises(
            HierAllreduceError,
            match=r"shape differs.*tower 0: float32 \(5, 2\), tower 1: float32 \(1, 2\)",
        ):
            allreduce_grads(rows, gpus_or_cpus(towers))
    else:
        with pytest.raises(tf.errors.InvalidArgumentError):
            evaluate(allreduce_grads(rows, gpus_or_cpus(towers)))


@pytest.mark.parametrize(
    "known", [[None, (2, 3), None], [(2, 3), None, (2, None)], [(2, None), (None, 3), (2, 3)]]
)
def test_shapes_that_the_towers_know_in_part_are_one_shape(graph, known):
    rows = [[tf1.placeholder_with_default(np.ones([2, 3], "float32"), shape)] for shape in known]
    result = allreduce_grads(rows, gpus_or_cpus(3))
    assert all((total == 3).all() for (total,) in evaluate(result))


def test_rows_whose_width_one_tower_does_not_know_are_added_up(graph):
    known, unknown = np.ones([2, 4], "float32"), np.ones([3, 4], "float32")
    rows = [
        [tf.IndexedSlices(tf1.placeholder_with_default(unknown, [3, None]), tf.range(3))],
        [tf.IndexedSlices(tf.constant(known), tf.range(2))],
    ]
    result = allreduce_grads(rows, gpus_or_cpus(2), strategy=Strategy(sparse="rows"))
    heights = {0: 2, 1: 2, 2: 1}
    for (total,) in evaluate(result):
        found = {index: list(row) for index, row in zip(total.indices, total.values)}
        assert found == {index: [height] * 4 for index, height in heights.items()}


def test_static_shapes_and_slopes_survive_packing_and_cutting(graph):
    rows = gradients_on(
        gpus_or_cpus(4),
        [[np.full([60, 50], 2.0**k, "float32"), np.float32(2.0**k)] for k in range(4)],
    )
    for chunk_bytes in (None, 0, 4096):
        result = allreduce_grads(
            rows, gpus_or_cpus(4), strategy=Strategy(chain, chunk_bytes=chunk_bytes)
        )
        shapes = for_each(lambda grad: grad.shape.as_list(), result)
        assert shapes == [[[60, 50], []]] * 4
        back = tf.gradients(
            tf.reduce_sum(result[3][0]) + result[0][1], [grad for row in rows for grad in row]
        )
        got, slopes = evaluate([result[2], back])
        assert all((total == 15).all() for total in got) and all(
            (slope == 1).all() for slope in slopes
        )


# ---- sparse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dense_shape", [(100, 2), None], ids=["shape", "no shape"])
@pytest.mark.parametrize("average", [False, True])
def test_sparse_gradients_stay_sparse_on_every_tower(graph, algorithm, dense_shape, average):
    rows = on_towers(
        gpus_or_cpus(5), lambda tower: [sparse(tower, tower, dense_shape)]
    )  # tower 0 has no rows at all
    result = allreduce_grads(rows, gpus_or_cpus(5), average, strategy=Strategy(algorithm))
    for tower, (grad,) in enumerate(result):
        assert isinstance(grad, tf.IndexedSlices) and grad.dense_shape is rows[tower][0].dense_shape
        assert {
            tf.DeviceSpec.from_string(t.device).device_index for t in (grad.values, grad.indices)
        } == {tower}
    got, given = evaluate([[row[0] for row in result], [row[0] for row in rows]])
    assert all(len(slices.indices) == 0 + 1 + 2 + 3 + 4 for slices in got)
    assert same_bits([[slices] for slices in got])
    np.testing.assert_allclose(
        dense(got[3]), sum(map(dense, given)) / (5 if average else 1), rtol=1e-6
    )


def rows_of(heights, counts, are_known=True, dtype="float32"):
    """Return a row for each tower: its gradient has ``counts[tower]`` rows of one index, 0.

    The shape of the table is [heights[tower], 2], or unknown for None.
    """
    rows = []
    for tower, (height, count) in enumerate(zip(heights, counts)):
        with tf.device(gpu_or_cpu(tower)):
            values = held(np.ones([count, 2], dtype), are_known)
            indices = held(np.zeros([count], "int64"), are_known)
            values.set_shape([None, 2])
            shape = None if height is None else tf.constant([height, 2], tf.int64)
            rows.append([tf.IndexedSlices(values, indices, shape)])
    return rows


# For each tower the table's height and the number of its rows, whether that is known; and whether
# the sum is sparse: a row has 16 bytes with its index, and 8 in the table.
SIZES = [
    ([8, 8], [2, 2], True, True),
    ([8, 8], [2, 3], True, False),
    ([8, 8], [0, 5], True, False),
    ([8, 8], [0, 0], True, True),
    ([8, 8], [2, 3], False, True),
    ([None, 8], [2, 3], True, False),
    ([None, None], [2, 3], True, True),
    ([8], [9], True, True),  # nothing is sent
]


@pytest.mark.parametrize("heights, counts, are_known, is_sparse", SIZES)
def test_rows_are_sent_where_they_are_no_more_bytes_than_the_table(
    graph, heights, counts, are_known, is_sparse
):
    rows = rows_of(heights, counts, are_known)
    for sparse_as, expected in (("auto", is_sparse), ("rows", True)):
        strategy = Strategy(sparse=sparse_as)
        result = allreduce_grads(rows, gpus_or_cpus(len(rows)), strategy=strategy)
        assert [isinstance(grad, tf.IndexedSlices) for (grad,) in result] == [expected] * len(rows)
        for (grad,) in evaluate(result):
            assert dense(grad, (8, 2)).tolist() == [[sum(counts)] * 2] + [[0, 0]] * 7


def test_rows_and_the_table_are_compared_as_they_travel(graph):
    """In 16 bits 3 rows are 36 bytes with their indices, and the table is 32 instead of 64."""
    rows = rows_of([8, 8], [2, 1])
    for wire, is_sparse in ((None, True), ("float16", False)):
        ((grad,), _) = allreduce_grads(rows, gpus_or_cpus(2), strategy=Strategy(wire_dtype=wire))
        assert isinstance(grad, tf.IndexedSlices) == is_sparse


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_sum_of_rows_has_each_index_once(graph, algorithm):
    rows = rows_of([100] * 5, [3, 0, 1, 2, 3])
    for (grad,) in evaluate(allreduce_grads(rows, gpus_or_cpus(5), strategy=Strategy(algorithm))):
        assert grad.indices.tolist() == [0] and grad.values.tolist() == [[9, 9]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype, wire", [("float16", None), ("float32", "float16")])
def test_rows_of_16_bits_are_added_in_float32(graph, algorithm, dtype, wire):
    """The sum of all is 80000, which float16 has not, and 6000 times 1 is 2048 there."""
    strategy = Strategy(algorithm, sparse="rows", wire_dtype=wire)
    for count, total in ((10000, 10000), (6000, 6000)):
        rows = rows_of([50000] * 8, [count] * 8, dtype=dtype)
        for (grad,) in evaluate(allreduce_grads(rows, gpus_or_cpus(8), True, strategy)):
            assert grad.values.dtype == dtype and grad.values.tolist() == [[total] * 2]


def test_indices_of_sums_are_int64_on_gpus(graph):
    for devices, dtype in ((["/gpu:0", "/gpu:1"], tf.int64), (["/cpu:0", "/cpu:1"], tf.int32)):
        slices = tf.IndexedSlices(held(np.ones([1, 2], "float32")), held(np.array([3], "int32")))
        for towers in (1, 2):
            for (grad,) in allreduce_grads([[slices]] * towers, devices[:towers]):
                assert grad.indices.dtype == dtype


@pytest.mark.parametrize("towers", [1, 3])
def test_sparse_results_are_on_their_towers_wherever_the_gradients_are(graph, towers):
    with tf.device(gpu_or_cpu(7)):
        rows = [[sparse(tower, 2)] for tower in range(towers)]
    for tower, (grad,) in enumerate(allreduce_grads(rows, gpus_or_cpus(towers), average=True)):
        assert {
            tf.DeviceSpec.from_string(t.device).device_index for t in (grad.values, grad.indices)
        } == {tower}


def test_sparse_and_dense_gradients_of_a_variable_have_a_dense_sum(graph):
    table = np.ones([100, 2], "float32")
    rows = [[sparse(0, 4, None)], [held(table)], [sparse(2, 3)]]
    got, first, third = evaluate(
        [[row[0] for row in allreduce_grads(rows, gpus_or_cpus(3))], rows[0][0], rows[2][0]]
    )
    assert np.array_equal(got[0], table + dense(first) + dense(third))
    assert same_bits([[value] for value in got])


@pytest.mark.parametrize("is_known", [True, False])
def test_sparse_gradients_made_dense(graph, is_known):
    def shape():
        return (
            tf.constant([6, 2], tf.int64)
            if is_known
            else tf1.placeholder_with_default(np.array([6, 2]), [2])
        )

    indices = held(np.array([4, 4]))
    rows = [
        [tf.IndexedSlices(held(np.array([[1, k]] * 2, "float32")), indices, shape())]
        for k in range(3)
    ]
    got = evaluate(allreduce_grads(rows, gpus_or_cpus(3), strategy=Strategy(sparse="dense")))
    assert got[2][0].tolist() == [[0, 0]] * 4 + [[6, 6], [0, 0]]


@pytest.mark.parametrize("average, total", [(False, 10000), (True, 5000)])
def test_5000_float16_rows_of_one_index_are_added_in_float32(graph, average, total):
    values, indices = held(np.ones([5000, 1], "float16")), held(np.zeros(5000, "int64"))
    rows = [[tf.IndexedSlices(values, indices, tf.constant([2, 1], tf.int64))]] * 2
    (first, _) = evaluate(allreduce_grads(rows, gpus_or_cpus(2), average, Strategy(sparse="dense")))
    assert first[0].tolist() == [[total], [0]]


# ---- missing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("without", [0, 2])
def test_none_on_some_towers_counts_as_zeros(graph, without):
    matrix = [
        [
            sparse(k, 2),
            held(np.ones([3], "float32")),
            tf1.placeholder_with_default(np.ones([2], "float32"), None),
        ]
        for k in range(3)
    ]
    given = evaluate([row[0] for row in matrix])
    matrix[without] = [None] * 3
    for row in evaluate(
        allreduce_grads(matrix, gpus_or_cpus(3), strategy=Strategy(missing="zeros"))
    ):
        others = [dense(slices) for k, slices in enumerate(given) if k != without]
        assert np.array_equal(dense(row[0]), sum(others)) and len(row[0].indices) == 4
        assert row[1].tolist() == [2, 2, 2] and row[2].tolist() == [2, 2]


def test_zeros_have_the_shape_that_another_tower_knows(graph):
    values = tf1.placeholder_with_default(np.array([[1, 2]], "float32"), [None, None])
    full = tf1.placeholder_with_default(np.ones([5, 2], "float32"), [5, None])
    rows = [[tf.IndexedSlices(values, tf.constant([4]), None)], [full], [None]]
    got = allreduce_grads(rows, gpus_or_cpus(3), strategy=Strategy(missing="zeros"))
    assert evaluate(got)[2][0].tolist() == [[1, 1]] * 4 + [[2, 3]]


def test_none_on_every_tower_stays_none(graph):
    result = allreduce_grads(
        [[None, held(np.array([1], "float32"))] for _ in range(3)], gpus_or_cpus(3)
    )
    assert [row[0] for row in result] == [None] * 3 and evaluate(result[1][1]).tolist() == [3]


# ---- 16 bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("towers", [2, 3, 8])
def test_float16_means_are_finite_where_sums_overflow(towers, algorithm):
    values = [[np.full([3], 60000 + 32 * k, "float16")] for k in range(towers)]
    rows = executed(values, gpus_or_cpus(towers), average=True, strategy=Strategy(algorithm))
    assert same_bits(rows)
    halvings = int(np.ceil(np.log2(towers)))
    hops_of = {"hierarchical": 2, "tree": halvings, chain: towers - 1}
    hops = hops_of.get(algorithm, 1)  # all to one
    error = np.abs(
        rows[0][0].astype("float64") - np.mean([row[0].astype("float64") for row in values], 0)
    )
    assert error.max() <= 32 * (1 + hops)  # half a unit in the last place a hop


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype, wire", [("float16", None), ("float32", "float16")])
def test_means_of_small_gradients_do_not_vanish(algorithm, dtype, wire):
    values = [[np.full([4], 1.8e-7, dtype)] for _ in range(8)]
    rows = executed(
        values,
        gpus_or_cpus(8),
        average=True,
        strategy=Strategy(algorithm=algorithm, wire_dtype=wire),
    )
    np.testing.assert_allclose(
        rows[5][0].astype("float64"), np.float16(1.8e-7).astype("float64"), rtol=1e-6
    )


def test_one_tower_is_returned_exactly_even_in_half_precision():
    value = np.array([1.0001, 1e-9], "float32")
    assert np.array_equal(
        executed([[value]], gpus_or_cpus(1), strategy=Strategy(wire_dtype="float16"))[0][0], value
    )


def test_the_wire_dtype_is_that_of_every_copy(graph):
    rows = gradients_on(
        gpus_or_cpus(4), [[np.ones([1000], "float32"), np.ones([3], "float64")]] * 4
    )
    allreduce_grads(
        rows,
        gpus_or_cpus(4),
        average=True,
        strategy=Strategy(chain, wire_dtype="bfloat16", chunk_bytes=0),
    )
    read = [(tensor, op) for op in graph.get_operations() for tensor in op.inputs]
    dtypes = [tensor.dtype.base_dtype.name for tensor, op in read if tensor.device != op.device]
    assert sorted(set(dtypes)) == ["bfloat16", "float64"]
    assert (
        dtypes.count("bfloat16") == dtypes.count("float64") == 6
    )  # 2(K-1) copies of either gradient


@pytest.mark.not_emulated("VariableV2", "AssignAdd")
@pytest.mark.parametrize("average", [True, False])
def test_accumulated_references_are_added_in_float32(graph, average):
    """Their dtype is float16_ref."""
    rows = []
    for k, device in enumerate(gpus_or_cpus(3)):
        with tf.device(device):
            total = tf1.get_variable(
                f"total{k}", initializer=np.array([0], "float16"), use_resource=False
            )
            rows.append([tf1.assign_add(total, np.array([60000 if average else 20000], "float16"))])
    with started() as sess:
        assert sess.run(allreduce_grads(rows, gpus_or_cpus(3), average)) == [[60000]] * 3


# ---- sums on CPU devices -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "devices, kib, columns",
    [
        (["/cpu:0", "/cpu:1", "/cpu:2"], 1024, 3),
        (["/cpu:0", "/cpu:1", "/cpu:2"], 1023, 0),
        (["/cpu:0", "/cpu:1"], 1024, 0),
        (["/gpu:0", "/gpu:1", "/cpu:0"], 1024, 0),
    ],
)
def test_large_gradients_are_reshaped_for_sums_of_three_on_cpu_devices(
    graph, devices, kib, columns
):
    rows = [[tf1.placeholder("float32", [kib * 256])] for _ in devices]
    allreduce_grads(rows, devices, strategy="flat")
    assert (
        sum(op.type == "Reshape" and "/column" in op.name for op in graph.get_operations())
        == columns
    )


def adding_ops_where_memory_is_short(reduce):
    """The ops that add up a gradient of 2 MiB on three devices whose other tensors take 100 MB."""
    devices, rows, finished = gpus_or_cpus(3), [], []
    with tf.Graph().as_default():
        for device in devices:
            with tf.device(device):
                zeros, name = tf1.zeros_initializer(), f"w{device[-1]}"
                weight = tf1.get_variable(name, [1 << 19], initializer=zeros, use_resource=True)
                rows.append((weight, weight + 1.0))
        for device, (weight, _), total in zip(
            devices, rows, reduce([grad for _, grad in rows], devices)
        ):
            with tf.device(
                device
            ):  # the update's op tells Grappler the gradient's shape, as optimizers' do
                update = tf.raw_ops.ResourceApplyGradientDescent(
                    var=weight.handle, alpha=1.0, delta=total
                )
                live = tf.raw_ops.Empty(shape=[80 << 20], dtype=tf.float32)
                with tf.control_dependencies([update]):
                    finished.append(
                        tf.raw_ops.Assert(condition=True, data=[live, total], summarize=0)
                    )
        step, seen = tf.group(*finished), tf1.RunMetadata()
        with started() as running:
            running.run(
                step, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=seen
            )
    ops = [node.op for part in seen.partition_graphs for node in part.node]
    return ops.count("AddN"), ops.count("AssignAdd")


@pytest.mark.cpu_only("Grappler expands sums on CPU devices")
@pytest.mark.parametrize("wire_dtype", [None, "float16"])
def test_a_sum_stays_one_pass_where_memory_is_short(wire_dtype):
    def plain(grads, devices):
        with tf.device(devices[0]):
            return [tf.add_n(grads)] * 3

    def ours(grads, devices):
        strategy = Strategy(algorithm="flat", wire_dtype=wire_dtype)
        rows = [[grad] for grad in grads]
        return [row[0] for row in allreduce_grads(rows, devices, strategy=strategy)]

    assert adding_ops_where_memory_is_short(plain) == (0, 3)  # the expansion by Grappler
    assert adding_ops_where_memory_is_short(ours) == (1, 0)


# ---- several hosts -------------------------------------------------------------------------------


class SameSums(SharedOps):
    """Two more hosts have the same sums."""

    def __init__(self, *options):
        super().__init__(*options)
        self.facts = []

    def announce(self, name, gradients, facts):
        self.facts.append((name, facts))

    def all_reduce(self, tensor, root, name):
        return tensor * 3


class Hosts(Cluster):
    def __init__(self):
        super().__init__(["a:1", "b:1", "c:1"], task=0)
        same_sums = SameSums(Job(self.hosts, self.task, 30.0, 600.0, 1800.0))
        self.ops = same_sums
        self.facts = same_sums.facts


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_mean_is_that_of_all_towers_of_all_hosts(graph, dtype):
    grads = [[tf.constant([tower], dtype)] for tower in (1, 2, 6)]
    assert (
        evaluate(allreduce_grads(grads, gpus_or_cpus(3), True, "flat", cluster=Hosts()))
        == [[3]] * 3
    )


def test_rows_of_several_hosts_are_made_dense(graph):
    (first, _) = allreduce_grads(
        [[sparse(k, 3)] for k in range(2)], gpus_or_cpus(2), cluster=Hosts()
    )
    assert isinstance(first[0], tf.Tensor) and first[0].shape.as_list() == [100, 2]


def test_hosts_with_another_algorithm_or_main_find_it_out(graph):
    hosts = Hosts()
    for strategy in (
        Strategy("flat"),
        Strategy("flat", main=1),
        Strategy("tree"),
        Strategy("flat"),
    ):
        rows = gradients_on(gpus_or_cpus(2), [[np.ones([1], "float32")] * 2] * 2)
        allreduce_grads(rows, gpus_or_cpus(2), cluster=hosts, strategy=strategy, name="mine")
    layouts = [facts["layout"] for _, facts in hosts.facts]
    assert layouts[0] == layouts[3] and len(set(layouts)) == 3
    assert [(name, facts["average"]) for name, facts in hosts.facts] == [("mine", False)] * 4
