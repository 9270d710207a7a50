"""Gradients that lie on their towers' devices, GPUs or not, and steps that leave the results there."""

import numpy as np
import tensorflow as tf

from hier_allreduce.logical import split_gpu, with_logical_gpus

tf1 = tf.compat.v1


def session():
    """Return a session on the logical GPUs of this process and 16 logical CPU devices, without soft placement."""
    return tf1.Session(config=with_logical_gpus(tf1.ConfigProto(device_count={"CPU": 16})))


def split_for_all(parts):
    """Cut each GPU into logical GPUs, and give them to sessions that are made by others, too."""
    split_gpu(parts)

    class Session(tf1.Session):
        def __init__(self, target="", graph=None, config=None):
            super().__init__(target, graph, with_logical_gpus(config or tf1.ConfigProto()))

    tf1.Session = Session


class Placed:
    """K×N arrays as tensors on K devices: values of variables, since what is fed would have to be copied there first.

    Attributes:
        rows: K×N tensors of the arrays' dtypes; ``unknown`` ones are known by rank only.
    """

    def __init__(self, devices, values, unknown=()):
        self._fills, self._feed = [], {}
        self.rows = []
        for device, row in zip(devices, values):
            with tf.device(device):
                self.rows.append([self._held(np.asarray(value), n in unknown) for n, value in enumerate(row)])

    def _held(self, value, unknown):
        wanted = tf.as_dtype(value.dtype)
        # GPUs of TensorFlow 1.15 have no variables of other dtypes
        dtype = tf.int64 if wanted.is_integer else tf.float32 if wanted == tf.bfloat16 else wanted
        given = tf1.placeholder(dtype, value.shape)
        shape = [None] * value.ndim if unknown else value.shape
        name = tf1.get_default_graph().unique_name("held")
        variable = tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape, shared_name=name, name=name)
        self._fills.append(tf.raw_ops.AssignVariableOp(resource=variable, value=given))
        self._feed[given] = value.astype(dtype.as_numpy_dtype)
        read = tf.raw_ops.ReadVariableOp(resource=variable, dtype=dtype)
        read.set_shape(shape)
        return tf.cast(read, wanted)

    def fill(self, running):
        """Bring the arrays to the devices."""
        running.run(self._fills, self._feed)


def in_place(devices, rows):
    """Return an op that needs every result on its tower's device, and copies none to the client."""
    consumed = []
    for device, row in zip(devices, rows):
        with tf.device(device):
            for value in row:
                tensors = [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]
                consumed += [tf1.placeholder_with_default(tensor, tensor.shape).op for tensor in tensors]
    return tf.group(*consumed)


def traced(running, op):
    """Return the metadata of one step, with partition graphs."""
    seen = tf1.RunMetadata()
    running.run(op, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=seen)
    return seen
