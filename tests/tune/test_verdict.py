"""What pairs of runs say: which all-reduce to use, and how certain that is."""

import json
from pathlib import Path

import pytest

from hier_allreduce.commands.tune.report import as_json, report
from hier_allreduce.commands.tune.run import Run
from hier_allreduce.commands.tune.verdict import ratio, verdict
from hier_allreduce.planning.candidate import Candidate

PEER = "NcclAllReduce"


def runs_of(name, milliseconds):
    """Return runs with these steps, in turns 1, 2, …; None is a turn without this candidate."""
    candidate = Candidate(name, PEER if name == PEER else "")
    if milliseconds == "hangs":
        return [Run(candidate, [], 1, Path("log"), "hung: no step")]
    return [
        Run(candidate, [step * 1e-3] * 5, turn, Path("log"))
        for turn, step in enumerate(milliseconds, 1)
        if step is not None
    ]


def runs_with(**milliseconds):
    return [run for name, steps in milliseconds.items() for run in runs_of(name, steps)]


def test_a_ratio_is_that_of_pairs():
    slow = runs_of("now", [100, 200, 100, 200, 150, 120])
    fast = runs_of("flat", [90, 180, 90, 180, 135, 108])
    assert ratio(fast, slow) == pytest.approx((0.9, 0.9, 0.9))


def test_the_interval_is_students():
    # logarithms of the last four pairs: mean 0.02, standard deviation 0.00816, t = 3.182
    steps = [100 * 2.718281828**value for value in (0.01, 0.02, 0.02, 0.03)]
    now = runs_of("now", [100] * 6)
    found = ratio(runs_of("flat", [50, 50, *steps]), now)
    assert found == pytest.approx((1.0202, 1.0070, 1.0335), abs=2e-4)


def test_one_pair_is_no_ratio():
    assert ratio(runs_of("flat", [1]), runs_of("now", [1, 2])) is None


QUIET = [100, 100, 100, 101, 99, 100]
BUSY = [100, 140, 100, 180, 120, 150]


@pytest.mark.parametrize(
    ("milliseconds", "sentences"),
    [
        (
            {"now": QUIET, "flat": [90] * 6},
            ["use flat: it takes 10% less time a step (8.8% to 11.2%) than the program as it is"],
        ),
        ({"now": QUIET, "flat": [99.8] * 6}, ["no difference: leave the program as it is"]),
        ({"now": QUIET, "flat": [98] * 6}, ["no difference is certain: leave the program"]),
        ({"now": [100] * 6, "flat": [101] * 6}, ["no difference: leave the program as it is"]),
        ({"now": QUIET, "flat": [110] * 6}, ["use the program as it is: flat, the fastest other"]),
        (
            {"now": QUIET, PEER: [120] * 6},
            [
                "use the program as it is: NcclAllReduce, the fastest other one, takes 20% more",
                "ours (the program as it is) takes 17% less time a step",
            ],
        ),
        (
            {"now": QUIET, PEER: [100] * 6},
            [
                "no difference",
                "ours (the program as it is) is not slower than NcclAllReduce (-1.3% to +1.3%",
            ],
        ),
        (
            {"now": QUIET, PEER: [80] * 6},
            ["use NcclAllReduce: it takes 20% less", "takes 25% more time a step"],
        ),
        (
            {"now": BUSY, PEER: [80, 140, 130, 90, 120, 190]},
            [
                "no difference is certain: leave",
                "no difference is certain (",
                "the runs are too few, or differ much: end other programs",
            ],
        ),
        (
            {"now": [100] * 6, PEER: [100, 100, 97, 103, 98, 102]},
            [
                "no difference is certain: leave",
                "ours (the program as it is) and NcclAllReduce: no difference is certain (-4",
            ],
        ),
        (
            {"now": [100] * 6, "flat": [100, 100, 96, 104, 96, 104]},
            ["no difference is certain: leave", "the runs are too few, or differ much"],
        ),
        # neither one candidate that differs, nor one that has run seldom, makes the machine busy
        (
            {"now": QUIET, "flat": [90] * 6, "tree": [91] * 6, "other": BUSY, "seldom": [100, 190]},
            ["use flat"],
        ),
        (
            {"now": QUIET, "flat": [90] * 6, "once": [5]},
            ["use flat: it takes 10% less time a step"],
        ),
        # other programs slow both runs of a pair
        ({"now": BUSY, "flat": [0.9 * step for step in BUSY]}, ["use flat: it takes 10% less"]),
        ({"now": "hangs", "flat": [9] * 6, PEER: [10] * 6}, ["use flat: the program as it is was"]),
        ({"now": [100], "flat": [50]}, ["nothing is certain: no other candidate has run"]),
        ({"now": [100], "flat": "hangs"}, ["nothing to compare: only the program as it is was"]),
        ({"now": "hangs"}, ["nothing was measured"]),
    ],
)
def test_what_is_certain_is_said(milliseconds, sentences):
    found = verdict(runs_with(**milliseconds))
    assert len(found.sentences) == len(sentences) + (PEER in milliseconds and len(sentences) == 1)
    for said, expected in zip(found.sentences, sentences):
        assert expected in said
    changed = sentences[0].startswith("use") and "use the program as it is" not in sentences[0]
    assert (found.best is not None) == changed
    assert all(said in report(found) for said in found.sentences)


