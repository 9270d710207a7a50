"""All-reduces over lanes: the right sums, the copies that were planned, and enough memory."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    checked,
    consumed_in_place,
    cpus,
    dense,
    evaluate,
    every_kind_of_gradient,
    executed,
    gradients_on,
    held,
    on_towers,
    same_bits,
    session,
    tensors_of,
    tf1,
    traced,
)

from hier_allreduce import (
    HierAllreduceError,
    Strategy,
    allreduce_grads,
    allreduce_grads_and_vars,
    audit,
    gpu_lanes,
)
from hier_allreduce.graph.emit import emitted_in, lane_memory_in
from hier_allreduce.graph.lane_memory import allocations, lane_memory
from hier_allreduce.graph.layout import lay_out

K = 4
LARGE = 2_000_000  # elements of a gradient, of which two are planned over lanes


def lanes_of(towers, lanes):
    """Lanes on CPU devices after those of the towers."""
    return gpu_lanes(cpus(towers), lanes).lanes


# ---- the same bits -----------------------------------------------------------------------------------

STRATEGIES = {
    "flat": (Strategy(algorithm="flat", pack_below=0), False),
    "tree, mean": (Strategy(algorithm="tree", mains="rotate"), True),
    "hierarchical, mean, 16 bits": (Strategy(algorithm="hierarchical", wire_dtype="float16"), True),
    "cut, dense": (Strategy(splits=5, sparse="dense"), False),
    "planned": (Strategy(topology="p3.8xlarge", sparse="gather"), False),
}


@pytest.fixture(scope="module")
def results():
    """{(strategy, lanes): K rows of arrays}, and the sparse gradients, all computed in one graph."""
    with tf.Graph().as_default():
        rows = {
            average: on_towers(cpus(K), lambda tower, average=average: tensors_of(tower, average))
            for average in (False, True)
        }
        reduced = {
            (name, lanes): [
                [grad for grad in row if grad is not None]
                for row in allreduce_grads(rows[average], cpus(K), average, strategy=how, lanes=lanes_of(K, lanes))
            ]
            for name, (how, average) in STRATEGIES.items()
            for lanes in (1, 3)
        }
        return evaluate({**reduced, "sparse": [row[-1] for row in rows[False]]})


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_kind_of_gradient_is_reduced_over_lanes(results, name, lanes):
    rows = [[dense(grad) for grad in row] for row in results[name, lanes]]
    assert same_bits(rows)
    average = STRATEGIES[name][1]
    columns = zip(*(every_kind_of_gradient(tower, average) for tower in range(K)))
    expected = [np.sum(column, axis=0) for column in columns if column[0] is not None]
    expected += [np.float32([[6, 16]]), np.sum([dense(grad) for grad in results["sparse"]], axis=0)]
    for got, total in zip(rows[0], expected):
        np.testing.assert_array_equal(got, total / K if average else total)


def test_what_enters_a_lane_is_not_rounded_to_16_bits():
    values = [[np.random.RandomState(tower).randn(500).astype("float32")] for tower in range(2)]
    for average in (False, True):
        how = {"average": average, "strategy": Strategy(wire_dtype="float16", algorithm="flat")}
        with_lanes = executed(values, cpus(2), lanes=lanes_of(2, 2), **how)
        assert same_bits(with_lanes + executed(values, cpus(2), **how))


@pytest.mark.tf2
def test_inside_a_function_and_eagerly():
    def reduce(*flat):
        return allreduce_grads([[grad] for grad in flat], cpus(2), True, lanes=lanes_of(2, 1))

    inputs = [tf.constant([2.0**tower, 1.0]) for tower in range(2)]
    for result in (reduce(*inputs), tf.function(reduce)(*inputs)):
        for tower, (grad,) in enumerate(result):
            np.testing.assert_array_equal(grad, [1.5, 1])
            assert grad.backing_device.endswith(f"CPU:{tower}")


# ---- what travels where ------------------------------------------------------------------------------


def built(graph, towers, lanes, sizes=(8, 5, 3), **how):
    """Build an all-reduce of random vectors over lanes; return its step's metadata."""
    values = [[np.random.RandomState(tower).randn(size).astype("float32") for size in sizes] for tower in range(towers)]
    rows = gradients_on(cpus(towers), values)
    how = how or {"strategy": Strategy(algorithm="tree", pack_below=0, mains="rotate")}
    return traced(consumed_in_place(allreduce_grads(rows, cpus(towers), lanes=lanes_of(towers, lanes), **how)))


