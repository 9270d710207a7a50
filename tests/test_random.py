"""Random all-reduces agree with float64, and the check finds random faults in schedules.

`make soak` runs more of both.
"""

from functools import partial

import numpy as np
import tensorflow as tf
from helpers.graphs import XPU, dense, evaluate, gpus_or_cpus, held, on_towers, same_bits
from helpers.rows import without_none
from hypothesis import given, settings
from hypothesis import strategies as st

from hier_allreduce import Copy, HierAllreduceError, Reduce, Strategy, allreduce_grads
from hier_allreduce.planning.algorithms import BY_NAME, hierarchical, schedules_of
from hier_allreduce.planning.plan import check

EXAMPLES = settings().max_examples
SOAKS = EXAMPLES > 100  # with `make soak`; else few examples, for a quick run
ROWS = 11  # of the sparse gradients' variables
DTYPES = ("float32", "float32", "float16", "bfloat16", "float64", "complex64", "int32", "int64")
# rows of int64 cannot be added up on GPUs
NEVER_SPARSE = ("bfloat16",) if XPU == "cpu" else ("bfloat16", "int64")
ROUGH = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-52}  # others: of float32


def examples(few):
    return settings(max_examples=EXAMPLES if SOAKS else few)


# ---- all-reduces ---------------------------------------------------------------------------------


@st.composite
def groupings(draw, towers):
    """Groups of any sizes, in any order, that hold each tower once."""
    order = draw(st.permutations(range(towers)))
    cuts = sorted(draw(st.sets(st.integers(1, towers - 1), max_size=3))) if towers > 1 else []
    return tuple(tuple(order[start:stop]) for start, stop in zip([0, *cuts], [*cuts, towers]))


@st.composite
def strategies(draw, towers):
    algorithm = draw(st.sampled_from(["auto", *BY_NAME]))
    options = {}
    if algorithm == "hierarchical":
        options["groups"] = draw(st.none() | groupings(towers))
    if algorithm in ("flat", "tree"):
        options["main"] = draw(st.none() | st.integers(0, towers - 1))
    return Strategy(
        algorithm=algorithm,
        **options,
        chunk_bytes=draw(st.sampled_from([None, 0, 4096, 10_000, 10**6])),
        sparse=draw(st.sampled_from(["auto", "rows", "dense"])),
        missing="zeros",
        wire_dtype=draw(st.sampled_from([None, None, "float16", "bfloat16"])),
    )


@st.composite
def columns(draw, towers, average):
    """One variable: its dtype, its shape, what is known of it, and a kind for each tower."""
    dtype = draw(st.sampled_from([d for d in DTYPES if not (average and d.startswith("int"))]))
    any_rank = st.lists(st.integers(0, 5), max_size=3)
    vector = st.lists(st.integers(1, 5000), min_size=1, max_size=1)
    shape = tuple(draw(any_rank | vector))
    kinds = draw(
        st.lists(st.sampled_from(["dense"] * 4 + ["none"]), min_size=towers, max_size=towers)
    )
    if draw(st.integers(0, 3)) == 0 and dtype not in NEVER_SPARSE:
        shape = (ROWS, draw(st.integers(1, 3)))
        kinds = draw(
            st.lists(
                st.sampled_from(["sparse"] * 4 + ["dense", "none"]),
                min_size=towers,
                max_size=towers,
            )
        )
    return dtype, shape, draw(st.booleans()), kinds


@st.composite
def cases(draw):
    towers, average = draw(st.integers(1, 8)), draw(st.booleans())
    matrix = draw(st.lists(columns(towers, average), min_size=1, max_size=5))
    return towers, average, matrix, draw(strategies(towers)), draw(st.integers(0, 2**31 - 1))


def made(random, dtype, shape, is_known, kind):
    """Return a gradient for TensorFlow, and its exact value as a NumPy array.

    The first is a tensor, ``tf.IndexedSlices`` or None, the second of float64 or complex128.
    """
    if kind == "none":
        return None, np.zeros(shape)
    indices = random.randint(0, ROWS, random.randint(0, 6))
    numbers = random.randn(*(shape if kind == "dense" else (len(indices), *shape[1:]))) * 9
    exact = np.asarray(numbers).astype("float32" if dtype == "bfloat16" else dtype)
    tensor = held(exact, is_known)
    tensor = tf.cast(tensor, tf.bfloat16) if dtype == "bfloat16" else tensor
    wide = exact.astype("complex128" if dtype == "complex64" else "float64")
    if kind == "dense":
        return tensor, wide
    full = np.zeros(shape, wide.dtype)
    np.add.at(full, indices, wide)
    return tf.IndexedSlices(
        tensor, held(indices.astype("int64")), tf.constant(shape, tf.int64)
    ), full


