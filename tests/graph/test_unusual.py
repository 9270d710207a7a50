"""What only shows in unusual matrices. Each test notices a change of the code that no other test noticed."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import checked, cpus, evaluate, gradients_on, held, tf1

from hier_allreduce import HierAllreduceError, Strategy, allreduce_grads, gpu_lanes
from hier_allreduce.graph import emit as emitting
from hier_allreduce.graph.allreduce import reduce_to_mains
from hier_allreduce.graph.emit import emit, lane_memory_in
from hier_allreduce.graph.hosts import CrossHostReduce, HostGroup
from hier_allreduce.graph.layout import lay_out
from hier_allreduce.planning import Bucketing, PlanningTarget, Spec, plan_cut
from hier_allreduce.topology import load


def laid_out(rows, strategy, kind="cpu", **how):
    devices = tuple(f"/{kind}:{tower}" for tower in range(len(rows)))
    return lay_out(checked(rows, devices, False), strategy, **how)


def parts(layout):
    return [(unit.parts, unit.variables) for unit in layout.units]


def rows_of(count, width=1, dtype="float32"):
    """A sparse gradient, of which TensorFlow knows no variable's shape."""
    return tf.IndexedSlices(tf1.placeholder(dtype, [count, width]), tf1.placeholder("int64", [count]))


# ---- which sparse gradients are joined ---------------------------------------------------------------


def test_joined_rows_fill_buckets_the_last_first(graph, monkeypatch):
    monkeypatch.setattr(Bucketing, "bucket_bytes", 120)
    matrix = [[rows_of(5) for _ in range(4)] for _ in range(2)]
    three = laid_out(matrix, Strategy(sparse="gather", pack_below=100))
    assert parts(three) == [
        (("values", "indices"), (0,)),
        (("indices",), (1, 2, 3)),
        (("values",), (1, 2, 3)),
    ]
    monkeypatch.setattr(Bucketing, "bucket_bytes", 50)
    layout = laid_out(matrix, Strategy(sparse="gather", pack_below=50))
    # on each tower 20 bytes of values, of which two fit, and 40 of indices, of which one does: none is joined
    assert parts(layout) == [(("values", "indices"), (variable,)) for variable in range(4)]


@pytest.mark.parametrize(("limit", "joined"), [(40, False), (41, True)])
def test_rows_of_less_than_pack_below_bytes_are_joined(graph, limit, joined):
    matrix = [[rows_of(5, width=2) for _ in range(2)] for _ in range(2)]  # values and indices have 40 bytes each
    layout = laid_out(matrix, Strategy(sparse="gather", pack_below=limit))
    assert ((0, 1) in [unit.variables for unit in layout.units]) == joined


@pytest.mark.parametrize("average", [False, True])
def test_joined_indices_have_the_order_of_their_values(graph, monkeypatch, average):
    """Of the indices two variables fit into a bucket, of the values all four: they are ready last."""
    monkeypatch.setattr(Bucketing, "bucket_bytes", 100)
    matrix = [
        [tf.IndexedSlices(held(np.full([5, 1], tower + 1, "float32")), held(np.arange(5) + tower)) for _ in range(4)]
        for tower in range(3)
    ]
    strategy = Strategy(sparse="gather", pack_below=100)
    assert parts(laid_out(matrix, strategy)) == [
        (("indices",), (0, 1)),
        (("values",), (0, 1, 2, 3)),
        (("indices",), (2, 3)),
    ]
    for row in evaluate(allreduce_grads(matrix, cpus(3), average, strategy=strategy)):
        for grad in row:
            pairs = sorted(zip(grad.indices, grad.values[:, 0] * (3 if average else 1)))
            np.testing.assert_allclose(pairs, sorted((i + k, k + 1) for k in range(3) for i in range(5)), rtol=1e-6)


@pytest.mark.parametrize("without", [0, 2])
def test_a_missing_gradient_has_zero_rows_which_is_known(graph, without):
    matrix = [
        [tf.IndexedSlices(held(np.full([2, 1], tower, "float32")), held(np.arange(2))) for _ in range(2)]
        for tower in range(3)
    ]
    matrix[without][1] = None
    strategy = Strategy(sparse="gather", missing="zeros")
    assert parts(laid_out(matrix, strategy)) == [(("indices",), (0, 1)), (("values",), (0, 1))]
    for matrix_of in (lambda row: row, lambda row: row[1:]):  # joined, and alone
        for row in evaluate(allreduce_grads(list(map(matrix_of, matrix)), cpus(3), strategy=strategy)):
            assert sorted(row[-1].values[:, 0]) == sorted([tower for tower in range(3) if tower != without] * 2)


