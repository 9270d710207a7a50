"""The functions people call: sums, means, places, and that they are nothing but dataflow."""

import textwrap
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers.forks import run_forked
from helpers.graphs import cpus, evaluate, executed, gradients_on, on_towers, started, tf1

from hier_allreduce import Strategy, allreduce_grads, allreduce_grads_and_vars, allreduce_grads_hierarchical
from hier_allreduce.graph.emit import emitted_in
from hier_allreduce.planning.algorithms import BY_NAME, two_group

SIZES = [1, 2, 3, 4, 5, 7, 8, 16]


def powers_of_two(devices, variables=1):
    """Tower r holds 2^r, so that a sum shows who is in it, and how often."""
    return [
        [np.full([2], 2.0**tower + variable, np.float32) for variable in range(variables)] for tower in range(devices)
    ]


def assert_all_towers_hold(result, expected):
    for tower, row in enumerate(result):
        assert len(row) == len(expected)
        for variable, (got, wanted) in enumerate(zip(row, expected)):
            np.testing.assert_array_equal(got, wanted, f"tower {tower}, variable {variable}")


# ---- sums and means --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", BY_NAME)
@pytest.mark.parametrize("devices", SIZES)
def test_every_tower_gets_the_sum(devices, algorithm):
    values = powers_of_two(devices, variables=3)
    one_by_one = Strategy(algorithm=algorithm, mains="rotate", pack_below=0)
    assert_all_towers_hold(executed(values, cpus(devices), strategy=one_by_one), np.sum(values, axis=0))
    assert_all_towers_hold(executed(values, cpus(devices), strategy=algorithm), np.sum(values, axis=0))


@pytest.mark.parametrize("algorithm", BY_NAME)
@pytest.mark.parametrize("devices", SIZES)
def test_means_are_the_same_bits_on_all_towers(devices, algorithm):
    values = np.random.RandomState(devices).randn(devices, 2, 33).astype(np.float32)
    result = executed(values, cpus(devices), average=True, strategy=algorithm)
    np.testing.assert_allclose(result[0], np.mean(values.astype(np.float64), axis=0), rtol=1e-5, atol=1e-6)
    assert_all_towers_hold(result[1:], result[0])


@pytest.mark.no_lanes
@pytest.mark.parametrize("devices", SIZES)
def test_the_drop_in_takes_the_published_way_for_every_variable(graph, devices):
    values = powers_of_two(devices, variables=10)
    grads = gradients_on(cpus(devices), values)
    result = allreduce_grads_hierarchical(grads, cpus(devices))
    (emitted,) = emitted_in(graph)
    for variable in range(10):
        chunk = emitted.names.index(grads[0][variable].op.name)
        steps = [step._replace(chunk=0) for step in emitted.plan.steps if step.chunk == chunk]
        assert steps == [step._replace(chunk=0) for step in two_group(devices, variable)]
    assert_all_towers_hold(evaluate(result), np.sum(values, axis=0))


@pytest.mark.no_lanes
@pytest.mark.parametrize("average", [False, True])
def test_the_ops_in_the_docstring_are_those_of_the_function(average):
    _, name, code = allreduce_grads_hierarchical.__doc__.partition("        def in_two_quads")
    plain = {"tf": tf}
    exec(textwrap.dedent(name + code.partition("    Raises:")[0]), plain)
    ops, values = [], []
    for reduce in (plain["in_two_quads"], allreduce_grads_hierarchical):
        with tf.Graph().as_default() as graph:
            grads = gradients_on(cpus(8), [[np.float32([k, v]) for v in range(9)] for k in range(8)])
            before = Counter((op.type, op.device) for op in graph.get_operations())
            values.append(evaluate(reduce(grads, cpus(8), average)))
            ops.append(Counter((op.type, op.device) for op in graph.get_operations()) - before)
    assert ops[0] == ops[1] and ops[0]["AddN", "/device:CPU:0"] > 0
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("static", [True, False], ids=["known", "unknown"])
def test_scalars_empty_tensors_and_shapes_known_only_at_run_time(static):
    shapes = [(), (0,), (2, 0, 3), (5,), (2, 3, 4)]
    values = [[np.full(shape, tower, np.float32) for shape in shapes] for tower in range(3)]
    for average, total in [(False, 3), (True, 1)]:
        result = executed(values, cpus(3), static, average=average)
        assert_all_towers_hold(result, [np.full(shape, total) for shape in shapes])


def test_no_variables_give_an_empty_row_for_each_tower(graph):
    before = len(graph.get_operations())
    assert allreduce_grads([[], (), iter([])], cpus(3)) == [(), (), ()]
    assert len(graph.get_operations()) == before


