"""``tf.distribute`` with this package's all-reduce: one argument of ``MirroredStrategy``.

::

    from hier_allreduce.integrations.distribute import HierarchicalAllReduce

    strategy = tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())
    with strategy.scope():
        model = …                       # then fit or your own loop, as usual

On TensorFlow 2 this module uses public names of TensorFlow only.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import Lane, allreduce_grads, gpu_count, mirrored_factory, replica_values
from ..planning import Strategy, strategy_from
from ..planning.strategy import THIS_MACHINE

__all__ = ["HierarchicalAllReduce"]

Places = Tuple[str, ...]  # K devices


class HierarchicalAllReduce(tf.distribute.ReductionToOneDevice):
    """``cross_device_ops`` of ``tf.distribute.MirroredStrategy`` for any K ≥ 1 devices of one host.

    ::

        value = PerReplica(a0 on /gpu:0, a1 on /gpu:1)   ──►   Mirrored(a0+a1 on /gpu:0, a0+a1 on /gpu:1)

    All values that TensorFlow reduces together go through one :func:`hier_allreduce.allreduce_grads`, so that small
    gradients share buckets. The parent class, ``ReductionToOneDevice``, handles everything that is not an all-reduce:
    one destination (the host, say), variables as values, the mean of integers (float64 in TensorFlow), and
    ``strategy.gather``. With one replica the result is the value itself: a script may use whatever GPUs there are.

    ``tf.IndexedSlices`` stay sparse unless the strategy has ``sparse="dense"``. Optimizers with momentum update other
    rows for a dense gradient than for a sparse one, so ``"auto"`` gathers here.
    """

    def __init__(
        self,
        strategy: Union[str, Strategy, None] = None,
        lanes: Sequence[Lane] = (),
    ):
        """Choose how to reduce.

        Args:
            strategy: a :class:`hier_allreduce.Strategy`, an algorithm's name, or the name or path of a strategy's YAML
                file. None means the default strategy.
            lanes: further devices over which values travel, with their replicas' numbers, as in
                :func:`hier_allreduce.allreduce_grads`. Give the ``MirroredStrategy`` its K devices: without a list it
                takes all logical devices, lanes too.

        Raises:
            HierAllreduceError: there is no such strategy, or it has a ``wire_dtype``.
        """
        super().__init__()
        chosen = strategy_from(strategy)
        if chosen.wire_dtype:
            # Keras 3 and synchronized batch normalization both call ReplicaContext.all_reduce. Destinations tell
            # nothing either: a variable there stands for its devices, and may get a statistic.
            raise HierAllreduceError(
                f"wire_dtype={chosen.wire_dtype!r}: TensorFlow does not say which values are gradients, and statistics,"
                " metrics and losses would be rounded too; leave wire_dtype out, and cast the gradients to 16 bits"
                " where they are reduced, as docs/distribute.md shows"
            )
        if chosen.topology == THIS_MACHINE and not gpu_count():
            warnings.warn(
                "topology='this machine': TensorFlow sees no GPUs, so nothing is planned; `hier-allreduce doctor` says"
                " why, and what to do",
                stacklevel=2,
            )
        self._strategy, self._lanes = chosen.for_optimizers(), lanes
        arguments = {"strategy": strategy, "lanes": lanes}
        self._shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value not in (None, ()))
        self._makers: Dict[Places, Callable[[Tuple[Any, ...]], Any]] = {}

    def __repr__(self) -> str:
        return f"HierarchicalAllReduce({self._shown})"

    def reduce(self, reduce_op: Any, per_replica_value: Any, destinations: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce one value to its destinations; see ``tf.distribute.CrossDeviceOps.reduce``.

        Raises:
            HierAllreduceError: as :meth:`batch_reduce`.
        """
        _refuse_unfit(reduce_op, per_replica_value, destinations)
        return super().reduce(reduce_op, per_replica_value, destinations, *args, **kwargs)

    def batch_reduce(self, reduce_op: Any, value_destination_pairs: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce values to their destinations together; see ``tf.distribute.CrossDeviceOps.batch_reduce``.

        Raises:
            HierAllreduceError: several replicas pass the very same tensor to a sum; or devices of several hosts; or
                replicas differ in dtype or shape, or a value has no sum; see ``allreduce_grads``.
        """
        pairs = list(value_destination_pairs)
        for value, destinations in pairs:
            _refuse_unfit(reduce_op, value, destinations)
        return super().batch_reduce(reduce_op, pairs, *args, **kwargs)

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, *options: Any) -> Any:
        """Reduce one value: TensorFlow's hook behind ``reduce``."""
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], *options)[0]

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Sequence[Tuple[Any, Any]], *options: Any
    ) -> List[Any]:
        """Reduce all values with the same destinations at once: TensorFlow's hook behind ``batch_reduce``."""
        average = reduce_op == tf.distribute.ReduceOp.MEAN
        results: List[Any] = [None] * len(value_destination_pairs)
        groups: Dict[Places, List[int]] = {}  # numbers of the values for the same K devices
        for number, (value, destinations) in enumerate(value_destination_pairs):
            places = _places(value, destinations, average)
            if places is None:
                results[number] = super().reduce_implementation(reduce_op, value, destinations, *options)
            else:
                groups.setdefault(places, []).append(number)
        for places, numbers in groups.items():
            rows = zip(*(replica_values(value_destination_pairs[number][0]) for number in numbers))
            reduced = allreduce_grads(list(rows), places, average, strategy=self._strategy, lanes=self._lanes)
            mirrored = self._maker(places, value_destination_pairs[numbers[0]][1])
            for number, column in zip(numbers, zip(*reduced)):
                results[number] = mirrored(column)
        return results

    def _maker(self, places: Places, destinations: Any) -> Callable[[Tuple[Any, ...]], Any]:
        """Return a function from K tensors to a Mirrored value."""
        # The class of such a value is not public. An example of it is: the result of ``broadcast``.
        if places not in self._makers:
            self._makers[places] = mirrored_factory(self.broadcast(tf.constant(0.0), destinations))
        return self._makers[places]


