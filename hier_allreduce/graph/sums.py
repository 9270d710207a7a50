"""The sum, the mean and the copies of one chunk: tensors as the values of ``planning.run``."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple, Union

import tensorflow as tf

from ..compat import tf1
from ..planning import Copy, Ops, Reduce


class Shared:
    """The devices, the kind of result, and the constants that the chunks of one all-reduce share.

    ``cluster`` adds up the totals of several hosts; None on one host.
    """

    def __init__(self, devices: Sequence[Any], average: bool = False, cluster: Any = None):
        self.devices, self.average, self.cluster = devices, average, cluster
        self.hosts = 1 if cluster is None else cluster.size
        self.contributions = len(devices) * self.hosts
        self._constants: Dict[Tuple[int, Any, bool], Any] = {}

    def constant(
        self, tower: int, numbers: Union[int, Tuple[int, ...]], is_hidden: bool = False
    ) -> Any:
        """Return an int32 constant on a tower, made once; a hidden one is not seen by Grappler's optimizers."""
        key = (tower, numbers, is_hidden)
        if key not in self._constants:
            with tf1.device(self.devices[tower]):
                constant = tf.constant(numbers, tf.int32)
                if is_hidden and not tf.executing_eagerly():
                    constant = tf1.placeholder_with_default(constant, constant.shape, "hidden")
            self._constants[key] = constant
        return self._constants[key]


class Sum(Ops[Any]):
    """The sum of one chunk's tensors, in their dtype.

    Args:
        name: the chunk's, in op names.
        shared: by all chunks.
    """

    def __init__(self, name: str, shared: Shared):
        self.name, self.shared, self.devices = name, shared, shared.devices

    def end(self, tower: int, value: Any) -> Any:
        """Return a reduced tensor as the result; called under the tower's device."""
        return value

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        return self.add([here, *others], (step.dst, *step.srcs), step.dst)

    def copy(self, step: Copy, value: Any) -> Any:
        with tf1.device(self.devices[step.dst]):
            return tf.identity(value, name=f"{self.name}/copy")

    def finish(self, root: int, total: Any) -> Any:
        if self.shared.contributions == 1:  # its gradient may be on another device
            return self.copy(Copy(root, root), total)
        # Here, before the copies: a multiply on each tower would be fused with different consumers, and the towers
        # would differ in their last bits.
        return self.mean(root, self.over_hosts(root, total))

    def add(self, values: Sequence[Any], towers: Sequence[int], dst: int) -> Any:
        """Return the sum of two values or more on tower ``dst``; ``towers`` has the number of each value's tower."""
        shape, name = values[0].shape, f"{self.name}/sum"
        are_known = all(value.shape.is_fully_defined() for value in values)
        with tf1.device(self.devices[dst]):
            # add would broadcast shapes that turn out to differ when the step runs; add_n raises an error
            total = (
                tf.add(*values, name=name)
                if are_known and len(values) == 2
                else tf.add_n(values, name=name)
            )
        total.set_shape(shape.merge_with(total.shape))
        return total

    def mean(self, root: int, total: Any) -> Any:
        """Return the mean of a sum, if it is wanted."""
        if not self.shared.average:
            return total
        with tf1.device(self.devices[root]):
            return tf.multiply(total, 1.0 / self.shared.contributions, name=f"{self.name}/mean")

    def over_hosts(self, root: int, total: Any) -> Any:
        """Return the sum of all hosts' totals."""
        if self.shared.hosts == 1:
            return total
        with tf1.device(self.devices[root]):
            return self.shared.cluster.all_reduce(total, root, f"{self.name}/across")
