"""The audit: the copies TensorFlow executed are those of the plan, and anything else is told."""

import gc
import re
import weakref
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from helpers.graphs import (
    ALGORITHMS,
    XPU,
    consumed_in_place,
    gpu_or_cpu,
    gpus_or_cpus,
    gradients_on,
    held,
    on_towers,
    session,
    tf1,
    traced,
)

from hier_allreduce import (
    AuditError,
    Copy,
    Reduce,
    Strategy,
    TowerOptimizer,
    allreduce_grads,
    allreduce_grads_hierarchical,
    audit,
)
from hier_allreduce.graph import broadcast

KIND = XPU.upper()
TO_ONE_MAIN = Strategy(algorithm="tree", main=0, chunk_bytes=0)
ONE_BY_ONE = {name: Strategy(algorithm=name, chunk_bytes=0) for name in ALGORITHMS}


def ones(devices, variables=1):
    return [[np.ones([2], np.float32)] * variables] * devices


def segment_sums(grads):
    """What training does with sparse gradients."""
    return [tf.math.unsorted_segment_sum(grad.values, grad.indices, 10).op for grad in grads]


def by_call(audited):
    return [sum(call.copies.values()) for call in audited.calls]


# ---- planned = executed ------------------------------------------------------------------------


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_every_algorithm_makes_two_copies_less_than_two_for_each_tower(
    graph, devices, algorithm, average
):
    grads = gradients_on(gpus_or_cpus(devices), ones(devices, 5))
    result = allreduce_grads(grads, gpus_or_cpus(devices), average, strategy=ONE_BY_ONE[algorithm])
    for fetched in (result, consumed_in_place(result)):
        assert sum(audit(traced(fetched)).copies.values()) == 5 * 2 * (devices - 1)


def test_eight_devices_make_twelve_copies_inside_and_two_across(graph):
    result = allreduce_grads_hierarchical(
        gradients_on(gpus_or_cpus(8), ones(8, 16)), gpus_or_cpus(8), average=True
    )
    copies = audit(traced(consumed_in_place(result))).copies
    inside = {pair: count for pair, count in copies.items() if (pair[0] < 4) == (pair[1] < 4)}
    across = {pair: count for pair, count in copies.items() if pair not in inside}
    assert sum(inside.values()) == 16 * 12
    assert across == {(tower, (tower + 4) % 8): 4 for tower in range(8)}, (
        "partners only, 16 times 2 in all"
    )


def through_two_mains(towers, chunk):
    return [Reduce((4, 3), 1), Reduce((0, 1), 2), *(Copy(2, tower) for tower in (0, 1, 3, 4))]


@pytest.mark.parametrize(
    "strategy, chunks",
    [
        (Strategy(algorithm="hierarchical"), 1),
        (Strategy(algorithm="hierarchical", chunk_bytes=4096), 8),
        (Strategy(algorithm="tree", wire_dtype="float16"), 1),
        (Strategy(algorithm="flat", main=1, chunk_bytes=0), 2),
        (Strategy(algorithm="hierarchical", groups=((3, 1), (0,), (4, 2)), chunk_bytes=0), 2),
        (Strategy(algorithm=through_two_mains), 1),
    ],
    ids=["packed", "cut", "16 bits", "one main", "groups", "a user's"],
)
def test_every_strategy_is_executed_as_planned(graph, strategy, chunks):
    values = [[np.ones([60 * 64], np.float32), np.ones([7 * 64, 9], np.float32)]] * 5
    result = allreduce_grads(
        gradients_on(gpus_or_cpus(5), values), gpus_or_cpus(5), True, strategy=strategy
    )
    (call,) = audit(traced(consumed_in_place(result))).calls
    assert (sum(call.copies.values()), len(call.all_reduce.tensors)) == (8 * chunks, chunks)


@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_rows_added_on_levels_take_planned_links(graph, algorithm):
    """Grappler would merge a concat, as of a table that is read twice, into the one that adds."""

    def row(tower):
        values = tf.concat([tf1.random_uniform([2, 3]), tf1.random_uniform([1, 3])], 0)
        indices = [tf1.random_uniform([n], maxval=9, dtype=tf.int64) for n in (2, 1)]
        return [tf.IndexedSlices(values, tf.concat(indices, 0))]

    result = allreduce_grads(
        on_towers(gpus_or_cpus(8), row), gpus_or_cpus(8), strategy=Strategy(algorithm)
    )
    used = on_towers(gpus_or_cpus(8), lambda tower: segment_sums(result[tower]))
    assert by_call(audit(traced(used), graph)) == [2 * 14]  # values and indices


@pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
@pytest.mark.parametrize(
    "there",
    [gpus_or_cpus(3), [gpu_or_cpu(0), gpu_or_cpu(1), gpu_or_cpu(0)]],
    ids=["3 devices", "2 devices"],
)
def test_the_steps_of_tower_optimizer(graph, update, there):
    optimizer, rows = (
        TowerOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), there, update=update),
        [],
    )
    for tower, device in enumerate(there):
        with tf.device(device), tf1.variable_scope(f"t{tower}"):
            weights = tf1.get_variable("w", [3], use_resource=True)
            rows.append(
                optimizer.compute_gradients(
                    tf.reduce_sum(weights * tf1.random_uniform([3])), [weights]
                )
            )
    train = optimizer.apply_gradients(rows)
    metadata = tf1.RunMetadata()
    with session() as sess:
        sess.run(tf1.global_variables_initializer())
        sess.run(optimizer.init_op)
        options = tf1.RunOptions(output_partition_graphs=True)
        sess.run(train, options=options, run_metadata=metadata)
    copies = audit(metadata).copies
    assert sum(copies.values()) == (2 if len(set(there)) == 2 else 4)


def test_the_report_has_tables_of_copies_and_a_line_for_each_all_reduce(graph):
    def reduced(name, devices, variables):
        grads = gradients_on(gpus_or_cpus(devices), ones(devices, variables))
        return allreduce_grads(grads, gpus_or_cpus(devices), name=name, strategy=ONE_BY_ONE["flat"])

    fetched = [reduced("a", 3, 2), reduced("b", 3, 2), reduced("c", 2, 1)]
    reduced("d", 3, 2)
    found = audit(traced(fetched))
    assert found.copies == Counter(
        {(0, 1): 5, (1, 0): 5, (0, 2): 2, (2, 0): 2, (1, 2): 2, (2, 1): 2}
    )
    assert str(found).splitlines() == [
        "copies between the devices, from row to column",
        "           0  1  2",
        f"0  {gpu_or_cpu(0)}  .  4  2",
        f"1  {gpu_or_cpu(1)}  4  .  2",
        f"2  {gpu_or_cpu(2)}  2  2  .",
        "           0  1",
        f"0  {gpu_or_cpu(0)}  .  1",
        f"1  {gpu_or_cpu(1)}  1  .",
        "a/: flat, 2 chunks, 8 copies, planned = executed by pair of towers",
        "b/: flat, 2 chunks, 8 copies, planned = executed by pair of towers",
        "c/: flat, 1 chunk, 2 copies, planned = executed by pair of towers",
        "d/: not audited: not in this run, or in a tf.cond or tf.while_loop, which metadata hide",
    ]


@pytest.mark.parametrize("wire, crossed", [(None, tf.float32), ("float16", tf.float16)])
def test_copies_cross_in_the_wire_dtype(graph, wire, crossed):
    values = [[np.ones([60], np.float32)]] * 3
    strategy = Strategy(algorithm="tree", wire_dtype=wire)
    result = allreduce_grads(gradients_on(gpus_or_cpus(3), values), gpus_or_cpus(3), True, strategy)
    metadata = traced(consumed_in_place(result))
    received = set()
    for node in [node for part in metadata.partition_graphs for node in part.node]:
        ends = {node.attr[end].s.decode() for end in ("send_device", "recv_device")}
        if "Recv" in node.op and len(ends) == 2 and all(KIND in device for device in ends):
            received.add(node.attr["tensor_type"].type)
    assert received == {crossed.as_datatype_enum}
    assert sum(audit(metadata).copies.values()) == 4


