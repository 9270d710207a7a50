"""Sums and means against float64: each algorithm × towers × kind of gradient × front end."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    ALGORITHMS,
    XPU,
    chain,
    dense,
    evaluate,
    gpus_or_cpus,
    held,
    on_towers,
    same_bits,
    tensors,
    tf1,
)
from helpers.rows import for_each

from hier_allreduce import Strategy, allreduce_grads

ROWS = 100  # of the sparse gradients' variables
# how far the mean of whole numbers may be off, in the kinds that have few bits
ROUGH = {"bfloat16": 2e-2, "float16": 3e-3, "sparse float16": 3e-3}


def values_of(tower, average, towers):
    """One tower's gradients by kind: whole numbers, whose sums are exact in any order."""
    random = np.random.RandomState(tower)
    small = ("uint8", "int8") if XPU == "cpu" or towers < 3 else ()  # GPUs add up two of them

    def whole(shape, dtype):
        return random.randint(-9, 9, shape).astype(dtype)

    kinds = {
        "matrix": whole((50, 3), "float32"),
        "scalar": whole((), "float32"),
        "empty": whole((2, 0, 3), "float32"),
        "vector": whole((129,), "float32"),
        "large": whole((300, 100), "float32"),
        "float16": whole((40,), "float16"),
        "bfloat16": whole((7, 2), "float32"),
        "float64": whole((9,), "float64"),
        "complex64": whole((3, 3), "complex64"),
        "unknown shape": whole((2, 3), "float32"),
        "sparse": whole((tower, 2), "float32"),
        "sparse float16": whole((2, 2), "float16"),
        "sparse and dense": whole((ROWS, 2), "float32"),
        "missing": whole((4, 2), "float32"),
    }
    integers = {dtype: whole((5,), dtype) + 9 for dtype in ("int32", "int64", *small)}
    return kinds if average else {**kinds, **integers}


def tensors_of(tower, average, towers):
    """The values as tensors, ``tf.IndexedSlices`` and None."""
    tensors = {}
    for kind, value in values_of(tower, average, towers).items():
        if kind.startswith("sparse") and not (kind == "sparse and dense" and tower == 0):
            rows = value[:5]
            indices = np.arange(len(rows), dtype="int64") * 3 % 4 + tower
            tensors[kind] = tf.IndexedSlices(
                held(rows), held(indices), tf.constant([ROWS, 2], tf.int64)
            )
        elif kind == "bfloat16":
            tensors[kind] = tf.cast(held(value), tf.bfloat16)
        elif kind == "unknown shape":
            tensors[kind] = tf1.placeholder_with_default(value, None)
        else:
            tensors[kind] = None if kind == "missing" and tower == towers - 1 > 0 else held(value)
    return tensors


def zeros_for_none(rows):
    return for_each(lambda grad: tf.zeros([]) if grad is None else grad, rows)


def in_session(rows, reduce):
    with tf.Graph().as_default():
        built = rows()
        return evaluate([zeros_for_none(built), reduce(built)])


def eagerly(rows, reduce):
    built = rows()
    return zeros_for_none(built), reduce(built)


def in_function(rows, reduce):
    """The gradients are eager tensors that the function captures."""
    built = rows()
    return zeros_for_none(built), tf.function(lambda: reduce(built))()


CASES: list = [(in_session, towers) for towers in (1, 2, 3, 5, 8)]
CASES += [
    pytest.param(end, towers, marks=pytest.mark.tf2)
    for end in (eagerly, in_function)
    for towers in (1, 3, 8)
]


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
@pytest.mark.parametrize("front_end, towers", CASES)
def test_every_kind_on_every_tower(front_end, algorithm, towers, average):
    devices = gpus_or_cpus(towers)
    # small chunks cut the large gradient
    chunk_bytes = {chain: 4096, "tree": 0}.get(algorithm)
    strategy = Strategy(algorithm=algorithm, missing="zeros", chunk_bytes=chunk_bytes)
    given, got = front_end(
        lambda: on_towers(devices, lambda tower: list(tensors_of(tower, average, towers).values())),
        lambda rows: allreduce_grads(rows, devices, average, strategy),
    )
    assert same_bits(got)
    for number, kind in enumerate(values_of(0, average, towers)):
        expected = sum(dense(row[number]) for row in given)
        rough = 0.0
        if average:
            expected = expected / towers
            rough = ROUGH.get(kind, 1e-6)
        np.testing.assert_allclose(
            dense(got[-1][number]), expected, rtol=rough, atol=rough, err_msg=kind
        )
        for given_part, got_part in zip(tensors(given[0][number]), tensors(got[0][number])):
            assert given_part.dtype == got_part.dtype, kind
