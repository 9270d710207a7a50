"""What each ``cross_device_ops`` object makes of each kind of input: the table of docs/distribute.md.

python tests/helpers/distribute_table.py        # prints the table; needs TensorFlow 2, takes some minutes
"""

import functools
import subprocess
import sys

import numpy as np
import tensorflow as tf

from hier_allreduce.integrations.distribute import HierarchicalAllReduce

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
OURS, RING = "HierarchicalAllReduce", "default (ring)"
PEERS = {
    OURS: HierarchicalAllReduce,
    "ReductionToOneDevice": tf.distribute.ReductionToOneDevice,
    "HierarchicalCopyAllReduce": tf.distribute.HierarchicalCopyAllReduce,
    "…(num_packs=0)": lambda: tf.distribute.HierarchicalCopyAllReduce(num_packs=0),
    RING: lambda: None,
}


def full(r, shape, dtype):
    """2^r everywhere: no two sets of replicas have the same sum."""
    return tf.cast(tf.fill(shape, 2**r), dtype)


def sparse(r, dense_shape=(16, 3)):
    values, indices = full(r, [2, 3], "float32"), tf.cast(tf.stack([r, r + 1]), tf.int64)
    return tf.IndexedSlices(values, indices, None if dense_shape is None else tf.constant(dense_shape, tf.int64))


def number(r):
    return int(tf.get_static_value(r))


# of replica r, the values that are reduced together
KINDS = {
    "float32": lambda r: [full(r, [2, 3], "float32")],
    "float16": lambda r: [full(r, [2, 3], "float16")],
    "bfloat16": lambda r: [full(r, [2, 3], "bfloat16")],
    "float64": lambda r: [full(r, [2, 3], "float64")],
    "complex64": lambda r: [full(r, [2, 3], "complex64")],
    "int64": lambda r: [full(r, [2, 3], "int64")],
    "int32": lambda r: [full(r, [2, 3], "int32")],
    "float16 and float32 in one batch": lambda r: [full(r, [2, 3], "float16"), full(r, [4], "float32")],
    "float32 and int64 in one batch": lambda r: [full(r, [2, 3], "float32"), full(r, [4], "int64")],
    "two int32 in one batch": lambda r: [full(r, [2, 3], "int32"), full(r, [1], "int32")],
    "IndexedSlices": lambda r: [sparse(r)],
    "IndexedSlices without dense_shape": lambda r: [sparse(r, None)],
    "IndexedSlices and dense in one batch": lambda r: [sparse(r), full(r, [4], "float32")],
    "IndexedSlices on some replicas": lambda r: [full(r, [16, 3], "float32") if number(r) else sparse(r)],
    "shape known only at run time": lambda r: [tf.reshape(full(r, [6], "float32"), tf.stack([2 + 0 * r, -1]))],
    "no elements": lambda r: [full(r, [0, 3], "float32"), full(r, [4], "float32")],
    "scalar": lambda r: [full(r, [], "float32")],
    "mean of 40000 in float16": lambda r: [full(0 * r, [2], "float16") * 40000],
    "shapes [3, 1] and [1, 4]": lambda r: [full(r, [3, 1] if number(r) < 2 else [1, 4], "float32")],
    "dtype differs between replicas": lambda r: [full(r, [3], "float64" if number(r) else "float32")],
    "bool": lambda r: [full(r, [3], "bool")],
}
SENSELESS = ("shapes [3, 1] and [1, 4]", "dtype differs between replicas", "bool")  # an error is what is right


def ops_of(kind):
    return [MEAN] if kind.startswith("mean") else [SUM, MEAN]


def reduced(devices, cross_device_ops, reduce_op, make, compiled=True):
    """What every replica gets, ``[variable][replica]``."""
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=cross_device_ops)

    def together(strategy, *values):
        return strategy.extended.batch_reduce_to(reduce_op, [(value, value) for value in values])

    def replica():
        context = tf.distribute.get_replica_context()
        return context.merge_call(together, make(context.replica_id_in_sync_group))

    @tf.autograph.experimental.do_not_convert
    def step():
        return strategy.run(replica)

    got = (tf.function(step) if compiled else step)()
    return [strategy.experimental_local_results(value) for value in got]


def dense(value):
    """As a complex128 array, in which every sum of the table is exact."""
    if not isinstance(value, tf.IndexedSlices):
        return value.numpy().astype("complex128")
    table = np.zeros([16, 3], "complex128")
    np.add.at(table, value.indices.numpy(), value.values.numpy())
    return table


def is_right(got, given, reduce_op):
    for results, arrays in zip(got, zip(*given)):
        exact = np.sum([dense(array) for array in arrays], 0) / (len(arrays) if reduce_op == MEAN else 1)
        tolerance = 1e-2 if results[0].dtype.size == 2 else 1e-6
        if not all(np.allclose(dense(result), exact, tolerance) for result in results):
            return False
    return True


@functools.lru_cache(maxsize=None)
def outcome(peer, kind, count, reduce_op, compiled=True):
    """Return ``right``, ``wrong``, or the class of the error."""
    make = KINDS[kind]
    try:
        got = reduced([f"CPU:{i}" for i in range(count)], PEERS[peer](), reduce_op, make, compiled)
        if kind in SENSELESS:
            return "wrong"
        return "right" if is_right(got, [make(tf.constant(r)) for r in range(count)], reduce_op) else "wrong"
    except Exception as error:
        return type(error).__name__


def cell(peer, kind):
    """What the table says: of 4 devices and of 3, sums and means."""
    even, odd = (verdict(peer, kind, count) for count in (4, 3))
    return even if even == odd else f"{even}; {odd} for odd K"


def verdict(peer, kind, count):
    outcomes = [outcome(peer, kind, count, op) for op in ops_of(kind)] if peer != RING else in_a_child(kind, count)
    return ", ".join(dict.fromkeys("**wrong**" if word == "wrong" else word for word in outcomes))


def in_a_child(kind, count):
    """A collective that fails, or whose group has another size, leaves the process unable to run any other."""
    child = [sys.executable, __file__, kind, str(count)]
    done = subprocess.run(child, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=280, check=False)
    return done.stdout.decode().split() or ["crash"]


def line(kind):
    return f"| {kind} | {' | '.join(cell(peer, kind) for peer in PEERS)} |"


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    if sys.argv[1:]:
        kind, count = sys.argv[1], int(sys.argv[2])
        print(*[outcome(RING, kind, count, op) for op in ops_of(kind)])
    else:
        print(f"| TensorFlow {tf.__version__} | {' | '.join(PEERS)} |", "|---" * (1 + len(PEERS)) + "|", sep="\n")
        for kind in KINDS:
            print(line(kind), flush=True)
