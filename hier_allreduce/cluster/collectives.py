"""TensorFlow's collectives: how a tensor gets from one host to the others.

::

    all_reduce   cast ─► CollectiveReduce (over the hosts) ─► cast       one for each chunk, on its root
    broadcast    chief: CollectiveBcastSend ─► others: CollectiveBcastRecv ─► assign
    table        H×M whole numbers, the same on all hosts: the sum of H tables, in each of which one host fills its row

All are pinned to this host's name in the cluster. A session that is not the cluster's has no such device, so TensorFlow
raises an error where its collectives would wait for ever.

NCCL matches the calls of a device by their order alone: hosts with different orders would add up tensors that do not
belong together, or wait for ever. Control edges give the collectives of a device the order of the plan.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Set

import tensorflow as tf
from tensorflow.python.ops import collective_ops  # it has no public name

from ..compat import COLLECTIVE_DTYPES, forget_colocation, tf1
from ..errors import ClusterError

RING, NCCL = ENGINES = ("ring", "nccl")

# Group and instance numbers belong to the server, and everything that uses its collectives shares them: tensorpack
# counts from 42 and 100, tf.distribute from 1 and 100.
_ON_CPU = 0x4840
_ROOTS = 0x4841  # and one more for each tower that can be a root
_INSTANCES = 0x484100
_TABLES = 0x5840
_MOST_DIMENSIONS = 254  # of a tensor: TensorShape::MaxDimensions() in TensorFlow
_NO_GRADIENT = "HierAllreduceOverHosts"  # TensorFlow's name for the function that raises the error
_CHECKSUMS = "hier_allreduce/checksums"  # the collection of a graph with (variable name, is it set, checksum)

_WIDER = {
    **dict.fromkeys(["bool", "int8", "uint8", "int16", "uint16", "int32"], "int64"),
    **dict.fromkeys(["float16", "bfloat16"], "float32"),
}


@tf.RegisterGradient(_NO_GRADIENT)
def _no_gradient(op: Any, grad: Any) -> Any:
    raise ClusterError(
        f"{op.name!r}: the result of an all-reduce over several hosts has no gradient. Take gradients of the values"
        " that each tower computes before it, or put tf.stop_gradient around the result"
    )


class Collectives:
    """The collectives of this host. A collective meets that with the same number on the other hosts.

    Args:
        hosts: H, 2 or more.
        task: the index of this host.

    Attributes:
        built: number of all-reduces of chunks and of broadcasts of variables so far, in all graphs.
    """

    def __init__(self, hosts: int, task: int):
        self.hosts, self.task = hosts, task
        self.built, self._tables = 0, 0
        self._here = f"/job:worker/replica:0/task:{task}"

    def number(self) -> int:
        """Return the number of the next collective."""
        self.built += 1
        return _INSTANCES + self.built - 1

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return an op that copies the chief's values to the variables."""
        with tf1.device(f"{self._here}/cpu:0"):
            return tf.group(*map(self._broadcast, variables))

    def _broadcast(self, variable: Any) -> Any:
        dtype = variable.dtype.base_dtype
        wide = _collective_dtype(dtype.name)
        numbers = (self.hosts, _ON_CPU, self.number())
        if self.task == 0:
            value = tf.cast(tf.identity(variable), wide)
            return collective_ops.broadcast_send(
                value, value.shape, wide, *numbers, communication_hint=RING
            ).op
        value = collective_ops.broadcast_recv(
            variable.shape, wide, *numbers, communication_hint=RING
        )
        return tf1.assign(variable, tf.cast(value, dtype)).op

    def sum(self, tensor: Any, group: int, engine: str, number: int) -> Any:
        """Return the sum of the hosts' tensors; called under the device with which this host is in the group."""
        with tf1.device(self._here):
            return collective_ops.all_reduce(
                tensor, self.hosts, group, number, "Add", "Id", communication_hint=engine
            )

    def table(self, row: Any, number: int = 0) -> Any:
        """Return the H×M table of all hosts' rows of M whole numbers.

        Args:
            row: of this host.
            number: of the collective; by default the next one of tables that are not in the user's graph.
        """
        self._tables += not number
        with tf1.device(f"{self._here}/cpu:0"):
            rows = tf.pad(
                [tf.cast(row, tf.int64)], [[self.task, self.hosts - self.task - 1], [0, 0]]
            )
            return self.sum(rows, _ON_CPU, RING, number or _TABLES + self._tables)


