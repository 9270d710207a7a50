"""Physical GPUs cut into logical ones, before TensorFlow starts; CPU devices alike.

::

    gpu_lanes(2, lanes=2)          TensorFlow 1.15         TensorFlow 2
    tower 0, its lanes 0 and 1     gpu:0  gpu:1  gpu:2     gpu:0  gpu:2  gpu:4
    tower 1, its lanes 0 and 1     gpu:3  gpu:4  gpu:5     gpu:1  gpu:3  gpu:5

TensorFlow 1.15 numbers the logical devices of one GPU after those of another. TensorFlow 2 goes by their ordinal first:
0 for towers, which so keep their numbers, 1 and up for lanes. The first session, or the first op outside of one, fixes
all this for the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple, Union

import tensorflow as tf

from ..errors import HierAllreduceError
from ..formatting import amount, count
from ..graph import IS_TF2, Lane, device_fields, device_strings, make_logical_cpus, tf1, without_autograph
from ..planning import MEMORY
from ..topology import free_gpu_memory

MIB = 1 << 20
RESERVED = 0.05  # the share of a GPU's free memory that TensorFlow leaves to CUDA and its libraries
LEAST = 256 * MIB  # a logical GPU with less has no room for a model
MOST_GPUS = 256  # of one machine, logical ones too: a larger number is a slip


@dataclass(frozen=True)
class LogicalDevices:
    """Towers and lanes as logical devices, and how TensorFlow gets them.

    Attributes:
        devices: K devices, one for each tower.
        lanes: K×L lanes, those of tower 0 first.
        gpus: the number of each tower's GPU, counted from 0 over those that CUDA_VISIBLE_DEVICES shows; empty if the
            towers are CPU devices.
        tower_memory: the bytes that each tower keeps of its GPU.
    """

    devices: Tuple[str, ...]
    lanes: Tuple[Lane, ...]
    gpus: Tuple[int, ...] = ()
    tower_memory: int = 0

    @property
    def config(self) -> Any:
        """A session's configuration, a new ``tf.compat.v1.ConfigProto``, with these devices."""
        return self.added_to(tf1.ConfigProto())

    def added_to(self, config: Any) -> Any:
        """Return a copy of a session's configuration with these devices.

        On GPUs, ``per_process_gpu_memory_fraction`` is reset: TensorFlow refuses it for logical GPUs.

        Raises:
            HierAllreduceError: ``config`` has other logical GPUs, or lists GPUs.
        """
        changed = type(config)()
        changed.CopyFrom(config)
        if not self.gpus:
            changed.device_count["CPU"] = max(changed.device_count["CPU"], self._cpus)
            return changed
        options = changed.gpu_options
        if options.experimental.virtual_devices or options.visible_device_list:
            raise HierAllreduceError(
                "the session's configuration has virtual_devices or a visible_device_list already; leave both out,"
                " they are set for the lanes"
            )
        options.per_process_gpu_memory_fraction = 0
        options.visible_device_list = ",".join(map(str, sorted(self.gpus)))
        for _ in self.gpus:
            logical = options.experimental.virtual_devices.add(memory_limit_mb=[size // MIB for size in self._sizes])
            if IS_TF2:
                logical.device_ordinal.extend(range(len(self._sizes)))
        return changed

    def configure(self) -> None:
        """Make these devices before TensorFlow starts: for eager execution, ``tf.function`` and ``tf.distribute``.

        Sessions make theirs from ``config``; on TensorFlow 1.15 this does nothing.

        Raises:
            HierAllreduceError: TensorFlow has started.
        """
        if not IS_TF2:
            return
        try:
            if self.gpus:
                self._configure_gpus()
            else:
                make_logical_cpus(self._cpus)
        except RuntimeError as error:
            raise HierAllreduceError(
                f"TensorFlow has started with other devices ({error}); call configure() before the first op or session"
            ) from None

    def _configure_gpus(self) -> None:
        physical = tf.config.list_physical_devices("GPU")
        chosen = [physical[gpu] for gpu in sorted(self.gpus)]
        logical = [
            tf.config.LogicalDeviceConfiguration(memory_limit=size // MIB, experimental_device_ordinal=ordinal)
            for ordinal, size in enumerate(self._sizes)
        ]
        tf.config.set_visible_devices(chosen, "GPU")
        for gpu in chosen:
            tf.config.set_logical_device_configuration(gpu, logical)

    @property
    def _sizes(self) -> List[int]:
        """Bytes of a GPU's logical devices: the tower's, then the lanes'."""
        return [self.tower_memory, *(lane.memory for lane in self.lanes if lane.tower == 0)]

    @property
    def _cpus(self) -> int:
        named = [*self.devices, *(lane.device for lane in self.lanes)]
        return 1 + max(device_fields(device)[4] for device in named)


@without_autograph
def gpu_lanes(
    gpus: Union[int, Sequence[Any]],
    lanes_per_gpu: int,
    memory_limit: Union[int, Sequence[int], None] = None,
    gradient_bytes: Optional[int] = None,
    tower_memory: Optional[int] = None,
) -> LogicalDevices:
    """Cut each of K GPUs into a tower's device and L lanes, for ``allreduce_grads(…, lanes=…)``.

    ::

        setup = hier_allreduce.gpu_lanes(8, lanes_per_gpu=3, gradient_bytes=102 << 20)
        # build the towers on setup.devices
        reduced = hier_allreduce.allreduce_grads(grads, setup.devices, lanes=setup.lanes)
        session = tf.compat.v1.Session(config=setup.config)

    Call ``setup.configure()`` first where there is no session. See docs/lanes.md.

    Args:
        gpus: the number K of GPUs, a list of their numbers, or a list of devices: ``["/gpu:0", …]``. CPU devices, such
            as ``["/cpu:0", "/cpu:1"]``, get lanes that are CPU devices.
        lanes_per_gpu: L, the lanes of each tower.
        memory_limit: the bytes of each lane, or L numbers.
        gradient_bytes: instead of ``memory_limit``: the bytes of one tower's gradients in one all-reduce. Each lane
            gets twice as much, a single one four times.
        tower_memory: the bytes that each tower keeps; by default what is free on the fullest GPU, less the lanes and
            the 5 % that TensorFlow leaves to CUDA. nvidia-smi tells what is free.

    Raises:
        HierAllreduceError: a GPU does not exist, the memory does not fit, or an argument is invalid.
    """
    setup = lane_numbers(gpus, lanes_per_gpu)
    limits = _lane_limits(lanes_per_gpu, memory_limit, gradient_bytes)
    if not setup.gpus:
        return _with_memory(setup, limits or (), 0)
    if limits is None:
        raise HierAllreduceError(
            "give memory_limit=, the bytes of each lane, or gradient_bytes=, those of one tower's gradients: TensorFlow"
            " fixes the memory of lanes when it starts"
        )
    return fitted(setup, limits, tower_memory)


def lane_numbers(gpus: Union[int, Sequence[Any]], lanes: int) -> LogicalDevices:
    """Return towers and lanes as TensorFlow will number them, without their memory; arguments as :func:`gpu_lanes`.

    Raises:
        HierAllreduceError: an argument is invalid.
    """
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 0:
        raise HierAllreduceError(f"lanes_per_gpu={lanes!r}: expected a whole number of lanes for each tower; 0 is none")
    devices = device_strings(_named(gpus))
    kinds = {_kind(device) for device in devices}
    numbers = [device_fields(device)[4] for device in devices if isinstance(device, str)]
    if kinds not in ({"CPU"}, {"GPU"}) or None in numbers or len(set(numbers)) < len(numbers):
        raise HierAllreduceError(
            f"devices {list(devices)}: lanes need towers on different GPUs, or on different CPU devices, each by a name"
            " with a number such as '/gpu:0'"
        )
    if kinds == {"CPU"}:
        free = max(numbers) + 1
        on_cpus = [Lane(f"/cpu:{free + number}", number // lanes) for number in range(len(numbers) * lanes)]
        return LogicalDevices(tuple(devices), tuple(on_cpus))
    order = {number: place for place, number in enumerate(sorted(numbers))}
    table = [
        [_gpu_number(order[number], place, len(numbers), lanes) for place in range(1 + lanes)] for number in numbers
    ]
    on_gpus = [
        Lane(f"/gpu:{lane}", tower, gpu=gpu) for tower, (gpu, row) in enumerate(zip(numbers, table)) for lane in row[1:]
    ]
    return LogicalDevices(tuple(f"/gpu:{row[0]}" for row in table), tuple(on_gpus), tuple(numbers))


def _named(gpus: Any) -> Any:
    """Return a number of GPUs, or their numbers, as device strings; anything else as it is."""
    if isinstance(gpus, int) and not isinstance(gpus, bool):
        if gpus > MOST_GPUS:
            raise HierAllreduceError(f"{gpus} GPUs: expected at most {MOST_GPUS} in one machine")
        gpus = range(gpus)
    if isinstance(gpus, str) or not hasattr(gpus, "__iter__"):
        return gpus
    return [f"/gpu:{gpu}" if isinstance(gpu, int) and not isinstance(gpu, bool) else gpu for gpu in gpus]


def _gpu_number(gpu: int, place: int, gpus: int, lanes: int) -> int:
    """Return TensorFlow's number of a logical device: at ``place`` 0, the tower's, or above on its GPU."""
    return gpu + place * gpus if IS_TF2 else gpu * (1 + lanes) + place


def _kind(device: Any) -> Optional[str]:
    return device_fields(device)[3] if isinstance(device, str) else None


def _lane_limits(
    lanes: int, memory_limit: Union[int, Sequence[int], None], gradient_bytes: Optional[int]
) -> Optional[Tuple[int, ...]]:
    """Return the bytes of each lane; None if they are not given."""
    if memory_limit is not None and gradient_bytes is not None:
        raise HierAllreduceError("give either memory_limit= or gradient_bytes=, not both")
    if gradient_bytes is not None:
        _check_bytes("gradient_bytes", gradient_bytes)
        # planned lanes carry different shares: of two or more lanes, one needs up to half of what all need together
        memory_limit = -(-MEMORY * int(gradient_bytes) // min(2, max(1, lanes)))
    if memory_limit is None:
        return None
    limits = list(memory_limit) if hasattr(memory_limit, "__iter__") else [memory_limit] * lanes
    for limit in limits:
        _check_bytes("memory_limit", limit)
    if len(limits) != lanes:
        raise HierAllreduceError(
            f"memory_limit={memory_limit!r}: expected one number, or one for each of {lanes} lanes"
        )
    return tuple(int(limit) for limit in limits)


def _check_bytes(name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0:
        raise HierAllreduceError(f"{name}={size!r}: expected bytes, a number above 0")


def fitted(setup: LogicalDevices, limits: Sequence[int], tower_memory: Optional[int] = None) -> LogicalDevices:
    """Return ``setup`` with the memory of lanes and towers, if it fits; arguments as :func:`gpu_lanes`.

    Raises:
        HierAllreduceError: as :func:`gpu_lanes`.
    """
    _refuse_missing_gpus(setup.gpus)
    limits = [max(1, -(-limit // MIB)) * MIB for limit in limits]  # TensorFlow counts in MiB, and 0 is no limit
    on_lanes = sum(limits)
    everywhere = free_gpu_memory()
    free = min((everywhere[gpu] for gpu in setup.gpus if gpu < len(everywhere)), default=None)
    if free is None and tower_memory is None:
        raise HierAllreduceError("nvidia-smi does not say how much memory is free; give tower_memory=, in bytes")
    if tower_memory is not None:
        _check_bytes("tower_memory", tower_memory)
    room = None if free is None else int(free * (1 - RESERVED)) - on_lanes
    wanted = LEAST if tower_memory is None else int(tower_memory)
    if free is not None and room is not None and room < wanted:
        raise HierAllreduceError(
            f"the memory does not fit: {amount(free, binary=True)} are free on the fullest GPU, the lanes of each take"
            f" {amount(on_lanes, binary=True)} and its tower {amount(wanted, binary=True)}; use fewer bytes in one"
            " all-reduce, fewer lanes' bytes, or no lanes"
        )
    return _with_memory(setup, limits, room if tower_memory is None and room is not None else wanted)


def _with_memory(setup: LogicalDevices, limits: Sequence[int], tower_memory: int) -> LogicalDevices:
    lanes = [lane._replace(memory=limits[number % len(limits)]) for number, lane in enumerate(setup.lanes) if limits]
    return LogicalDevices(setup.devices, tuple(lanes) or setup.lanes, setup.gpus, tower_memory // MIB * MIB)


def _refuse_missing_gpus(gpus: Sequence[int]) -> None:
    found = len(tf.config.experimental.list_physical_devices("GPU"))
    missing = [gpu for gpu in gpus if gpu >= found]
    if missing:
        raise HierAllreduceError(
            f"GPUs {', '.join(map(str, missing))} do not exist: TensorFlow finds {count(found, 'GPU')} here; without"
            ' GPUs give CPU devices, such as ["/cpu:0", "/cpu:1"]'
        )
