"""TensorFlow's collectives: the ops by which a tensor gets from one host to the others.

::

    add_up   CollectiveReduce over the hosts
    gather   H×M whole numbers, the same on all hosts: the sum of H tables, each with a host's line
    send     chief: CollectiveBcastSend ─► others: CollectiveBcastRecv ─► assign

All are pinned to this host's name in the cluster. A session that is not the cluster's has no such
device, so TensorFlow raises an error where its collectives would wait for ever. The engine is
TensorFlow's ring over gRPC. NCCL would match calls by their order, and so hang if hosts differ.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

import tensorflow as tf
from tensorflow.python.ops import collective_ops  # it has no public name

from ..compat import COLLECTIVE_DTYPES, forget_colocation, tf1
from ..errors import ClusterError
from ..graphs import memory_of, needed_by
from .environment import Job

_RING = "ring"

# Groups and numbers of collectives belong to the server, and everything that uses its collectives
# shares them: tensorpack counts from 42 and 100, tf.distribute from 1 and 100.
# The group of the hosts' first CPU devices:
ON_CPU = 0x4840
# The group of the hosts' towers 0; there is one more group for each tower that can be a root.
ON_ROOTS = 0x4841
# The number of the first collective in users' graphs:
FIRST_IN_GRAPHS = 0x484100
# The number of the first collective by which sessions compare hosts:
FIRST_OF_SESSIONS = 0x5841

# The types of ops that this module adds to users' graphs.
TYPES = ("CollectiveReduce", "CollectiveBcastSend", "CollectiveBcastRecv")

# The dtypes in which tensors cross, by their own: a wider one where collectives have no kernels.
_CROSSING_DTYPES = {
    **dict.fromkeys(["bool", "int8", "uint8", "int16", "uint16", "int32"], "int64"),
    **dict.fromkeys(["float16", "bfloat16"], "float32"),
    **{dtype: dtype for dtype in COLLECTIVE_DTYPES},
}


# ---- ops -------------------------------------------------------------------------------------


def crossing_dtype(dtype: str, what: str) -> str:
    """Return the dtype in which tensors of a dtype cross.

    Raises:
        ClusterError: they cannot; it begins with ``what`` they are.
    """
    if dtype not in _CROSSING_DTYPES:
        raise ClusterError(f"{what}: {dtype} cannot cross between hosts; cast it, or leave it out")
    return _CROSSING_DTYPES[dtype]


def add_up(tensor: Any, job: Job, group: int, instance: int) -> Any:
    """Return the sum of this tensor and those of the collectives with this number on other hosts.

    It is called under the device by which this host is in ``group``.
    """
    with tf1.device(_here(job)):
        return collective_ops.all_reduce(
            tensor, job.size, group, instance, "Add", "Id", communication_hint=_RING
        )


def gather(integers: Any, job: Job, instance: int) -> Any:
    """Return an H×M table: the M whole numbers of each host, in int64 and on this host's CPU."""
    with tf1.device(f"{_here(job)}/cpu:0"):
        # Other hosts' lines are 0 here, so the sum of the tables has each host's line once.
        own = tf.one_hot(job.task, job.size, dtype=tf.int64)  # H
        table = own[:, None] * tf.cast(integers, tf.int64)  # H × M
        return add_up(table, job, ON_CPU, instance)


def send(variable: Any, job: Job, instance: int) -> Any:
    """Return an op that copies the chief's value of a variable to the other hosts."""
    dtype = variable.dtype.base_dtype
    wide = tf.as_dtype(crossing_dtype(dtype.name, variable.op.name))
    with tf1.device(f"{_here(job)}/cpu:0"):
        if job.task == 0:
            crossing = tf.cast(tf.identity(variable), wide)
            sent = collective_ops.broadcast_send(
                crossing, crossing.shape, wide, job.size, ON_CPU, instance, communication_hint=_RING
            )
            return sent.op
        received = collective_ops.broadcast_recv(
            variable.shape, wide, job.size, ON_CPU, instance, communication_hint=_RING
        )
        return tf1.assign(variable, tf.cast(received, dtype)).op


def _here(job: Job) -> str:
    return f"/job:worker/replica:0/task:{job.task}"


# ---- fingerprints of weights -----------------------------------------------------------------


def fingerprint(tensor: Any) -> Any:
    """Return one int64 of all bits of a tensor, on the CPU, by which towers and hosts compare."""
    with tf1.device("/cpu:0"):
        row = tf.reshape(tensor, [1, -1])
        eight_bytes = tf.raw_ops.Fingerprint(data=row, method="farmhash64")
        return tf.bitcast(eight_bytes, tf.int64)[0]


def fingerprints(graph: Any) -> Dict[str, Any]:
    """Return a fingerprint of each trainable variable, by its name; add those that are missing.

    That of a variable without a value is 0.
    """
    compared = memory_of(graph).compared
    with graph.as_default(), forget_colocation(), tf1.name_scope(None), tf1.device(None):
        for variable in graph.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES):
            if variable.op.name not in compared:
                compared[variable.op.name] = _fingerprint_or_0(variable)
    return dict(compared)


def _fingerprint_or_0(variable: Any) -> Any:
    return tf1.cond(
        tf1.is_variable_initialized(variable),
        lambda: fingerprint(variable.read_value()),
        lambda: tf.constant(0, tf.int64),
    )


# ---- the collectives of a step ---------------------------------------------------------------


def collectives_of(ops: Iterable[Any]) -> List[Any]:
    """Return the collectives among ``ops`` and everything they depend on."""
    return [op for op in needed_by(ops) if op.type.startswith("Collective")]


def has_sum(ops: Iterable[Any]) -> bool:
    """Return whether there are sums over hosts among ``ops``."""
    return any(op.type.startswith("CollectiveReduce") for op in ops)