def test_one_tower_and_single_mains_join_nothing(graph):
    rows = [[rows_of(2), rows_of(2)] for _ in range(2)]
    alone = [(("values", "indices"), (variable,)) for variable in range(2)]
    strategy = Strategy(sparse="gather")
    assert parts(laid_out(rows[:1], strategy)) == parts(laid_out(rows, strategy, one_main=True)) == alone
    assert parts(laid_out(rows, strategy)) == [(("indices",), (0, 1)), (("values",), (0, 1))]


def test_what_two_variables_share_is_named_a_bucket(graph):
    rows = [[tf.zeros([2], name="a"), tf.zeros([3], name="b"), rows_of(2), rows_of(2)] for _ in range(2)]
    names = laid_out(rows, Strategy(sparse="gather")).names
    assert sorted(names) == [("Placeholder.bucket.indices",), ("Placeholder.bucket.values",), ("b.bucket",)]
    assert laid_out([row[:1] for row in rows], Strategy()).names == [("a",)]


# ---- which sparse gradients are gathered -------------------------------------------------------------


def table_rows(count):
    return tf.IndexedSlices(
        tf1.placeholder("float32", [count, 2]), tf1.placeholder("int64", [count]), tf.constant([100, 2], tf.int64)
    )


def test_rows_of_several_hosts_are_added_up(graph):
    for kind in ("gpu", "cpu"):
        matrix = [[table_rows(3)] for _ in range(2)]
        assert parts(laid_out(matrix, Strategy(), kind)) == [(("values", "indices"), (0,))]
        assert parts(laid_out(matrix, Strategy(), kind, hosts=2)) == [(("dense",), (0,))]


def test_rows_of_unknown_number_are_gathered(graph):
    layout = laid_out([[table_rows(None)] for _ in range(2)], Strategy(), "gpu")
    assert parts(layout) == [(("values", "indices"), (0,))]


# ---- shapes ------------------------------------------------------------------------------------------


def test_rows_become_dense_with_another_towers_shape(graph):
    """Then they are packed with others."""
    values = tf1.placeholder_with_default(np.float32([[1, 2]]), [None, None])
    rows = [
        [tf.IndexedSlices(values, held(np.int64([2])), tf.constant([4, 2], tf.int64)), held(np.float32([3]))],
        [held(np.ones([4, 2], "float32")), held(np.float32([4]))],
    ]
    result = allreduce_grads(rows, cpus(2), strategy=Strategy(sparse="dense"))
    assert [row[0].shape.as_list() for row in result] == [[4, 2]] * 2
    assert evaluate(result)[0][0].tolist() == [[1, 1], [1, 1], [2, 3], [1, 1]]


def test_rows_become_dense_with_a_shape_of_the_step(graph):
    rows = [
        [
            tf.IndexedSlices(
                held(np.float32([[1, 2]])),
                held(np.int64([2])),
                tf1.placeholder_with_default(np.int64([4, 2]), [2]),
            )
        ]
        for _ in range(2)
    ]
    assert evaluate(allreduce_grads(rows, cpus(2), strategy=Strategy(sparse="dense")))[0][0].tolist() == [
        *([[0, 0]] * 2),
        [2, 4],
        [0, 0],
    ]


def test_large_gradients_have_any_number_of_elements(graph, monkeypatch):
    """Three are added up as columns, so that TensorFlow does not expand the sum."""
    monkeypatch.setattr(emitting, "_LARGE", 0)
    result = allreduce_grads(gradients_on(cpus(3), [[np.ones([3, 5], "float32")]] * 3), cpus(3), strategy="flat")
    assert any(op.name.endswith("/column") for op in graph.get_operations())
    assert evaluate(result)[2][0].tolist() == [[3.0] * 5] * 3


# ---- several hosts ----------------------------------------------------------------------------------


