"""Updates on GPUs: which of them have kernels there, and which copy to the host."""

import re

import pytest
import tensorflow as tf
from emulated_gpu import plugin
from helpers.graphs import gpus_or_cpus, on_towers, session, tf1
from helpers.real_gpus import ARE_EMULATED

from hier_allreduce import Strategy, TowerOptimizer

pytestmark = pytest.mark.skipif(not ARE_EMULATED, reason="needs emulated GPUs")
train = tf1.train
WITHOUT_KERNEL = {
    "ResourceSparseApplyMomentum": lambda: train.MomentumOptimizer(0.1, 0.9),
    "ResourceSparseApplyRMSProp": lambda: train.RMSPropOptimizer(0.1),
    "ResourceSparseApplyCenteredRMSProp": lambda: train.RMSPropOptimizer(0.1, centered=True),
    "ResourceSparseApplyProximalGradientDescent": lambda: train.ProximalGradientDescentOptimizer(1),
}
WITH_KERNEL = {
    "Adagrad": lambda: train.AdagradOptimizer(0.1),
    "Adam": lambda: train.AdamOptimizer(0.1),
    "Ftrl": lambda: train.FtrlOptimizer(0.1),
    "gradient descent": lambda: train.GradientDescentOptimizer(0.1),
}
UPDATES = pytest.mark.parametrize("update", ["replicated", "once", "sharded"])


def step_of(make, **options):
    """Return the train op of a table on two GPUs, and the op that initializes the towers."""
    optimizer = TowerOptimizer(make(), gpus_or_cpus(2), **options)

    def row(tower):
        with tf1.variable_scope(f"tower{tower}", use_resource=True):
            table = tf1.get_variable("table", [50, 8], initializer=tf1.ones_initializer())
        ids = tf1.placeholder_with_default([tower, 3, 3], [3])
        return optimizer.compute_gradients(tf.reduce_sum(tf.gather(table, ids)), [table])

    return optimizer.apply_gradients(on_towers(gpus_or_cpus(2), row)), optimizer.init_op


def updates_elsewhere(step, start):
    """Run a step; return the ops that update variables, and ran on no GPU."""
    options, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    with session() as running:
        running.run(tf1.global_variables_initializer())
        running.run(start)
        running.run(step, options=options, run_metadata=seen)
    nodes = [node for part in seen.partition_graphs for node in part.node]
    updates = [node for node in nodes if re.match("Resource(Sparse)?(Apply|Scatter)", node.op)]
    assert len(updates) >= 1
    return [node.op for node in updates if "GPU" not in node.device]


@UPDATES
@pytest.mark.parametrize("op_type", WITHOUT_KERNEL)
def test_a_sparse_update_without_a_kernel_is_tensorflows_error(graph, op_type, update):
    step, start = step_of(WITHOUT_KERNEL[op_type], update=update)
    words = rf"(?s)Cannot assign a device.*{op_type}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        updates_elsewhere(step, start)


@UPDATES
@pytest.mark.parametrize("name", WITH_KERNEL)
def test_other_sparse_updates_stay_on_their_gpu(graph, name, update):
    step, start = step_of(WITH_KERNEL[name], update=update)
    assert updates_elsewhere(step, start) == []


@UPDATES
def test_rows_made_dense_let_momentum_stay_on_its_gpu(graph, update):
    momentum = WITHOUT_KERNEL["ResourceSparseApplyMomentum"]
    step, start = step_of(momentum, update=update, strategy=Strategy(sparse="dense"))
    assert updates_elsewhere(step, start) == []


@UPDATES
@pytest.mark.parametrize("name", WITH_KERNEL)
def test_no_step_waits_for_indices_on_the_host(graph, name, update):
    """Optimizers need the number of unique indices. For int32 ones it is found in host memory."""
    step, start = step_of(WITH_KERNEL[name], update=update)
    with session() as running:
        for op in (tf1.global_variables_initializer(), start, step):
            running.run(op)
        before = to_host()
        running.run(step)
        assert to_host() == before


def to_host():
    """Return how many copies from GPUs to the host there were."""
    copies = plugin.counters()["copies"].items()
    return sum(pair["count"] for name, pair in copies if name.endswith("-host"))
