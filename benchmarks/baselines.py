"""The all-reduces of others, as they are shipped: real code, with its defaults and its best knob.

Each is a function ``(gradients, devices, average) -> reduced gradients``; both are K×N.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any, Callable, Dict, Iterable, Sequence

import tensorflow as tf

Matrix = Sequence[Sequence[Any]]  # K×N gradients
Build = Callable[[Matrix, Sequence[str], bool], Matrix]


def plain_sum(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Add up each variable's gradients on the first device, and copy the result to the others."""
    results = []
    for column in zip(*grads):
        with tf.device(devices[0]):
            total = tf.add_n(column)
            results.append(total / len(devices) if average else total)
    rows = []
    for device in devices:
        with tf.device(device):
            rows.append([tf.identity(result) for result in results])
    return rows


def tensorpack_packed(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Do as tensorpack's trainer does: concatenate all gradients and cut them into K pieces."""
    packer = _tensorpack().GradientPacker(len(devices))
    if not packer.compute_strategy(grads[0]):
        raise ValueError("tensorpack packs no mixed dtypes, unknown shapes or few elements")
    packed = packer.pack_all(grads, devices)
    return packer.unpack_all(tensorpack(packed, devices, average), devices)


def tensorpack(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Reduce each gradient in two groups of four: tensorpack's mode "hierarchical"."""
    return _tensorpack().allreduce_grads_hierarchical(grads, list(devices), average=average)


def tensorpack_gpu(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Add up on the devices in rotation, and let each tower read: tensorpack's mode "gpu"."""
    utils = _tensorpack()
    row = utils.allreduce_grads_naive(grads, devices=list(devices), average=average)
    return [row] * len(devices)


def tensorpack_cpu(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Add up on the host: tensorpack's mode "cpu"."""
    row = _tensorpack().allreduce_grads_naive(grads, devices=["/cpu:0"], average=average)
    return [row] * len(devices)


def reduction_to_one_device(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Reduce by ``tf.distribute.ReductionToOneDevice``."""
    ops = tf.distribute.ReductionToOneDevice()
    return by_distribute(ops.batch_reduce, grads, average)


def hierarchical_copy(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Reduce by ``tf.distribute.HierarchicalCopyAllReduce``; it packs all into one tensor."""
    ops = tf.distribute.HierarchicalCopyAllReduce()
    return by_distribute(ops.batch_reduce, grads, average)


def hierarchical_copy_in_8(grads: Matrix, devices: Sequence[str], average: bool) -> Matrix:
    """Reduce by ``tf.distribute.HierarchicalCopyAllReduce`` in 8 packs."""
    ops = tf.distribute.HierarchicalCopyAllReduce(num_packs=8)
    return by_distribute(ops.batch_reduce, grads, average)


BASELINES: Dict[str, Build] = {
    "tensorpack packed": tensorpack_packed,
    "tensorpack": tensorpack,
    "tensorpack gpu": tensorpack_gpu,
    "tensorpack cpu": tensorpack_cpu,
    "ReductionToOneDevice": reduction_to_one_device,
    "HierarchicalCopyAllReduce": hierarchical_copy,
    "HierarchicalCopyAllReduce in 8 packs": hierarchical_copy_in_8,
    "plain sum": plain_sum,
}


def why_not(name: str, towers: int) -> str:
    """Return why a baseline does not run on so many towers here; empty if it does."""
    if name.startswith("tensorpack") and importlib.util.find_spec("tensorpack") is None:
        return "it is not installed: pip install tensorpack"
    if name in ("tensorpack packed", "tensorpack") and towers != 8:
        return f"its two groups are of four towers, and there are {towers}"
    if name.startswith("HierarchicalCopy") and towers % 2:
        return f"it leaves out the last of an odd number of towers, and there are {towers}"
    return ""


def prepare(names: Iterable[str]) -> None:
    """Import tensorpack before the first session, if a baseline needs it.

    tensorpack sets ``TF_GPU_THREAD_MODE``, which TensorFlow reads for each new session: all
    all-reduces are to have the same, so it is set back.
    """
    if any(name.startswith("tensorpack") for name in names):
        before = dict(os.environ)
        _tensorpack()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _tensorpack() -> Any:
    logging.getLogger("tensorpack").setLevel(logging.ERROR)
    from tensorpack.graph_builder import utils  # here, because not everybody has it

    return utils


def by_distribute(batch_reduce: Callable[..., Any], grads: Matrix, average: bool) -> Matrix:
    """Reduce by a ``batch_reduce`` of tf.distribute, on the gradients' devices."""
    from tensorflow.python.distribute.values import PerReplica  # it is not public

    values = [PerReplica(tuple(column)) for column in zip(*grads)]
    operation = tf.distribute.ReduceOp.MEAN if average else tf.distribute.ReduceOp.SUM
    reduced = batch_reduce(operation, [(value, value) for value in values])
    return list(zip(*(value.values for value in reduced)))
