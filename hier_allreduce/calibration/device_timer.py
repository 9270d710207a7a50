"""Copies and sums on real devices, timed inside one session.

::

    go ┄┄► slice ──► copy ──► assign to a variable ┄┄► end         go, end: the host's clock; ┄┄ control edges
             on the sender      on the receiver

TensorFlow passes a received tensor on only when its last byte has arrived, so ``end`` waits for the copy and for
nothing else: no data comes back to the host. Slices that begin and end at a multiple of 64 bytes are views, which cost
nothing. CPU devices share one memory and pass tensors on without a copy; there the receiver makes one.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import tensorflow as tf

from ..graph import tf1
from .speeds import TRAIN
from .timer import Pair, Timer, Transfer

_TIMEOUT_MS = 60_000
_FLOAT = 4  # bytes
_ALIGNED = 16  # elements: TensorFlow copies a slice that does not begin and end at 64 bytes


class DeviceTimer(Timer):
    """Times copies and sums on devices of this process.

    Args:
        devices: K device strings, all GPUs or all CPUs.
        largest: the most bytes that one copy moves. Every device holds as much twice.
    """

    def __init__(self, devices: Sequence[str], largest: int):
        self.devices, self._names = len(devices), tuple(devices)
        self.one_memory = all("cpu" in device.lower() for device in devices)
        # the copies of a train, and the operands of a sum, which are fewer, are different parts of it
        self._elements = max(largest // _FLOAT, TRAIN * 1024)
        self.largest = self._elements * _FLOAT
        self._steps: Dict[Tuple[Any, ...], Callable[..., List[float]]] = {}
        self._graph = tf.Graph()
        with self._graph.as_default():
            fill = self._build()
        self._session = tf1.Session(graph=self._graph, config=self._config())
        self._session.run(fill)

    def _config(self) -> Any:
        config = tf1.ConfigProto(operation_timeout_in_ms=_TIMEOUT_MS)
        if self.one_memory:
            config.device_count["CPU"] = self.devices
        config.gpu_options.allow_growth = True
        # what is measured is what is written here
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = tf1.OptimizerOptions.L0
        return config

    def close(self) -> None:
        """Close the session."""
        self._session.close()

    # ---- runs ------------------------------------------------------------------------------------------

    def together(self, transfers: Sequence[Transfer]) -> List[float]:
        """Return the seconds from a common start to the end of each copy; see :class:`.Timer`."""
        pairs = tuple((transfer.src, transfer.dst) for transfer in transfers)
        sizes = {transfer.src: transfer.size for transfer in transfers}
        return self._run(pairs, [self._ends[pair] for pair in pairs], sizes)

    def trains(self, pairs: Sequence[Pair], count: int, size: int) -> float:
        """Return the seconds of ``count`` independent copies of each pair; see :class:`.Timer`."""
        key = ("trains", tuple(pairs), count)
        return self._run(key, [self._trains_end(pairs, count)], dict.fromkeys([src for src, _ in pairs], size))[0]

    def hops(self, count: int, size: int) -> float:
        """Return the seconds of ``count`` copies around all devices, one after another; see :class:`.Timer`."""
        return self._run(("hops", count), [self._hops_end(count)], {0: size})[0]

    def sums(self, operands: int, count: int, size: int) -> float:
        """Return the seconds of ``count`` sums, one after another; see :class:`.Timer`."""
        return self._run(("sums", operands, count), [self._sums_end(operands, count)], {0: size})[0]

    def _run(self, key: Tuple[Any, ...], ends: List[Any], sizes: Dict[int, int]) -> List[float]:
        if key not in self._steps:
            self._steps[key] = self._session.make_callable([self._go, *ends], feed_list=[self._counts])
        elements = [_elements(sizes.get(device, _FLOAT)) for device in range(self.devices)]
        go, *finished = self._steps[key](elements)
        return [float(end - go) for end in finished]

    # ---- the graph -------------------------------------------------------------------------------------

    def _build(self) -> Any:
        """Build what all runs share and the copies of all pairs; return the op that fills the memory."""
        raw = tf.raw_ops
        with tf1.device("/cpu:0"):
            self._counts = tf1.placeholder(tf.int32, [self.devices], "counts")
            self._count = [self._counts[device : device + 1] for device in range(self.devices)]
            self._go = raw.Timestamp()
        self._values, self._slots, fills = [], [], []
        for number, device in enumerate(self._names):
            with tf1.device(device):
                source = raw.VarHandleOp(dtype=tf.float32, shape=[self._elements], shared_name=f"source{number}")
                fills.append(raw.AssignVariableOp(resource=source, value=tf.ones([self._elements])))
                self._values.append(raw.ReadVariableOp(resource=source, dtype=tf.float32))
                # [None]: an unknown length
                self._slots.append(raw.VarHandleOp(dtype=tf.float32, shape=[None], shared_name=f"slot{number}"))
        parts = [self._part(number, 0) for number in range(self.devices)]
        self._ends = {
            (src, dst): self._end(self._consumed(dst, self._received(dst, parts[src])))
            for src in range(self.devices)
            for dst in range(self.devices)
            if src != dst
        }
        self._built: Dict[Tuple[Any, ...], Any] = {}
        return tf.group(*fills)

    def _part(self, device: int, number: int) -> Any:
        """Return part ``number`` of a device's memory, as many elements as are fed, once the clock is read."""
        begin = number * (self._elements // TRAIN // 1024 * 1024)
        with tf1.device(self._names[device]), tf1.control_dependencies([self._go.op]):
            return tf.raw_ops.Slice(input=self._values[device], begin=[begin], size=self._count[device])

    def _received(self, device: int, value: Any) -> Any:
        with tf1.device(self._names[device]):
            return tf.raw_ops.DeepCopy(x=value) if self.one_memory else tf.identity(value)

    def _consumed(self, device: int, value: Any) -> Any:
        with tf1.device(self._names[device]):
            return tf.raw_ops.AssignVariableOp(resource=self._slots[device], value=value)

    def _end(self, *ops: Any) -> Any:
        with tf1.device("/cpu:0"), tf1.control_dependencies(ops):
            return tf.raw_ops.Timestamp()

    def _once(self, key: Tuple[Any, ...], build: Callable[[], Any]) -> Any:
        """Return what ``build`` added to the graph when it was first called for this key."""
        if key not in self._built:
            with self._graph.as_default():
                self._built[key] = build()
        return self._built[key]

    def _trains_end(self, pairs: Sequence[Pair], count: int) -> Any:
        def build() -> Any:
            turns = [(src, dst, number) for number in range(count) for src, dst in pairs]
            received = [self._received(dst, self._part(src, number)) for src, dst, number in turns]
            with tf1.device(self._names[pairs[-1][1]]):
                return self._end(tf.group(*received))

        return self._once(("trains", tuple(pairs), count), build)

    def _hops_end(self, count: int) -> Any:
        def build() -> Any:
            value = self._part(0, 0)
            for hop in range(1, count + 1):
                value = self._received(hop % self.devices, value)
            return self._end(value.op)

        return self._once(("hops", count), build)

    def _sums_end(self, operands: int, count: int) -> Any:
        def build() -> Any:
            total, *others = [self._part(0, number) for number in range(operands)]
            with tf1.device(self._names[0]):
                for _ in range(count):
                    total = tf.add_n([total, *others])
                first = tf.raw_ops.Slice(input=total, begin=[0], size=[1])
            # a GPU's kernels run after their op has returned; this copy to the host waits for them
            with tf1.device("/cpu:0"):
                return self._end(tf.identity(first).op)

        return self._once(("sums", operands, count), build)


def _elements(size: int) -> int:
    """Return the number of elements in ``size`` bytes, so that a slice of them is a view."""
    elements = size // _FLOAT
    return elements // _ALIGNED * _ALIGNED if elements > _ALIGNED else elements
