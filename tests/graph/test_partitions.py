"""What partition graphs show: the tensors that crossed from device to device, and their bytes."""

import numpy as np
import tensorflow as tf
from helpers.graphs import cpus, gradients_on, session, tf1

from hier_allreduce import allreduce_grads
from hier_allreduce.graph import executed_copies


def traced_step(fetches):
    """Return the RunMetadata of one step with sizes and partition graphs."""
    metadata = tf1.RunMetadata()
    options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True)
    with session() as sess:
        sess.run(fetches, options=options, run_metadata=metadata)
    return metadata


def test_copies_are_counted_with_their_own_dtypes_bytes(graph):
    values = [[np.ones([5], np.float32), np.ones([3], np.complex128)]] * 2
    result = allreduce_grads(gradients_on(cpus(2), values), cpus(2))
    size = 5 * 4 + 3 * 16
    copies = executed_copies(traced_step([[tensor.op for tensor in row] for row in result]))
    assert copies == {("cpu:0", "cpu:1"): (2, size), ("cpu:1", "cpu:0"): (2, size)}


def test_control_dependencies_are_no_copies(graph):
    with tf.device("/cpu:0"):
        first = tf1.random_uniform([3])
    with tf.device("/cpu:1"), tf.control_dependencies([first]):
        second = tf1.random_uniform([3])
    assert executed_copies(traced_step(second.op)) == {}
