"""Chunks travel in the order in which gradients become ready, however the variables are listed."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import gpus_or_cpus, tf1

from hier_allreduce import Strategy, all_reduces, allreduce_grads
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

LAYERS, WIDTH = 6, 32
ALONE = Strategy("flat", chunk_bytes=4 * WIDTH * WIDTH)  # each gradient is a chunk
DEVICES = gpus_or_cpus(2)


def weights(names):
    """Return a variable of each name for one tower."""
    start = np.zeros([WIDTH, WIDTH], "float32")
    return {name: tf1.get_variable(name, initializer=start, use_resource=True) for name in names}


def sent(grads_by_name, names):
    """Return the names in the order of their chunks, if towers list their gradients so."""
    rows = []
    for by_name in grads_by_name:
        rows.append([by_name[name] for name in names])
    allreduce_grads(rows, DEVICES, strategy=ALONE)
    name_by_op = {}
    for by_name in grads_by_name:
        name_by_op.update({grad.op.name: name for name, grad in by_name.items()})
    tensors = all_reduces(rows[0][0].graph)[-1].tensors
    return [name_by_op[variable] for tensor in tensors for variable in tensor.variables]


def towers(loss_of, names):
    """Return the gradients of each tower by their names."""
    found = []
    for tower, device in enumerate(DEVICES):
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            by_name = weights(names)
            grads = tf1.gradients(loss_of(by_name), list(by_name.values()))
            found.append(dict(zip(names, grads)))
    return found


def chained(names):
    """Return the loss of a chain of layers."""

    def loss(by_name):
        value = tf.ones([WIDTH, WIDTH])
        for name in names:
            value = tf.tanh(tf.matmul(value, by_name[name]))
        return tf.reduce_sum(value)

    return loss


NAMES = [f"layer{n}" for n in range(LAYERS)]
LISTINGS = {
    "as made": NAMES,
    "reversed": NAMES[::-1],
    "by chance": [NAMES[n] for n in (3, 0, 5, 1, 4, 2)],
}
CHANGES = {
    "raw": lambda grad: grad,
    "identity": tf.identity,
    "scaled": lambda grad: tf.cast(tf.cast(grad * 0.5, "float64"), "float32"),
    "clipped": lambda grad: tf.clip_by_value(grad, -1.0, 1.0),
    "clipped by norm": lambda grad: tf.clip_by_norm(grad, 1.0),
    "decayed": lambda grad: grad + 0.1 * tf.zeros_like(grad),
}


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_chunks_are_ready_one_after_the_other(graph, listing, change):
    found = towers(chained(NAMES), NAMES)
    changed = []
    for by_name in found:  # after the whole pass, in the order of the listing
        changed.append({name: change(by_name[name]) for name in listing})
    assert sent(changed, listing) == NAMES[::-1]


def test_a_head_that_is_listed_first_is_ready_first(graph):
    names = ["head", *NAMES]
    found = towers(chained([*NAMES, "head"]), names)
    assert sent(found, names) == ["head", *NAMES[::-1]]


def test_a_shared_layer_is_ready_with_its_first_use(graph):
    """Its gradient is the sum of those of all uses."""
    found = towers(chained(["shared", *NAMES, "shared"]), [*NAMES, "shared"])
    assert sent(found, [*NAMES, "shared"]) == [*NAMES[::-1], "shared"]


def test_a_branch_with_a_loss_of_its_own_is_ready_before_the_trunk(graph):
    def loss(by_name):
        trunk = tf.tanh(tf.matmul(tf.ones([WIDTH, WIDTH]), by_name["trunk"]))
        side = tf.reduce_sum(tf.matmul(trunk, by_name["side"]))
        for name in ("a", "b", "c"):
            trunk = tf.tanh(tf.matmul(trunk, by_name[name]))
        return tf.reduce_sum(trunk) + side

    names = ["side", "trunk", "a", "b", "c"]
    assert sent(towers(loss, names), names)[-1] == "trunk"


def test_control_edges_count(graph):
    names = [NAMES[n] for n in (3, 0, 5, 1, 4, 2)]
    found = []
    for device in DEVICES:
        by_name = {}
        before: list = []
        with tf.device(device):
            for name in names:
                with tf.control_dependencies(before):
                    by_name[name] = tf.zeros([WIDTH, WIDTH])
                before = [by_name[name]]
        found.append(by_name)
    assert sent(found, NAMES) == names


def test_gradients_without_a_graph_behind_them_go_last_one_first(graph):
    found = []
    for device in DEVICES:
        with tf.device(device):
            found.append({name: tf1.placeholder("float32", [WIDTH, WIDTH]) for name in NAMES})
    assert sent(found, NAMES) == NAMES[::-1]


@pytest.mark.tf2
@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS)
def test_so_they_are_in_a_function_of_mirrored_replicas(listing):
    alone = HierarchicalAllReduce(Strategy("flat", chunk_bytes=8 * WIDTH * WIDTH))
    mirrored = tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=alone)
    with mirrored.scope():
        by_name = {}
        for n, name in enumerate(NAMES):  # their sizes differ, because their names say nothing
            by_name[name] = tf.Variable(tf.zeros([WIDTH + n, WIDTH + n + 1]))

    def replica():
        with tf.GradientTape() as tape:
            loss = chained(NAMES)(by_name)
        grads = tape.gradient(loss, [by_name[name] for name in listing])
        return tf.distribute.get_replica_context().all_reduce("sum", grads)

    graph = tf.function(lambda: mirrored.run(replica)).get_concrete_function().graph
    (built,) = all_reduces(graph)
    sizes = [by_name[name].shape.num_elements() for name in reversed(NAMES)]
    assert [tensor.elements for tensor in built.tensors] == sizes
