"""tensorpack's all-reduces by their modes, for ``hier-allreduce tune``: as in its ``SyncMultiGPUReplicatedBuilder``."""

from __future__ import annotations

from typing import Any, List, Sequence

from tensorpack.graph_builder import utils

from ...graph.tuning import with_clock
from ...training.update import Pairs


def reduced_by_peer(
    name: str, rows: Sequence[Pairs], devices: Sequence[Any], average: bool
) -> List[Pairs]:
    """Return K×N (gradient, variable) pairs, reduced by the mode in a name such as ``tensorpack-nccl``."""
    grads, variables = utils.split_grad_list(rows)
    mode = name.split("-")[1]
    if mode == "nccl":
        reduced = utils.allreduce_grads(grads, average=average)
    elif mode == "hierarchical":
        packer = utils.GradientPacker(len(devices))
        is_packed = packer.compute_strategy(grads[0])
        packed = packer.pack_all(grads, devices) if is_packed else grads
        reduced = utils.allreduce_grads_hierarchical(packed, devices, average=average)
        reduced = packer.unpack_all(reduced, devices) if is_packed else reduced
    else:
        on = ["/cpu:0"] if mode == "cpu" else devices
        reduced = [utils.allreduce_grads_naive(grads, devices=on, average=average)] * len(devices)
    pairs: List[Pairs] = utils.merge_grad_list(
        with_clock([tuple(row) for row in reduced]), variables
    )
    return pairs