def test_the_audit_names_lanes_and_counts_their_copies(graph):
    seen = built(graph, 3, 2)
    text = str(audit(seen, graph))
    assert "0.1  /cpu:4" in text and "2.1  /cpu:8" in text
    # of each chunk: 3 enter lanes, 2 go to other lanes to be added, 2 go to the other towers, 1 to the lane's own
    assert "tree, 3 chunks, 24 copies (12 between a tower and its lanes), planned = executed" in text


def test_planned_copies_over_lanes_are_executed_in_order(graph):
    rows = on_towers(cpus(4), lambda tower: [tf.fill([LARGE], held(np.float32(2**tower))) for _ in range(2)])
    reduced = allreduce_grads(rows, cpus(4), lanes=lanes_of(4, 3), strategy=Strategy(topology="p3.8xlarge"))
    parts = [[tf.reduce_max(grad) for grad in row] for row in reduced]
    seen = tf1.RunMetadata()
    with session() as sess:
        step, asked = [parts, consumed_in_place(parts)], tf1.RunOptions(output_partition_graphs=True)
        assert np.array_equal(sess.run(step, options=asked, run_metadata=seen)[0], np.full([4, 2], 15))
    (call,) = audit(seen, graph).calls
    assert call.in_order > 0 and {device for pair in call.copies for device in pair} > set(range(4))


def test_sums_are_formed_on_lanes_packing_on_towers(graph):
    built(graph, 3, 2, strategy=Strategy(algorithm="flat"))
    places = {}
    for op in graph.get_operations():
        kind = op.name.rpartition("/")[2].split("_")[0]
        places.setdefault(kind, set()).add(int(op.device.rpartition(":")[2] or 0))
    assert places["sum"] <= set(range(3, 9)) and places["pack"] == places["unpack"] == {0, 1, 2}


def test_with_one_tower_lanes_have_nothing_to_do(graph):
    assert np.array_equal(
        evaluate(allreduce_grads([[held(np.float32([3]))]], cpus(1), True, lanes=lanes_of(1, 2))), [[[3]]]
    )


def test_every_function_takes_lanes(graph):
    rows = gradients_on(cpus(2), [[np.float32([1])], [np.float32([2])]])
    variables = [tf1.get_variable(f"tower{tower}/w", [1], use_resource=True) for tower in range(2)]
    pairs = [[(grad, var)] for (grad,), var in zip(rows, variables)]
    allreduce_grads(rows, cpus(2), lanes=lanes_of(2, 1))
    allreduce_grads_and_vars(pairs, cpus(2), lanes=lanes_of(2, 1))
    assert [call.devices for call in emitted_in(graph)] == [("/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3")] * 2


def test_sums_over_hosts_and_variables_mains_are_on_towers():
    with tf.Graph().as_default():
        grads = checked([[tf.zeros([LARGE])] * 2] * 4, cpus(4), False, lanes=lanes_of(4, 3))
        for strategy in (Strategy(), Strategy(topology="p3.8xlarge")):
            assert set(lay_out(grads, strategy, hosts=2).plan.roots) <= set(range(4))
            assert set(lay_out(grads, strategy, one_main=True).plan.roots) <= set(range(4))
            assert max(lay_out(grads, strategy).plan.roots) >= 4


# ---- memory ------------------------------------------------------------------------------------------


def layout_of(towers, lanes, sizes, dtype="float32", **how):
    with tf.Graph().as_default():
        rows = [[tf.zeros([size], dtype) for size in sizes] for _ in range(towers)]
        return lay_out(checked(rows, cpus(towers), False, lanes=lanes_of(towers, lanes)), Strategy(**how))


