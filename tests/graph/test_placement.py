"""Devices and names of ops, whatever the scopes around the call, and the parts of an all-reduce."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    ALGORITHMS,
    IS_TF2,
    XPU,
    chain,
    evaluate,
    floats,
    gpu_or_cpu,
    gpus_or_cpus,
    gradients_on,
    held,
    same_bits,
    session,
    tf1,
)
from helpers.rows import for_each, powers_of_two

from hier_allreduce import (
    Strategy,
    allreduce_grads,
    allreduce_grads_and_vars,
)
from hier_allreduce.graph import (
    all_gather,
    broadcast,
    checked_call,
    checked_layout,
    device_strings,
    reduce,
    reduce_scatter,
)
from hier_allreduce.graph.names import op_names
from hier_allreduce.graph.record import all_reduces


def placed(result):
    """Return the device of each tensor, in the notation of the tests."""
    return for_each(lambda tensor: tensor.device.lower().replace("device:", ""), result)


@pytest.mark.parametrize(
    "strategy",
    [None, "hierarchical", Strategy("tree", chunk_bytes=0), Strategy(chain, chunk_bytes=4096)],
)
@pytest.mark.parametrize("towers", [1, 3, 8])
def test_each_result_lives_on_its_towers_device(graph, towers, strategy):
    rows = gradients_on(
        gpus_or_cpus(towers), [[np.full([1999], 2.0**k, "float32")] * 3 for k in range(towers)]
    )
    result = allreduce_grads(rows, gpus_or_cpus(towers), True, strategy)
    assert type(result) is list and [type(row) for row in result] == [list] * towers
    assert placed(result) == [[device] * 3 for device in gpus_or_cpus(towers)]


def scopes(graph, anchor):
    yield graph.device(gpu_or_cpu(7))
    yield graph.colocate_with(anchor)
    yield graph.colocate_with(anchor, ignore_existing=True)
    yield graph.name_scope("tower0")
    yield graph.control_dependencies([anchor])


@pytest.mark.parametrize(
    "number", range(5), ids=["device", "colocate", "colocate_only", "name", "control"]
)
def test_surrounding_scopes_do_not_move_anything(graph, number):
    with tf.device(gpu_or_cpu(9)):
        anchor = tf1.placeholder_with_default(1.0, [], name="anchor").op
    grads = gradients_on(gpus_or_cpus(3), powers_of_two(3, 2))
    with list(scopes(graph, anchor))[number]:
        result = allreduce_grads(grads, gpus_or_cpus(3))
        after = tf.constant(0.0)
    assert placed(result) == [[device] * 2 for device in gpus_or_cpus(3)]
    ours = [op for op in graph.get_operations() if "hier_allreduce" in op.name]
    assert ours and not any(b"loc:@anchor" in op.colocation_groups() for op in ours)
    assert [row[0].tolist() for row in evaluate(result)] == [[7, 7]] * 3
    assert (b"loc:@anchor" in after.op.colocation_groups()) == (number in (1, 2)), (
        "the scope goes on afterwards"
    )


def test_an_outer_device_completes_the_towers_device(graph):
    with tf.device("/job:worker/task:1"):
        result = allreduce_grads(
            gradients_on(["/gpu:0", "/gpu:1"], powers_of_two(2, 1)), ["/gpu:0", "/job:ps/gpu:1"]
        )
    assert [tf.DeviceSpec.from_string(row[0].device).to_string() for row in result] == [
        "/job:worker/task:1/device:GPU:0",
        "/job:ps/task:1/device:GPU:1",
    ]


KIND = XPU.upper()
HOST = "/job:localhost/replica:0/task:0"
FIRST, SECOND, THIRD = gpus_or_cpus(3)
# three devices as users write them, and as TensorFlow names them
DEVICES: dict = {
    "shared": ([FIRST, FIRST, SECOND], [FIRST, FIRST, SECOND]),
    "anywhere": ([None, "", SECOND], ["", "", SECOND]),
    "spellings": ([f"/{KIND}:0", f"/device:{KIND}:1", f"{XPU}:2"], [FIRST, SECOND, THIRD]),
    "full": ([f"{HOST}/device:{KIND}:1"] * 3, [SECOND] * 3),
}
# ways to name the first three devices
NOTATIONS = {
    "spec": [tf.DeviceSpec(device_type=KIND, device_index=i) for i in range(3)],
    "spec_v1": [tf1.DeviceSpec(device_type=KIND, device_index=i) for i in range(3)],
    "functions": [lambda op, i=i: gpu_or_cpu(i) for i in range(3)],
}
if IS_TF2:
    NOTATIONS["logical"] = tf.config.list_logical_devices(KIND)[:3]
for notation, devices in NOTATIONS.items():
    DEVICES[notation] = (devices, [FIRST, SECOND, THIRD])


@pytest.mark.parametrize("case", DEVICES)
def test_devices_in_every_notation(graph, case):
    """Gradients live on another device than their towers."""
    devices, expected = DEVICES[case]
    with tf.device(gpu_or_cpu(4)):
        grads = []
        for tower in range(3):
            grads.append([held(np.float32(2**tower)) for _ in range(4)])
    result = allreduce_grads(grads, devices, strategy="hierarchical")
    assert placed(result) == [[device] * 4 for device in expected]
    assert evaluate(result) == [[7.0] * 4] * 3


@pytest.mark.parametrize(
    "devices", [["/job:worker"] * 2, ["/job:worker/task:0", "/job:worker/task:1"], ["/gpu"] * 2]
)
def test_a_job_or_a_type_alone_is_a_device(graph, devices):
    """Variables on a device of that job are not taken for those of another tower."""
    rows = []
    for tower in range(2):
        with tf.device(f"/job:worker/task:{tower}/gpu:0"):
            variable = tf1.get_variable(f"tower{tower}/w", [2], use_resource=True)
            rows.append([(tf.zeros([2]), variable)])
    result = allreduce_grads_and_vars(rows, devices)
    assert [tf.DeviceSpec.from_string(row[0][0].device) for row in result] == list(
        map(tf.DeviceSpec.from_string, device_strings(devices))
    )


@pytest.mark.parametrize(
    "name",
    [
        *("/gpu:0", "/GPU:0", "gpu:0", "/device:GPU:0", "/gpu", "/device:GPU:*"),
        f"{HOST}/device:GPU:0",
        "/job:localhost/gpu:0",
        tf.DeviceSpec(device_type="GPU", device_index=0),
    ],
)
def test_a_device_has_one_spelling(graph, name):
    assert device_strings([name]) == ("/gpu:0",)


@pytest.mark.parametrize(
    "name, spelled",
    [
        ("/job:worker/task:1/device:GPU:10", "/job:worker/task:1/gpu:10"),
        ("/job:worker", "/job:worker"),
        ("/device:NPU:3", "/device:NPU:3"),
        ("", ""),
        (None, None),
    ],
)
def test_the_spelling_says_which_host_and_kind(graph, name, spelled):
    """``None`` and "" leave the choice to TensorFlow, and a job may have any device."""
    assert device_strings([name]) == (spelled,)


# ---- plain dataflow ------------------------------------------------------------------------------


def test_any_one_result_can_be_fetched_alone(graph):
    rows: Any = (
        iter(row) for row in gradients_on(gpus_or_cpus(5), powers_of_two(5, 3))
    )  # any iterables
    for row in allreduce_grads(rows, iter(gpus_or_cpus(5))):
        for variable, tensor in enumerate(row):
            assert evaluate(tensor).tolist() == [31 + 5 * variable] * 2


def test_one_gradient_alone_in_its_chunk_needs_no_other(graph):
    rows = [[tf1.placeholder("float32", [2]), tf1.placeholder("float32", [2])] for _ in range(3)]
    result = allreduce_grads(rows, gpus_or_cpus(3), strategy=Strategy(chunk_bytes=0))
    with session() as sess:
        assert sess.run(result[2][0], {row[0]: [1, 2] for row in rows}).tolist() == [3, 6]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("average, share", [(False, 1), (True, 1 / 5)])
def test_gradients_flow_through(graph, algorithm, average, share):
    grads = gradients_on(gpus_or_cpus(5), powers_of_two(5, 2))
    result = allreduce_grads(grads, gpus_or_cpus(5), average, Strategy(algorithm))
    loss = tf.add_n([(tower + 1) * tf.reduce_sum(row[1]) for tower, row in enumerate(result)])
    through = evaluate(tf1.gradients(loss, [row[1] for row in grads]))
    np.testing.assert_allclose(through, np.full([5, 2], (1 + 2 + 3 + 4 + 5) * share), rtol=1e-6)


def test_no_variables_give_an_empty_row_for_each_tower(graph):
    rows: Any = [[], (), iter([])]
    assert allreduce_grads(rows, gpus_or_cpus(3)) == [[], [], []]
    assert graph.get_operations() == []


@pytest.mark.parametrize("strategy", ["muji", "tensorpack", "sixteen_bit"])
def test_autograph_does_not_translate_the_package(graph, strategy):
    """The autograph of TensorFlow 1.15 cannot translate all of Python, and should not try."""

    @tf.function
    def reduce(one, other):
        return allreduce_grads([[one], [other]], gpus_or_cpus(2), strategy=strategy)[1][0]

    assert evaluate(reduce(tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]))).tolist() == [4, 6]


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, scopes",
    [("sync", ["sync/", "sync_1/"]), (None, ["hier_allreduce/", "hier_allreduce_1/"])],
)
def test_ops_carry_the_name_that_was_asked_for(graph, name, scopes):
    for scope in scopes:
        result = allreduce_grads(
            gradients_on(gpus_or_cpus(3), powers_of_two(3, 2)), gpus_or_cpus(3), name=name
        )
        assert all(tensor.op.name.startswith(scope) for row in result for tensor in row)
    assert [call.scope for call in all_reduces(graph)] == scopes


def test_names_of_ops_are_made_unique_and_valid():
    names = ["a", "a.2", "a/2", "a", "a.2.2", "/", "", "b", "é", "_c"]
    safe = op_names(names)
    assert safe == ["a", "a.2", "a.2.2", "a.3", "a.2.2.2", "chunk", "chunk.2", "b", "chunk.3", "c"]
    assert op_names(safe) == safe


# ---- the two parts: sums at the roots, and copies from them --------------------------------------


@pytest.mark.parametrize(
    "how", [{}, {"wire_dtype": "float16"}, {"algorithm": "hierarchical"}, {"main": 0}]
)
@pytest.mark.parametrize("towers", [1, 3, 8])
def test_roots_get_the_sums_and_all_towers_get_the_roots_values(graph, towers, how):
    strategy = Strategy(**how)
    devices = gpus_or_cpus(towers)
    shapes = [(300, 100), (7,), (0, 3), (129,), (20, 20)]
    random = np.random.RandomState(towers)
    values = []
    for _ in devices:
        values.append([random.randint(-9, 9, shape).astype("float32") for shape in shapes])
    rows = [[*row, None] for row in gradients_on(devices, values)]
    sizes = [4 * int(np.prod(shape)) for shape in shapes] + [4]
    layout = checked_layout(checked_call(rows, devices, False, strategy), variable_bytes=sizes)
    totals = reduce_scatter(rows, layout)
    roots = layout.roots()
    assert sorted(roots) == [0, 1, 2, 3, 4]  # the variable without gradients has none
    assert strategy.main is None or set(roots.values()) == {strategy.main}

    updated = []
    for variable, root in sorted(roots.items()):
        assert [k for k in range(towers) if totals[k][variable] is not None] == [root]
        total = totals[root][variable]
        assert placed([[total]]) == [[devices[root]]]
        with tf.device(devices[root]):
            updated.append(2 * total)
    result = all_gather([*updated, None], layout)
    # the other towers have no tensors to pack, and need no zeros in their place
    assert not any("zeros" in op.name for op in graph.get_operations())

    assert [row[-1] for row in result] == [None] * towers
    copies = [row[:-1] for row in result]
    assert placed(copies) == [[device] * 5 for device in devices]
    got = evaluate(copies)
    assert same_bits(got)
    for variable in range(5):
        np.testing.assert_array_equal(got[-1][variable], 2 * sum(row[variable] for row in values))


@pytest.mark.parametrize("algorithm", ["flat", "tree", "flat_hierarchical"])
@pytest.mark.parametrize("tower", [0, 3])
def test_one_tower_gets_all_sums(graph, algorithm, tower):
    devices = gpus_or_cpus(5)
    rows = gradients_on(devices, powers_of_two(5, 20, 1500))
    strategy = Strategy(algorithm, chunk_bytes=4096)
    layout = checked_layout(checked_call(rows, devices, False, strategy))
    totals = reduce(rows, layout, tower)
    assert placed([totals]) == [[devices[tower]] * 20]
    for n, total in enumerate(evaluate([totals])[0]):
        np.testing.assert_array_equal(total, np.full([1500], 31 + 5 * n))


def test_roots_carry_about_equal_bytes(graph):
    sizes = [5000, 1000, 1000, 3000] * 6
    rows = gradients_on(gpus_or_cpus(4), [[np.zeros([size], "float32") for size in sizes]] * 4)
    call = checked_call(rows, gpus_or_cpus(4), False, Strategy(chunk_bytes=0))
    layout = checked_layout(call, variable_bytes=sizes)
    loads = [0] * 4
    for variable, root in layout.roots().items():
        loads[root] += sizes[variable]
    assert max(loads) - min(loads) <= 1000


@pytest.mark.no_gpu_kernel("Const of strings")
def test_values_of_tower_0_go_to_all(graph):
    with tf.device(gpu_or_cpu(0)):
        values = [
            held(value)
            for value in (floats([1, 2]), np.int64(7), np.array(["a", "b"]), np.zeros([0, 2]))
        ]
    result = broadcast(values, gpus_or_cpus(5))
    assert placed(result) == [[device] * 4 for device in gpus_or_cpus(5)]
    for row in evaluate(result):
        assert (
            row[0].tolist() == [1, 2]
            and row[1] == 7
            and row[2].tolist() == [b"a", b"b"]
            and row[3].shape == (0, 2)
        )
