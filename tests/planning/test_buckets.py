"""Which gradients travel together: a partition, whatever the sizes."""

import hypothesis.strategies as st
from hypothesis import example, given, settings

from hier_allreduce.planning.buckets import Bucketing, Chunk, Piece, Spec, balanced, cut, make_buckets

KIB = 1 << 10
ITEMSIZE = {"float32": 4, "float16": 2, "int64": 8}

specs = st.lists(
    st.builds(
        lambda elements, dtype, packable: Spec(elements, ITEMSIZE[dtype], dtype, packable),
        st.one_of(st.none(), st.integers(0, 40), st.integers(0, 100_000)),
        st.sampled_from(sorted(ITEMSIZE)),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=30,
)
bucketings = st.builds(Bucketing, st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 9))


def floats(*elements):
    return [Spec(n, 4, "float32") for n in elements]


def variables(chunks):
    return [[piece.number for piece in chunk.pieces] for chunk in chunks]


@settings(deadline=None, max_examples=300)
@given(specs, bucketings)
def test_every_element_travels_exactly_once(gradients, how):
    chunks = make_buckets(gradients, how)
    ranges = {}
    for chunk in chunks:
        dtypes = {gradients[piece.number].dtype for piece in chunk.pieces}
        assert len(dtypes) == 1, "a chunk has one dtype"
        for variable, start, stop in chunk.pieces:
            ranges.setdefault(variable, []).append((start, stop))
    assert sorted(ranges) == list(range(len(gradients)))
    for variable, held in ranges.items():
        if held == [(0, None)]:
            continue
        held.sort()
        assert held[0][0] == 0 and held[-1][1] == gradients[variable].elements
        assert all(a[1] == b[0] for a, b in zip(held, held[1:])), "no gap, no overlap"


@settings(deadline=None, max_examples=300)
@given(specs, bucketings)
def test_chunk_sizes_are_what_their_pieces_hold(gradients, how):
    for chunk in make_buckets(gradients, how):
        if chunk.alone:
            assert chunk.bytes == gradients[chunk.pieces[0].number].bytes
        else:
            itemsize = gradients[chunk.pieces[0].number].itemsize
            size = sum((gradients[v].elements if stop is None else stop) - start for v, start, stop in chunk.pieces)
            assert chunk.bytes == size * itemsize


@settings(deadline=None)
@given(specs, bucketings)
def test_gradients_that_cannot_be_packed_travel_alone(gradients, how):
    chunks = make_buckets(gradients, how)
    alone = {chunk.pieces[0].number for chunk in chunks if chunk.alone}
    assert {v for v, spec in enumerate(gradients) if not spec.elements or not spec.packable} <= alone


def test_small_gradients_share_buckets_large_ones_are_alone():
    chunks = make_buckets(floats(10, 100_000, 20, 30), Bucketing(64 * KIB, 1 << 20))
    assert variables(chunks) == [[3, 2, 0], [1]]
    assert chunks[0] == Chunk((Piece(3, 0, 30), Piece(2, 0, 20), Piece(0, 0, 10)), 240)
    assert chunks[1].alone


def test_only_what_is_below_the_limit_shares_a_bucket():
    assert variables(make_buckets(floats(9, 10, 9), Bucketing(pack_below=40))) == [[2, 0], [1]]


def test_a_full_bucket_is_closed():
    assert variables(make_buckets(floats(*[256] * 5), Bucketing(64 * KIB, 2 * KIB))) == [[4, 3], [2, 1], [0]]


def test_dtypes_have_their_own_buckets():
    gradients = [Spec(8, 4, "float32"), Spec(8, 2, "float16"), Spec(8, 4, "float32"), Spec(8, 2, "float16")]
    assert variables(make_buckets(gradients, Bucketing())) == [[3, 1], [2, 0]]


def test_unknown_shapes_and_odd_dtypes_leave_packing_on():
    gradients = [*floats(8, 8), Spec(None, 4, "float32"), Spec(1, 8, "int64"), *floats(8)]
    assert variables(make_buckets(gradients, Bucketing())) == [[4, 1, 0], [3], [2]]


def test_gradients_of_one_byte_are_packed_too():
    (bucket,) = make_buckets([Spec(1, 1, "int8")] * 2, Bucketing())
    assert bucket == Chunk((Piece(1, 0, 1), Piece(0, 0, 1)), 2)


def test_nothing_is_packed_below_zero_bytes():
    assert all(chunk.alone for chunk in make_buckets(floats(1, 2, 3), Bucketing(pack_below=0)))


def test_splits_are_equal_and_cut_through_variables():
    chunks = make_buckets(floats(1600, 1600, 3200), Bucketing(splits=4))
    assert [chunk.bytes for chunk in chunks] == [6400] * 4
    assert variables(chunks) == [[2], [2], [1], [0]]
    assert len(make_buckets(floats(5, 6400), Bucketing(splits=8))) == 8


def test_less_than_64_bytes_for_each_share_are_not_cut():
    assert [len(make_buckets(floats(elements), Bucketing(splits=8))) for elements in (127, 128)] == [1, 8]


@settings(deadline=None)
@given(st.integers(1, 200_000), st.lists(st.floats(0.01, 1), min_size=1, max_size=9))
@example(41, [1.0, 1 / 64])  # the nearest multiple is past the end
def test_cuts_start_at_multiples_of_64_bytes_in_proportion(elements, shares):
    whole = Chunk((Piece(0, 0, None),), 4 * elements)
    parts = cut(whole, floats(elements), shares)
    assert sum(part.bytes for part in parts) == 4 * elements
    assert all(part.pieces[0].start % 16 == 0 for part in parts)
    if len(parts) == len(shares) and elements > 16 * 64:
        for part, share in zip(parts, shares):
            assert abs(part.bytes - 4 * elements * share / sum(shares)) <= 128


def test_two_shares_are_cut_as_any_others_are():
    specs = [Spec(64, 4, "float32")]
    (whole,) = make_buckets(specs, Bucketing())
    assert cut(whole, specs, [1, 1]) == [Chunk((Piece(0, 0, 32),), 128), Chunk((Piece(0, 32, 64),), 128)]
    assert len(make_buckets(specs, Bucketing(splits=2))) == 2


def test_a_part_of_a_gradient_is_cut_from_where_it_begins():
    part = Chunk((Piece(1, 32, 96), Piece(0, 0, 64)), 512)
    assert cut(part, [Spec(128, 4, "float32")] * 2, [1, 2, 1]) == [
        Chunk((Piece(1, 32, 64),), 128),
        Chunk((Piece(1, 64, 96), Piece(0, 0, 32)), 256),
        Chunk((Piece(0, 32, 64),), 128),
    ]


def test_equal_sizes_rotate_over_the_mains():
    assert balanced([7] * 5, range(3)) == [0, 1, 2, 0, 1]
    assert balanced([0] * 4, range(2)) == [0, 1, 0, 1]


def test_the_largest_get_their_mains_first():
    assert balanced([1, 1, 2], range(2)) == [1, 1, 0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(1, 9))
def test_no_main_carries_more_than_four_thirds_of_its_share(sizes, mains):
    load = [0] * mains
    for size, main in zip(sizes, balanced(sizes, range(mains))):
        load[main] += size
    best_possible = max([sum(sizes) / mains, *sizes, 0])
    # Graham's bound is against the optimum, which pairs of large chunks can put above the mean
    pairs = sorted(sizes, reverse=True)[mains - 1 : mains + 1]
    best_possible = max(best_possible, sum(pairs) if len(pairs) == 2 else 0)
    assert max(load) <= best_possible * 4 / 3 + 1