def test_the_result_is_a_list_of_one_tuple_for_each_tower(graph):
    result = allreduce_grads(gradients_on(cpus(3), powers_of_two(3, 2)), cpus(3))
    assert type(result) is list and [type(row) for row in result] == [tuple] * 3
    assert all(isinstance(tensor, tf.Tensor) for row in result for tensor in row)


@pytest.mark.no_lanes
def test_rows_may_be_generators(graph):
    grads = gradients_on(cpus(3), powers_of_two(3, 2))
    result = allreduce_grads(((grad for grad in row) for row in grads), iter(cpus(3)))
    assert_all_towers_hold(evaluate(result), [[7, 7], [10, 10]])


# ---- places ----------------------------------------------------------------------------------------


def placed(result):
    return [[tensor.device.lower().replace("device:", "") for tensor in row] for row in result]


@pytest.mark.parametrize(
    "how", [{}, {"strategy": Strategy(algorithm="tree", pack_below=0)}, {"strategy": "hierarchical", "average": True}]
)
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_each_result_lives_on_its_towers_device(graph, devices, how):
    result = allreduce_grads(gradients_on(cpus(devices), powers_of_two(devices, 9)), cpus(devices), **how)
    assert placed(result) == [[device] * 9 for device in cpus(devices)]


def scopes(graph, anchor):
    yield graph.device("/cpu:7")
    yield graph.colocate_with(anchor)
    yield graph.colocate_with(anchor, ignore_existing=True)
    yield graph.name_scope("tower0")
    yield graph.control_dependencies([anchor])


@pytest.mark.parametrize("number", range(5), ids=["device", "colocate", "colocate_only", "name", "control"])
def test_surrounding_scopes_do_not_move_anything(graph, number):
    with tf.device("/cpu:9"):
        anchor = tf1.placeholder_with_default(1.0, [], name="anchor").op
    grads = gradients_on(cpus(3), powers_of_two(3, 2))
    with list(scopes(graph, anchor))[number]:
        result = allreduce_grads(grads, cpus(3))
        after = tf.constant(0.0)
    assert placed(result) == [[device] * 2 for device in cpus(3)]
    ours = [op for op in graph.get_operations() if "hier_allreduce" in op.name]
    assert ours and not any(b"loc:@anchor" in op.colocation_groups() for op in ours)
    assert_all_towers_hold(evaluate(result), [[7, 7], [10, 10]])
    assert (b"loc:@anchor" in after.op.colocation_groups()) == (number in (1, 2)), "the scope goes on afterwards"


def test_an_outer_device_completes_the_towers_device(graph):
    with tf.device("/job:worker/task:1"):
        result = allreduce_grads(gradients_on(["/gpu:0", "/gpu:1"], powers_of_two(2)), ["/gpu:0", "/job:ps/gpu:1"])
    assert [tf.DeviceSpec.from_string(row[0].device).to_string() for row in result] == [
        "/job:worker/task:1/device:GPU:0",
        "/job:ps/task:1/device:GPU:1",
    ]


def test_gradients_may_live_elsewhere_than_their_towers(graph):
    result = allreduce_grads(gradients_on(["/cpu:5", "/cpu:5", "/cpu:0"], powers_of_two(3, 4)), cpus(3), average=True)
    assert placed(result) == [[device] * 4 for device in cpus(3)]
    np.testing.assert_allclose(evaluate(result), [[[7 / 3 + variable] * 2 for variable in range(4)]] * 3, rtol=1e-6)


@pytest.mark.no_lanes
@pytest.mark.parametrize(
    "devices, expected",
    [
        (["/cpu:0", "/cpu:0", "/cpu:1"], ["/cpu:0", "/cpu:0", "/cpu:1"]),
        ([None, "", "/cpu:1"], ["", "", "/cpu:1"]),
        (["/CPU:1", "/device:CPU:2", "cpu:3"], ["/cpu:1", "/cpu:2", "/cpu:3"]),
        (["/job:localhost/replica:0/task:0/device:CPU:1"] * 3, ["/job:localhost/replica:0/task:0/cpu:1"] * 3),
        ([tf.DeviceSpec(device_type="CPU", device_index=i) for i in range(3)], ["/cpu:0", "/cpu:1", "/cpu:2"]),
        ([tf1.DeviceSpec(device_type="CPU", device_index=i) for i in range(3)], ["/cpu:0", "/cpu:1", "/cpu:2"]),
        ([lambda op, i=i: f"/cpu:{i}" for i in range(3)], ["/cpu:0", "/cpu:1", "/cpu:2"]),
    ],
    ids=["shared", "anywhere", "spellings", "full", "spec", "spec_v1", "functions"],
)
@pytest.mark.parametrize("algorithm", ["hierarchical", "flat"])
def test_devices_in_every_notation(graph, devices, expected, algorithm):
    with tf.device("/cpu:4"):
        grads = [[tf1.placeholder_with_default(2.0**tower, []) for _ in range(4)] for tower in range(3)]
    result = allreduce_grads(grads, devices, strategy=algorithm)
    assert placed(result) == [[device] * 4 for device in expected]
    assert_all_towers_hold(evaluate(result), [7.0] * 4)


