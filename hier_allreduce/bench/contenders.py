"""The contenders: this package by strategy, tensorpack, ``tf.distribute``, and TensorFlow's ring collective.

A contender adds the ops that turn K×N gradients into K×N reduced ones. A peer's own functions are called as its
trainers call them. Where a peer raises an error, the bench reports that error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow as tf

from .. import presets
from ..errors import HierAllreduceError
from ..graph import Lane, allreduce_grads, per_replica
from ..planning import Strategy, named, strategy_from
from .case import Rows

Build = Callable[[Rows, Sequence[str], bool], Rows]


@dataclass(frozen=True)
class Contender:
    """A name, and ``build(grads, devices, average)``: K×N in, K×N out."""

    name: str
    build: Build


class CannotRun(Exception):
    """A peer declined these gradients without an error of its own; the text says how."""


# ---- this package ----------------------------------------------------------------------------------


def ours(
    strategy: Union[str, Strategy, None] = None,
    name: Optional[str] = None,
    lanes: Sequence[Lane] = (),
) -> Contender:
    """Return :func:`hier_allreduce.allreduce_grads` with a strategy as a contender.

    Args:
        strategy: a name or path, a ``Strategy``, or None for the default.
        name: the contender's name (default: ``ours`` or ``ours:STRATEGY``).
        lanes: the lanes of all towers.

    Raises:
        HierAllreduceError: there is no such strategy.
    """
    resolved = strategy_from(strategy)
    default_name = f"ours:{strategy}" if isinstance(strategy, str) else "ours"

    def build(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
        return allreduce_grads(grads, devices, average, strategy=resolved, lanes=lanes)

    return Contender(name or default_name, build)


def is_ours(name: str) -> bool:
    """Return whether the contender of this name is this package."""
    return name.startswith("ours")


def planned_for(topology: str) -> Contender:
    """Return ours with a plan for a machine's links: the name of a preset, or a YAML or nvidia-smi file.

    Raises:
        HierAllreduceError: there is no such preset or file.
    """
    return ours(Strategy(topology=topology), f"ours on {Path(topology).name}")


# ---- tensorpack: its functions, called as SyncMultiGPUReplicatedBuilder.build calls them -------------


def _tensorpack() -> Any:
    logging.getLogger("tensorpack").setLevel(logging.ERROR)
    from tensorpack.graph_builder import utils  # here, because importing it changes global state

    return utils


def tensorpack_hierarchical(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Run mode "hierarchical" without its packer: one all-reduce for each variable."""
    return _tensorpack().allreduce_grads_hierarchical(grads, list(devices), average=average)


def tensorpack_packed(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Run mode "hierarchical" as the trainer does: concatenate all gradients and cut them into K equal parts."""
    packer = _tensorpack().GradientPacker(len(devices))
    if not packer.compute_strategy(grads[0]):
        raise CannotRun("its packer skips mixed dtypes, unknown shapes and fewer than 1024 elements a split")
    packed = packer.pack_all(grads, devices)
    reduced = tensorpack_hierarchical(packed, devices, average)
    return packer.unpack_all(reduced, devices)


def tensorpack_gpu(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Run mode "gpu": add up the gradients on the towers' devices in turn, from where all towers read them."""
    return [_tensorpack().allreduce_grads_naive(grads, devices=list(devices), average=average)] * len(devices)


def tensorpack_cpu(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Run mode "cpu": add up everything on the first CPU device, from where all towers read it."""
    return [_tensorpack().allreduce_grads_naive(grads, devices=["/cpu:0"], average=average)] * len(devices)


# ---- tf.distribute -----------------------------------------------------------------------------------


def _distribute(make_ops: Callable[[], Any]) -> Build:
    def build(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
        values = [per_replica(column) for column in zip(*grads)]
        operation = tf.distribute.ReduceOp.MEAN if average else tf.distribute.ReduceOp.SUM
        reduced = make_ops().batch_reduce(operation, [(value, value) for value in values])
        return list(zip(*(value.values for value in reduced)))

    return build


def _hierarchical_copy(num_packs: int) -> Build:
    return _distribute(lambda: tf.distribute.HierarchicalCopyAllReduce(num_packs=num_packs))


# ---- TensorFlow's collective -------------------------------------------------------------------------


def ring(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Run TensorFlow's ring collective, one instance for each variable."""
    from tensorflow.python.ops import collective_ops  # it has no public name

    reduced: List[List[Any]] = []
    for device, row in zip(devices, grads):
        with tf.device(device):
            reduced.append(
                [
                    collective_ops.all_reduce(
                        grad,
                        len(devices),
                        1,
                        100 + n,
                        "Add",
                        "Div" if average else "Id",
                        communication_hint="ring",
                    )
                    for n, grad in enumerate(row)
                ]
            )
    return reduced


PEERS: Dict[str, Build] = {
    "tensorpack": tensorpack_hierarchical,
    "tensorpack-packed": tensorpack_packed,
    "tensorpack-gpu": tensorpack_gpu,
    "tensorpack-cpu": tensorpack_cpu,
    "distribute-0": _hierarchical_copy(0),
    "distribute-1": _hierarchical_copy(1),
    "distribute-8": _hierarchical_copy(8),
    "distribute-one": _distribute(tf.distribute.ReductionToOneDevice),
    "ring": ring,
}


def nccl(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Run NCCL's all-reduce, as MirroredStrategy calls it by default on GPUs."""
    others = [device for device in devices if "gpu" not in device.lower()]
    if others:
        raise CannotRun(f"NCCL needs GPUs; {others[0]} is not a GPU")
    return _distribute(tf.distribute.NcclAllReduce)(grads, devices, average)


ON_GPUS: Dict[str, Build] = {"nccl": nccl}


def find_contender(name: str) -> Contender:
    """Return the contender of a name: a peer, ``ours``, ``ours:STRATEGY``, or ``ours:FILE.py:FUNCTION``.

    Raises:
        HierAllreduceError: an unknown name; the message suggests the nearest one; or an unknown strategy.
    """
    peers = {**PEERS, **ON_GPUS}
    if name in peers:
        return Contender(name, peers[name])
    kind, _, strategy = name.partition(":")
    if kind == "ours" and ".py:" in strategy:
        return ours(Strategy(algorithm=named(strategy)), name)
    if kind == "ours":
        return ours(strategy or None)
    raise HierAllreduceError(
        f"contender {name!r} is unknown{presets.nearest(name, ['ours', 'ours:STRATEGY', 'floor', *peers])}"
    )


def all_contenders() -> Tuple[Contender, ...]:
    """Return our default strategy, then every peer that can run on the devices of this machine."""
    several_gpus = len(tf.config.experimental.list_physical_devices("GPU")) > 1
    return (ours(), *(find_contender(name) for name in (*PEERS, *(ON_GPUS if several_gpus else ()))))