def test_gradients_of_unknown_size_are_counted(graph):
    """The number of slices is known in the step only, and so is the shape of one gradient."""

    def row(tower):
        rows = tf.IndexedSlices(tf1.random_uniform([2, 3]), tf.constant([0, 1], tf.int64))
        unknown = tf1.placeholder_with_default(np.ones([7], "float32"), [None])
        return [rows, tf1.random_uniform([8], dtype=tf.float64), unknown, tf1.zeros([0, 4])]

    result = allreduce_grads(
        on_towers(gpus_or_cpus(2), row), gpus_or_cpus(2), strategy=ONE_BY_ONE["flat"]
    )
    used = on_towers(
        gpus_or_cpus(2),
        lambda k: [*segment_sums(result[k][:1]), *(tf.identity(grad).op for grad in result[k][1:])],
    )
    (call,) = audit(traced(used), graph).calls
    assert ", 8 copies and 2 left out, planned" in str(call)


def test_an_audit_keeps_neither_graph_nor_metadata():
    graph = tf.Graph()
    with graph.as_default():
        metadata = traced(allreduce_grads(gradients_on(gpus_or_cpus(2), ones(2)), gpus_or_cpus(2)))
    audited, gone = audit(metadata, graph), weakref.ref(graph)
    del graph, metadata
    gc.collect()
    assert gone() is None
    assert sum(audited.copies.values()) == 2


# ---- one copy less, and yet all is well --------------------------------------------------------


