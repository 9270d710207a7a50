"""tensorpack's training, as its ``SyncMultiGPUReplicatedBuilder`` has it, to be measured."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import tensorflow as tf
from tensorpack.graph_builder import utils
from tensorpack.graph_builder.training import SyncMultiGPUReplicatedBuilder

from hier_allreduce.compat import tf1
from hier_allreduce.graph.columns import grads_in, variables_in
from hier_allreduce.graph.measuring import measurement
from hier_allreduce.training.options import Options
from hier_allreduce.training.towers import Pairs


def train_by_baseline(
    baseline: str, optimizer: Any, rows: Sequence[Pairs], devices: Sequence[Any], options: Options
) -> Tuple[Any, Any]:
    """Reduce the towers' gradients, and call the optimizer on each tower.

    Returns the op that does so, and the one that copies tower 0's variables to the others.
    """
    ops = []
    pairs = _reduced(baseline, rows, devices, options.average)
    transform = options.transform or list
    with tf1.name_scope("apply_gradients"):
        for tower, (device, row) in enumerate(zip(devices, pairs)):
            with tf1.device(device), utils.override_to_local_variable(enable=tower > 0):
                updated = list(zip(transform(grads_in(row)), variables_in(row)))
                ops.append(optimizer.apply_gradients(updated, name=f"apply_grad_{tower}"))
        update = tf.group(*ops, name="train_op")
    with tf1.name_scope("sync_variables"):
        return update, SyncMultiGPUReplicatedBuilder.get_post_init_ops()


def _reduced(
    baseline: str, rows: Sequence[Pairs], devices: Sequence[Any], average: bool
) -> List[Pairs]:
    """Return K×N pairs, reduced by the mode in a baseline's name such as ``tensorpack-nccl``."""
    grads, variables = utils.split_grad_list(rows)
    mode = baseline.split("-")[1]
    packer = utils.GradientPacker(len(devices))
    if mode == "nccl":
        reduced = utils.allreduce_grads(grads, average=average)
    elif mode != "hierarchical":
        adders = ["/cpu:0"] if mode == "cpu" else devices
        sums = utils.allreduce_grads_naive(grads, devices=adders, average=average)
        reduced = [sums] * len(devices)
    # What tensorpack cannot pack travels as it is.
    elif not packer.compute_strategy(grads[0]):
        reduced = utils.allreduce_grads_hierarchical(grads, devices, average=average)
    else:
        packed = packer.pack_all(grads, devices)
        sums = utils.allreduce_grads_hierarchical(packed, devices, average=average)
        reduced = packer.unpack_all(sums, devices)
    pairs: List[Pairs] = utils.merge_grad_list(measurement().reduced(reduced), variables)
    return pairs
