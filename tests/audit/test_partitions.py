"""What partition graphs show: the tensors that crossed from device to device, and their bytes."""

import numpy as np
import tensorflow as tf
from helpers.graphs import cpus, gradients_on, tf1, traced

from hier_allreduce import allreduce_grads, audit
from hier_allreduce.inspect import executed_copies

SIZES = {"trace_level": tf1.RunOptions.FULL_TRACE}


def test_copies_are_counted_with_their_own_dtypes_bytes(graph):
    values = [[np.ones([5], np.float32), np.ones([3], np.complex128)]] * 2
    result = allreduce_grads(gradients_on(cpus(2), values), cpus(2))
    size = 5 * 4 + 3 * 16
    copies = executed_copies(traced([[tensor.op for tensor in row] for row in result], **SIZES))
    assert copies == {("cpu:0", "cpu:1"): (2, size), ("cpu:1", "cpu:0"): (2, size)}


def test_control_dependencies_are_no_copies(graph):
    with tf.device("/cpu:0"):
        first = tf1.random_uniform([3])
    with tf.device("/cpu:1"), tf.control_dependencies([first]):
        second = tf1.random_uniform([3])
    assert executed_copies(traced(second.op, **SIZES)) == {}


def through_host_memory(metadata):
    """Add what TensorFlow adds on GPUs before an op whose operands are in host memory: a send to its own device."""
    for part in metadata.partition_graphs:
        for node in [node for node in part.node if node.op == "AddN"]:
            for number, tensor in enumerate(node.input):
                send = part.node.add(name=f"{node.name}/to_host{number}", op="_HostSend", device=node.device)
                recv = part.node.add(name=f"{node.name}/on_host{number}", op="_HostRecv", device=node.device)
                send.input.append(tensor)
                for each in (send, recv):
                    for attr in ("send_device", "recv_device"):
                        each.attr[attr].s = node.device.encode()
                    each.attr["tensor_name"].s = f"memtype_{number}_{tensor.split(':')[0]}".encode()
                node.input[number] = recv.name
    return metadata


def test_a_copy_to_host_memory_is_none_between_devices(graph):
    result = allreduce_grads(gradients_on(cpus(3), [[np.ones([5], np.int32)]] * 3), cpus(3))
    metadata = traced([row[0].op for row in result], **SIZES)
    before = executed_copies(metadata), audit(metadata, graph).copies
    through_host_memory(metadata)
    assert any(node.op == "_HostSend" for part in metadata.partition_graphs for node in part.node)
    assert (executed_copies(metadata), audit(metadata, graph).copies) == before
