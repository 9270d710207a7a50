"""Algorithms of users: those of the examples are right, and what is wrong is refused before it is used."""

import inspect
import random
import threading

import pytest
from helpers.adding import Adding
from helpers.own import ALGORITHMS, FILE, cases

from hier_allreduce import Copy, HierAllreduceError, Plan, Reduce, Strategy, verify
from hier_allreduce.planning import named
from hier_allreduce.planning.algorithms import checked, flat, plan_of, two_group
from hier_allreduce.planning.plan import run
from hier_allreduce.topology import load


def is_right(plan):
    """Whether numbers come to their sum everywhere, without a check by counting."""
    numbers = [[1 << 8 * device] * plan.chunks for device in range(plan.devices)]
    try:
        return run(plan, numbers, Adding()) == [[sum(row[0] for row in numbers)] * plan.chunks] * plan.devices
    except IndexError:
        return False


@pytest.mark.parametrize("algorithm, devices", cases(range(2, 17)))
def test_the_examples_are_right(algorithm, devices):
    plan = verify(plan_of(checked(algorithm), devices, range(devices)))
    assert is_right(plan) and plan.copies == 2 * (devices - 1) * devices


def test_the_examples_are_what_they_say():
    ours, quads, halving, trees, grid = (plan_of(each, 8, range(8)) for each in (two_group, *ALGORITHMS))
    assert set(quads.steps) == set(ours.steps)
    assert halving.steps[:7] == tuple(
        Reduce(0, (a,), a ^ bit) for a, bit in zip((4, 5, 6, 7, 2, 3, 1), (4,) * 4 + (2, 2, 1))
    )
    adding = [
        {step.dst for step in trees.steps if step.chunk == chunk and isinstance(step, Reduce)} for chunk in (0, 1)
    ]
    assert not adding[0] & adding[1]  # no device adds in both trees
    assert {abs(a - b) for a, b in grid.transfers()} == {
        1,
        3,
        4,
    }  # along rows of four, around their ends, along columns
    assert all(len(inspect.getsource(each).splitlines()) <= 30 for each in ALGORITHMS)


def broken(plan, rng):
    """A plan with a step that is dropped, done twice, or sent elsewhere."""
    steps, place = list(plan.steps), rng.randrange(len(plan.steps))
    fault = rng.choice(("dropped", "twice", "elsewhere"))
    changed = {
        "dropped": [],
        "twice": [steps[place]] * 2,
        "elsewhere": [steps[place]._replace(dst=rng.randrange(plan.devices))],
    }
    steps[place : place + 1] = changed[fault]
    return fault, Plan(plan.devices, plan.chunks, tuple(steps))


def test_broken_variants_are_refused_with_the_step():
    rng, refused = random.Random(36), {"dropped": 0, "twice": 0, "elsewhere": 0}
    while sum(refused.values()) < 200:
        algorithm, devices = rng.choice(cases(range(2, 17)))
        turn = rng.randrange(devices)
        fault, plan = broken(plan_of(algorithm, devices, [turn]), rng)
        if fault == "elsewhere" and is_right(plan):
            continue  # other ways to the sum
        with pytest.raises(
            HierAllreduceError, match=r"chunk 0, (after the last )?step \d+( of \d+)?, (Reduce|Copy)\(.*\): "
        ) as error:
            verify(plan)
        assert str(error.value).count("\n") == 1 + devices  # the table
        refused[fault] += 1
    assert min(refused.values()) > 40


def one_copy_short(devices, chunk):
    return flat(devices, chunk)[:-1]


def endless(devices, chunk):
    while True:
        yield Reduce(chunk, (1,), 0)


def fails(devices, chunk):
    raise KeyError("no such device")


CALLS = []


def another_each_time(devices, chunk):
    CALLS.append(chunk)
    return [step._replace(chunk=chunk) for step in flat(devices, len(CALLS))]


@pytest.mark.parametrize(
    "algorithm, message",
    [
        (
            one_copy_short,
            r"^one_copy_short\(4, 2\): chunk 2, after the last step 3, Copy\(.*\): device 3 misses \[0, 1, 2\]",
        ),
        (endless, r"^endless\(4, 2\): .*more than 32 steps; a sum over 4 devices needs at most 6"),
        (fails, r"^fails\(4, 2\): KeyError: 'no such device'"),
        (another_each_time, r"^another_each_time\(4, 2\) returns other steps when called again"),
        (lambda devices, chunk: None, r"^<lambda>\(4, 2\): TypeError: 'NoneType'"),
        (lambda devices: [], r"\(4, 2\): TypeError: .*takes 1 positional argument"),
        (lambda devices, chunk: [(chunk, 0, 1)], r"step 1 is \(2, 0, 1\): expected a Reduce or a Copy"),
        (lambda devices, chunk: [Copy(0, 0, 1)], r"step 1 is Copy\(chunk=0.*\): expected steps of chunk 2"),
        (lambda devices, chunk: [Reduce(chunk, 1, 0)], r"step 1 is Reduce\(.*\): expected numbers of devices, in srcs"),
        (lambda devices, chunk: [Copy(chunk, "0", 1)], r"step 1 is Copy\(.*\): expected numbers of devices"),
        (lambda devices, chunk: flat(devices + 1, chunk), r"chunk 2, step 1 of 5, .*: there are devices 0 to 3 only"),
    ],
)
def test_functions_that_are_wrong_are_refused(algorithm, message):
    with pytest.raises(HierAllreduceError, match=message):
        checked(algorithm)(4, 2)


def test_a_function_that_never_returns_is_refused(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("hier_allreduce.planning.algorithms._PATIENCE", 0.05)
    with pytest.raises(HierAllreduceError, match=r"\(4, 2\): TimeoutError: no steps after 0.05 s"):
        checked(lambda devices, chunk: ended.wait() and [])(4, 2)
    ended.set()


def test_who_asks_for_the_topology_gets_it():
    def asking(devices, chunk, topology):
        return flat(devices, chunk) if topology == load("dgx-1v") else []

    assert checked(asking, load("dgx-1v"))(8, 0) == flat(8, 0)
    with pytest.raises(HierAllreduceError, match="algorithm asking has an argument 'topology': give topology= too"):
        checked(asking)


def test_functions_are_found_by_file_and_name(tmp_path):
    assert named("tree") == "tree"
    assert named(f"{FILE}:two_quads").__name__ == "two_quads"
    (tmp_path / "mine.py").write_text("1 / 0\n")
    for name, message in (
        (f"{FILE}:two", "has no function 'two'"),
        (f"{tmp_path / 'mine.py'}:f", "mine.py' raises ZeroDivisionError"),
        (f"{tmp_path / 'none.py'}:f", "none.py' raises FileNotFoundError"),
        ("heirarchical", "did you mean 'hierarchical'.*FILE.py:NAME"),
    ):
        with pytest.raises(HierAllreduceError, match=message):
            named(name)


def test_a_strategy_prints_the_name_of_its_function():
    assert str(Strategy(algorithm=endless)).startswith("endless all-reduce\n")
    with pytest.raises(HierAllreduceError, match=r"groups=.* not 'endless'"):
        Strategy(algorithm=endless, groups=((0, 1),))
    assert str(Strategy(plan=plan_of(flat, 2, [0, 1])).for_optimizers()).splitlines()[:2] == [
        "flat all-reduce",
        "  as planned in a Plan: 2 devices, 0 lanes each, 2 chunks",
    ]
