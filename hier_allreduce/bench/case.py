"""What the bench reduces, and the graph that all contenders have in common.

- A gradient is the value of a resource variable on its tower's device: no constant that could be folded into
  the sum, and a buffer that no op may overwrite, so every step adds up the same numbers.
- Every result is an input of an op on its tower's device which reads no element (``Assert``, that is true). A control
  dependency is not enough: Grappler replaces a sum that nobody reads by a ``NoOp``.
"""

from __future__ import annotations

import gc
import zlib
from dataclasses import dataclass
from typing import Any, Callable, List, Sequence, Tuple

import tensorflow as tf

from ..graph import tf1
from .models import GradientShape

Rows = Sequence[Sequence[Any]]  # K×N
_TIMEOUT_MS = 300_000
_INDEX_BYTES = 4


@dataclass(frozen=True)
class Case:
    """What is reduced: one gradient of each shape on each device, the sum or the mean.

    Attributes:
        rows: how many rows a sparse gradient has (some of them the same, as in a batch).
        memory: bytes; a contender that makes sparse gradients dense is not run where that alone needs more.
    """

    shapes: Tuple[GradientShape, ...]
    devices: Tuple[str, ...]
    average: bool = False
    rows: int = 2048
    memory: int = 8 << 30

    @property
    def dense_and_sparse_bytes(self) -> Tuple[int, int]:
        """What one tower's dense gradients take, and the rows (values and indices) that its sparse ones have."""
        dense = sum(shape.dense_bytes for shape in self.shapes if not shape.sparse)
        sparse = sum(
            self.rows * (shape.dense_bytes // max(1, shape.shape[0]) + _INDEX_BYTES)
            for shape in self.shapes
            if shape.sparse
        )
        return dense, sparse

    @property
    def tower_bytes(self) -> int:
        """What one tower's gradients take."""
        return sum(self.dense_and_sparse_bytes)


def session(graph: Any, case: Case, optimize: bool = True) -> Any:
    """A session on the case's devices, with all cores; without Grappler where ``optimize`` is False."""
    config = tf1.ConfigProto(device_count={"CPU": len(case.devices)}, operation_timeout_in_ms=_TIMEOUT_MS)
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimize
    return tf1.Session(graph=graph, config=config)


def _gradients(case: Case, tensor: Callable[[str, Sequence[int], Any, int], Any]) -> Rows:
    """K×N gradients, where ``tensor(name, shape, dtype, limit)`` makes a tensor of numbers in [0, limit)."""
    rows = []
    for tower, device in enumerate(case.devices):
        row: List[Any] = []
        with tf.device(device):
            for n, shape in enumerate(case.shapes):
                name, dtype = f"tower{tower}_grad{n}", tf.as_dtype(shape.dtype)
                limit = 100 if dtype.is_integer else 1
                if shape.sparse:
                    values = tensor(name, [case.rows, *shape.shape[1:]], dtype, limit)
                    indices = tensor(f"{name}_rows", [case.rows], tf.int32, shape.shape[0])
                    row.append(tf.IndexedSlices(values, indices, tf.constant(shape.shape)))
                else:
                    row.append(tensor(name, list(shape.shape), dtype, limit))
        rows.append(row)
    return rows


def variables(case: Case) -> Tuple[Rows, Any]:
    """Gradients that are the values of variables, and the op that fills those at random."""
    gc.collect()  # the last session's variables live as long as its graph, which is full of cycles
    fills: List[Any] = []
    raw = tf.raw_ops  # tf.get_variable adds many more ops for each

    def tensor(name: str, shape: Sequence[int], dtype: Any, limit: int) -> Any:
        variable = raw.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, name=name)
        seed = zlib.crc32(name.encode())
        if dtype.is_integer:
            ends = {"minval": tf.constant(0, dtype), "maxval": tf.constant(limit, dtype)}
            fill = raw.RandomUniformInt(shape=tf.constant(shape, tf.int32), seed=seed, seed2=1, **ends)
        else:
            fill = raw.RandomUniform(shape=tf.constant(shape, tf.int32), dtype=dtype, seed=seed, seed2=1)
        fills.append(raw.AssignVariableOp(resource=variable, value=fill))
        value = raw.ReadVariableOp(resource=variable, dtype=dtype)
        value.set_shape(shape)
        return value

    return _gradients(case, tensor), tf.group(*fills)


def placeholders(case: Case) -> Rows:
    """Gradients that are only there to be built upon."""
    return _gradients(case, lambda name, shape, dtype, limit: tf1.placeholder(dtype, shape, name))


def consumed(rows: Rows, case: Case) -> Any:
    """An op that runs after all results were there, each on its tower's device."""
    readers = []
    for device, row in zip(case.devices, rows):
        with tf.device(device):
            true = tf.constant(True)
            for value in row:
                tensors = [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]
                readers.append(tf.raw_ops.Assert(condition=true, data=tensors, summarize=0))
    return tf.group(*readers)