@pytest.mark.parametrize(
    ("now", "flat", "words", "is_shown"),
    [
        ([100] * 2, [70, 140], "the fastest other one is flat (unsure)", False),
        ([100] * 2, [300, 150], "the fastest other one is flat (unsure)", False),
        ([100] * 4, [40, 40, 40, 10], "it takes 72% less time a step (14.8% or more) than", False),
        ([100] * 4, [240, 300, 200, 900], "takes 237% more time a step (15.3% or more)", False),
        # a great difference is said in figures where it is certain
        ([100] * 4, [400, 401, 399, 400], "takes 300% more time a step (298", True),
    ],
)
def test_an_interval_that_is_too_wide_is_not_shown(now, flat, words, is_shown):
    found = verdict(runs_with(now=now, flat=flat))
    assert words in found.sentences[0]
    assert (" (unsure)" in report(found).splitlines()[2]) != is_shown
    assert ("the runs are too few, or differ much" in found.sentences[-1]) != is_shown


@pytest.mark.parametrize(("tree", "named"), [([103, 98] * 3, "tree"), ([110] * 6, "flat")])
def test_the_fastest_other_one_is_measured_well_if_one_is(tree, named):
    found = verdict(runs_with(now=QUIET, flat=[70, 140], tree=tree))
    assert "no difference is certain: leave the program as it is" in found.sentences[0]
    assert f"the fastest other one is {named} (" in found.sentences[0]


def test_the_table_has_faults_and_left_out_candidates():
    runs = runs_with(now=QUIET, flat=[90] * 6, tree="hangs")
    found = verdict(runs, {"flat_tree-8MiB": "no time", "tree-8MiB": "no time", PEER: "no GPUs"})
    lines = report(found).splitlines()
    assert lines[1].split() == ["the", "program", "as", "it", "is", "100", "(99–101)", "6"]
    assert lines[2].split()[:2] == ["flat", "90"] and lines[2].endswith("6     ← use this")
    assert lines[3].split() == ["tree", "hung:", "no", "step"]
    assert "  flat_tree-8MiB, tree-8MiB: no time" in lines and "  NcclAllReduce: no GPUs" in lines


def test_a_candidate_that_hangs_once_is_not_measured():
    hung = Run(Candidate("flat"), [], 7, Path("log"), "hung: no step")
    found = verdict([*runs_with(now=QUIET, flat=[90] * 6, tree=[101] * 6), hung])
    assert found.best is None and "the fastest other one is tree" in found.sentences[0]
    assert report(found).splitlines()[2].split() == ["flat", "hung:", "no", "step"]


def test_json_has_the_same():
    runs = runs_with(now=QUIET, flat=[90] * 6, **{PEER: "hangs"})
    found = as_json(verdict(runs, {"tree": "no time"}))
    assert json.loads(json.dumps(found)) == found
    assert (found["best"], found["left_out"]) == ("flat", {"tree": "no time"})
    _, flat, peer = found["candidates"]
    assert (flat["peer"], peer["peer"], peer["step"]) == (False, True, None)
    assert flat["step"] == pytest.approx(0.09) and flat["runs"][2]["turn"] == 3


def test_the_picture_has_a_bar_for_each_measured_candidate(tmp_path):
    pytest.importorskip("matplotlib")
    from hier_allreduce.commands.tune.picture import draw

    runs = runs_with(now=QUIET, flat=[90] * 6, tree="hangs", **{PEER: [120] * 6})
    path = tmp_path / "steps.svg"
    draw(verdict(runs), path, "python train.py")
    text = path.read_text(encoding="utf-8")
    shown = {word for word in ("flat", "tree", PEER, "use this") if f"{word}" in text}
    assert shown == {"flat", PEER, "use this"} and "the program as it is" in text
