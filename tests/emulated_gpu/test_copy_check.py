"""A copy that changes a bit is named: its link, its chunk, its step."""

import re

import numpy as np
import pytest
import tensorflow as tf
from emulated_gpu import plugin
from helpers.graphs import (
    ALGORITHMS,
    chain,
    consumed_in_place,
    gpus_or_cpus,
    held,
    on_towers,
    session,
    sparse,
    tf1,
)
from helpers.real_gpus import ARE_EMULATED

from hier_allreduce import (
    HierAllreduceError,
    Strategy,
    all_reduces,
    allreduce_grads,
    copy_check,
)

pytestmark = pytest.mark.skipif(not ARE_EMULATED, reason="needs emulated GPUs")
NAMED = re.compile(
    r"step 7: the copy from tower (\d) \(/gpu:\1\) to tower (\d) \(/gpu:\2\) has other bits:"
    r" hier_allreduce/(\S+): "
)


def gradients(tower):
    """Return a large gradient, two that share a chunk, one with NaN, and rows."""
    values = [np.full([size], tower + 1, "float32") for size in (3000, 5, 7)]
    values.append(np.array([[np.nan, np.inf, tower]], "float32"))
    return [*map(held, values), sparse(tower, 4)]


def strategy_of(algorithm, wire):
    """Return a strategy whose chunks all have one schedule: no sum then uses the link of a copy."""
    if algorithm is chain:
        return Strategy(lambda towers, chunk: chain(towers, 0), chunk_bytes=4096, wire_dtype=wire)
    return Strategy(algorithm, main=0, chunk_bytes=4096, wire_dtype=wire)


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("towers", [2, 5, 8])
def test_a_flipped_bit_is_named(graph, towers, algorithm, wire):
    devices = gpus_or_cpus(towers)
    strategy = strategy_of(algorithm, wire)
    rows = allreduce_grads(on_towers(devices, gradients), devices, strategy=strategy)
    consumers = [consumed_in_place([[*row[:4], row[4].values, row[4].indices]]) for row in rows]
    check = copy_check(consumers)
    (built,) = all_reduces()
    with session() as running:
        step = [consumers, check.fingerprints]
        for number in range(1, 4):  # it also takes memory that later steps take again
            check.compare(running.run(step)[1], step=number)
        link = built.tensors[0].schedule[-1]
        for number in range(1, len(built.tensors) + 1):
            plugin.set_flip(*link, number)
            bits = running.run(step)[1]
            plugin.set_flip(0, 0, 0)
            with pytest.raises(HierAllreduceError, match="3 checked steps before had") as raised:
                check.compare(bits, step=7)
            *towers_named, chunk = NAMED.search(str(raised.value)).groups()
            assert list(map(int, towers_named)) == [*link]
            assert chunk in [tensor.name for tensor in built.tensors]
        check.compare(running.run(step)[1], step=8)
