"""Algorithms and plans of users, executed: every kind of gradient, and plans from files."""

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
    started,
    tensors_of,
    tf1,
    traced,
)
from helpers.own import ALGORITHMS, FILE, cases

from hier_allreduce import (
    HierAllreduceError,
    Plan,
    Strategy,
    TowerOptimizer,
    allreduce_grads,
    audit,
    gpu_lanes,
    presets,
)
from hier_allreduce.cli.entry import main
from hier_allreduce.graph.layout import lay_out
from hier_allreduce.planning import Lanes, best_plan, named, on_lanes
from hier_allreduce.planning.algorithms import flat, plan_of, tree
from hier_allreduce.topology import load

pytestmark = pytest.mark.no_lanes


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("algorithm, devices", cases([2, 3, 6, 8]))
def test_every_kind_of_gradient_is_reduced(graph, algorithm, devices, average):
    rows = on_towers(cpus(devices), lambda tower: tensors_of(tower, average))
    how = Strategy(algorithm=algorithm, pack_below=100, sparse="gather" if average else "dense")
    reduced = allreduce_grads(rows, cpus(devices), average, strategy=how)
    parts = [[part for grad in row for part in parts_of(grad)] for row in reduced]
    audit(traced(consumed_in_place(parts)), graph)
    without_none = [[grad for grad in row if grad is not None] for row in reduced]
    got = [[dense(grad) for grad in row] for row in evaluate(without_none)]
    assert same_bits(got)
    values = [
        [value for value in every_kind_of_gradient(tower, average) if value is not None] for tower in range(devices)
    ]
    for total, *column in zip(got[0], *values):
        expected = np.sum(column, 0) / (devices if average else 1)
        error = 0.04 if total.dtype == "float16" else 1e-6  # of a mean: half a unit in the last place for each hop
        assert total.dtype == column[0].dtype and np.allclose(total, expected, rtol=0, atol=error * average)


def parts_of(grad):
    return [] if grad is None else [grad.values, grad.indices] if hasattr(grad, "indices") else [grad]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("how", [{}, {"topology": "dgx-1v"}, {"mains": "rotate", "wire_dtype": "bfloat16"}])
def test_variables_can_be_updated_at_the_mains(algorithm, how):
    with tf.Graph().as_default():
        strategy = Strategy(algorithm=algorithm, **how)
        optimizer = TowerOptimizer(tf1.train.GradientDescentOptimizer(1.0), cpus(8), update="main", strategy=strategy)
        zeros = tf1.zeros_initializer()

        def row(tower):
            names = [f"tower{tower}/{name}" for name in "abc"]
            weights = [tf1.get_variable(name, [30, 3], use_resource=True, initializer=zeros) for name in names]
            return [(held(np.full([30, 3], 2 * tower, "float32")), each) for each in weights]

        rows = on_towers(cpus(8), row)
        train_op = optimizer.apply_gradients(rows)
        with started(optimizer.init_op, train_op) as session:
            assert all((value == -7).all() for row in rows for _, value in session.run(row))


def test_ways_with_one_root_carry_the_same_bytes(graph):
    def two_ways(devices, chunk):
        return [step._replace(chunk=chunk) for step in (flat, tree)[chunk % 2](devices, 0)]

    plan = laid_out(Strategy(algorithm=two_ways, pack_below=0), [1000] * 6).plan
    lengths = [sum(step.chunk == chunk for step in plan.steps) for chunk in range(6)]
    assert set(plan.roots) == {0} and sorted(lengths) == [4] * 3 + [6] * 3
    with pytest.raises(HierAllreduceError, match=r"mains=1: sums end on towers \[0\] only"):
        laid_out(Strategy(algorithm=two_ways, mains=1), [1000])


def laid_out(strategy, sizes, towers=4, dtype="float32", **how):
    """Return the layout of vectors."""
    rows = [[tf1.placeholder(dtype, [size]) for size in sizes] for _ in range(towers)]
    return lay_out(checked(rows, cpus(towers), lanes=how.pop("lanes", ())), strategy, **how)


# ---- plans from files ----------------------------------------------------------------------------------