@pytest.mark.parametrize("shared", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_towers_that_share_a_device_need_no_copy_between_them(graph, shared, algorithm):
    devices = [gpu_or_cpu(index) for index in shared]
    result = allreduce_grads(
        gradients_on(devices, ones(4, 5)), devices, strategy=ONE_BY_ONE[algorithm]
    )
    other = shared.index(1)
    assert set(audit(traced(result)).copies) == {(0, other), (other, 0)}


@pytest.mark.parametrize(
    "devices, pairs",
    [
        (
            [f"/device:{KIND}:1", f"/job:localhost/replica:0/task:0/device:{KIND}:2"],
            {(0, 1): 1, (1, 0): 1},
        ),
        (
            [f"/job:localhost/task:0{gpu_or_cpu(1)}", f"/task:0{gpu_or_cpu(2)}"],
            {(0, 1): 1, (1, 0): 1},
        ),
        ([gpu_or_cpu(1), f"/task:0{gpu_or_cpu(1)}"], {}),
    ],
)
def test_a_device_may_be_spelled_in_any_way(graph, devices, pairs):
    result = allreduce_grads(
        gradients_on(devices, ones(len(devices))), devices, strategy="hierarchical"
    )
    assert audit(traced(result)).copies == pairs


def test_a_tower_of_another_process_shares_no_device_with_one_of_this():
    """As if the other tower's device were that of another task."""
    far = f"/job:worker/task:1/device:{KIND}:0"
    seen = {}
    for other in (gpu_or_cpu(1), far):
        with tf.Graph().as_default() as graph:
            devices = [gpu_or_cpu(0), other]
            result = allreduce_grads(gradients_on(devices, ones(2)), devices)
            seen[other] = traced(consumed_in_place(result)) if other != far else None
    text = text_format.MessageToString(seen[gpu_or_cpu(1)])
    near = f"/job:localhost/replica:0/task:0/device:{KIND}:1"
    text = text.replace(near, "/job:worker/replica:0/task:1/device:" + KIND + ":0")
    step = text_format.Parse(text, tf1.RunMetadata())
    assert audit(step, graph).copies == {(0, 1): 1, (1, 0): 1}


def test_copies_of_results_to_other_devices_are_not_counted(graph):
    result = allreduce_grads(
        gradients_on(gpus_or_cpus(4), ones(4, 2)), gpus_or_cpus(4), strategy="hierarchical"
    )
    with tf.device(gpu_or_cpu(9)):
        norm = tf.add_n([tf.norm(tensor) for row in result for tensor in row])
    with tf.device(gpu_or_cpu(1)):
        neighbour = result[2][0] * norm
    through = tf1.gradients(neighbour, result[0])
    assert by_call(audit(traced([result, neighbour, through]))) == [6]


def test_waiting_for_another_device_is_no_copy(graph):
    first, mine = gradients_on([gpu_or_cpu(3), gpu_or_cpu(1)], [[np.float32(1)], [np.float32(1)]])
    grads = gradients_on(gpus_or_cpus(3), ones(3, 2))
    with tf.control_dependencies(first):
        result = allreduce_grads(grads, gpus_or_cpus(3), strategy=ONE_BY_ONE["tree"])
    with tf.device(gpu_or_cpu(1)), tf.control_dependencies(result[2][:1]):
        after = -mine[0]
    assert by_call(audit(traced([result, after]))) == [2 * 4]


def test_constants_need_no_copies(graph):
    result = allreduce_grads(
        on_towers(gpus_or_cpus(3), lambda tower: [tf.ones([4])]),
        gpus_or_cpus(3),
        strategy=TO_ONE_MAIN,
    )
    (call,) = audit(traced(consumed_in_place(result))).calls
    assert str(call) == (
        "hier_allreduce/: tree, 1 chunk, 0 copies and 4 left out, planned = executed by pair of"
        " towers"
    )


def test_an_all_reduce_of_constants_is_done_before_the_step(graph):
    """Grappler folds it into its readers, and no op of it is left."""
    rows = on_towers(gpus_or_cpus(3), lambda tower: [tf.ones([4])])
    result = allreduce_grads(rows, gpus_or_cpus(3), strategy="tree")
    read = on_towers(gpus_or_cpus(3), lambda tower: result[tower][0] * held(np.float32(2)))
    with pytest.raises(
        AuditError, match=r"none .*; of constants they are computed before the step"
    ):
        audit(traced(read))


def test_values_that_are_only_copied_go_straight_to_their_readers(graph):
    """Grappler prunes the op of a copy, and the value comes from outside."""
    (value,) = gradients_on(gpus_or_cpus(1), [[np.ones([2], np.float32)]])[0]
    result = broadcast([value], gpus_or_cpus(4))
    (call,) = audit(traced(consumed_in_place(result))).calls
    assert (sum(call.copies.values()), call.left_out) == (3, 0)


def test_copies_that_a_sum_and_a_mean_have_in_common_are_made_once(graph):
    grads = gradients_on(gpus_or_cpus(4), ones(4, 3))
    results = [
        allreduce_grads(grads, gpus_or_cpus(4), average, "tree") for average in (False, True)
    ]
    found = audit(traced([consumed_in_place(result) for result in results]), graph)
    assert sorted((sum(call.copies.values()), call.left_out) for call in found.calls) == [
        (3, 3),
        (6, 0),
    ]
    assert "/: tree, 1 chunk, 3 copies and 3 left out, planned = executed" in str(found)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_sum_and_the_mean_of_rows_that_are_read_on_their_tower(graph, algorithm, average):
    def row(tower):
        indices = tf.cast(9 * tf1.random_uniform([2]), tf.int64)
        return [tf.IndexedSlices(tf1.random_uniform([2, 3]), indices)]

    grads = on_towers(gpus_or_cpus(3), row)
    result = allreduce_grads(grads, gpus_or_cpus(3), average, ONE_BY_ONE[algorithm])
    used = on_towers(
        gpus_or_cpus(3),
        lambda tower: [(result[tower][0].values + 1).op, (result[tower][0].indices + 1).op],
    )
    assert by_call(audit(traced(used), graph)) == [2 * 4]


@pytest.mark.parametrize("owner", range(3))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [tf.int32, tf.float32])
def test_zeros_of_all_other_towers_need_no_copies(graph, dtype, algorithm, owner):
    """Grappler drops the sums, and the gradient is copied as it is."""

    def row(tower):
        grads = [tf.cast(9 * tf1.random_uniform([4]), dtype) for _ in range(2)]
        return grads if tower == owner else [grads[0], None]

    strategy = Strategy(algorithm=algorithm, chunk_bytes=0, missing="zeros")
    result = allreduce_grads(on_towers(gpus_or_cpus(3), row), gpus_or_cpus(3), strategy=strategy)
    (call,) = audit(traced(consumed_in_place(result)), graph).calls
    assert sum(call.copies.values()) + call.left_out == 8 and call.left_out <= 2