@pytest.mark.tf2
def test_logical_devices_as_tensorflow_lists_them(graph):
    devices = tf.config.list_logical_devices("CPU")[:3]
    result = allreduce_grads(gradients_on(cpus(3), powers_of_two(3)), devices)
    assert placed(result) == [[device] for device in cpus(3)]


# ---- plain dataflow --------------------------------------------------------------------------------


def test_any_one_result_can_be_fetched_alone(graph):
    result = allreduce_grads(gradients_on(cpus(5), powers_of_two(5, 3)), cpus(5))
    for row in result:
        for variable, tensor in enumerate(row):
            np.testing.assert_array_equal(evaluate(tensor), [31 + 5 * variable] * 2)


@pytest.mark.parametrize("algorithm", BY_NAME)
@pytest.mark.parametrize("average, share", [(False, 1), (True, 1 / 5)])
def test_gradients_flow_through(graph, algorithm, average, share):
    grads = gradients_on(cpus(5), powers_of_two(5, 2))
    result = allreduce_grads(grads, cpus(5), average, algorithm)
    loss = tf.add_n([(tower + 1) * tf.reduce_sum(row[1]) for tower, row in enumerate(result)])
    through = evaluate(tf1.gradients(loss, [row[1] for row in grads]))
    np.testing.assert_allclose(through, np.full([5, 2], (1 + 2 + 3 + 4 + 5) * share), rtol=1e-6)


def adding_ops_where_memory_is_short(reduce):
    """What adds up a gradient of 32 MiB in a step on three devices with little memory left: they hold 320 MB more."""
    devices, rows, finished = cpus(3), [], []
    with tf.Graph().as_default():
        for device in devices:
            with tf.device(device):
                weight = tf1.get_variable(
                    f"w{device[-1]}", [8 << 20], use_resource=True, initializer=tf1.zeros_initializer()
                )
                rows.append((weight, weight + 1.0))
        for device, (weight, _), total in zip(devices, rows, reduce([grad for _, grad in rows], devices)):
            with tf.device(device):  # the update's op tells Grappler the gradient's shape, as optimizers' do
                update = tf.raw_ops.ResourceApplyGradientDescent(var=weight.handle, alpha=1.0, delta=total)
                room = tf.raw_ops.Empty(shape=[80 << 20], dtype=tf.float32)
                with tf.control_dependencies([update]):
                    finished.append(tf.raw_ops.Assert(condition=True, data=[room, total], summarize=0))
        step, seen = tf.group(*finished), tf1.RunMetadata()
        with started() as running:
            running.run(step, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=seen)
    ops = [node.op for part in seen.partition_graphs for node in part.node]
    return ops.count("AddN"), ops.count("AssignAdd")


@pytest.mark.parametrize("wire_dtype", [None, "float16"])
def test_a_sum_stays_one_pass_where_memory_is_short(wire_dtype):
    def plain(grads, devices):
        with tf.device(devices[0]):
            return [tf.add_n(grads)] * 3

    def ours(grads, devices):
        strategy = Strategy(algorithm="flat", wire_dtype=wire_dtype)
        return [grad for (grad,) in allreduce_grads([[grad] for grad in grads], devices, strategy=strategy)]

    assert adding_ops_where_memory_is_short(plain) == (0, 3)  # what Grappler does to others
    assert adding_ops_where_memory_is_short(ours) == (1, 0)


def test_ops_carry_the_name_that_was_asked_for(graph):
    grads = gradients_on(cpus(3), powers_of_two(3, 2))
    for scope in ("sync/", "sync_1/"):
        result = allreduce_grads(grads, cpus(3), name="sync")
        assert all(tensor.op.name.startswith(scope) for row in result for tensor in row)
        assert emitted_in(graph)[-1].scope == scope


def test_ops_of_a_chunk_are_named_after_it(graph):
    allreduce_grads_hierarchical(gradients_on(cpus(4), powers_of_two(4, 3)), cpus(4), average=True)
    (emitted,) = emitted_in(graph)
    assert len(set(emitted.names)) == 3
    for name in emitted.names:
        kinds = {op.name.rpartition("/")[2].split("_")[0] for op in graph.get_operations() if f"/{name}/" in op.name}
        assert {"sum", "mean", "copy"} <= kinds


