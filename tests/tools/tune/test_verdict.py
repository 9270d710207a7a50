"""What rows say: which all-reduce to use, and how certain that is."""

import json
from pathlib import Path

import pytest

from hier_allreduce_tools.tune.candidates import AS_IT_IS, Candidate
from hier_allreduce_tools.tune.protocol import ProgramFacts
from hier_allreduce_tools.tune.report import as_json, report
from hier_allreduce_tools.tune.run import Run
from hier_allreduce_tools.tune.verdict import verdict

BASELINE = "NcclAllReduce"
NAMES = {"now": AS_IT_IS, "baseline": BASELINE}
QUIET = [100, 100, 100, 101, 99, 100]
BUSY = [100, 140, 100, 180, 120, 150]


def runs_of(name, milliseconds):
    """Return runs with these steps in rounds 1, 2, …; None is a round without this candidate."""
    is_baseline = name == "baseline"
    candidate = Candidate(NAMES.get(name, name), BASELINE if is_baseline else "", was=is_baseline)
    if milliseconds == "hangs":
        return [Run(candidate, [], 1, Path("log"), "hung: no step")]
    return [
        Run(candidate, [step * 1e-3] * 5, number, Path("log"))
        for number, step in enumerate(milliseconds, 1)
        if step is not None
    ]


def runs_with(**milliseconds):
    return [run for name, steps in milliseconds.items() for run in runs_of(name, steps)]


@pytest.mark.parametrize(
    ("milliseconds", "sentences"),
    [
        (
            {"now": QUIET, "flat": [90] * 6},
            [
                "use flat, and not the program as it is",
                "flat takes 10% less time a step (9.1% to 10.9%) than the program as it is",
            ],
        ),
        (
            {"now": QUIET, "baseline": [80] * 6, "flat": [90] * 6},
            [
                "use NcclAllReduce (as it was), and not the program as it is",
                "NcclAllReduce (as it was) takes 20% less time a step",
                "flat takes 10% less time a step",
            ],
        ),
        (
            {"now": QUIET, "baseline": [120] * 6},
            [
                "keep the program as it is: no other one is faster",
                "NcclAllReduce (as it was) takes 20% more time a step (18.8% to 21.3%) than the pr",
            ],
        ),
        (
            {"now": QUIET, "flat": [99.8] * 6},
            [
                "keep the program as it is: no other one is faster",
                "flat takes as long as the program as it is (-1.2% to +0.8% time a step)",
            ],
        ),
        (
            {"now": QUIET, "flat": [97.5] * 5 + [102]},
            [
                "keep the program as it is: no other one is certainly faster; fewer other programs",
                "flat: no difference is certain (-4.9% to +1.4% time",
            ],
        ),
        (
            {"now": BUSY, "baseline": [80, 140, 130, 90, 120, 190]},
            ["keep the program as it is: no other one is certainly faster", "no difference is cer"],
        ),
        # other programs slow both runs of a pair
        (
            {"now": BUSY, "flat": [0.9 * step for step in BUSY]},
            ["use flat, and not", "flat takes 10% less time a step"],
        ),
        (
            {"now": [100] * 5, "flat": [50] * 5},
            [
                "keep the program as it is: nothing is certain with fewer than 6 pairs of runs;",
                "flat: nothing is certain with 5 of 6 pairs of runs",
            ],
        ),
        (
            {"now": [100], "flat": [None, 50]},
            ["keep the program as it is: nothing is certain", "flat has no run in a round of the"],
        ),
        (
            {"now": "hangs", "baseline": [10] * 6, "flat": [9] * 6},
            ["use flat: the program as it is was not", "flat takes 10% less time a step"],
        ),
        (
            {"now": "hangs", "baseline": [10] * 6, "flat": [12] * 6},
            ["use NcclAllReduce (as it was): the program as it is was not", "flat takes 20% more"],
        ),
        ({"now": [100], "flat": "hangs"}, ["nothing to compare: only the program as it is was"]),
        ({"now": "hangs"}, ["nothing was measured"]),
    ],
)
def test_what_is_certain_is_said(milliseconds, sentences):
    found = verdict(runs_with(**milliseconds))
    assert len(found.sentences) == len(sentences)
    for said, expected in zip(found.sentences, sentences):
        assert expected in said
    assert (found.best is not None) == sentences[0].startswith("use")
    assert all(said in report(found) for said in found.sentences)


