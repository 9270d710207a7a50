"""Buckets and cuts at their limits. Each test notices a change of the code that no other test noticed."""

from hier_allreduce.planning import Bucketing, Chunk, Piece, Spec
from hier_allreduce.planning.buckets import cut, make_buckets


def test_two_shares_are_cut_as_any_others_are():
    specs = [Spec(64, 4, "float32")]
    (whole,) = make_buckets(specs, Bucketing())
    assert cut(whole, specs, [1, 1]) == [Chunk((Piece(0, 0, 32),), 128), Chunk((Piece(0, 32, 64),), 128)]
    assert len(make_buckets(specs, Bucketing(splits=2))) == 2


def test_gradients_of_one_byte_are_packed_too():
    (bucket,) = make_buckets([Spec(1, 1, "int8")] * 2, Bucketing())
    assert bucket == Chunk((Piece(1, 0, 1), Piece(0, 0, 1)), 2)