def test_memory_of_two_towers_by_hand():
    """Tower 1's 4096 bytes go to its lane, on to tower 0's lane and are added there; the sum leaves for both towers."""
    layout = layout_of(2, 1, [1024], algorithm="flat", mains=0)
    assert lane_memory(layout) == (2 * 4096,)  # on lane 0.0: from tower 0 and from lane 1.0
    narrow = layout_of(2, 1, [1024], algorithm="flat", mains=0, wire_dtype="float16")
    # from tower 0 as it is; from lane 1.0 in 16 bits, cast to be added; and the sum in 16 bits
    assert lane_memory(narrow) == (4096 + 2048 + 4096 + 2048,)
    sender = [size for device, size in allocations(narrow) if device == narrow.plan.lane(1, 0)]
    assert sender == [4096, 2048], "what enters, and what is cast to leave"


@pytest.mark.parametrize(
    ("lanes", "most", "how"),
    [(2, 2.1, {"algorithm": "flat", "pack_below": 0}), (3, 4, {"topology": "p3.8xlarge"})],
    ids=["by the strategy", "planned"],
)
def test_lanes_need_at_most_four_times_the_gradients(lanes, most, how):
    """Without a topology it is less, because the chunks of one root use different lanes."""
    layout = layout_of(4, lanes, [LARGE // 6] * 12, **how)
    needed = [0] * 4
    for device, size in allocations(layout):
        needed[layout.plan.tower(device)] += size * (device >= 4)
    assert len(lane_memory(layout)) == lanes and min(lane_memory(layout)) > 0
    assert max(needed) <= most * 4 * 2 * LARGE * 1.001  # chunks are cut at 64 bytes


def test_too_little_memory_is_an_error_before_the_first_op(graph):
    rows = gradients_on(cpus(2), [[np.zeros([1 << 20], "float32")]] * 2)
    setup = gpu_lanes(cpus(2), 1, memory_limit=1 << 20)
    before = len(graph.get_operations())
    words = r"lane 0 of each tower has 1 MiB of memory.* needs 8 MiB.*memory_limit=\[8388608\]"
    with pytest.raises(HierAllreduceError, match=words):
        allreduce_grads(rows, cpus(2), lanes=setup.lanes, strategy="flat")
    assert len(graph.get_operations()) == before
    allreduce_grads(rows, cpus(2), lanes=gpu_lanes(cpus(2), 1, gradient_bytes=4 << 20).lanes, strategy="flat")
    assert lane_memory_in(graph) == (8 << 20,)


# ---- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "lanes", "words"),
    [
        (cpus(2), 3, r"lanes=3: lanes is a list of Lane\(device, tower\)"),
        (cpus(2), ["/cpu:2", "/cpu:3"], "lanes: '/cpu:2': lanes is a list"),
        (cpus(2), [["/cpu:2"], ["/cpu:3"]], r"lanes: \['/cpu:2'\]: lanes is a list"),
        (cpus(2), [("/cpu:2", 0), ("/cpu:3", 2)], r"\('/cpu:3', 2\): .*for towers 0 to 1"),
        (cpus(2), [("/cpu:2", 0)], "same number of lanes: tower 0 has 1, tower 1 has 0"),
        (
            cpus(2),
            [("/cpu:2", 0), ("/cpu:1", 1)],
            r"tower 1, lane 0 \(/cpu:1\) is also the device of tower 1 \(/cpu:1\)",
        ),
        (cpus(2), [("/cpu:2", 0), ("/job:x/cpu:2", 1)], r"tower 1, lane 0 .* is also the device of tower 0, lane 0"),
        (cpus(2), [("/cpu:2", 0), ("/gpu:3", 1)], "tower 1, lane 0 is /gpu:3, of another kind than its tower"),
        (cpus(2), [("/cpu:2", 0), (None, 1)], "tower 1, lane 0: None may be any device"),
        (["/cpu:0", None], [("/cpu:2", 0), ("/cpu:3", 1)], "tower 1: None may be any device"),
        (cpus(2), [("/cpu:2", 0), ("cpux:3", 1)], "tower 1, lane 0: 'cpux:3' cannot be read"),
    ],
)
def test_wrong_lanes_are_refused_before_the_first_op(graph, devices, lanes, words):
    rows = gradients_on(cpus(2), [[np.float32([1])]] * 2)
    before = len(graph.get_operations())
    with pytest.raises(HierAllreduceError, match=words):
        allreduce_grads(rows, devices, lanes=lanes)
    assert len(graph.get_operations()) == before
