"""The sum, the mean and the copies of one chunk: tensors as the values of ``planning.run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow as tf

from ..compat import DTYPES_WITHOUT_ADD, tf1
from ..planning import ChunkOps, Copy, Reduce
from .devices import all_on_cpu

if TYPE_CHECKING:
    from ..cluster.shared_ops import SharedOps


class Context:
    """What the chunks of one all-reduce share: devices, the kind of result, and constants.

    Attributes:
        devices: K devices.
        average: the mean instead of the sum.
        hosts: what several hosts build together; None on one host.
        host_count: H, the number of hosts.
        contributions: the gradients in each sum: K for each host.
        on_cpu: whether all towers are CPU devices.
    """

    def __init__(
        self, devices: Sequence[Any], average: bool = False, hosts: Optional[SharedOps] = None
    ):
        self.devices = devices
        self.average = average
        self.hosts = hosts
        self.host_count = 1 if hosts is None else hosts.size
        self.contributions = len(devices) * self.host_count
        self.on_cpu = all_on_cpu(devices)
        self._constants: Dict[Tuple[int, Any, bool], Any] = {}

    def constant(
        self, tower: int, numbers: Union[int, Tuple[int, ...]], is_hidden: bool = False
    ) -> Any:
        """Return an int32 constant on a tower, made once.

        Grappler does not use the value of a hidden one when it infers shapes or fuses ops.
        """
        key = (tower, numbers, is_hidden)
        if key not in self._constants:
            with tf1.device(self.devices[tower]):
                constant = tf.constant(numbers, tf.int32)
                if is_hidden and not tf.executing_eagerly():
                    constant = tf1.placeholder_with_default(constant, constant.shape, "hidden")
            self._constants[key] = constant
        return self._constants[key]


class Sum(ChunkOps[Any]):
    """The sum of one chunk's tensors, in their dtype.

    Args:
        name: the chunk's, in op names.
        context: of the all-reduce.
    """

    def __init__(self, name: str, context: Context):
        self.name = name
        self.context = context
        self.devices = context.devices

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        terms = self.terms(step, here, others)
        return self.add(terms, (step.dst, *step.srcs), step.dst)

    def terms(self, step: Reduce, here: Any, others: List[Any]) -> List[Any]:
        """Return what a step adds up: the values of its destination and of its sources."""
        return [here, *others]

    def at_root(self, root: int, total: Any) -> Any:
        if self.context.contributions == 1:
            return self.copy(Copy(root, root), total)  # the gradient may be on another device
        # The mean is taken here, before the copies. A multiply on each tower would be fused with
        # different consumers, and the towers would differ in their last bits.
        return self.mean(root, self.over_hosts(root, total))

    def copy(self, step: Copy, value: Any) -> Any:
        with tf1.device(self.devices[step.dst]):
            return tf.identity(value, name=f"{self.name}/copy")

    def as_result(self, tower: int, value: Any) -> Any:
        """Return a reduced tensor as the result; called under the tower's device."""
        return value

    def add(self, values: Sequence[Any], towers: Sequence[int], dst: int) -> Any:
        """Return the sum of two values or more on tower ``dst``.

        Args:
            values: tensors.
            towers: the tower of each value.
            dst: a tower.
        """
        shape = values[0].shape
        are_known = all(value.shape.is_fully_defined() for value in values)
        if are_known and len(values) > 2 and self.context.on_cpu and not tf.executing_eagerly():
            return self._add_on_cpu(values, towers, dst)
        with tf1.device(self.devices[dst]):
            if are_known and len(values) == 2 and values[0].dtype.name not in DTYPES_WITHOUT_ADD:
                return tf.add(*values, name=f"{self.name}/sum")
            # add would broadcast shapes that turn out to differ when the step runs; add_n does not
            total = tf.add_n(values, name=f"{self.name}/sum")
        total.set_shape(shape.merge_with(total.shape))
        return total

    def _add_on_cpu(self, values: Sequence[Any], towers: Sequence[int], dst: int) -> Any:
        """Return the sum of tensors of equal, known shape as that of columns of unknown height.

        Grappler's memory optimizer replaces an add_n of more than two inputs, one of which is made
        on the same device, by one pass over memory for each input. On CPU devices this takes twice
        the time. It does so only where it knows the shape of the inputs, and so a reshape hides it.
        The reshape copies nothing. GPUs would pay for the further ops.
        """
        columns = []
        for value, tower in zip(values, towers):
            column = self.context.constant(tower, (-1, 1), is_hidden=True)
            with tf1.device(self.devices[tower]):
                columns.append(tf.reshape(value, column, name=f"{self.name}/column"))
        shape = self.context.constant(dst, tuple(values[0].shape.as_list()))
        with tf1.device(self.devices[dst]):
            total = tf.add_n(columns, name=f"{self.name}/sum")
            return tf.reshape(total, shape, name=f"{self.name}/sum")

    def mean(self, root: int, total: Any) -> Any:
        """Return the mean of a sum, if it is wanted."""
        if not self.context.average:
            return total
        share = 1.0 / self.context.contributions
        with tf1.device(self.devices[root]):
            return tf.multiply(total, share, name=f"{self.name}/mean")

    def over_hosts(self, root: int, total: Any) -> Any:
        """Return the sum of all hosts' totals."""
        if self.context.hosts is None:
            return total
        with tf1.device(self.devices[root]):
            return self.context.hosts.all_reduce(total, root, f"{self.name}/across")
