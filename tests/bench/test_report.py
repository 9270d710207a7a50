"""A report's ratios and text."""

import csv
import os
import runpy

from helpers.benches import case, made_up
from helpers.project import TOP

from hier_allreduce.bench import report as bench_report
from hier_allreduce.bench import results, size_case, sizes_text, sweep_sizes
from hier_allreduce.bench.contenders import PEERS
from hier_allreduce.bench.models import GradientShape


def test_ratios_are_paired_and_over_the_baseline():
    report = made_up(ours=[2.0, 3.0, 5.0], peer=[3.0, 7.0, 5.0], floor=[0.5, 1.0, 2.0])
    ours_measured, peer, floor_measured = report.contenders
    assert report.net_seconds(peer) == [2.0, 6.0, 4.0]
    assert report.ratio(ours_measured) == 1
    assert report.ratio(peer) == 2  # of 2, 3, 1
    assert report.ratio(floor_measured) == 0.5  # of 0.5, 0.5, 0.5: no baseline in it


def test_without_ours_there_is_no_ratio():
    assert made_up(peer=[2.0]).ratio(made_up(peer=[2.0]).contenders[0]) is None
    for report in (made_up(peer=[2.0, 2.0, 2.0]), made_up(ours=[0.5, 0.5, 0.5], peer=[2.0, 2.0, 2.0])):
        assert report.ratio(report.contenders[-1]) is None
        assert "peer" in bench_report.report_text("x", report)


def test_the_table_has_at_most_120_columns():
    """With the longest names; not with the times of a machine that was busy for long just then."""
    copies = {("cpu:0", "cpu:1"): (140, 1 << 30)}
    numbers = {"nodes_built": 1234, "nodes_executed": 1234, "build_seconds": 9.5, "first_run_seconds": 9.5}
    report = made_up(**{name: [9.0, 9.5, 9.9] for name in ("ours", *PEERS, "ours:tensorpack")})
    report.case = case((GradientShape("w", (1 << 30,), "float32"),))
    for measured in report.contenders:
        vars(measured).update(numbers, copies=copies)
    lines = bench_report.report_text("table", report).splitlines()
    assert len(lines) > 2 + len(PEERS) and max(map(len, lines)) <= 120


def test_bandwidths_are_those_of_nccl_tests():
    """A tower's bytes over the net time, and 2(K-1)/K times that."""
    report = made_up(ours=[1.5, 2.0, 9.0], peer=[0.5, 0.5, 0.5])  # over a baseline of 1.0 s
    report.case = case((GradientShape("w", (25 << 20,), "float32"),), devices=4)
    ours, peer = report.contenders
    assert report.algbw(ours) == 100 * 2**20 and report.busbw(ours) == 1.5 * 100 * 2**20
    assert report.algbw(peer) is report.busbw(peer) is None
    row = bench_report.report_text("x", report).splitlines()[7]
    assert row.split()[:6] == ["ours", "1000", "750–4500", "1.00", "0.105", "0.157"]
    sizes = sizes_text({100 << 20: report})
    assert ["100", "MiB", "ours", "1", "s", "0.105", "0.157"] in [line.split()[:7] for line in sizes.splitlines()]
    assert sweep_sizes(1, 100, 4) == [1, 4, 16, 64] and size_case(9, ["/cpu:0"]).tower_bytes == 12


def test_cores_are_counted_on_any_system(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # as on Windows and macOS
    report = made_up(ours=[2.0, 3.0, 5.0])
    assert results.cores() == report.as_dict()["cores"] == os.cpu_count()
    assert f"{os.cpu_count()} cores, 3 rounds" in bench_report.case_lines(report)[0]


def test_steps_are_in_milliseconds_with_quartiles():
    report = made_up(ours=[1.001, 1.002, 1.003], peer=[1.2, 1.3, 1.5])
    assert [bench_report.contender_row(report, measured)[1:3] for measured in report.contenders] == [
        ["2.0", "1.5–2.5"],
        ["300", "250–400"],
    ]


def test_the_data_of_docs_have_a_row_for_each_contender():
    records = runpy.run_path(str(TOP / "benchmarks" / "measurements.py"))["records"]
    rows = records("a/x.tsv", made_up(ours=[2.0, 3.0, 5.0], peer=[3.0, 7.0, 5.0], floor=[0.5, 1.0, 2.0]))
    assert [row["times ours"] for row in rows] == ["1.00", "2.00", "0.50"]
    assert rows[0]["case"] == "x, sum over 4 devices" and "3 rounds" in rows[0]["note"]
    data = (TOP / "docs" / "data" / "measurements.csv").read_text(encoding="utf-8")
    assert next(csv.reader(data.splitlines())) == list(rows[0])
