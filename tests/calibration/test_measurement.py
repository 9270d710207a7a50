"""From times to a machine: robust fits, errors instead of noise, and a file that every reader understands."""

import re
from dataclasses import replace

import numpy as np
import pytest
from helpers.machines import SimulatedTimer

from hier_allreduce.calibration.machine import measured_machine, named
from hier_allreduce.calibration.measurement import measure
from hier_allreduce.calibration.report import report_text
from hier_allreduce.calibration.samples import steady
from hier_allreduce.calibration.sharing import Way
from hier_allreduce.calibration.speeds import SIZES, fitted
from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.planning import best_plan
from hier_allreduce.topology import load, subset
from hier_allreduce.topology.topology import from_yaml

STAMP = {"date": "2026-11-22", "tensorflow": "2.21.0", "hier_allreduce": "0.1.0", "devices": ["a", "b", "c", "d"]}


def test_a_line_is_found_among_outliers():
    sizes = np.array([4e3, 6e4, 1e6, 16e6, 256e6] * 5)
    seconds = 10e-6 + sizes / 12e9
    seconds[[3, 9, 17]] *= 3
    line = fitted(sizes, seconds)
    assert (line.start, line.rate) == (pytest.approx(10e-6, rel=0.02), pytest.approx(12e9, rel=0.02))


def test_the_largest_size_decides_even_if_all_others_disagree():
    line = fitted([4e3, 6e4, 1e6, 16e6], [5e-3, 5e-3, 5e-3, 2e-3])
    assert 16e6 / 2e-3 <= line.rate <= 2 * 16e6 / 2e-3


def test_what_stays_noisy_is_an_error_with_its_quartiles():
    calm, wild = iter(range(10**6)), iter(range(10**6))
    runs = {"calm": lambda: 1 + next(calm) % 2 / 100, "wild": lambda: 1 + next(wild) % 5}
    with pytest.raises(HierAllreduceError, match=r"the wild: too noisy .* of 45 runs.*expected at most 25%") as error:
        steady(runs, 9, 0.25, "the {}".format, lambda: None)
    assert "2 s and 3 s around 2 s" in str(error.value)
    assert next(calm) < 15  # what is calm is not measured again


def test_the_slower_half_of_the_runs_does_not_count():
    seconds = iter([9.0, 1.0, 7.0, 1.0, 8.0, 1.0, 9.0])
    assert steady({"x": lambda: next(seconds)}, 6, 0.1, str, lambda: None)["x"].median == 1.0


@pytest.fixture(scope="module")
def calibrated():
    """What is measured on two GPUs of each socket of a machine, and what its links were taken for."""
    true = subset(load("pcie-sockets"), (0, 1, 4, 5))
    true = replace(true, speeds=replace(true.speeds, arrival=20e-6, dispatch=3e-6))
    assumed = subset(load("pcie-switch"), (0, 1, 4, 5))
    measurement = measure(SimulatedTimer(true, 0.02), SIZES, 0.25, lambda stage: None)
    return true, assumed, measurement, measured_machine(measurement, assumed, STAMP)


def test_links_starts_and_sums_are_those_of_the_machine(calibrated):
    true, _, _, machine = calibrated
    for link in true.links:
        assert machine.link(link.src, link.dst).bandwidth == pytest.approx(link.bandwidth, rel=0.05)
    assert machine.speeds.copy_latency == pytest.approx(true.speeds.copy_latency, rel=0.1)
    assert machine.speeds.arrival == pytest.approx(20e-6, rel=0.1)
    assert machine.speeds.dispatch == pytest.approx(3e-6)
    assert machine.speeds.kernel == pytest.approx(true.speeds.kernel, rel=0.1)
    assert machine.speeds.memory == pytest.approx(true.speeds.memory, rel=0.05)


def test_the_file_keeps_it_and_plans_are_those_of_the_machine(calibrated):
    true, _, _, machine = calibrated
    again = from_yaml(machine.to_yaml())
    assert again == machine
    assert again.measured.devices == ("a", "b", "c", "d")
    assert best_plan(again, 10**7).seconds == pytest.approx(best_plan(true, 10**7).seconds, rel=0.05)


def test_the_report_has_what_was_assumed_next_to_it(calibrated):
    _, assumed, measurement, _ = calibrated
    text = report_text(measurement, assumed)
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines["host, at an arrival"][-2:] == ["0", "µs"]
    measured, expected = map(float, lines["way out of GPU0+GPU1"][-2:])
    assert (measured, expected) == (pytest.approx(24, rel=0.05), 12)
    assert lines["links PIX, GB/s"][-1] == "12"
    assert re.search(r"\d+ patterns of copies at once took 1\.0\d times as long as these speeds predict", text)


def test_one_memory_is_shared_by_all_and_nothing_is_searched():
    timer = SimulatedTimer(subset(load("dgx-a100"), range(4)))
    timer.one_memory = True
    measurement = measure(timer, SIZES[:2], 0.25, lambda stage: None)
    assert [len(way.pairs) for way in measurement.found.ways] == [12]
    assert timer.runs < 200


def test_ways_are_named_after_whose_they_are():
    def name(*pairs):
        return named([Way(frozenset(pairs), 1e9)], ["A", "B", "C", "D"])[0][0]

    assert name((0, 2), (1, 2)) == "port of C in"
    assert name((0, 2), (0, 3), (1, 2), (1, 3)) == "way out of A+B"
    assert name((0, 2), (0, 3), (1, 2)) == "way out of A+B"
    assert name((0, 1), (1, 2)) == "way from A+B to B+C"
    twice = [Way(frozenset({(0, 2), (1, 2)}), 1e9)] * 2
    assert [name for name, _ in named(twice, ["A", "B", "C"])] == ["port of C in", "port of C in, 2"]
