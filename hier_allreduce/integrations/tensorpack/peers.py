"""tensorpack's all-reduces, as its ``SyncMultiGPUReplicatedBuilder`` has them, to be measured."""

from __future__ import annotations

from typing import Any, List, Sequence

from tensorpack.graph_builder import utils

from ...graph.measuring import hook
from ...training.towers import Pairs


def reduced_by_peer(
    name: str, rows: Sequence[Pairs], devices: Sequence[Any], average: bool
) -> List[Pairs]:
    """Return K×N pairs, reduced by the mode in a name such as ``tensorpack-nccl``."""
    grads, variables = utils.split_grad_list(rows)
    mode = name.split("-")[1]
    reduced = hook().reduced(_reduced(mode, grads, devices, average))
    pairs: List[Pairs] = utils.merge_grad_list(reduced, variables)
    return pairs


def _reduced(mode: str, grads: Any, devices: Sequence[Any], average: bool) -> Any:
    """Return K rows of N reduced gradients."""
    if mode == "nccl":
        return utils.allreduce_grads(grads, average=average)
    if mode == "hierarchical":
        return _packed_hierarchical(grads, devices, average)
    on = ["/cpu:0"] if mode == "cpu" else devices
    return [utils.allreduce_grads_naive(grads, devices=on, average=average)] * len(devices)


def _packed_hierarchical(grads: Any, devices: Sequence[Any], average: bool) -> Any:
    """Return K rows that travelled packed, where tensorpack packs them."""
    packer = utils.GradientPacker(len(devices))
    if not packer.compute_strategy(grads[0]):
        return utils.allreduce_grads_hierarchical(grads, devices, average=average)
    packed = packer.pack_all(grads, devices)
    reduced = utils.allreduce_grads_hierarchical(packed, devices, average=average)
    return packer.unpack_all(reduced, devices)
