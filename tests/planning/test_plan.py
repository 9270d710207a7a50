"""Plans: the check by counting, the interpreter, and how plans print."""

import numpy as np
import pytest
from helpers.adding import Adding

from hier_allreduce import Copy, HierAllreduceError, Plan, Reduce, verify
from hier_allreduce.planning.algorithms import plan_of, two_group
from hier_allreduce.planning.plan import Ops, operands, run

RING_OF_THREE = Plan(3, 1, (Reduce(0, (1,), 0), Reduce(0, (0,), 2), Copy(0, 2, 0), Copy(0, 2, 1)))


def with_step(number, step):
    steps = list(RING_OF_THREE.steps)
    steps[number : number + 1] = [step] if step else []
    return Plan(3, 1, tuple(steps))


def test_a_plan_that_is_right_comes_back_from_verify():
    assert verify(RING_OF_THREE) is RING_OF_THREE


@pytest.mark.parametrize(
    "plan, message",
    [
        (
            with_step(1, None),
            r"step 2 of 3, Copy\(.*dst=0\): copies what is not the complete sum: device 2 misses \[0, 1\]",
        ),
        (with_step(3, None), r"after the last step 3, Copy\(.*dst=0\): device 1 misses \[0, 2\]\n"),
        (with_step(1, Reduce(0, (0, 1), 2)), r"step 2 of 4, Reduce\(.*dst=2\): counts \[1\] twice"),
        (with_step(0, Reduce(0, (2,), 0)), r"step 2 of 4, Reduce\(.*dst=2\): counts \[2\] twice"),
        (with_step(1, Copy(0, 0, 2)), r"step 2 of 4, Copy\(.*dst=2\): .* device 0 misses \[2\]"),
        (with_step(2, Reduce(0, (2,), 0)), r"step 3 of 4, Reduce\(.*dst=0\): counts \[0, 1\] twice"),
        (with_step(2, Copy(0, 0, 1)), r"step 3 of 4, Copy\(.*\): .* device 0 misses \[2\]"),
        (with_step(0, Copy(0, 0, 1)), r"step 1 of 4, Copy\(.*dst=1\): .* device 0 misses \[1, 2\]"),
        (with_step(3, Copy(0, 2, 0)), r"step 4 of 4, Copy\(.*\): device 0 has the sum already"),
        (with_step(0, Reduce(0, (0,), 0)), r"step 1 of 4, Reduce\(.*\): a step needs sources, all of them other than"),
        (with_step(0, Reduce(0, (), 0)), r"step 1 of 4, Reduce\(.*\): a step needs sources"),
        (with_step(3, Copy(0, 1, 1)), r"step 4 of 4, Copy\(.*\): a step needs sources"),
        (with_step(0, Reduce(0, (3,), 0)), r"step 1 of 4, Reduce\(.*\(3,\).*\): there are devices 0 to 2 only"),
        (with_step(3, Copy(0, 2, -1)), r"step 4 of 4, Copy\(.*dst=-1\): there are devices 0 to 2 only"),
        (with_step(3, Copy(1, 2, 1)), r"Copy\(chunk=1.*\): there are chunks 0 to 0 only"),
        (Plan(2, 1, ()), r"chunk 0, after the last step, of none: device 0 misses \[1\]; device 1 misses \[0\]"),
    ],
)
def test_verify_names_the_chunk_the_step_and_the_fault(plan, message):
    with pytest.raises(HierAllreduceError, match=message):
        verify(plan)


def test_the_error_shows_what_each_device_holds():
    with pytest.raises(HierAllreduceError) as refused:
        verify(with_step(1, None))
    _, *table = str(refused.value).splitlines()
    assert [line.split() for line in table[1:]] == [["0", "0,", "1"], ["1", "1"], ["2", "2"]]


def test_verify_names_the_one_chunk_of_many_that_is_wrong():
    good = plan_of(two_group, 4, range(9))
    broken = tuple(step for step in good.steps if step != Copy(6, 2, 3))
    assert len(broken) == len(good.steps) - 1
    with pytest.raises(HierAllreduceError, match=r"^chunk 6, after the last step .*: device 3 misses \[0, 1, 2\]\n"):
        verify(Plan(4, 9, broken))


def test_one_device_or_no_chunks_need_no_steps():
    assert verify(Plan(1, 2, ())).transfers() == {}
    assert verify(Plan(3, 0, ())).roots == ()


def test_run_adds_arrays_and_leaves_its_input_alone():
    values = [[np.float32(1)], [np.float32(2)], [np.float32(4)]]
    assert run(RING_OF_THREE, values, Adding()) == [[7], [7], [7]]
    assert values == [[1], [2], [4]]


def test_a_sum_is_finished_once_on_its_root_before_copies():
    class Halving(Adding):
        def finish(self, chunk, root, total):
            seen.append((chunk, root, total))
            return total / 2

    seen = []
    assert run(RING_OF_THREE, [[1], [2], [5]], Halving()) == [[4], [4], [4]]
    assert seen == [(0, 2, 8)]


def test_without_a_sum_a_value_is_finished_before_copies():
    class Finishing(Ops):
        def finish(self, chunk, root, total):
            return f"{total} finished on {root}"

    steps = (Copy(0, 1, 0),)
    assert run(Plan(2, 2, steps), [["a", "b"], ["c", "d"]], Finishing()) == [
        ["c finished on 1", "b finished on 0"],
        ["c finished on 1", "d"],
    ]


def test_a_root_has_the_last_reduce_or_the_first_copy():
    steps = (Reduce(0, (1,), 2), Reduce(0, (2,), 0), Copy(0, 0, 1), Copy(1, 1, 0), Copy(1, 0, 2))
    assert Plan(3, 3, steps).roots == (0, 1, 0)
    assert Plan(3, 1, (Reduce(0, (0, 1), 2),)).roots == (2,)


def test_the_two_halves_make_the_whole():
    plan = plan_of(two_group, 5, range(3))
    values = [[10**device + chunk for chunk in range(3)] for device in range(5)]
    reduced = run(plan.reduce_half(), values, Adding())
    assert [reduced[root][chunk] for chunk, root in enumerate(plan.roots)] == [11111, 11116, 11121]
    assert run(plan.copy_half(), reduced, Adding()) == run(plan, values, Adding())


def test_transfers_count_every_source_of_every_step():
    assert RING_OF_THREE.transfers() == {(1, 0): 1, (0, 2): 1, (2, 0): 1, (2, 1): 1}


def test_an_empty_lane_adds_no_operand_a_full_one_does():
    """Device 2 is the lane of tower 0, device 3 that of tower 1."""
    steps = (Reduce(0, (0,), 2), Reduce(0, (1,), 3), Reduce(0, (3,), 2), Copy(0, 2, 3), Copy(0, 2, 0), Copy(0, 3, 1))
    assert operands(Plan(4, 1, steps, lanes=1)) == [1, 1, 2, 1, 1, 1]


def test_a_plan_prints_as_lines_that_can_be_reviewed():
    assert str(plan_of(two_group, 8, [0])).splitlines()[1:] == [
        "c0  1,2,3→0  sum",
        "c0  5,6,7→4  sum",
        "c0  0→4  sum",
        "c0  4→0,5,6,7  copy",
        "c0  0→1,2,3  copy",
    ]
    assert str(plan_of(two_group, 8, [0])).startswith("two_group: 8 devices, 1 chunk")
