"""Parts of plans by hand, which other tests see only through whole all-reduces."""

from hier_allreduce.planning import Chunk, Copy, Ops, Piece, Plan, Reduce, Spec, run
from hier_allreduce.planning.buckets import cut
from hier_allreduce.planning.plan import operands


def test_a_root_has_the_last_reduce_or_the_first_copy():
    steps = (Reduce(0, (1,), 2), Reduce(0, (2,), 0), Copy(0, 0, 1), Copy(1, 1, 0), Copy(1, 0, 2))
    assert Plan(3, 3, steps).roots == (0, 1, 0)
    assert Plan(3, 1, (Reduce(0, (0, 1), 2),)).roots == (2,)


def test_an_empty_lane_adds_no_operand_a_full_one_does():
    """Device 2 is the lane of tower 0, device 3 that of tower 1."""
    steps = (Reduce(0, (0,), 2), Reduce(0, (1,), 3), Reduce(0, (3,), 2), Copy(0, 2, 3), Copy(0, 2, 0), Copy(0, 3, 1))
    assert operands(Plan(4, 1, steps, lanes=1)) == [1, 1, 2, 1, 1, 1]


class Finishing(Ops):
    def finish(self, chunk, root, total):
        return f"{total} finished on {root}"


def test_without_a_sum_a_value_is_finished_before_copies():
    steps = (Copy(0, 1, 0),)
    assert run(Plan(2, 2, steps), [["a", "b"], ["c", "d"]], Finishing()) == [
        ["c finished on 1", "b finished on 0"],
        ["c finished on 1", "d"],
    ]


def test_a_part_of_a_gradient_is_cut_from_where_it_begins():
    part = Chunk((Piece(1, 32, 96), Piece(0, 0, 64)), 512)
    assert cut(part, [Spec(128, 4, "float32")] * 2, [1, 2, 1]) == [
        Chunk((Piece(1, 32, 64),), 128),
        Chunk((Piece(1, 64, 96), Piece(0, 0, 32)), 256),
        Chunk((Piece(0, 32, 64),), 128),
    ]