class ThreeHosts(CrossHostReduce):
    """Two more hosts with the same sums."""

    hosts = 3

    def all_reduce(self, tensor, root, name):
        return tensor * 3


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_mean_is_that_of_all_towers_of_all_hosts(graph, dtype):
    grads = checked([[tf.constant([tower], dtype)] for tower in (1, 2, 6)], cpus(3), True)
    layout = lay_out(grads, Strategy("flat"), hosts=3)
    reduced = emit(layout, [{0: (grad,)} for grad in grads.columns[0].grads], True, ThreeHosts())
    assert evaluate([row[0][0] for row in reduced]) == [[3], [3], [3]]


class Three(HostGroup):
    size = 3

    def __init__(self):
        self.noted = []

    def across(self, name, grads, facts):
        self.noted.append((name, facts))
        return ThreeHosts()


def test_hosts_compare_what_decides_their_collectives(graph):
    group = Three()
    for strategy in (Strategy("flat"), Strategy("flat", mains=1), Strategy("tree"), Strategy("flat")):
        rows = gradients_on(cpus(2), [[np.float32([1])], [np.float32([2])]])
        reduced = allreduce_grads(rows, cpus(2), cluster=group, strategy=strategy, name="mine")
    assert evaluate(reduced) == [(9,), (9,)]
    plans = [facts["plan"] for _, facts in group.noted]
    assert plans[0] == plans[3] and len(set(plans)) == 3
    assert [(name, facts["average"]) for name, facts in group.noted] == [("mine", False)] * 4
    assert group.noted[1][1]["strategy"]["mains"] == "1"


def test_one_tower_on_each_of_several_hosts_packs_too(graph):
    rows = [[tf.zeros([2]), tf.zeros([3])]]
    assert [len(laid_out(rows, Strategy(), hosts=hosts).chunks) for hosts in (1, 2)] == [2, 1]


# ---- machines ----------------------------------------------------------------------------------------


def test_gpus_are_planned_for_the_machine_that_has_them(graph, monkeypatch):
    asked = []
    monkeypatch.setattr("hier_allreduce.graph.layout.this_machine", lambda names: asked.append(names) or machine)
    machine, rows = load("p3.8xlarge"), [[tf.zeros([500_000])] for _ in range(4)]
    strategy = Strategy(topology="this machine")
    assert laid_out(rows, strategy, "gpu").machine == machine and laid_out(rows, strategy).machine is None
    assert asked == [["/gpu:0", "/gpu:1", "/gpu:2", "/gpu:3"]]


def test_gradients_stay_whole_where_each_variable_needs_its_main(graph):
    machine = load("p3.8xlarge")
    grads = checked([[tf.zeros([2_000_000]), tf.zeros([500_000])]] * 4, cpus(4), False)
    assert len(lay_out(grads, Strategy(topology=machine)).chunks) > 2
    totals, layout = reduce_to_mains(grads, False, Strategy(topology=machine))
    assert [total.device for total in totals] == [f"/device:CPU:{layout.mains()[v]}" for v in range(2)]


# ---- defaults ----------------------------------------------------------------------------------------


def test_a_gradient_that_is_cut_has_no_main(graph):
    matrix = checked([[tf1.placeholder("float32", [1024])] for _ in range(2)], cpus(2), False)
    with pytest.raises(HierAllreduceError, match="cuts gradients over several mains"):
        reduce_to_mains(matrix, False, Strategy(splits=2, mains="rotate"))


# ---- lanes -------------------------------------------------------------------------------------------


def test_memory_of_all_reduces_is_added_lane_by_lane(graph):
    for lanes in (1, 2):
        rows = gradients_on(cpus(2), [[np.zeros(1024, "float32")]] * 2)
        allreduce_grads(rows, cpus(2), lanes=gpu_lanes(cpus(2), lanes).lanes, strategy=Strategy("flat", mains=0))
    one, two = 8192, (8192, 0)
    assert lane_memory_in(graph) == (one + two[0], two[1])


def test_a_plan_for_a_machine_knows_of_the_lanes(graph):
    machine = load("p3.8xlarge")
    rows = [[tf.zeros([2_000_000])] * 2 for _ in range(4)]
    grads = checked(rows, cpus(4), False, lanes=gpu_lanes(cpus(4), 3).lanes)
    _, plan = plan_cut([Spec(2_000_000, 4, "float32")] * 2, PlanningTarget(machine, lanes=3))
    assert lay_out(grads, Strategy(topology=machine)).plan.steps == plan.steps
