"""The gradients that the bench reduces, and the parts of the graph that all contenders share.

- A gradient is the value of a resource variable on its tower's device. TensorFlow cannot fold it into the sum, as it
  could a constant, and no op may overwrite its buffer. So every step adds up the same numbers.
- Every result is the default of a placeholder on its tower's device, which hands it on without reading an element. A
  control dependency is not enough: Grappler replaces a sum that nothing reads by a ``NoOp``. An ``Assert`` would need
  its data in host memory, so that on GPUs it would add a copy to the host.
- Every tensor can be placed on a GPU: int32 has no variables there, so that indices are int64, and gradients of int32
  are cast from int64.
"""

from __future__ import annotations

import gc
import zlib
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..graph import gpu_count, tf1
from ..logical import LogicalDevices, with_logical_gpus
from .models import GradientShape

Rows = Sequence[Sequence[Any]]  # K×N
ROWS = 2048  # in each sparse gradient
_TIMEOUT_MS = 300_000
_INDEX_BYTES = 8


@dataclass(frozen=True)
class Case:
    """One gradient of each shape on each device, and whether to compute the sum or the mean.

    Attributes:
        rows: the number of rows in a sparse gradient (some indices are equal, as in a batch).
        memory: bytes; a contender that needs more than this only to make sparse gradients dense is not run.
        logical: the towers' devices with their lanes, where there are lanes.
    """

    shapes: Tuple[GradientShape, ...]
    devices: Tuple[str, ...]
    average: bool = False
    rows: int = ROWS
    memory: int = 8 << 30
    logical: Optional[LogicalDevices] = None

    @property
    def dense_and_sparse_bytes(self) -> Tuple[int, int]:
        """The bytes of one tower's dense gradients, and those of its sparse ones (values and indices)."""
        dense = sum(shape.dense_bytes for shape in self.shapes if not shape.sparse)
        sparse = sum(
            self.rows * (shape.dense_bytes // max(1, shape.shape[0]) + _INDEX_BYTES)
            for shape in self.shapes
            if shape.sparse
        )
        return dense, sparse

    @property
    def tower_bytes(self) -> int:
        """The bytes of one tower's gradients."""
        return sum(self.dense_and_sparse_bytes)


def sweep_sizes(least: int, most: int, factor: int) -> List[int]:
    """Return ``least``, ``least × factor``, … up to ``most`` bytes."""
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def size_case(size: int, devices: Sequence[str], average: bool = False) -> Case:
    """Return the case of one dense gradient of ``size`` bytes, rounded up to a whole float32."""
    return Case((GradientShape("gradient", (-(-size // 4),), "float32"),), tuple(devices), average)


def devices_here(count: Optional[int] = None) -> Tuple[str, ...]:
    """Return ``count`` GPUs (default: all), logical or not, if there are enough, else ``count`` logical CPUs (8).

    Without ``count``, a single GPU is not enough: it has nothing to reduce with.
    """
    gpus = gpu_count()
    if gpus >= (count or 2):
        return tuple(f"/gpu:{k}" for k in range(count or gpus))
    return tuple(f"/cpu:{k}" for k in range(count or 8))


def session(graph: Any, case: Case, optimize: bool = True) -> Any:
    """Return a session on the case's devices and all cores; ``optimize=False`` turns Grappler off."""
    config = tf1.ConfigProto(device_count={"CPU": len(case.devices)}, operation_timeout_in_ms=_TIMEOUT_MS)
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimize
    if case.logical:
        config = case.logical.added_to(config)
    return tf1.Session(graph=graph, config=with_logical_gpus(config))


def _gradients(case: Case, tensor: Callable[[str, Sequence[int], Any, int], Any]) -> Rows:
    """Return K×N gradients; ``tensor(name, shape, dtype, limit)`` makes a tensor of numbers in [0, limit)."""
    rows = []
    for tower, device in enumerate(case.devices):
        row: List[Any] = []
        with tf.device(device):
            for n, shape in enumerate(case.shapes):
                name, dtype = f"tower{tower}_grad{n}", tf.as_dtype(shape.dtype)
                limit = 100 if dtype.is_integer else 1
                if shape.sparse:
                    values = tensor(name, [case.rows, *shape.shape[1:]], dtype, limit)
                    indices = tensor(f"{name}_rows", [case.rows], tf.int64, shape.shape[0])
                    row.append(tf.IndexedSlices(values, indices, tf.constant(shape.shape)))
                else:
                    row.append(tensor(name, list(shape.shape), dtype, limit))
        rows.append(row)
    return rows


def variables(case: Case) -> Tuple[Rows, Any]:
    """Return K×N gradients that are the values of variables, and the op that fills the variables at random."""
    gc.collect()  # the previous session's variables live as long as its graph, which is full of reference cycles
    fills: List[Any] = []
    raw = tf.raw_ops  # tf.get_variable would add many more ops for each variable

    def tensor(name: str, shape: Sequence[int], dtype: Any, limit: int) -> Any:
        held = tf.int64 if dtype == tf.int32 else dtype
        variable = raw.VarHandleOp(dtype=held, shape=shape, shared_name=name, name=name)
        seed = zlib.crc32(name.encode())
        if held.is_integer:
            interval = {"minval": tf.constant(0, held), "maxval": tf.constant(limit, held)}
            numbers = raw.RandomUniformInt(shape=tf.constant(shape, tf.int32), seed=seed, seed2=1, **interval)
        else:
            numbers = raw.RandomUniform(shape=tf.constant(shape, tf.int32), dtype=held, seed=seed, seed2=1)
        fills.append(raw.AssignVariableOp(resource=variable, value=numbers))
        value = raw.ReadVariableOp(resource=variable, dtype=held)
        value.set_shape(shape)
        return tf.cast(value, dtype)

    return _gradients(case, tensor), tf.group(*fills)


def placeholders(case: Case) -> Rows:
    """Return K×N placeholders, for building a graph that is never run."""
    return _gradients(case, lambda name, shape, dtype, limit: tf1.placeholder(dtype, shape, name))


def consumed(rows: Rows, case: Case) -> Any:
    """Return an op that waits for every result on its tower's device."""
    readers = []
    for device, row in zip(case.devices, rows):
        with tf.device(device):
            for value in row:
                tensors = [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]
                readers += [tf1.placeholder_with_default(tensor, tensor.shape, "consumed").op for tensor in tensors]
    return tf.group(*readers)
