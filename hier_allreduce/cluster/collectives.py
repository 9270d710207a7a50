"""TensorFlow's collectives: how a tensor gets from one host to the others.

::

    all_reduce   cast ─► CollectiveReduce (over the hosts) ─► cast       one for each chunk, on its main
    broadcast    chief: CollectiveBcastSend ─► others: CollectiveBcastRecv ─► assign
    meeting      CollectiveReduce of one number: it ends when all hosts have come to it

Two engines carry them: TensorFlow's ring over gRPC, and NCCL between GPUs. NCCL matches the calls of a
device by their order alone: hosts with different orders would add up what does not belong together, or wait for ever.
Control edges give the collectives of a device the order in which they were built, which is that of the plan::

    device 0   chunk 0: CollectiveReduce ┄┄► chunk 2: CollectiveReduce ┄┄► chunk 4 …
    device 1   chunk 1: CollectiveReduce ┄┄► chunk 3: CollectiveReduce …

float16, bfloat16 and small integers are cast to a dtype that the collectives can add up, where they cannot add their
own.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Set

import tensorflow as tf
from tensorflow.python.framework import kernels  # neither has a public name
from tensorflow.python.ops import collective_ops

from ..errors import ClusterError
from ..graph import COLLECTIVE_DTYPES, CrossHostReduce, device_fields, tf1
from .config import AUTO, NCCL, RING

# Group and instance numbers belong to the server, and everything that uses its collectives shares them: tensorpack
# counts from 42 and 100, tf.distribute from 1 and 100.
_ON_CPU = 0x4840
_MAINS = 0x4841  # and one more for each tower that can be a main
_VARIABLES = 0x5840  # and one more for each GPU with variables that are broadcast
_INSTANCES = 0x484100
_MEETING = _INSTANCES - 1
_MOST_DIMENSIONS = 254  # of a tensor: TensorShape::MaxDimensions() in TensorFlow
_NO_GRADIENT = "HierAllreduceOverHosts"  # TensorFlow's name for the function that refuses one

_WIDER = {
    **dict.fromkeys(["bool", "int8", "uint8", "int16", "uint16", "int32"], "int64"),
    **dict.fromkeys(["float16", "bfloat16"], "float32"),
}


@tf.RegisterGradient(_NO_GRADIENT)
def _refuse_gradient(op: Any, grad: Any) -> Any:
    """Raise an error that says more than TensorFlow's, which has no gradient for collectives.

    Raises:
        ClusterError: always.
    """
    raise ClusterError(
        f"{op.name!r}: the result of an all-reduce over several hosts has no gradient. Take gradients of what each"
        " tower computes before it, or put tf.stop_gradient around the result"
    )


def engine_for(communication: str, devices: Iterable[Any]) -> str:
    """Return the engine, ``RING`` or ``NCCL``, that adds up tensors on ``devices``."""
    if communication != AUTO:
        return communication
    return NCCL if all(map(_is_gpu, devices)) and _has_nccl() else RING


def _is_gpu(device: Any) -> bool:
    return isinstance(device, str) and device_fields(device)[3] == "GPU"


def _has_nccl() -> bool:
    """Whether this TensorFlow was built with NCCL, as tf.distribute finds out."""
    return bool(kernels.get_registered_kernels_for_op("NcclAllReduce").kernel)


class Collectives:
    """The numbers of this host's collectives, and those that belong to no all-reduce.

    Attributes:
        hosts: H, 2 or more.
        task: the index of this host.
        built: number of collectives built so far, in all graphs. A collective meets the one with the same number on
            the other hosts.
    """

    def __init__(self, hosts: int, task: int):
        self.hosts, self.task = hosts, task
        self.built = 0

    def broadcast(self, variables: Sequence[Any], groups: Dict[str, int]) -> Any:
        """Return an op that gives variables the chief's values: over NCCL those on the devices of ``groups``."""
        received: Dict[str, Any] = {}  # the last one of each of these devices
        others = []
        for variable in variables:
            group = groups.get(variable.device)
            if group is None:
                with tf1.device("/cpu:0"):
                    others.append(self._broadcast(variable, _ON_CPU, RING))
                continue
            before = [received[variable.device]] if variable.device in received else []
            with tf1.device(variable.device), tf1.control_dependencies(before):
                received[variable.device] = self._broadcast(variable, group, NCCL)
        return tf.group(*others, *received.values())

    def _broadcast(self, variable: Any, group: int, engine: str) -> Any:
        dtype = variable.dtype.base_dtype
        wide = _collective_dtype(dtype)
        numbers = (self.hosts, group, self._next_instance())
        if self.task == 0:
            value = tf.cast(tf.identity(variable), wide)
            return collective_ops.broadcast_send(value, value.shape, wide, *numbers, communication_hint=engine).op
        value = collective_ops.broadcast_recv(variable.shape, wide, *numbers, communication_hint=engine)
        return tf1.assign(variable, tf.cast(value, dtype)).op

    def meeting(self) -> Any:
        """Return an op that no host ends before all have begun it."""
        with tf1.device("/cpu:0"):
            return self.sum(tf.zeros([1]), _ON_CPU, RING, _MEETING).op

    def sum(self, tensor: Any, group: int, engine: str, instance: int = 0) -> Any:
        """Return the sum of the hosts' tensors; called under the device with which this host is in the group."""
        number = instance or self._next_instance()
        return collective_ops.all_reduce(tensor, self.hosts, group, number, "Add", "Id", communication_hint=engine)

    def _next_instance(self) -> int:
        self.built += 1
        return _INSTANCES + self.built - 1


