"""The host's ops in the simulator are the nodes that TensorFlow executes, for shipped models and plans."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import consumed_in_place, on_towers, traced, xpus

from hier_allreduce import Strategy, allreduce_grads
from hier_allreduce.graph.layout import lay_out, size_of
from hier_allreduce.graph.matrix import check_matrix
from hier_allreduce.planning.simulator import Work

MODELS = Path(__file__).parents[2] / "configs" / "models"
SCALE = 64  # gradients and chunks have fewer elements by this; their number and order are the same
MIB = (1 << 20) // SCALE
CHOSEN = Strategy(topology="dgx-1v", chunk_bytes=16 * MIB)
PLANS = {
    "rule, 4": (4, Strategy("flat", chunk_bytes=4 * MIB)),
    "rule, 8": (8, Strategy("hierarchical", chunk_bytes=8 * MIB)),
    "chosen, 4": (4, CHOSEN),
    "chosen, 8": (8, CHOSEN),
}


def shapes_of(model):
    """Shapes of as many dimensions as the model's gradients, 1/64 of their elements."""
    for line in (MODELS / f"{model}.tsv").read_text().splitlines()[1:]:
        shape = [int(number) for number in line.split("\t")[1].split(",")]
        yield [max(1, int(np.prod(shape)) // SCALE)] + [1] * (len(shape) - 1)


def executed_nodes(metadata):
    """Nodes of an all-reduce in partition graphs, without constants: its ops, and the sends and receives of copies."""
    count = 0
    for node in [node for part in metadata.partition_graphs for node in part.node]:
        if node.op.endswith(("Send", "Recv")):
            count += node.attr["send_device"].s != node.attr["recv_device"].s
        else:
            count += node.name.startswith("hier_allreduce/") and node.op != "Const"
    return count


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["resnet50", "mobilenet_v2", "bert_base", "vgg16"])
def test_the_simulator_charges_the_host_for_what_is_executed(graph, model, plan):
    """Device functions are not known to be CPUs, so the ops are those that GPUs would get."""
    towers, strategy = PLANS[plan]
    functions = [lambda op, device=device: device for device in xpus(towers)]
    rows = on_towers(
        xpus(towers),
        lambda tower: [
            tf.raw_ops.Empty(shape=shape, dtype=tf.float32) for shape in shapes_of(model)
        ],
    )
    layout = lay_out(check_matrix(rows, functions, True, strategy), tuple(functions), strategy)
    ops = Work(layout.plan, layout.chunks, [size_of(column) for column in layout.columns]).ops
    executed = executed_nodes(
        traced(consumed_in_place(allreduce_grads(rows, functions, True, strategy)))
    )
    assert abs(executed - ops) <= 0.05 * executed, (executed, ops)
