"""Devices as users write them, as values that ``tf.compat.v1.device`` takes in both TensorFlows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import DeviceError

_EXPECTED = "a device is a string such as '/gpu:0', a tf.DeviceSpec, or a tf.config.LogicalDevice"


@dataclass(frozen=True)
class Places:
    """The devices of an all-reduce, in the numbering of plans.

    Attributes:
        towers: K devices.
        lanes: the K×L lanes, those of tower 0 first; none by default.
    """

    towers: Tuple[Any, ...]
    lanes: Tuple[Any, ...] = ()

    @property
    def devices(self) -> Tuple[Any, ...]:
        """The K×(1 + L) devices of a plan: the towers', then the lanes."""
        return self.towers + self.lanes

    @property
    def lanes_each(self) -> int:
        """The number of lanes of each tower, L."""
        return len(self.lanes) // len(self.towers)

    def lanes_of(self, tower: int) -> range:
        """Return the numbers of a tower's lanes among ``devices``; of what is no tower there are none."""
        if tower >= len(self.towers):
            return range(0)
        first = len(self.towers) + tower * self.lanes_each
        return range(first, first + self.lanes_each)


def device_strings(devices: Sequence[Any]) -> Tuple[Any, ...]:
    """Return K values for ``tf.compat.v1.device``: strings, None, or (in graph mode) device functions.

    Raises:
        DeviceError: an entry is not a device, or not a valid device name.
    """
    if isinstance(devices, (str, bytes, set, frozenset)) or not hasattr(devices, "__iter__"):
        raise DeviceError(f"devices must be a list with one device for each tower, not {devices!r}; {_EXPECTED}")
    strings = tuple(_device_string(tower, device) for tower, device in enumerate(devices))
    if not strings:
        raise DeviceError(f"devices is empty: give one device for each tower; {_EXPECTED}")
    return strings


def _device_string(tower: int, device: Any) -> Any:
    if device is None or device == "":
        return device
    if isinstance(device, str):
        return _parsed(tower, device, device)
    if hasattr(device, "to_string"):  # a DeviceSpec, of either version
        return device.to_string()
    if type(device).__name__ == "LogicalDevice":
        return _parsed(tower, device, device.name)
    if callable(device) and not tf.executing_eagerly():
        return device
    hint = f" (did you mean '/gpu:{device}'?)" if isinstance(device, int) and not isinstance(device, bool) else ""
    if type(device).__name__ == "PhysicalDevice":
        hint = " (take the names from tf.config.list_logical_devices())"
    raise DeviceError(f"tower {tower}: {device!r} is not a device: {_EXPECTED}{hint}")


def _parsed(tower: int, device: Any, text: str) -> str:
    try:
        index = tf.DeviceSpec.from_string(text).device_index
    except ValueError as error:
        raise DeviceError(f"tower {tower}: {device!r} cannot be read as a device ({error}); {_EXPECTED}") from None
    if index is not None and index < 0:
        raise DeviceError(f"tower {tower}: {device!r} has a number below 0; {_EXPECTED}")
    return text


def all_on_cpu(devices: Sequence[Any]) -> bool:
    """Return whether every device is known to be a CPU."""
    return all(isinstance(d, str) and d and tf.DeviceSpec.from_string(d).device_type == "CPU" for d in devices)


@lru_cache(maxsize=4096)
def device_fields(device: Optional[str]) -> Tuple[Any, ...]:
    """Return job, replica, task, type and index of a device's name, each None where the name leaves it out."""
    spec = tf.DeviceSpec.from_string(device or "")
    return spec.job, spec.replica, spec.task, spec.device_type, spec.device_index


def devices_match(device: Optional[str], wanted: Optional[str]) -> bool:
    """Return whether two names may mean one device: either may leave out the job, the task or more."""
    return all(None in pair or pair[0] == pair[1] for pair in zip(device_fields(device), device_fields(wanted)))


def device_numbers(devices: Sequence[Any]) -> List[int]:
    """Return the index of each device; the tower's number where the device has none."""
    numbers = []
    for tower, device in enumerate(devices):
        index = tf.DeviceSpec.from_string(device).device_index if isinstance(device, str) and device else None
        numbers.append(tower if index is None else int(index))
    return numbers
