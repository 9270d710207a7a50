"""``tf.distribute`` with this package's all-reduce: one argument of ``MirroredStrategy``."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow as tf

from ..compat import mirrored_like, replica_values, without_autograph
from ..errors import HierAllreduceError
from ..graph import all_reduce, checked_call, checked_layout
from ..graph.record import log_once
from ..planning.strategy import Strategy, strategy_from

__all__ = ["HierarchicalAllReduce"]

_BATCH = 32  # Keras' default


class HierarchicalAllReduce(tf.distribute.ReductionToOneDevice):
    """``cross_device_ops`` of ``tf.distribute.MirroredStrategy`` for any K ≥ 1 devices of one host.

    ::

        strategy = tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())
        with strategy.scope():
            model = …                   # then fit or a training loop, as usual

    All values that TensorFlow reduces together go through one
    :func:`hier_allreduce.allreduce_grads`, so that small gradients share chunks. The parent class,
    ``ReductionToOneDevice``, does everything that is not an all-reduce: one destination (such as
    the CPU), variables as values, the mean of integers (float64 in TensorFlow), and
    ``strategy.gather``. With one replica the result is the value itself, so a program may use
    any number of GPUs.

    ``tf.IndexedSlices`` remain sparse where that is fewer bytes, or as ``Strategy(sparse=…)`` says.
    The difference counts, because optimizers with momentum update other rows for a dense gradient.
    """

    def __init__(self, strategy: Union[str, Strategy, None] = None):
        """The constructor reads the strategy.

        Args:
            strategy: a :class:`hier_allreduce.Strategy`, an algorithm's name, or the name or path
                of a strategy's YAML file. None means the default strategy.

        Raises:
            HierAllreduceError: no such strategy, or one with a ``wire_dtype``.
        """
        super().__init__()
        self._strategy = strategy_from(strategy)
        if self._strategy.wire_dtype:
            raise HierAllreduceError(
                f"wire_dtype={self._strategy.wire_dtype!r}: TensorFlow does not say which values"
                " are gradients, and statistics, metrics and losses would be rounded too; leave"
                " wire_dtype out, and cast the gradients to 16 bits where they are reduced, as the"
                " page about Keras shows"
            )

    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Reduce values to their destinations together.

        See ``tf.distribute.CrossDeviceOps.batch_reduce``.

        Raises:
            HierAllreduceError: several replicas pass the very same tensor to a sum; or as
                ``allreduce_grads``.
        """
        pairs = list(value_destination_pairs)
        # TensorFlow keeps equal tensors once, and would return a single one as the sum of all.
        is_sum = reduce_op == tf.distribute.ReduceOp.SUM
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        for per_replica, _ in pairs:
            tensors = replica_values(per_replica)
            if is_sum and len(tensors) == 1 < replicas:
                raise HierAllreduceError(
                    f"{replicas} replicas pass the very same tensor, on {tensors[0].device!r}, and"
                    " TensorFlow would take it for their sum: create it inside the function that"
                    " strategy.run calls"
                )
        return super().batch_reduce(reduce_op, pairs, *args, **kwargs)

    # ---- TensorFlow's hooks behind both ------------------------------------------------------

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, *options: Any
    ) -> Any:
        """Reduce one value."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, *options)[0]

    @without_autograph
    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[Tuple[Any, Any]], *options: Any
    ) -> List[Any]:
        """Reduce all values with the same destinations at once."""
        average = reduce_op == tf.distribute.ReduceOp.MEAN
        mirrored: List[Any] = [None] * len(value_destination_pairs)
        # Values on the same devices go through one all-reduce, so that small ones share chunks.
        places_by_devices: Dict[Tuple[str, ...], List[int]] = {}
        for place, (replicas, destinations) in enumerate(value_destination_pairs):
            devices = _devices(replicas, destinations, average)
            if devices is None:
                mirrored[place] = super().reduce_implementation(
                    reduce_op, replicas, destinations, *options
                )
            else:
                places_by_devices.setdefault(devices, []).append(place)
        for devices, places in places_by_devices.items():
            pairs = [value_destination_pairs[place] for place in places]
            grads = list(zip(*(replica_values(replicas) for replicas, _ in pairs)))  # K × N
            call = checked_call(grads, devices, average, self._strategy)
            call = call._replace(front_end="keras", arguments=(reduce_op, pairs, *options))
            # Keras adds up first batches in a way that needs them to be equal.
            count = len(devices)
            if _BATCH % count:
                log_once(f"{count} replicas: batches: multiples of {count}, for Keras")
            reduced = all_reduce(call.rows, checked_layout(call))
            # The class of a result is not public. The result of ``broadcast``, which is, has it.
            example = self.broadcast(tf.constant(0.0), pairs[0][1])
            for place, column in zip(places, zip(*reduced)):
                mirrored[place] = mirrored_like(example, column)
        return mirrored


def _devices(replicas: Any, destinations: Any, average: bool) -> Optional[Tuple[str, ...]]:
    """Return the K devices of the result, in the replicas' order; None if it is no all-reduce."""
    tensors = replica_values(replicas)
    for tensor in tensors:
        if not isinstance(tensor, (tf.Tensor, tf.IndexedSlices)):
            return None
        # TensorFlow computes the mean of integers in float64.
        if average and tensor.dtype.is_integer:
            return None
    # One of them may be a text, such as that of the CPU.
    devices = tuple(getattr(place, "device", "") for place in replica_values(destinations))
    # One replica has nothing to add up, and one destination for several is a reduction without
    # copies back.
    is_one_to_one = 1 < len(tensors) == len(devices) == len(set(devices))
    return devices if is_one_to_one and all(devices) else None