def _places(value: Any, destinations: Any, average: bool) -> Optional[Places]:
    """Return the K devices that get the result, in the replicas' order; None if it is not an all-reduce."""
    tensors = replica_values(value)
    if not all(isinstance(tensor, (tf.Tensor, tf.IndexedSlices)) for tensor in tensors):
        return None
    if average and any(tensor.dtype.is_integer for tensor in tensors):
        return None
    places = () if isinstance(destinations, str) else tuple(part.device for part in replica_values(destinations))
    if len(places) != len(tensors) or len(set(places)) < len(places) or not all(places):
        return None
    _refuse_several_hosts(places)
    return places


# ---- bad input -------------------------------------------------------------------------------------


def _refuse_unfit(reduce_op: Any, value: Any, destinations: Any) -> None:
    """Check that a value is neither a composite tensor nor, for a sum, a single tensor that several replicas share.

    TensorFlow returns a single tensor as it is. That is the mean of equal values, but not their sum.
    """
    tensors = replica_values(value)
    for replica, tensor in enumerate(tensors):
        if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
            raise HierAllreduceError(
                f"replica {replica}: a {type(tensor).__name__} cannot be all-reduced; use a tf.Tensor, such as its"
                " values if they have the same shape on all replicas, or tf.IndexedSlices"
            )
    replicas = max(tf.distribute.get_strategy().num_replicas_in_sync, len(replica_values(destinations)))
    if reduce_op == tf.distribute.ReduceOp.SUM and len(tensors) == 1 < replicas:
        raise HierAllreduceError(
            f"{replicas} replicas pass the very same tensor, on {tensors[0].device!r}, and TensorFlow would take it for"
            " their sum: create it inside the function that strategy.run calls"
        )


def _refuse_several_hosts(places: Places) -> None:
    specs = [tf.DeviceSpec.from_string(place) for place in places]
    hosts = sorted({f"/job:{spec.job}/task:{spec.task}" for spec in specs})
    if len(hosts) > 1:
        raise HierAllreduceError(
            f"the devices belong to several hosts ({', '.join(hosts)}): {', '.join(places)}. MirroredStrategy trains on"
            " the devices of one host; for several use tf.distribute.MultiWorkerMirroredStrategy"
        )