def on_gpus(metadata):
    """Rename the devices of a step to GPUs, and add the nodes for values in host memory."""
    for part in metadata.partition_graphs:
        for node in part.node:
            node.op = {"_Send": "_HostSend", "_Recv": "_HostRecv"}.get(node.op, node.op)
            node.device = node.device.replace("CPU", "GPU")
            for attr in {"send_device", "recv_device"} & set(node.attr):
                node.attr[attr].s = node.attr[attr].s.replace(b"CPU", b"GPU")
        for node in [node for node in part.node if node.op in ("Add", "AddV2")]:
            send = part.node.add(
                name=f"n/_{node.name}", op="_HostSend", device=node.device, input=[node.name]
            )
            for attr in ("send_device", "recv_device"):
                send.attr[attr].s = node.device.encode()
            send.attr["tensor_name"].s = f"memtype_1_{node.name}".encode()
            recv = part.node.add()
            recv.CopyFrom(send)
            recv.op, recv.name, recv.input[:] = "_HostRecv", f"{node.name}/in_host_memory", []
            recv.attr["tensor_type"].type = tf.int32.as_datatype_enum
            part.node.add(
                name=f"{node.name}/reader", op="Identity", device=node.device, input=[recv.name]
            )
    return metadata


def test_a_copy_to_host_memory_is_no_copy_between_gpus(graph):
    gpus = [f"/gpu:{tower}" for tower in range(3)]
    with tf.Graph().as_default():
        values = [[np.ones([5], np.int32)]] * 3
        fetched = allreduce_grads(
            gradients_on(gpus_or_cpus(3), values), gpus_or_cpus(3), strategy=TO_ONE_MAIN
        )
        metadata = on_gpus(traced([row[0].op for row in fetched]))
    allreduce_grads(gradients_on(gpus, values), gpus, strategy=TO_ONE_MAIN)
    assert audit(metadata, graph).copies == {(1, 0): 1, (2, 0): 1, (0, 1): 1, (0, 2): 1}


# ---- anything else is told ---------------------------------------------------------------------


def goes_from_3_to_2(node):
    """Whether a node is one end of a copy of a gradient from tower 3 to tower 2."""
    src = node.attr["send_device"].s
    dst = node.attr["recv_device"].s
    is_gradient = b"Placeholder" in node.attr["tensor_name"].s
    return is_gradient and src.endswith(b"PU:3") and dst.endswith(b"PU:2")


def test_an_error_names_the_missing_and_the_extra_copy(graph):
    """As if Grappler had let tower 3 send to the root itself, not to the adder of its group."""
    result = allreduce_grads(
        gradients_on(gpus_or_cpus(4), ones(4, 2)),
        gpus_or_cpus(4),
        strategy=Strategy(algorithm="hierarchical", main=0, chunk_bytes=0),
    )
    metadata = traced(consumed_in_place(result))
    lines = str(audit(metadata)).splitlines()
    assert lines[1:5] == [
        "           0  1  2  3",
        f"0  {gpu_or_cpu(0)}  .  2  2  .",
        f"1  {gpu_or_cpu(1)}  2  .  .  .",
        f"2  {gpu_or_cpu(2)}  2  .  .  2",
    ]
    moved = [
        node for part in metadata.partition_graphs for node in part.node if goes_from_3_to_2(node)
    ]
    for node in moved:
        node.attr["recv_device"].s = node.attr["recv_device"].s.replace(b"PU:2", b"PU:0")
    with pytest.raises(AuditError) as caught:
        audit(metadata)
    first, missing, number, *copies, remedy = str(caught.value).splitlines()
    assert first == (
        "hier_allreduce/: the step's copies are not those of the hierarchical plan, by tower number"
    )
    assert (missing, number) == ("missing: 3→2", "not planned: 2")
    assert len(moved) == 4 and len(copies) == 2
    for line in copies:
        assert re.fullmatch(r"3→0 of 'PlaceholderWithDefault_\d+': (\S+): 8 B .*: \1", line)
    assert "build tower k's gradients under tf.device(devices[k])" in remedy


def test_a_tensor_that_is_copied_twice_is_an_error(graph):
    result = allreduce_grads(
        gradients_on(gpus_or_cpus(3), ones(3)), gpus_or_cpus(3), strategy=TO_ONE_MAIN
    )
    metadata = traced(consumed_in_place(result))
    for part in metadata.partition_graphs:
        for node in [node for node in part.node if node.op in ("_Send", "_Recv")]:
            again = part.node.add()
            again.CopyFrom(node)
            again.name += "_again"
            again.attr["tensor_name"].s = node.attr["tensor_name"].s.replace(b"edge_", b"edge_9")
            for reader in [other for other in part.node if node.name in other.input]:
                reader.input.append(again.name)
    with pytest.raises(AuditError, match=r"\nnot planned: 2\n1→0 of .*, .*\n2→0 of .*, "):
        audit(metadata)


