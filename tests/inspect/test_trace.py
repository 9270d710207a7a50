"""Traces: what bars say about links and senders, and the file that Perfetto reads."""

import json

import pytest

from hier_allreduce import HierAllreduceError
from hier_allreduce.inspect import predicted_trace
from hier_allreduce.inspect.bars import Bar, Run, union
from hier_allreduce.inspect.trace import Trace
from hier_allreduce.inspect.trace_file import in_rows
from hier_allreduce.planning import IDLE, best_plan
from hier_allreduce.topology import load

NAMES = ("GPU0", "GPU1")


def copy(src, dst, ready, start, end, size=1e9, exact=True):
    return Bar("copy", f"c0 w {src}→{dst}", src, dst, ready, start, end, size, exact)


def test_intervals_that_touch_or_overlap_become_one():
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]


def test_rates_are_of_busy_time_and_of_exact_copies():
    bars = (copy(0, 1, 0, 0, 1), copy(0, 1, 0, 3, 4), copy(1, 0, 0, 0, 4, exact=False))
    run = Run("executed", NAMES, bars, last_gradient=2.5, bound=1.0)
    assert run.links() == {(0, 1): (2e9, 2)}
    assert run.sending() == {0: 2, 1: 0}
    assert run.exposed == 1.5
    text = run.summary()
    for part in ("25% of it reached", "GPU0 → GPU1   2 GB  1 GB/s", "busiest sender: GPU0, 2 s (50%", "1 of 3 copies"):
        assert part in text, text
    assert "exposed after the last gradient: 1.5 s" in text


def test_bars_that_overlap_get_lanes_of_their_own():
    assert in_rows([copy(0, 1, 0, 0, 2), copy(0, 1, 0, 1, 3), copy(0, 1, 0, 2, 4), copy(0, 1, 0, 2.5, 3)]) == [
        0,
        1,
        0,
        2,
    ]


@pytest.fixture(scope="module")
def machine():
    return load("p3.8xlarge")


@pytest.mark.parametrize("backward", [IDLE, None])
def test_the_predicted_run_is_the_simulation(machine, backward):
    found = best_plan(machine, 10**7, backward)
    (run,) = predicted_trace(found).runs
    assert run.end == pytest.approx(found.timing().seconds, abs=2 * machine.speeds.dispatch)
    assert run.exposed == pytest.approx(found.seconds, abs=2 * machine.speeds.dispatch)
    assert len(run.copies) == found.plan.copies
    assert all(bar.ready <= bar.start <= bar.end for bar in run.bars)
    assert run.bound == (found.bound if backward is IDLE else None)


def test_the_file_is_chromes_trace(machine, tmp_path):
    trace = predicted_trace(best_plan(machine, 1 << 20, IDLE))
    trace.write(str(tmp_path / "plan.json"))
    events = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["traceEvents"]
    check_events(events)
    named = {(event["pid"], event["args"]["name"]) for event in events if event["name"].endswith("_name")}
    assert (0, "GPU0") in named and (3, "predicted: copies out") in named
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == len(trace.runs[0].bars)
    assert max(event["ts"] + event["dur"] for event in bars) == pytest.approx(trace.runs[0].seconds * 1e6, abs=0.01)


def check_events(events):
    """Fail unless the events are what Perfetto accepts: nothing of one thread overlaps in part."""
    rows = {}
    for event in events:
        assert event["ph"] in "XMi" and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    for bars in rows.values():
        bars.sort()
        assert all(start + length <= later + 0.002 for (start, length), (later, _) in zip(bars, bars[1:]))
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert rows.keys() <= threads


def test_a_file_that_cannot_be_written_is_named(machine, tmp_path):
    with pytest.raises(HierAllreduceError, match="nowhere"):
        Trace((Run("predicted", NAMES, (copy(0, 1, 0, 0, 1),)),)).write(str(tmp_path / "nowhere" / "a.json"))
