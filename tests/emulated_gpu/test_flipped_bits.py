"""A copy that changes a bit is named: its link, its chunk, its step."""

import re

import numpy as np
import pytest
from emulated_gpu import plugin
from helpers.clusters import job
from helpers.graphs import (
    ALGORITHMS,
    chain,
    config,
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
    TowerOptimizer,
    all_reduces,
    allreduce_grads,
    copy_check,
)
from hier_allreduce.planning.plan import copies

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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("towers", range(2, 9))
def test_a_flipped_bit_is_named(graph, towers, algorithm):
    # Half of the cases, so that each algorithm and each number of towers is in both.
    wire = "float16" if (towers + ALGORITHMS.index(algorithm)) % 2 else None
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
        link = copies(built.tensors[0].schedule)[-1]
        for number in range(1, len(built.tensors) + 1):
            plugin.set_flip(link.src, link.dst, number)
            bits = running.run(step)[1]
            plugin.set_flip(0, 0, 0)
            with pytest.raises(HierAllreduceError, match="3 checked steps before had") as raised:
                check.compare(bits, step=7)
            (named,) = NAMED.findall(str(raised.value))
            *towers_named, chunk = named
            assert towers_named == [str(link.src), str(link.dst)]
            assert chunk in [tensor.name for tensor in built.tensors]
        check.compare(running.run(step)[1], step=8)


def rows_of_one_variable(optimizer, devices):
    def row(tower):
        with tf1.variable_scope(f"tower{tower}", use_resource=True):
            w = tf1.get_variable("w", [50], initializer=tf1.zeros_initializer())
        return optimizer.compute_gradients(w * held(np.float32(tower)), [w])

    return on_towers(devices, row)


@pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
def test_the_hook_ends_a_training_with_the_step(graph, update):
    devices = gpus_or_cpus(2)
    plain = tf1.train.GradientDescentOptimizer(0.1)
    optimizer = TowerOptimizer(plain, devices, update=update, strategy=Strategy("flat", main=0))
    step = optimizer.apply_gradients(rows_of_one_variable(optimizer, devices))
    creator = tf1.train.ChiefSessionCreator(config=config())
    with tf1.train.MonitoredSession(creator, hooks=[optimizer.hook()]) as running:
        for _ in range(3):
            running.run(step)
        plugin.set_flip(0, 1, 1)
        with pytest.raises(HierAllreduceError, match=r"^step 4: the copy from tower 0 .*; 2 ch"):
            running.run(step)


def test_all_hosts_name_the_link_of_one():
    with job("train", hosts=2, each={1: {"flip_at": 3}}) as hosts:
        for host in hosts:
            told = r"step 4: the copy from tower 0 .* to tower 1 .* on host 1 has other bits"
            assert re.search(told, host.error())