def test_a_gradient_on_a_device_of_no_tower_is_an_error(graph):
    result = allreduce_grads(
        gradients_on([gpu_or_cpu(0), gpu_or_cpu(9)], ones(2)), gpus_or_cpus(2), strategy=TO_ONE_MAIN
    )
    with pytest.raises(AuditError, match=r"missing: 1→0\nnot planned: 1\n/job:localhost/.*PU:9→0"):
        audit(traced(result))


def test_gradients_on_another_tower_of_shared_devices_are_an_error(graph):
    """They cross beside the sums that were planned on the same way."""
    devices = list(map(gpu_or_cpu, (2, 0, 2, 1)))
    rows = on_towers(devices[1:] + devices[:1], lambda _: [tf1.random_uniform([700])])
    result = allreduce_grads(rows, devices, strategy=Strategy("tree", wire_dtype="float16"))
    with pytest.raises(AuditError, match=r"\nnot planned: [1-9].*\n.* of 'random_uniform"):
        audit(traced(consumed_in_place(result)))


@pytest.mark.parametrize("shape", [[64, 64], [4096]])
def test_a_gradient_that_is_cut_on_another_device_is_an_error(graph, shape):
    rows = on_towers([gpu_or_cpu(9)] * 2, lambda _: [tf1.random_uniform(shape)])
    pieces = Strategy("flat", chunk_bytes=4096)
    result = allreduce_grads(rows, gpus_or_cpus(2), strategy=pieces)
    crosses = r"\n/job:localhost/.*PU:9→[01] of 'random_uniform.*: before it is cut\n"
    with pytest.raises(AuditError, match=crosses):
        audit(traced(consumed_in_place(result)))


def test_a_tower_without_an_op_of_the_all_reduce_is_an_error(graph):
    result = allreduce_grads(
        gradients_on(gpus_or_cpus(4), ones(4, 9)), gpus_or_cpus(4), strategy=TO_ONE_MAIN
    )
    with pytest.raises(AuditError) as caught:
        audit(traced(consumed_in_place(result[:1])))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4 and lines[1:3] == ["missing: 0→1 2→3", "not planned: 0"]
    assert lines[3].startswith(
        "fetch the results of all towers and variables: TensorFlow executes nothing else"
    )


def test_an_error_lists_the_first_copies_that_are_not_planned(graph):
    rows = gradients_on([gpu_or_cpu(0), gpu_or_cpu(9)], ones(2, 9))
    result = allreduce_grads(rows, gpus_or_cpus(2), strategy=TO_ONE_MAIN)
    with pytest.raises(AuditError, match="\nnot planned: 9\n") as caught:
        audit(traced(result))
    assert str(caught.value).count("PU:9→0 of ") == 5


def test_results_that_nobody_reads_are_left_out_and_counted(graph):
    result = allreduce_grads(
        gradients_on(gpus_or_cpus(4), ones(4, 9)), gpus_or_cpus(4), strategy=TO_ONE_MAIN
    )
    first = consumed_in_place([row[:1] for row in result])
    (call,) = audit(traced(first)).calls
    assert (sum(call.copies.values()), call.left_out) == (6, 8 * 6)


def test_a_step_of_a_graph_with_another_main_is_an_error(graph):
    def built(main):
        rows = on_towers(gpus_or_cpus(3), lambda _: [tf1.random_uniform([2])])
        return allreduce_grads(
            rows, gpus_or_cpus(3), strategy=Strategy(algorithm="flat", main=main, chunk_bytes=0)
        )

    with tf.Graph().as_default():
        metadata = traced(built(1))
    built(0)
    with pytest.raises(AuditError, match=r"missing: 0→2 2→0\nnot planned: 2\n1→2 of .*\n2→1 of "):
        audit(metadata, graph)


def test_a_mean_that_only_one_tower_gets_beside_a_sum(graph):
    grads = gradients_on(gpus_or_cpus(3), ones(3))
    sums, means = (
        allreduce_grads(grads, gpus_or_cpus(3), average, TO_ONE_MAIN) for average in (False, True)
    )
    with pytest.raises(AuditError, match=r"missing: 0→1 0→2\nnot planned: 0\nfetch"):
        audit(traced([*consumed_in_place(sums), consumed_in_place(means[:1])]), graph)


