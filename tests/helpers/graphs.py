"""Small graphs on sixteen CPU devices or GPUs: gradients on towers in, all-reduced ones out."""

import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from helpers import real_gpus
from hier_allreduce import Copy, Reduce, allreduce_grads
from hier_allreduce.planning.algorithms import BY_NAME

tf1 = tf.compat.v1
IS_TF2 = tf.__version__.startswith("2")
XPU = os.environ.get("TEST_DEVICES", "cpu")  # the kind under test: "gpu" with pytest --devices gpu
DEVICES = 16
# Of float32: CUDA's kernels add up rows of equal index, and some others, in no fixed order.
ROUNDING = 2e-5 if real_gpus.ARE_REAL else 1e-6
if IS_TF2:  # before TensorFlow starts; on 1.15 every session makes its own
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * DEVICES,
    )


def allow_soft_placement(allowed):
    """Let TensorFlow move an op to the CPU if a GPU has no kernel of it.

    It holds in this process and in programs that are started later.
    """
    os.environ["TEST_SOFT_PLACEMENT"] = str(int(allowed))
    if IS_TF2:
        tf.config.set_soft_device_placement(allowed)


def config(**options):
    """Return the options of sessions on 16 CPU devices and, if there are any, GPUs."""
    is_soft = os.environ.get("TEST_SOFT_PLACEMENT") == "1"
    options.setdefault("allow_soft_placement", is_soft)
    return tf1.ConfigProto(device_count={"CPU": DEVICES}, **options)


def session(**options):
    """Return a v1 session with these options of its config."""
    return tf1.Session(config=config(**options))


@contextlib.contextmanager
def started(*ops):
    """Yield a session that has initialized all global variables, and then run ``ops`` in order."""
    with session() as sess:
        sess.run(tf1.global_variables_initializer())
        for op in ops:
            sess.run(op)
        yield sess


def floats(numbers):
    """Return numbers as an array of float32."""
    return np.asarray(numbers, "float32")


def gpu_or_cpu(number):
    """Return the name of a device under test: a logical CPU device, or a GPU."""
    return f"/{XPU}:{number}"


def gpus_or_cpus(count):
    """Return the names of ``count`` devices of the kind under test."""
    return [gpu_or_cpu(number) for number in range(count)]


def on_towers(devices, row_of):
    """Return K rows: what ``row_of(tower)`` builds on each tower's device."""
    rows = []
    for tower, device in enumerate(devices):
        with tf.device(device):
            rows.append(row_of(tower))
    return rows


def chain(towers, chunk):
    """Add up from tower to tower, as a user's algorithm may: each sum waits for the one before."""
    path = [(chunk + step) % towers for step in range(towers)]
    hops = list(zip(path, path[1:]))
    sums = [Reduce((src,), dst) for src, dst in hops]
    return sums + [Copy(dst, src) for src, dst in reversed(hops)]


ALGORITHMS: list = [*BY_NAME, chain]


def held(value, static=True):
    """Return a tensor fed by a placeholder, which Grappler cannot fold into a constant."""
    return tf1.placeholder_with_default(value, np.shape(value) if static else None)


def gradients_on(devices, values, static=True):
    """Return ``values[tower][variable]`` as tensors on their towers' devices."""
    return on_towers(devices, lambda tower: [held(value, static) for value in values[tower]])


def evaluate(fetches):
    """Run tensors of the current graph in a fresh session."""
    tf1.get_default_graph().get_operations() or tf1.no_op()  # a session refuses an empty graph
    with session() as sess:
        return sess.run(fetches)


def executed(values, devices, static=True, **how):
    """Build the all-reduce of K×N arrays in a new graph, run it, and return the results."""
    with tf.Graph().as_default():
        return evaluate(allreduce_grads(gradients_on(devices, values, static), devices, **how))


def consumed_in_place(rows):
    """Return an op for each tower that reads its results on its own device.

    A result that a session returns would be copied to the host.
    """
    consumers = []
    for row in rows:
        with tf.device(row[0].device):
            consumers.append(
                tf.raw_ops.Assert(condition=held(np.bool_(True)), data=list(row), summarize=1)
            )
    return consumers


def traced(fetches, allow_soft_placement=False, **options):
    """Return the metadata of one step, partition graphs included."""
    metadata = tf1.RunMetadata()
    with session(allow_soft_placement=allow_soft_placement) as sess:
        sess.run(
            fetches,
            options=tf1.RunOptions(output_partition_graphs=True, **options),
            run_metadata=metadata,
        )
    return metadata


def tensors(grad):
    """Return a gradient's tensors: the values and indices of a sparse one."""
    return [grad.values, grad.indices] if hasattr(grad, "indices") else [grad]


def same_bits(rows):
    """Return whether all K rows of gradients are equal to the last bit."""
    bits = []
    for row in rows:
        arrays = [np.asarray(tensor) for grad in row for tensor in tensors(grad)]
        bits.append([array.tobytes() for array in arrays])
    return all(row == bits[0] for row in bits)


def equal_in_any_order(one, other):
    """Return whether arrays are equal to the bit; on CUDA, as near as sums in another order."""
    return np.abs(np.subtract(one, other)).max() <= (ROUNDING if real_gpus.ARE_REAL else 0)


def dense(grad, shape=(100, 2)):
    """Return a gradient as an array of float64 or complex128.

    Rows of a sparse gradient that have the same index are added up.
    """
    array = np.asarray(tensors(grad)[0])
    array = array.astype("complex128" if array.dtype.kind == "c" else "float64")
    if not hasattr(grad, "indices"):
        return array
    full = np.zeros(shape, array.dtype)
    np.add.at(full, np.asarray(grad.indices), array)
    return full


def sparse(tower, rows, dense_shape=(100, 2)):
    values = np.arange(rows * 2, dtype="float32").reshape(rows, 2) + 10 * tower
    indices = (np.arange(rows) * 3 + tower).astype("int64")
    shape = None if dense_shape is None else tf.constant(dense_shape, tf.int64)
    return tf.IndexedSlices(held(values), held(indices), shape)