class AcrossHosts:
    """The sums of one all-reduce's chunks over the roots of all hosts.

    Attributes:
        hosts: H.
    """

    def __init__(self, collectives: Collectives, engine: str):
        self.hosts = collectives.hosts
        self._collectives, self._engine = collectives, engine
        self._last: Dict[int, Any] = {}  # by root, over NCCL

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of all hosts' tensors; called under the device of tower ``root``."""
        if tensor.shape.num_elements() == 0:
            return tensor
        checks = (
            []
            if tensor.shape.is_fully_defined()
            else [self._equal_shapes(tensor, name.rpartition("/")[0])]
        )
        overridden = tf1.get_default_graph().gradient_override_map(
            {"CollectiveReduce": _NO_GRADIENT}
        )
        with tf1.name_scope(name), overridden:
            here = (
                tensor if tensor.device else tf.identity(tensor)
            )  # TensorFlow 1 needs to know the device
            wide = tf.cast(here, _collective_dtype(tensor.dtype.name))
            before = [self._last[root]] if root in self._last else []
            with tf1.control_dependencies([*checks, *before]):
                total = self._collectives.sum(
                    wide, _ROOTS + root, self._engine, self._collectives.number()
                )
            if self._engine == NCCL:
                self._last[root] = total.op
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)

    def _equal_shapes(self, tensor: Any, name: str) -> Any:
        """Return an op that fails on every host if the hosts' tensors differ in shape: engines compare only sizes."""
        with tf1.name_scope(
            "shapes_across"
        ):  # not in the chunk's scope, where the audit counts the sums over hosts
            shape = tf.shape(tensor)
            with tf1.device("/cpu:0"):
                row = tf.pad(
                    shape + 1, [[0, _MOST_DIMENSIONS - tf.size(shape)]]
                )  # no size becomes 0
                rows = self._collectives.table(row, self._collectives.number())
                told = f"{name}: the shape of its gradient differs between the hosts; on this host it is"
                return tf.raw_ops.Assert(
                    condition=tf.reduce_all(tf.equal(rows, rows[:1])), data=[told, shape]
                )


def checksums(graph: Any) -> List[Any]:
    """Return ``(name, op that says whether it has a value, checksum)`` for each trainable variable of a graph.

    They are built once for a graph, and not in a graph that is finalized.
    """
    if graph.finalized or graph.get_collection(_CHECKSUMS):
        return list(graph.get_collection(_CHECKSUMS))
    with graph.as_default(), forget_colocation(), tf1.name_scope(None), tf1.device(None):
        before: List[Any] = []
        for variable in graph.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES):
            if can_cross(variable.dtype.base_dtype.name):
                is_set = tf1.is_variable_initialized(variable)
                with tf1.device("/cpu:0"), tf1.control_dependencies(before):
                    checksum = _checksum(variable)
                before = [checksum]  # one after another: they need more memory than the variables
                graph.add_to_collection(_CHECKSUMS, (str(variable.op.name), is_set, checksum))
    return list(graph.get_collection(_CHECKSUMS))


def _checksum(variable: Any) -> Any:
    """Return a whole number that depends on a variable's bits and their order."""
    dtype = variable.dtype.base_dtype
    value = tf.cast(variable, tf.int64) if dtype.is_bool else tf.convert_to_tensor(variable)
    word = {1: tf.int8, 2: tf.int16, 4: tf.int32}.get(value.dtype.size, tf.int64)
    words = tf.reshape(tf.cast(tf.bitcast(value, word), tf.int64), [-1])
    factors = 2 * tf.range(tf.size(words, out_type=tf.int64), dtype=tf.int64) + 1
    return tf.reduce_sum(words * factors)


def collectives_of(ops: Iterable[Any]) -> List[Any]:
    """Return the collectives among ``ops`` and everything they depend on."""
    return [op for op in _with_inputs(ops) if op.type.startswith("Collective")]


def check_order(collectives: Iterable[Any]) -> None:
    """Check that each device's collectives over NCCL run in the same order on all hosts.

    Raises:
        ClusterError: two of them, of different all-reduces, may run in either order.
    """
    over_nccl = [op for op in collectives if op.get_attr("communication_hint") == b"nccl"]
    last: Dict[str, Any] = {}
    for op in sorted(over_nccl, key=lambda op: int(op.get_attr("instance_key"))):
        before = last.get(op.device, op)
        if (
            before is not op
            and before not in op.control_inputs
            and before not in _with_inputs([op])
        ):
            raise ClusterError(
                f"{before.name!r} and {op.name!r} would cross between the hosts in one step over NCCL, in an order that"
                " could differ between the hosts. Run them in different steps; or build the second all-reduce under"
                " tf.control_dependencies, with results of the first; or choose communication='ring'"
            )
        last[op.device] = op


def _with_inputs(ops: Iterable[Any]) -> Set[Any]:
    seen = set(ops)
    waiting = list(seen)
    while waiting:
        op = waiting.pop()
        new = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
        seen |= new
        waiting += new
    return seen


def can_cross(dtype: str) -> bool:
    """Return whether tensors of a dtype can be added up across hosts."""
    return _WIDER.get(dtype, dtype) in COLLECTIVE_DTYPES


def _collective_dtype(dtype: str) -> Any:
    """Return the dtype in which a tensor crosses: the same if collectives can add that, else a wider one."""
    return tf.as_dtype(dtype if dtype in COLLECTIVE_DTYPES else _WIDER.get(dtype, dtype))