@examples(12)
@given(cases())
def test_sums_and_means_are_those_of_float64_on_every_tower(case):
    towers, average, matrix, strategy, seed = case
    with tf.Graph().as_default():
        random, arrays = np.random.RandomState(seed), []

        def row(tower):
            pairs = [
                made(random, dtype, shape, known, kinds[tower])
                for dtype, shape, known, kinds in matrix
            ]
            arrays.append([array for _, array in pairs])
            return [grad for grad, _ in pairs]

        rows = on_towers(gpus_or_cpus(towers), row)
        result = allreduce_grads(rows, gpus_or_cpus(towers), average, strategy)
        is_none = [set(kinds) == {"none"} for *_, kinds in matrix]
        for reduced in result:
            assert [grad is None for grad in reduced] == is_none
        got = evaluate(list(map(without_none, result)))
    assert same_bits(got)
    present = [number for number, none in enumerate(is_none) if not none]
    for number, grad in zip(present, got[0]):
        dtype, shape, _, _ = matrix[number]
        share = towers if average else 1
        column = [row[number] for row in arrays]
        exact = sum(column) / share
        size = sum(map(np.abs, column)) / share
        wire = strategy.wire_dtype if dtype == "float32" and towers > 1 else None
        unit = ROUGH.get(wire or dtype, 2.0**-23)
        # A sum is rounded at each of up to K hops. The second term is for the smallest numbers of
        # 16 bits and for inputs that were rounded to bfloat16, which lose more than ``unit``.
        bound = 3 * (towers + 2) * unit * size + (towers + 2) * 1e-6
        assert (np.abs(dense(grad, shape) - exact) <= bound).all(), (dtype, strategy)


# ---- schedules -----------------------------------------------------------------------------------


def counted(steps, towers):
    """Run steps, and return how often the value of tower t contains that of tower k."""
    held_counts = np.eye(towers, dtype=int)
    for step in steps:
        if isinstance(step, Reduce):
            held_counts[step.dst] += sum(held_counts[src] for src in step.srcs)
        else:
            held_counts[step.dst] = held_counts[step.src]
    return held_counts


@st.composite
def schedules(draw):
    towers = draw(st.integers(2, 9))
    in_groups = partial(hierarchical, groups=draw(groupings(towers)))
    algorithm = draw(st.sampled_from([*BY_NAME.values(), in_groups]))
    return towers, list(draw(st.sampled_from(schedules_of(algorithm, towers))))


@examples(40)
@given(schedules())
def test_schedules_of_all_algorithms_give_every_tower_each_contribution_once(drawn):
    towers, steps = drawn
    assert (counted(steps, towers) == 1).all() and check(steps, towers) == tuple(steps)


@st.composite
def faults(draw):
    """A schedule with one or two changes: a step less, twice, elsewhere, or with another tower."""
    towers, steps = draw(schedules())
    for _ in range(draw(st.integers(1, 2))):
        if not steps:
            break
        at, tower = draw(st.integers(0, len(steps) - 1)), draw(st.integers(0, towers - 1))
        step, change = steps[at], draw(st.sampled_from(["drop", "repeat", "move", "dst", "src"]))
        if change == "drop":
            del steps[at]
        elif change == "repeat":
            steps.insert(draw(st.integers(0, len(steps))), step)
        elif change == "move":
            steps.insert(draw(st.integers(0, len(steps) - 1)), steps.pop(at))
        elif change == "dst":
            steps[at] = step._replace(dst=tower)
        else:
            if isinstance(step, Copy):
                steps[at] = Copy(tower, step.dst)
            else:
                steps[at] = Reduce((*step.srcs[1:], tower), step.dst)
    return towers, steps


@examples(150)
@given(faults())
def test_the_check_lets_no_wrong_sum_pass(drawn):
    towers, steps = drawn
    try:
        schedule = check(steps, towers)
    except HierAllreduceError:
        return
    assert (counted(schedule, towers) == 1).all()
