"""The tools of trust/ notice what they search for: a wrong sum, a wrong plan, an exception, a changed line."""

import ast
import random
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import graphs

TOP = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def trust_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(TOP)


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


def test_cases_are_the_same_every_time_and_differ():
    assert str(drawn(7)) == str(drawn(7)) != str(drawn(8))


def test_a_sum_with_one_wrong_contribution_is_found_by_soak():
    """The last tower's gradients change between the case and its run."""
    from collections import Counter

    from trust import cases, soak

    case = next(
        case for case in map(drawn, range(99)) if len(case.devices) > 1 and case.columns and cases.is_auditable(case)
    )
    with graphs.tf.Graph().as_default():
        assert soak._in_graph([case], True, Counter()) == []
    grads = [
        *case.columns[0].grads[:-1],
        case.columns[0].grads[-1] * 2 + np.asarray(1, case.columns[0].grads[-1].dtype),
    ]
    changed = case._replace(columns=[case.columns[0]._replace(grads=grads), *case.columns[1:]])
    real, cases.tensors = cases.tensors, lambda _, held: real(changed, held)
    try:
        ((seed, text),) = soak._in_graph([case], False, Counter())
    finally:
        cases.tensors = real
    assert seed == case.seed and "variable 0" in text


def test_faults_in_plans_are_judged_by_exact_count():
    from hier_allreduce import Plan, Reduce
    from hier_allreduce.planning import hierarchical
    from trust import mutants_of_plans as plans

    plan = hierarchical(5, [0, 3])
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


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_fuzz_keeps_what_is_no_error_of_this_package_once_for_each_place(tmp_path, monkeypatch):
    from hier_allreduce import StrategyError
    from trust import damage, fuzz

    def target(path):
        data = Path(path).read_bytes()
        if data == b"bad":
            return {}[data]
        raise StrategyError("\x1b[31m" if data == b"red" else "refused")

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    judge = fuzz.Judge(str(tmp_path), {"it": target}, is_guided=True)
    assert [bool(judge.judge("it", data)) for data in (b"bad", b"good", b"bad", b"red")] == [True, False, True, True]
    assert [finding.text.split(":")[0] for finding in judge.findings] == [
        "KeyError",
        "a message with control characters",
    ]
    assert judge.counts["inputs"] == 4 and judge.counts["  refused"] == 2
    given = damage.seeds()
    assert any(b"GPU0" in data for data in given)
    assert damage.damaged(given[0], random.Random(1), given) == damage.damaged(given[0], random.Random(1), given)


@pytest.mark.skipif(sys.version_info < (3, 9), reason="ast.unparse is new in Python 3.9")
def test_modules_are_changed_at_every_operator_of_their_functions():
    from trust import mutants_of_code as code

    tree = ast.parse('def f(a: int = 1) -> int:\n    """x"""\n    return a + 1 if a < 2 and not a else f"{a + 1}"\n')
    found = [list(code.changes(node))[number][0] for node, number in code.places(tree)]
    expected = ["one more", "returns None", "other branch", "Or", "Sub", "one more", "LtE", "one more", "without not"]
    assert sorted(found) == sorted(expected)
    mutant = code.Mutant("planning/plan", 0)
    assert ast.unparse(mutant.tree) != ast.unparse(
        ast.parse(Path(TOP, "hier_allreduce/planning/plan.py").read_text("utf-8"))
    )
    assert mutant.text.startswith("planning/plan.py:") and not mutant.is_none()


MODULE = '''
import functools

class Base:
    def size(self):
        """A docstring."""
        return 1

class Derived(Base):
    def size(self):
        return super().size() + 2

@functools.lru_cache(maxsize=None)
def total(more=3):
    if more > 2:
        more += sum(
            part * 2
            for part in (1, 2)
        )
    return more
'''


@pytest.mark.skipif(sys.version_info < (3, 11), reason="mutants are tried on the newest Python only")
def test_functions_take_the_changes_of_a_module_and_marks_say_what_ran(tmp_path, monkeypatch):
    import builtins
    import types

    from trust import mutants_of_code as code

    monkeypatch.setattr(code, "_PACKAGE", tmp_path)
    (tmp_path / "module.py").write_text(MODULE, encoding="utf-8")
    tree, changed = code._parsed("module"), {}

    def module(tree):
        space = {"__name__": "module"}
        exec(compile(ast.fix_missing_locations(tree), str(tmp_path / "module.py"), "exec"), space)
        return space

    for number in range(len(code.places(tree))):
        mutant, space = code.Mutant("module", number), module(tree)
        functions = [thing for thing in vars(space["Base"]).values() if isinstance(thing, types.FunctionType)]
        functions += [space["Derived"].size, space["total"].__wrapped__]
        assert mutant.put(functions), mutant.text
        try:
            changed[mutant.text.split(": ", 1)[1]] = (space["Derived"]().size(), space["total"]())
        except TypeError:
            changed[mutant.text.split(": ", 1)[1]] = None
    assert [name for name, result in changed.items() if result == (3, 9)] == ["GtE: more > 2 → more >= 2"]
    assert changed["one more: 3 → 4"] == (3, 10), "a default value"
    assert changed["returns None: return super().size() + 2 → return None"] == (None, 9)
    assert changed["FloorDiv: part * 2 → part // 2"] == (3, 4)
    seen = set()
    monkeypatch.setattr(builtins, "_trust_ran", seen.add, raising=False)
    marked = module(code._Marked("module").visit(code._parsed("module")))
    assert marked["Base"].size.__doc__ == "A docstring." and not seen
    marked["total"](0)
    lines = MODULE.split("\n")
    ran = [lines[line - 1].split("(")[0].strip() for _, line in sorted(seen)]
    assert ran == ["def total", "if more > 2:", "return more"]
    marked["total"]()
    owner = code.owners(tree)
    assert {("module", owner[node][0]) for node, _ in code.places(tree) if owner[node][1] == "total"} <= seen


def test_the_page_names_tests_that_exist():
    page = Path(TOP, "docs", "testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"((?:`test_\w+`,? ?)+) in `(tests/[\w/]+\.py)`", page)
    assert len(rows) > 5
    for names, file in rows:
        defined = Path(TOP, file).read_text(encoding="utf-8")
        for name in re.findall(r"test_\w+", names):
            assert f"def {name}(" in defined, f"{file} has no {name}"
