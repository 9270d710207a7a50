"""The numbers of the benchmarks: passes, ratios, and real cells beside emulated ones."""

import json
import sys

import pytest
from helpers.project import TOP

sys.path.insert(0, str(TOP / "benchmarks"))

import anchors
import baselines
import machines
import ratios
import rounds

RESULTS = TOP / "benchmarks" / "results"


def cell(base_ms=100.0, **medians):
    """Return a cell whose all-reduces have these medians; a blank in a name is ``_``."""
    contenders = {
        name.replace("_", " "): {"exposed_ms": [median], "median_ms": median}
        for name, median in medians.items()
    }
    return {"base_ms": base_ms, "base_ms_of_functions": 2 * base_ms, "contenders": contenders}


def test_rounds_are_compared_with_the_median_step_without_an_all_reduce():
    times = {
        "no all-reduce": [10.0, 12.0, 11.0],
        "ours": [13.0, 15.0, 12.0],
        "no all-reduce in a tf.function": [20.0, 20.0, 20.0],
        "ours in a tf.function": [21.0, 25.0, 22.0],
    }
    found = rounds.exposed(times, {name: {} for name in times})
    assert found["base_ms"] == 11 and found["base_ms_of_functions"] == 20
    assert found["contenders"]["ours"] == {"exposed_ms": [2, 4, 1], "median_ms": 2}
    assert found["contenders"]["ours in a tf.function"]["median_ms"] == 2


def test_ratios_are_those_of_exposed_times_and_of_steps():
    one = cell(ours=2.0, tensorpack_packed=8.0, tensorpack=4.0, another=1.0)
    assert ratios.best_baseline(one) == "tensorpack"
    assert ratios.exposed_ratio(one, "ours", "tensorpack") == 0.5
    assert ratios.step_ratio(one, "ours", "tensorpack") == 102 / 104


def test_a_function_is_a_step_of_functions():
    assert ratios.step_ms(cell(**{"ours_in_a_tf.function": 3.0}), "ours in a tf.function") == 203


@pytest.mark.parametrize("nothing", [0.0, -0.4, 0.05])
def test_times_that_rounds_cannot_tell_from_nothing_are_alike(nothing):
    assert ratios.exposed_ratio(cell(ours=nothing, baseline=0.2), "ours", "baseline") == 0.5


def test_an_anchor_is_the_median_of_the_real_runs():
    place = anchors.Place("h100-8-logical", "resnet50", 60, 0.0)
    real = anchors.real_medians()[place]["flat/4"]
    assert len(real) == 3 and min(real) == 5.711
    emulated = {**place._asdict(), **cell(**{"flat/4": 2 * sorted(real)[1]})}
    (found,) = anchors.anchors([emulated])
    assert found.error == 1
    assert "0 of 1 errors" in anchors.anchors_table([emulated])


def test_real_cells_that_are_no_anchors_say_why():
    cells = [
        one
        for path in sorted((RESULTS / "real").glob("*.json"))
        for one in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]
    assert {one["kind"] for one in cells} == {"real"}
    assert sum("no_anchor" in one for one in cells) == 5 and len(cells) == 13
    assert all(len(one["no_anchor"]) > 20 for one in cells if "no_anchor" in one)


def test_each_anchor_can_be_emulated():
    for (name, _, _), (hosts, names) in anchors.to_emulate().items():
        machine = machines.load_machine(name)
        assert machine.op_us > 0 and machine.options["chip_us"] > 0
        assert 0.0 in hosts and "flat/4" in names


def test_a_baseline_that_leaves_a_tower_out_is_compared_with_nothing():
    copies = [name for name in ratios.COMPARED if name.startswith("HierarchicalCopy")]
    assert len(copies) == 2
    assert all("leaves out the last" in baselines.why_not(name, 3) for name in copies)
    assert not any(baselines.why_not(name, 4) for name in copies)