@pytest.mark.parametrize(
    ("now", "flat", "words", "is_shown"),
    [
        ([100] * 5, [70] * 5, "nothing is certain with 5 of 6 pairs", False),
        ([100] * 6, [70, 300] * 3, "no difference is certain (unsure)", False),
        ([100] * 6, [40] * 5 + [20], "takes 64% less time a step (43.2% or more) than", False),
        ([100] * 6, [250] * 5 + [500], "takes 181% more time a step (76.1% or more)", False),
        # a great difference is said in figures where it is certain
        ([100] * 6, [400, 401, 399] * 2, "takes 300% more time a step (298", True),
    ],
)
def test_an_interval_that_is_too_wide_is_not_shown(now, flat, words, is_shown):
    found = verdict(runs_with(now=now, flat=flat))
    assert words in found.sentences[1]
    assert (" (unsure)" in report(found).splitlines()[2]) != is_shown


def test_with_more_candidates_more_pairs_are_needed():
    flat = [95, 96, 97, 96, 95, 99]
    assert verdict(runs_with(now=[100] * 6, flat=flat)).best is not None
    others = {name: [100] * 6 for name in "abcdefgh"}
    assert verdict(runs_with(now=[100] * 6, flat=flat, **others)).best is None


def test_steps_of_two_rows_have_their_ratio():
    slow, fast = verdict(runs_with(now=[100, 200, 150, 90, 80, 70], flat=[50, 190] * 3)).rows
    assert fast.ratio and fast.step / slow.step == pytest.approx(fast.ratio.middle)


def test_a_run_without_a_partner_is_not_in_the_mean():
    _, fast = verdict(runs_with(now=[100] * 6, flat=[50] * 6 + [900])).rows
    assert fast.step == pytest.approx(0.05) and len(fast.runs) == 6


def test_the_first_run_of_all_counts_if_there_is_no_other():
    first = Run(Candidate(), [0.5], 0, Path("log"))
    (row,) = verdict([first]).rows
    assert row.step == pytest.approx(0.5)
    slow, _ = verdict([first, *runs_with(now=QUIET, flat=QUIET)]).rows
    assert slow.step == pytest.approx(0.1, rel=1e-3) and len(slow.runs) == 6


def test_the_table_has_faults_and_left_out_candidates():
    runs = runs_with(now=QUIET, flat=[90] * 6, tree="hangs")
    left_out = {"x": "no time", "y": "no time", BASELINE: "no GPUs"}
    lines = report(verdict(runs, left_out)).splitlines()
    assert lines[1].split() == ["the", "program", "as", "it", "is", "100", "(99–101)", "6"]
    assert lines[2].split()[:2] == ["flat", "90"] and lines[2].endswith("6     ← use this")
    assert lines[3].split() == ["tree", "hung:", "no", "step"]
    assert "  x, y: no time" in lines and "  NcclAllReduce: no GPUs" in lines


def test_a_candidate_that_hangs_once_is_not_measured():
    hung = Run(Candidate("flat"), [], 7, Path("log"), "hung: no step")
    found = verdict([*runs_with(now=QUIET, flat=[90] * 6, tree=[101] * 6), hung])
    assert found.best is None and len(found.sentences) == 2
    assert report(found).splitlines()[2].split() == ["flat", "hung:", "no", "step"]


def test_the_cost_of_the_first_run_has_a_line():
    facts = ProgramFacts(cost="step 10.0 ms; after the pass 1.0 ms")
    first = Run(Candidate(), [0.5], 0, Path("log"), facts=facts)
    found = verdict([first, *runs_with(now=QUIET, flat=QUIET)])
    assert f"step 10 of the program as it is, traced: {facts.cost}" in report(found).splitlines()
    assert as_json(found)["cost"] == facts.cost
    assert "traced" not in report(verdict(runs_with(now=QUIET, flat=QUIET)))


def test_json_has_the_same():
    runs = runs_with(now=QUIET, flat=[90] * 6, tree=[1], baseline="hangs")
    found = as_json(verdict(runs, {"auto": "no time"}))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["best"], found["left_out"]) == ("flat", {"auto": "no time"})
    now, flat, tree, baseline = found["candidates"]
    assert (now["candidate"], now["ratio"], tree["ratio"]) == (AS_IT_IS, None, None)
    assert (flat["baseline"], baseline["baseline"], baseline["as_it_was"], baseline["step"]) == (
        False,
        True,
        True,
        None,
    )
    assert flat["step"] == pytest.approx(0.09) and flat["runs"][2]["round"] == 3
    assert flat["ratio"]["middle"] == pytest.approx(0.9, rel=1e-3) and flat["ratio"]["pairs"] == 6
