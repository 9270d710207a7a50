"""Measurements in turn: the order of the runs, the rounds that do not count, quartiles."""

from hier_allreduce.sampling import in_turn, quartiles, timed


def test_all_run_once_a_round_in_changing_orders():
    ran, stages = [], []
    values = in_turn({name: lambda name=name: ran.append(name) or len(ran) for name in "abcd"}, 3, 2, stages.append)
    rounds = [ran[start : start + 4] for start in range(0, 20, 4)]
    assert all(sorted(each) == list("abcd") for each in rounds) and len(set(map(tuple, rounds))) > 1
    assert sorted(value for kept in values.values() for value in kept) == list(range(9, 21))  # not the first two rounds
    assert stages == ["warming up"] * 2 + ["round 1 of 3", "round 2 of 3", "round 3 of 3"]


def test_quartiles_have_a_width():
    assert quartiles([1, 2, 3, 4, 5]) == (2, 3, 4) and quartiles([1, 2, 3, 4, 5]).width == 2 / 3
    assert quartiles([0.0]).width == 0


def test_a_timed_step_is_taken_once():
    taken = []
    assert timed(lambda: taken.append(1))() >= 0 and taken == [1]