class AcrossHosts(CrossHostReduce):
    """The sums of one all-reduce's chunks over the mains of all hosts."""

    def __init__(self, collectives: Collectives, engine: str):
        self.hosts = collectives.hosts
        self._collectives, self._engine = collectives, engine
        self._last: Dict[int, Any] = {}  # by main, over NCCL

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of all hosts' tensors."""
        if tensor.shape.num_elements() == 0:
            return tensor
        checks = [] if tensor.shape.is_fully_defined() else [self._equal_shapes(tensor, name.rpartition("/")[0])]
        overridden = tf1.get_default_graph().gradient_override_map({"CollectiveReduce": _NO_GRADIENT})
        with tf1.name_scope(name), overridden:
            here = tensor if tensor.device else tf.identity(tensor)  # TensorFlow 1 needs to know the device
            wide = tf.cast(here, _collective_dtype(tensor.dtype))
            before = [self._last[root]] if root in self._last else []
            with tf1.control_dependencies([*checks, *before]):
                total = self._collectives.sum(wide, _MAINS + root, self._engine)
            if self._engine == NCCL:
                self._last[root] = total.op
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)

    def _equal_shapes(self, tensor: Any, name: str) -> Any:
        """Return an op that fails on every host if the hosts' tensors differ in shape: engines compare only sizes."""
        hosts, task = self.hosts, self._collectives.task
        with tf1.name_scope("shapes_across"):  # not in the chunk's scope, where the audit counts what crosses
            shape = tf.shape(tensor)
            with tf1.device("/cpu:0"):
                # a row for each host, of which this one fills its own; no size becomes 0
                margins = [[task, hosts - task - 1], [0, _MOST_DIMENSIONS - tf.size(shape)]]
                rows = self._collectives.sum(tf.pad([shape + 1], margins), _ON_CPU, RING)
                told = f"{name}: the shape of its gradient differs between the hosts; on this host it is"
                return tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(rows, rows[:1])), data=[told, shape])


def nccl_groups(communication: str, variables: Iterable[Any]) -> Dict[str, int]:
    """Return the number of the group of hosts for each GPU whose variables are broadcast over NCCL."""
    devices = sorted({str(variable.device) for variable in variables if _is_gpu(variable.device)})
    over_nccl = engine_for(communication, devices) == NCCL
    return {device: _VARIABLES + number for number, device in enumerate(devices)} if over_nccl else {}


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
        if before is not op and before not in op.control_inputs and before not in _with_inputs([op]):
            raise ClusterError(
                f"{before.name!r} and {op.name!r} would cross between the hosts in one step over NCCL, in an order that"
                " could differ between the hosts. Run them in different steps; or build the second all-reduce under"
                " tf.control_dependencies, with results of the first; or choose communication='ring'"
            )
        last[op.device] = op


def _with_inputs(ops: Iterable[Any]) -> Set[Any]:
    """Return ``ops`` and everything they depend on."""
    seen = set(ops)
    waiting = list(seen)
    while waiting:
        op = waiting.pop()
        new = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
        seen |= new
        waiting += new
    return seen


def can_cross(dtype: Any) -> bool:
    """Whether tensors of a dtype can be added up across hosts."""
    return _collective_dtype(dtype).name in COLLECTIVE_DTYPES


def _collective_dtype(dtype: Any) -> Any:
    """Return the dtype in which a tensor crosses: its own if collectives can add that, else a wider one."""
    name = dtype.base_dtype.name
    return tf.as_dtype(name if name in COLLECTIVE_DTYPES else _WIDER.get(name, name))
