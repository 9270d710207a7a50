"""tensorpack's all-reduces, as its ``SyncMultiGPUReplicatedBuilder`` has them, to be measured."""

from __future__ import annotations

from typing import Any, List, Sequence

from tensorpack.graph_builder import utils

from ...graph.measuring import measurement
from ...training.towers import Pairs


def reduced_by_baseline(
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
