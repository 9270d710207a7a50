"""What rows say: which all-reduce to use, and how certain that is."""

import pytest

from hier_allreduce_tools.tune.candidates import CURRENT
from hier_allreduce_tools.tune.journal import Run
from hier_allreduce_tools.tune.report import report, verdict

BASELINE = "NcclAllReduce"
NAMES = {"now": CURRENT, "baseline": BASELINE}
QUIET = [100, 100, 100, 101, 99, 100, 100, 100, 100]
BUSY = [100, 140, 100, 180, 120, 150, 130, 110, 100]


def run_of(candidate, round, step, fault=""):
    return Run(round, candidate, step, 1.0, fault, 1 << 20, "keras", towers=8)


def runs_of(name, milliseconds):
    """Return runs with these steps in rounds 1, 2, …; None is a round without this candidate."""
    candidate = NAMES.get(name, name)
    if milliseconds == "hangs":
        return [run_of(candidate, 1, 0.0, "hung: no step")]
    return [
        run_of(candidate, number, step * 1e-3)
        for number, step in enumerate(milliseconds, 1)
        if step is not None
    ]


def verdict_on(**milliseconds):
    return verdict([run for name, steps in milliseconds.items() for run in runs_of(name, steps)])


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [
        (
            {"now": QUIET, "flat": [90] * 9},
            [
                "use flat",
                "0.900 (0.891–0.909)",
            ],
        ),
        (
            {"now": QUIET, "baseline": [80] * 9, "flat": [90] * 9},
            [
                "use NcclAllReduce",
                "0.800 (0.792–0.808)",
                "0.900 (0.891–0.909)",
            ],
        ),
        (
            {"now": QUIET, "baseline": [120] * 9},
            [
                "keep the program as it is: no other one is certainly faster",
                "1.200 (1.188–1.212)",
            ],
        ),
        (
            {"now": QUIET, "flat": [99.8] * 9},
            [
                "keep the program as it is: no other one is certainly faster",
                "0.998 (0.988–1.008)",
            ],
        ),
        # other programs slow both runs of a pair
        (
            {"now": BUSY, "flat": [0.9 * step for step in BUSY]},
            ["use flat", "0.900 (0.900–0.900)"],
        ),
        (
            {"now": [100] * 5, "flat": [50] * 5},
            [
                "keep the program as it is: no other one is certainly faster",
                "0.500 (rough)",
            ],
        ),
        (
            {"now": [100], "flat": [None, 50]},
            [
                "keep the program as it is: no other one is certainly faster",
                "nan (rough)",
            ],
        ),
        (
            {"now": "hangs", "baseline": [10] * 9, "flat": [9] * 9},
            ["use flat", "0.900 ("],
        ),
        (
            {"now": "hangs", "baseline": [10] * 9, "flat": [12] * 9},
            ["use NcclAllReduce", "1.200 ("],
        ),
        ({"now": "hangs", "flat": [10]}, ["use flat"]),
        ({"now": [100], "flat": "hangs"}, ["keep the program as it is: no other one is certainly"]),
        ({"now": "hangs"}, ["nothing was measured"]),
        ({"now": "hangs", "flat": "hangs"}, ["the program hangs with each of these, so it is not"]),
    ],
)
def test_what_is_certain_is_said(milliseconds, said):
    advice, *ratios = said
    found = verdict_on(**milliseconds)
    assert found.advice.startswith(advice) and found.advice in report(found, {})
    assert all(ratio in report(found, {}) for ratio in ratios)
    assert (found.best is not None) == advice.startswith("use")


def test_with_more_candidates_more_pairs_are_needed():
    flat = [95, 96, 97, 96, 95, 99, 96, 95]
    assert verdict_on(now=[100] * 8, flat=flat).best is not None
    found = verdict_on(now=[100] * 8, flat=flat, tree=[100] * 8)
    assert found.best is None and found.missing_pairs == 1
    assert "0.960 (rough)" in report(found, {})


def test_the_first_run_of_all_is_no_pair():
    first = run_of(CURRENT, 0, 0.5)
    slow, flat = verdict([first, *runs_of("flat", QUIET), *runs_of("now", QUIET)]).rows
    assert slow.name == CURRENT and slow.step == pytest.approx(0.1)
    assert flat.pairs == 9 and flat.ratio == pytest.approx(1.0)
    (row,) = verdict([first]).rows
    assert row.step == pytest.approx(0.5)
    assert verdict([first, *runs_of("flat", "hangs")]).rows == [row]


def test_without_a_run_more_minutes_are_needed():
    assert verdict([]).advice == "no run ended: more --minutes"


def test_the_table_has_what_was_measured_and_reasons_follow():
    found = verdict_on(now=QUIET, flat=[90] * 9, tree="hangs")
    lines = report(found, {"x": "no time"}).splitlines()
    first = "the program as it is 100 1 9"
    assert lines[1].split() == first.split()
    assert lines[2].split() == ["flat", "90", "0.900", "(0.891–0.909)", "9"]
    assert lines[4].startswith("step: from one sum of 1.049 MB to the next, median")
    assert lines[7:] == [
        "not measured: x: no time",
        "not measured: tree: hung: no step",
        "",
        "use flat",
    ]


def test_a_candidate_that_hangs_once_is_not_measured():
    hung = run_of("flat", 7, 0.0, "hung: no step")
    runs = [run for name in ("now", "flat", "tree") for run in runs_of(name, QUIET)]
    found = verdict([*runs, hung])
    assert found.best is None and [row.name for row in found.rows] == [CURRENT, "tree"]
    assert "\nnot measured: flat: hung: no step\n" in report(found, {})