@pytest.mark.parametrize("strategy", ["default", "tensorpack", "tensorpack-packed", "half"])
def test_a_function_calls_it_as_it_is_written(graph, strategy):
    """TensorFlow 1.15's autograph cannot translate all of Python, and should not try."""

    @tf.function
    def reduce(one, other):
        return allreduce_grads([[one], [other]], cpus(2), strategy=strategy)[1][0]

    assert evaluate(reduce(tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]))).tolist() == [4, 6]


@pytest.mark.tf2
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("algorithm", BY_NAME)
def test_inside_a_function_and_eagerly(algorithm, average):
    def reduce(*flat):
        return allreduce_grads([flat[:2], flat[2:4], flat[4:]], cpus(3), average, algorithm)

    inputs = [tf.constant(value) for row in powers_of_two(3, 2) for value in row]
    expected = [np.float32([7, 7]) / (3 if average else 1), np.float32([10, 10]) / (3 if average else 1)]
    for result in (reduce(*inputs), tf.function(reduce)(*inputs)):
        for row in result:
            np.testing.assert_allclose(row, expected, rtol=1e-6)
        assert [row[0].backing_device[-5:] for row in result] == ["CPU:0", "CPU:1", "CPU:2"]


@pytest.mark.tf2
def test_gradients_flow_through_a_tape():
    grads = [[tf.constant([2.0**tower])] for tower in range(3)]
    with tf.GradientTape() as tape:
        tape.watch(grads)
        result = allreduce_grads(grads, cpus(3), average=True)
        loss = result[0][0] + 2 * result[2][0]
    np.testing.assert_allclose(tape.gradient(loss, grads), np.ones([3, 1, 1]), rtol=1e-6)


# ---- pairs -----------------------------------------------------------------------------------------


def variables(devices, names=("w", "b")):
    return on_towers(devices, lambda k: [tf1.get_variable(f"tower{k}/{n}", [2], use_resource=True) for n in names])


def test_pairs_keep_every_towers_own_variables(graph):
    mine = variables(cpus(3))
    pairs = [list(zip(*rows)) for rows in zip(gradients_on(cpus(3), powers_of_two(3, 2)), mine)]
    result = allreduce_grads_and_vars(pairs, cpus(3), strategy="tree", name="sync")  # by default the sum
    assert [[var for _, var in row] for row in result] == mine
    grads = [[grad for grad, _ in row] for row in result]
    assert placed(grads) == [[device] * 2 for device in cpus(3)]
    assert_all_towers_hold(evaluate(grads), [[7, 7], [10, 10]])
    assert emitted_in(graph)[0].scope == "sync/"


def test_pairs_come_as_compute_gradients_gives_them(graph):
    optimizer = tf1.train.GradientDescentOptimizer(0.5)
    pairs = []
    for tower, (w, b) in enumerate(variables(cpus(2))):
        with tf.device(cpus(2)[tower]):
            pairs.append(optimizer.compute_gradients((tower + 1) * tf.reduce_sum(w + 3 * b), [w, b]))
    steps = [optimizer.apply_gradients(row) for row in allreduce_grads_and_vars(pairs, cpus(2), average=True)]
    with started() as sess:
        before = sess.run([[var for _, var in row] for row in pairs])
        sess.run(steps)
        after = sess.run([[var for _, var in row] for row in pairs])
    moved = np.subtract(before, after)
    np.testing.assert_allclose(moved, [[[0.75] * 2, [2.25] * 2]] * 2, rtol=1e-5)


# ---- the peers -------------------------------------------------------------------------------------


@pytest.mark.tf2
def test_hierarchical_copy_drops_a_third_replica_ours_does_not():
    strategy = tf.distribute.MirroredStrategy(cpus(3), tf.distribute.HierarchicalCopyAllReduce())

    def replica():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", 2.0 ** tf.cast(context.replica_id_in_sync_group, tf.float32))

    theirs = strategy.experimental_local_results(strategy.run(replica))
    assert [float(total) for total in theirs] == [3.0] * 3  # 1 + 2; the third replica's 4 is lost
    assert_all_towers_hold(executed(powers_of_two(3), cpus(3), strategy="hierarchical"), [[7, 7]])


def test_tensorpacks_function_refuses_other_than_eight(tmp_path):
    program = """
import tensorflow as tf
from tensorpack.graph_builder.utils import allreduce_grads_hierarchical
tf.compat.v1.disable_eager_execution()
devices = ["/cpu:%d" % i for i in range(3)]
allreduce_grads_hierarchical([[tf.constant(1.0)] for _ in devices], devices)
"""
    ran = run_forked(program, folder=tmp_path)
    assert ran.status == 1
    assert "AssertionError" in ran.err.splitlines()[-1], ran.err
