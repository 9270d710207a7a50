"""Chunks: each element once, in readiness order, of one dtype, cut at multiples of 64 bytes."""

import pytest
from helpers.models import gradients
from hypothesis import given
from hypothesis import strategies as st

from hier_allreduce.planning.algorithms import flat, hierarchical, schedules_of
from hier_allreduce.planning.chunks import GradientSize, Range, chunks_of
from hier_allreduce.planning.plan import Plan
from hier_allreduce.planning.schedules import rule, scheduled
from hier_allreduce.planning.strategy import Strategy, plan_for

KIB, MIB = 1 << 10, 1 << 20


def of(*sizes, dtype="float32", **fields):
    """Return gradients of so many KiB."""
    return [GradientSize(size * 256, 4, dtype, **fields) for size in sizes]


def plan_of(chunk_bytes, pack_below=None, **fields):
    """Return a plan of one schedule with such chunks."""
    most = chunk_bytes if pack_below is None else pack_below
    return Plan(((),), chunk_bytes, "flat", most, **fields)


def chunks_by(plan, grads):
    """Return the chunks of gradients of which the last one is ready first."""
    return chunks_of(grads, plan, range(len(grads))[::-1])


def numbers(chunks):
    """Return for each chunk its gradients' numbers."""
    found = []
    for chunk in chunks:
        found.append([part.gradient for part in chunk.ranges])
    return found


def bytes_of(chunk, grads):
    """Return the bytes of a chunk of some gradients."""
    ends = [grads[n].elements if stop is None else stop for n, _, stop in chunk.ranges]
    elements = sum(ends) - sum(part.start for part in chunk.ranges)
    return elements * grads[chunk.first].itemsize


UNKNOWN, TEXT = (
    GradientSize(None, 4, "float32", packable=False),
    GradientSize(8, 0, "string", packable=False),
)


@pytest.mark.parametrize(
    "sizes, chunk_kib, expected",
    [
        (of(100, 1, 2, 3), 40, [[3, 2, 1], [0], [0], [0]]),
        (of(1, 100, 1), 50, [[1], [1], [2, 0]]),
        (of(30, 30, 30), 100, [[2, 1, 0]]),
        (of(39, 39, 39), 100, [[2, 1], [0]]),
        (of(51, 51, 51), 100, [[2], [1], [0]]),
        (of(9, 99, 1, 100), 100, [[3], [2, 1], [0]]),
        (of(1, 1) + of(1, 1, dtype="float16"), 9, [[3, 2], [1, 0]]),
        ([*of(1, 1), UNKNOWN, TEXT, *of(1)], 9, [[3], [2], [4, 1, 0]]),
        (of(100, 1), 0, [[0], [1]]),
        (of(0, 1, 1), 9, [[2, 1], [0]]),
        ([], 9, []),
    ],
    ids=[
        "cut",
        "late pack",
        "packed",
        "full",
        "no room",
        "filled",
        "dtypes",
        "unpackable",
        "whole",
        "empty gradient",
        "nothing",
    ],
)
def test_small_gradients_are_packed_and_large_ones_cut(sizes, chunk_kib, expected):
    assert numbers(chunks_by(plan_of(chunk_kib * KIB), sizes)) == expected


@pytest.mark.parametrize(
    "mib, expected", [(10, 12), (16, 8), (32, 4), (64, 2), (128, 1), (1 << 20, 1)]
)
def test_a_users_chunks_are_filled(mib, expected):
    """ResNet-50 has 97.5 MiB."""
    grads = gradients("resnet50")
    chunks = chunks_by(plan_for(Strategy(chunk_bytes=mib * MIB), 8), grads)
    assert len(chunks) == expected
    assert all(bytes_of(chunk, grads) <= mib * MIB for chunk in chunks)


def test_by_the_rule_the_last_packed_chunks_are_smaller():
    grads = of(*[64] * 256)
    sizes = [bytes_of(chunk, grads) // KIB for chunk in chunks_by(rule(8), grads)]
    assert sum(sizes) == 256 * 64
    assert sizes[0] == 4096
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 256


def test_whole_gradients_are_packed_below_a_size_only():
    plan = plan_of(100 * KIB, pack_below=64 * KIB, whole=True)
    assert numbers(chunks_by(plan, of(900, 70, 1, 1))) == [[3, 2], [1], [0]]
    assert chunks_by(plan_of(KIB, whole=True), of(900))[0].ranges == (Range(0, 0, None),)


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.sampled_from([2, 4, 8, 16]), st.booleans()), max_size=20
    ),
    st.integers(64, 5000),
)
def test_each_element_travels_once_in_readiness_order(sizes, chunk_bytes):
    grads = [
        GradientSize(elements, itemsize, f"f{itemsize}", packable)
        for elements, itemsize, packable in sizes
    ]
    chunks = chunks_by(plan_of(chunk_bytes), grads)
    covered: dict = {number: [(0, 0)] for number in range(len(grads))}
    for chunk in chunks:
        assert len({grads[part.gradient].dtype for part in chunk.ranges}) == 1
        size = bytes_of(chunk, grads)
        assert size <= chunk_bytes or not grads[chunk.ranges[0].gradient].packable
        for number, start, stop in chunk.ranges:
            covered[number].append((start, grads[number].elements if stop is None else stop))
            assert start * grads[number].itemsize % 64 == 0
    for number, ranges in covered.items():
        assert ranges[-1][1] == grads[number].elements
        assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:]))
    sizes_of_chunks = [bytes_of(chunk, grads) for chunk in chunks]
    assert sum(sizes_of_chunks) == sum(gradient.bytes for gradient in grads)


def test_whole_variables_go_to_roots_by_bytes():
    grads = gradients("resnet50")
    plan = Plan(schedules_of(flat, 8), 4 * MIB, "flat", 2 * MIB, whole=True)
    chunks = chunks_by(plan, grads)
    sizes = [gradient.bytes for gradient in grads]
    loads = [0] * 8
    roots = [chunk.root for chunk in scheduled(chunks, plan, sizes)]
    for chunk, root in zip(chunks, roots):
        loads[root] += bytes_of(chunk, grads)
    in_two_groups = plan._replace(schedules=schedules_of(hierarchical, 8))
    # slots stay where they are
    assert [chunk.root for chunk in scheduled(chunks, in_two_groups, sizes)] == roots
    assert max(loads) <= sum(loads) / 8 + max(gradient.bytes for gradient in grads) / 2
