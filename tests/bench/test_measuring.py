"""What the bench measures, on contenders whose numbers are known; and the floor."""

import pytest
import tensorflow as tf
from helpers.benches import MIB, SMALL, case, flat_sum, measure_one
from helpers.graphs import cpus

from hier_allreduce.bench import floor as floor_module
from hier_allreduce.bench import measuring
from hier_allreduce.bench.case import devices_here
from hier_allreduce.bench.contenders import ours
from hier_allreduce.bench.models import GradientShape


def test_nodes_copies_and_bytes_are_those_of_the_executed_graph():
    measured = measure_one(flat_sum, columns=(SMALL[0],), devices=3)
    assert (measured.status, measured.error) == ("ok", "")
    assert measured.nodes_built == 1 + 3
    assert measured.copies == {
        ("cpu:1", "cpu:0"): (1, 8192),
        ("cpu:2", "cpu:0"): (1, 8192),
        ("cpu:0", "cpu:1"): (1, 8192),
        ("cpu:0", "cpu:2"): (1, 8192),
    }
    assert (measured.copied_tensors, measured.copied_bytes) == (4, 4 * 8192)
    assert measured.nodes_executed >= 1 + 2 * 4  # the sum and a pair for each copy


def test_peak_memory_counts_what_is_there_at_one_time():
    big = GradientShape("big", (MIB,), "float32")
    assert 4 * MIB <= measure_one(flat_sum, columns=(big,), devices=3).peak_bytes < 5 * MIB

    def one_after_the_other(grads, devices, average):
        value = grads[0][0]
        for _ in range(5):
            value = tf.roll(value, 1, 0)  # from one buffer into another
        return [[value]]

    assert 8 * MIB <= measure_one(one_after_the_other, columns=(big,), devices=1).peak_bytes < 9 * MIB


def test_the_sum_is_not_optimized_away():
    """Consumers that only waited for the results would let Grappler drop every addition."""
    big = GradientShape("big", (MIB,), "float32")
    nothing = measure_one(lambda grads, devices, average: grads, columns=(big,), devices=1)
    assert nothing.peak_bytes == 0 and nothing.nodes_executed == 0
    assert measure_one(flat_sum, columns=(big,), devices=3).peak_bytes


@pytest.mark.parametrize("average", [False, True])
def test_ours_is_right_for_every_kind(average):
    columns = SMALL[:3] if average else SMALL
    report = measuring.measure(case(columns, average=average), [ours()], rounds=2, floor=True)
    assert [(m.name, m.status) for m in report.contenders] == [("ours", "ok"), ("floor", "ok")]
    assert report.contenders[0].max_error < 1e-5
    assert all(len(m.step_seconds) == 2 for m in [report.baseline, *report.contenders])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64"])
def test_other_dtypes_are_measured_too(dtype):
    report = measuring.measure(case((GradientShape("v", (9, 5), dtype),)), [ours()], rounds=1, floor=False)
    assert (report.contenders[0].status, report.contenders[0].error) == ("ok", "")


def drop_last(grads, devices, average):
    return flat_sum(grads[:-1], devices, average)


def swap_variables(grads, devices, average):
    return [row[::-1] for row in flat_sum(grads, devices, average)]


def one_tower_forgotten(grads, devices, average):
    return [*flat_sum(grads, devices, average)[:-1], grads[-1]]


@pytest.mark.parametrize("build", [drop_last, swap_variables, one_tower_forgotten])
def test_a_wrong_result_is_called_wrong(build):
    measured = measure_one(build, columns=(SMALL[0], GradientShape("other", (64, 32), "float32")))
    assert measured.status == "wrong" and "% off the sum" in measured.error
    assert measured.step_seconds  # and it is timed all the same


def drop_first_element(grads, devices, average):
    return [[tf.reshape(value, [-1])[1:] for value in row] for row in flat_sum(grads, devices, average)]


def test_a_shape_that_changed_is_wrong():
    assert measure_one(drop_first_element, columns=SMALL[:1]).status == "wrong"


def raises(grads, devices, average):
    raise AssertionError("not with me")


def one_row(grads, devices, average):
    return flat_sum(grads, devices, average)[:1]


@pytest.mark.parametrize(
    "build, error",
    [
        (raises, "AssertionError: not with me"),
        (one_row, "it returned rows of [2] for rows of [2, 2, 2] gradients"),
        (lambda grads, devices, average: [[tf.debugging.check_numerics(v / 0.0, "bad") for v in row] for row in grads],
         "InvalidArgumentError"),
    ],
)  # fmt: skip
def test_a_contender_that_cannot_run_is_listed_with_its_error(build, error):
    measured = measure_one(build)
    assert measured.status == "cannot run" and error in measured.error and not measured.step_seconds


def densify(grads, devices, average):
    return flat_sum([[tf.convert_to_tensor(v) for v in row] for row in grads], devices, average)


def test_dense_copies_of_sparse_ones_run_only_where_they_fit():
    columns = SMALL[2:3]
    assert measure_one(densify, columns).status == "ok"
    refused = measure_one(densify, columns, memory=3 * 50 * 4 * 4 - 1)
    assert refused.status == "cannot run" and "makes 1 sparse gradients dense" in refused.error


def test_devices_are_logical_cpus_where_there_are_no_gpus():
    assert devices_here() == tuple(cpus(8))
    assert devices_here(3) == tuple(cpus(3))


# ---- the floor -------------------------------------------------------------------------------------


def test_the_floor_extrapolates_beyond_its_limit(monkeypatch):
    columns = (GradientShape("dense", (3 * MIB,), "float32"), *SMALL[2:3])
    whole = floor_module.Floor(case(columns, 2))
    whole.step()
    whole.close()
    assert whole.scale == 1
    monkeypatch.setattr(floor_module, "_AT_MOST", 6 * MIB)
    part = floor_module.Floor(case(columns, 2))
    part.step()
    part.close()
    assert part.scale == pytest.approx(4, rel=0.01)
    pieces = floor_module._pieces(2 * MIB + 8)
    assert [shape.elements for shape in pieces] == [MIB // 4, MIB // 4, 2]
