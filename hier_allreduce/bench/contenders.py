"""Who is measured: this package by strategy, tensorpack, ``tf.distribute``, TensorFlow's ring.

A contender adds the ops that turn K×N gradients into K×N reduced ones. The peers' own functions are called, as their
trainers call them; what a peer cannot do is its own error, which the bench reports.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow as tf

from .. import presets
from ..errors import BenchError
from ..graph import allreduce_grads, per_replica
from ..planning import Strategy, strategy_from
from .case import Rows

Build = Callable[[Rows, Sequence[str], bool], Rows]


@dataclass(frozen=True)
class Contender:
    """A name, and ``build(grads, devices, average)``: K×N in, K×N out."""

    name: str
    build: Build


class CannotRun(Exception):
    """A peer gave up on these gradients in its own way; the text says how."""


# ---- this package ----------------------------------------------------------------------------------


def ours(strategy: Union[str, Strategy, None] = None, name: Optional[str] = None) -> Contender:
    """:func:`hier_allreduce.allreduce_grads` with a strategy: a name or path, a ``Strategy``, None for the default.

    Raises:
        StrategyError: there is no such strategy.
    """
    chosen = strategy_from(strategy)
    return Contender(
        name or (f"ours:{strategy}" if isinstance(strategy, str) else "ours"),
        lambda grads, devices, average: allreduce_grads(grads, devices, average, strategy=chosen),
    )


def is_ours(name: str) -> bool:
    """Whether this package does the work of the contender of this name."""
    return name.startswith("ours")


def planned_for(topology: str) -> Contender:
    """Ours, planned for the links of a machine: a preset's name, a YAML or an nvidia-smi file.

    Raises:
        StrategyError: there is no such preset or file.
    """
    return ours(Strategy(topology=topology), f"ours on {Path(topology).name}")


# ---- tensorpack: its functions, called as SyncMultiGPUReplicatedBuilder.build calls them -------------


def _tensorpack() -> Any:
    logging.getLogger("tensorpack").setLevel(logging.ERROR)
    from tensorpack.graph_builder import utils  # importing it changes global state: only where it is measured

    return utils


def tensorpack_hierarchical(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Mode "hierarchical" without its packer: one all-reduce for each variable."""
    return _tensorpack().allreduce_grads_hierarchical(grads, list(devices), average=average)


def tensorpack_packed(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Mode "hierarchical" as the trainer runs it: everything concatenated and cut into K equal parts."""
    packer = _tensorpack().GradientPacker(len(devices))
    if not packer.compute_strategy(grads[0]):
        raise CannotRun("its packer skips mixed dtypes, unknown shapes and fewer than 1024 elements a split")
    packed = packer.pack_all(grads, devices)
    reduced = tensorpack_hierarchical(packed, devices, average)
    return packer.unpack_all(reduced, devices)


def tensorpack_gpu(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Mode "gpu": each gradient is added up on one tower's device, in turn, and read from there by all towers."""
    return [_tensorpack().allreduce_grads_naive(grads, devices=list(devices), average=average)] * len(devices)


def tensorpack_cpu(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
    """Mode "cpu": everything is added up on the first CPU device and read from there by all towers."""
    return [_tensorpack().allreduce_grads_naive(grads, devices=["/cpu:0"], average=average)] * len(devices)


# ---- tf.distribute -----------------------------------------------------------------------------------


def _distribute(make_ops: Callable[[], Any]) -> Build:
    def build(grads: Rows, devices: Sequence[str], average: bool) -> Rows:
        values = [per_replica(column) for column in zip(*grads)]
        how = tf.distribute.ReduceOp.MEAN if average else tf.distribute.ReduceOp.SUM
        reduced = make_ops().batch_reduce(how, [(value, value) for value in values])
        return list(zip(*(value.values for value in reduced)))

    return build


def _hierarchical_copy(num_packs: int) -> Build:
    return _distribute(lambda: tf.distribute.HierarchicalCopyAllReduce(num_packs=num_packs))


# ---- TensorFlow's collective -------------------------------------------------------------------------


def ring(grads: Rows, devices: Sequence[str], average: bool, hosts: int = 1, first: int = 100) -> Rows:
    """TensorFlow's ring collective, one instance for each variable; over the devices of all hosts, if of several.

    Instances are numbered from ``first``: in a server a number is one shape for ever.
    """
    from tensorflow.python.ops import collective_ops  # it has no public name

    reduced: List[List[Any]] = []
    for device, row in zip(devices, grads):
        with tf.device(device):
            reduced.append(
                [
                    collective_ops.all_reduce(
                        grad,
                        hosts * len(devices),
                        1,
                        first + n,
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


def find_contender(name: str) -> Contender:
    """The contender of a name: a peer's, ``ours``, or ``ours:STRATEGY``.

    Raises:
        BenchError: there is none of that name; the message has the nearest.
    """
    if name in PEERS:
        return Contender(name, PEERS[name])
    kind, _, strategy = name.partition(":")
    if kind == "ours":
        return ours(strategy or None)
    raise BenchError(
        f"contender {name!r} is unknown{presets.nearest(name, ['ours', 'ours:STRATEGY', 'floor', *PEERS])}"
    )


def all_contenders() -> Tuple[Contender, ...]:
    """Our default strategy, then every peer."""
    return (ours(), *(find_contender(name) for name in PEERS))


def sweep_contenders() -> Tuple[Contender, ...]:
    """Our default strategy, then others that differ from it in one choice each: what the defaults were chosen from."""
    choices: Dict[str, Tuple[Any, ...]] = {
        "algorithm": ("hierarchical", "tree"),
        "mains": ("rotate", 0),
        "pack_below": (0, 4 << 10, 16 << 10, 256 << 10, 1 << 20),
        "bucket_bytes": (1 << 20, 4 << 20, 40 << 20),
        "split_above": (1 << 20, 4 << 20, 16 << 20),
        "splits": (1, 8),
    }
    pairs = [(field, value) for field, values in choices.items() for value in values]
    return (ours(), *(ours(Strategy(**{field: value}), f"ours:{field}={_short(value)}") for field, value in pairs))


def _short(value: Any) -> str:
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if isinstance(value, int) and value and value % unit == 0:
            return f"{value // unit}{name}"
    return str(value)