def test_a_tower_on_a_device_that_does_not_exist_is_an_error(graph):
    devices = [gpu_or_cpu(0), gpu_or_cpu(1), f"/{XPU}:99"]
    result = allreduce_grads(gradients_on(devices, ones(3)), devices)
    with pytest.raises(
        AuditError,
        match=r"missing: 0→2\n.*\nfetch .*under tf.device\(devices\[k\]\), which has to exist",
    ):
        audit(traced(result, allow_soft_placement=True))


def test_metadata_without_partition_graphs(graph):
    for wrong, words in ((tf1.RunMetadata(), "the RunMetadata has"), (None, "the NoneType has")):
        with pytest.raises(
            AuditError, match=words + r" no partition graphs; run .*output_partition_graphs=True"
        ):
            audit(wrong)


def test_a_step_that_ran_no_all_reduce_is_an_error(graph):
    allreduce_grads(gradients_on(gpus_or_cpus(2), ones(2)), gpus_or_cpus(2), name="sync")
    with pytest.raises(AuditError, match=r"none of the all-reduces in .* \(sync/\)\. Fetch"):
        audit(traced(tf.constant(1.0)))


@pytest.fixture
def control_flow_v1():
    """As TensorFlow 1 has it by itself: branches are parts of the same graph."""
    was_on = tf1.control_flow_v2_enabled()
    tf1.disable_control_flow_v2()
    yield
    if was_on:
        tf1.enable_control_flow_v2()


def branch(devices):
    return [tf.identity(row[0]) for row in allreduce_grads(gradients_on(devices, ones(3)), devices)]


def in_cond(devices):
    taken = tf1.placeholder_with_default(False, [])
    return tf1.cond(taken, lambda: branch(devices), lambda: [tf.zeros([2]) for _ in devices])


def in_loop(devices):
    start = [tf.zeros([2]) for _ in devices]
    return tf1.while_loop(
        lambda turn, *_: turn < 3, lambda turn, *_: [turn + 1, *branch(devices)], [0, *start]
    )


@pytest.mark.parametrize("build", [in_cond, in_loop])
def test_control_flow_is_not_audited(graph, control_flow_v1, build):
    """Partition graphs have the branch that was not taken too."""
    devices = gpus_or_cpus(3)
    inside = build(devices)
    with pytest.raises(AuditError, match=r"/hier_allreduce/\)\. .*Those in a tf.cond"):
        audit(traced(inside))
    outside = consumed_in_place(allreduce_grads(gradients_on(devices, ones(3)), devices))
    found = audit(traced([inside, outside]))
    assert [call.all_reduce.scope for call in found.calls] == ["hier_allreduce/"]
    assert str(found).endswith(
        "/hier_allreduce/: not audited: not in this run, or in a tf.cond or tf.while_loop, which"
        " metadata hide"
    )


def test_another_graph_than_the_one_that_ran(graph):
    result = allreduce_grads(gradients_on(gpus_or_cpus(2), ones(2)), gpus_or_cpus(2))
    metadata = traced(result)
    with tf.Graph().as_default(), pytest.raises(
        AuditError, match=r"none of the all-reduces in .* \(there is none\)\. .* pass graph=, the"
    ):
        audit(metadata)
    with tf.Graph().as_default():
        assert audit(metadata, graph).copies == {(0, 1): 1, (1, 0): 1}


@pytest.mark.parametrize(
    "devices",
    [
        [gpu_or_cpu(0), lambda op: gpu_or_cpu(1)],
        [gpu_or_cpu(0), None],
        ["", ""],
        ["/job:localhost"] * 2,
    ],
    ids=["a function", "None", "empty", "a job"],
)
def test_towers_on_devices_without_a_number_cannot_be_audited(graph, devices):
    """Copies between two unknown devices would be none."""
    result = allreduce_grads(gradients_on(gpus_or_cpus(2), ones(2)), devices, strategy="flat")
    with pytest.raises(AuditError, match="cannot be told from others; an audit needs devices by"):
        audit(traced(result))