def graph_of(strategy, towers, elements, lanes=0):
    with tf.Graph().as_default() as graph:
        sizes = (elements // 2, elements - elements // 2)
        rows = on_towers(cpus(towers), lambda _: [tf1.placeholder(tf.float32, [size]) for size in sizes])
        allreduce_grads(rows, cpus(towers), strategy=strategy, lanes=gpu_lanes(cpus(towers), lanes).lanes)
        return graph.as_graph_def()


@pytest.mark.parametrize(
    "machine, options",
    [
        *((machine, {}) for machine in presets.names("machines")),
        ("p3.8xlarge", {"lanes": 3}),
        ("pcie-pairs", {"algorithm": "tree"}),
        ("hgx-a100-4", {"algorithm": f"{FILE}:double_binary_trees"}),
    ],
)
def test_a_plans_file_makes_the_graph_of_its_strategy(machine, options, tmp_path, capsys):
    elements, towers = 1_000_000, len(load(machine))
    given = [f"--{name}={value}" for name, value in options.items()]
    assert main(["plan", machine, "--bytes", str(4 * elements), "--json", *given]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    lanes, algorithm = options.get("lanes", 0), named(options.get("algorithm", "auto"))
    made_by = Strategy(algorithm=algorithm, topology=machine)
    from_file = Strategy(plan=str(tmp_path / "plan.json"))
    assert from_file.given_plan().lanes == lanes
    assert graph_of(from_file, towers, elements, lanes) == graph_of(made_by, towers, elements, lanes)


def test_gradients_of_other_sizes_are_cut_by_the_shares(graph):
    steps = plan_of(flat, 4, (3, 1, 3, 1)).steps
    strategy = Strategy(plan=Plan(4, 4, steps, buckets=(0, 0, 1, 1), shares=(0.1, 0.2, 0.3, 0.4)), pack_below=0)
    for size in (1600, 160_000):
        layout = laid_out(strategy, [size // 4, size - size // 4])
        assert [chunk.bytes for chunk in layout.chunks] == [4 * size * tenth // 10 for tenth in (1, 2, 3, 4)]
        assert layout.plan.steps == steps and layout.plan.buckets == (0, 0, 1, 1) and layout.in_order
    small = laid_out(strategy, [40])  # 160 bytes
    assert [chunk.bytes for chunk in small.chunks] == [160] and small.plan.roots == (3,)
    whole = laid_out(strategy, [400, 1200], one_main=True)
    assert whole.mains() == {0: 3, 1: 1} and not whole.in_order
    assert laid_out(strategy, [1600], hosts=2).plan.steps == steps


def test_every_tower_gets_the_sum_by_a_given_plan(graph):
    plan = best_plan(load("p3.8xlarge"), 10**6).plan
    values = [[np.full([3000], k, "float32"), np.full([77], k, "int64"), np.full([9], k, "float16")] for k in range(4)]
    rows = executed(values, cpus(4), strategy=Strategy(plan=plan, wire_dtype="bfloat16"))
    assert same_bits(rows) and [row.dtype.name for row in rows[0]] == ["float32", "int64", "float16"]
    assert all((row == 6).all() for row in rows[3])


@pytest.mark.parametrize(
    "towers, lanes, how, message",
    [
        (3, 0, {}, "the plan is for 4 devices with 0 lanes each, but here are 3 devices with 0 lanes each"),
        (4, 2, {}, "but here are 4 devices with 2 lanes each"),
        (4, 0, {"planned": 2}, "the plan is for 4 devices with 2 lanes each, but here are 4 devices with 0 lanes each"),
        (4, 2, {"planned": 2, "one_main": True}, "the plan forms sums on lanes; .* need one without lanes"),
        (4, 2, {"planned": 2, "hosts": 2}, "the plan forms sums on lanes"),
    ],
)
def test_a_plan_for_something_else_is_refused(graph, towers, lanes, how, message):
    planned = how.pop("planned", 0)
    plan = on_lanes(plan_of(flat, 4, range(4)), Lanes(planned))
    with pytest.raises(HierAllreduceError, match=message):
        laid_out(Strategy(plan=plan), [1000], towers, lanes=gpu_lanes(cpus(towers), lanes).lanes, **how)


@pytest.mark.parametrize("how", [{}, {"topology": "p3.8xlarge"}])
def test_a_forgotten_copy_is_an_error_before_the_first_op(graph, how):
    rows = gradients_on(cpus(4), [[np.ones(3, "float32")]] * 4)
    before = len(graph.get_operations())
    with pytest.raises(
        HierAllreduceError, match=r"\(4, 0\): chunk 0, after the last step 3, .*: device 3 misses \[0, 1, 2\]\n"
    ):
        allreduce_grads(rows, cpus(4), strategy=Strategy(algorithm=lambda k, chunk: flat(k, chunk)[:-1], **how))
    assert len(graph.get_operations()) == before
