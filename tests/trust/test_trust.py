"""The tools of trust/ notice what they search for: a wrong sum, a wrong plan, an exception."""

import importlib
import random
import re
import sys
import tempfile
from collections import Counter
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from helpers import graphs, strategies
from hypothesis import given, settings

TOP = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def trust_can_be_imported(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(TOP)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where findings are kept


def drawn(seed, **changes):
    from trust import cases

    return cases.draw(seed, "graph")._replace(spoilt="", **changes)


def right(case):
    """The results that a case must have, in its dtypes."""
    from trust import cases

    row = []
    for column in case.columns:
        total = cases._total(column)[0] / (len(case.devices) if case.average else 1)
        missing = all(grad is None for grad in column.grads)
        row.append(None if missing else np.asarray(total).astype(cases._numpy(column.dtype)))
    return [list(row) for _ in case.devices]


def test_soak_accepts_right_results_and_notices_each_wrong_one():
    from trust import cases

    wrong = 0
    for seed in range(12):
        case = drawn(seed)
        assert cases.check(case, right(case)) == "", case
        variable = next((v for v, column in enumerate(case.columns) if is_summed(case, column)), None)
        if variable is not None:
            results = right(case)
            for row in results:
                row[variable] = row[variable] + np.asarray(1, row[variable].dtype)
            assert "instead of" in cases.check(case, results)
            results[0][variable] = right(case)[0][variable]
            assert len(case.devices) == 1 or "other bits" in cases.check(case, results)
            wrong += 1
    assert wrong


def is_summed(case, column):
    """Whether a column has whole numbers whose sum must be exact."""
    return not case.average and column.is_whole and 0 not in column.shape and column.grads[0] is not None


@settings(max_examples=20)
@given(strategies.generators)
def test_any_case_is_reduced_right(rng):
    from trust import cases, soak

    case = cases.drawn(rng, "graph")
    assert soak._in_graph([case._replace(columns=case.columns[:6])], False, Counter()) == []


def test_cases_are_the_same_every_time_and_differ():
    assert str(drawn(7)) == str(drawn(7)) != str(drawn(8))


def test_a_sum_with_one_wrong_contribution_is_found_by_soak():
    """The last tower's gradients change between the case and its run."""
    from trust import cases, soak

    case = next(
        case for case in map(drawn, range(99)) if len(case.devices) > 1 and case.columns and cases.is_auditable(case)
    )
    with graphs.tf.Graph().as_default():
        assert soak._in_graph([case], True, Counter()) == []
    grads = [
        *case.columns[0].grads[:-1],
        np.asarray(case.columns[0].grads[-1] * 2 + np.asarray(1, case.columns[0].grads[-1].dtype)),
    ]
    changed = case._replace(columns=[case.columns[0]._replace(grads=grads), *case.columns[1:]])
    real, cases.tensors = cases.tensors, lambda _, held: real(changed, held)
    try:
        (seed, text), *_ = soak._in_graph([case], False, Counter())
    finally:
        cases.tensors = real
    assert seed == case.seed and "variable 0" in text


def test_soak_runs_each_graph_with_other_shapes_too(monkeypatch):
    from trust import cases, soak

    case = next(case for case in map(drawn, range(99)) if any(not column.is_static for column in case.columns))
    shapes, real = [], cases.check

    def check(case, rows):
        shapes.append([column.shape for column in case.columns])
        return real(case, rows)

    monkeypatch.setattr(cases, "check", check)
    assert soak._in_graph([case], False, Counter()) == []
    assert len(shapes) == 2 and shapes[0] != shapes[1]


@pytest.mark.tf2
def test_soak_calls_eagerly_from_one_thread_at_a_time(monkeypatch):
    from trust import cases, soak

    was_locked, real = [], cases.reduce_case

    def reduce_case(*given):
        was_locked.append(soak._EAGERLY.locked())
        return real(*given)

    monkeypatch.setattr(cases, "reduce_case", reduce_case)
    for mode in ("eager", "function"):
        assert soak._alone(soak._small(3, mode), Counter()) == ""
    assert was_locked == [True, False]


def test_faults_in_plans_are_judged_by_exact_count():
    from hier_allreduce import Plan, Reduce
    from hier_allreduce.planning.algorithms import plan_of, two_group
    from trust import mutants_of_plans as plans

    plan = plan_of(two_group, 5, [0, 3])
    assert plans.is_harmless(plan) and not plans.is_refused(plan)
    assert not plans.is_harmless(Plan(5, 2, plan.steps[1:]))
    assert not plans.is_harmless(Plan(5, 2, (*plan.steps, Reduce(0, (9,), 0))))
    rng, names = random.Random(0), set()
    for _ in range(300):
        made = plans.mutant(plan, rng)
        if made:
            names.add(made[0])
            assert plans.is_harmless(made[1]) or plans.is_refused(made[1]), made
    assert names == set(plans.FAULTS)


fuzzed = pytest.mark.skipif(sys.platform == "win32", reason="has no such timers")


@fuzzed
def test_fuzz_keeps_a_fault_once_for_each_place(tmp_path):
    from hier_allreduce import HierAllreduceError
    from trust import fuzz

    def target(path):
        data = Path(path).read_bytes()
        if data == b"bad":
            return {}[data]
        raise HierAllreduceError("refused")

    judge = fuzz.Judge({"it": target}, str(tmp_path))
    assert not any(judge.judge("it", data)[0] for data in (b"bad", b"good", b"bad"))
    (finding,) = judge.findings
    assert "KeyError: b'bad'" in finding.text
    assert judge.counts["inputs"] == 3 and judge.counts["  refused"] == 1


def lopsided(labels, kinds):
    return any(kinds[a][b] != kinds[b][a] for a in range(len(labels)) for b in range(a))


def a_list(value, *others):
    return isinstance(value, list)


@fuzzed
@pytest.mark.parametrize(
    "target, module, name, is_met",
    [("table", "topology.nvidia_smi", "_symmetric", lopsided), ("machine", "presets", "_number", a_list)],
)
def test_fuzz_finds_a_planted_key_error(tmp_path, monkeypatch, target, module, name, is_met):
    from trust import fuzz

    functions, reader = fuzz.targets(), importlib.import_module(f"hier_allreduce.{module}")
    real = getattr(reader, name)
    monkeypatch.setattr(reader, name, lambda *given: {}["planted"] if is_met(*given) else real(*given))
    judge = fuzz.Judge(functions, str(tmp_path))
    fuzz.search(judge, [target], 0, takewhile(lambda _: not judge.findings, range(10_000)))
    (finding,) = judge.findings
    assert "KeyError: 'planted'" in finding.text and Path(finding.seed).exists()


def test_the_page_names_tests_that_exist():
    page = Path(TOP, "docs", "testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"((?:`test_\w+`,? ?)+) in `(tests/[\w/]+\.py)`", page)
    assert len(rows) > 5
    for names, file in rows:
        defined = Path(TOP, file).read_text(encoding="utf-8")
        for name in re.findall(r"test_\w+", names):
            assert f"def {name}(" in defined, f"{file} has no {name}"
