"""Devices as users write them, as values that ``tf.compat.v1.device`` takes in both TensorFlows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError

_EXPECTED = "a device is a string such as '/gpu:0', a tf.DeviceSpec, or a tf.config.LogicalDevice"


class Lane(NamedTuple):
    """A further device that relays the copies of one tower: a logical GPU of the tower's GPU. See docs/lanes.md.

    Attributes:
        device: its name, with a number.
        tower: the number of the tower.
        memory: its bytes; 0 if they are not known.
        gpu: the number of the tower's GPU in the machine; None if the tower's device has that number.
    """

    device: str
    tower: int
    memory: int = 0
    gpu: Optional[int] = None


@dataclass(frozen=True)
class Places:
    """The devices of an all-reduce, in the numbering of plans.

    Attributes:
        towers: K devices.
        lanes: K×L lanes, those of tower 0 first; none by default.
    """

    towers: Tuple[Any, ...]
    lanes: Tuple[Lane, ...] = ()

    @property
    def devices(self) -> Tuple[Any, ...]:
        """The K×(1 + L) devices of a plan: the towers', then the lanes."""
        return (*self.towers, *(lane.device for lane in self.lanes))

    @property
    def lanes_each(self) -> int:
        """The number of lanes of each tower, L."""
        return len(self.lanes) // len(self.towers)

    @property
    def gpus(self) -> Tuple[int, ...]:
        """The number of each tower's GPU in the machine; empty where its device's own number is that."""
        numbers = [lane.gpu for lane in self.lanes[:: self.lanes_each or 1]]
        return tuple(number for number in numbers if number is not None)

    def is_lane_of(self, device: int, tower: int) -> bool:
        """Return whether device number ``device`` is a lane of device number ``tower``."""
        return device >= len(self.towers) and self.lanes[device - len(self.towers)].tower == tower


def device_strings(devices: Sequence[Any]) -> Tuple[Any, ...]:
    """Return K values for ``tf.compat.v1.device``: strings, None, or (in graph mode) device functions.

    Raises:
        HierAllreduceError: an entry is not a device, or not a valid device name.
    """
    if not _is_list(devices):
        raise HierAllreduceError(f"devices must be a list with one device for each tower, not {devices!r}; {_EXPECTED}")
    strings = tuple(_device_string(f"tower {tower}", device) for tower, device in enumerate(devices))
    if not strings:
        raise HierAllreduceError(f"devices is empty: give one device for each tower; {_EXPECTED}")
    return strings


def places_of(devices: Tuple[Any, ...], lanes: Any) -> Places:
    """Return K devices, from :func:`device_strings`, with their lanes, checked.

    Args:
        devices: K devices.
        lanes: the lanes of all towers: each a :class:`Lane`, or a pair of its device and its tower's number.

    Raises:
        HierAllreduceError: a lane is not a device by name, is of no tower or of another kind than its tower, or may be
            the same device as another lane or a tower; or the towers have different numbers of lanes.
    """
    expected = f"lanes is a list of Lane(device, tower), such as gpu_lanes(…).lanes, for towers 0 to {len(devices) - 1}"
    if not _is_list(lanes):
        raise HierAllreduceError(f"lanes={lanes!r}: {expected}")
    for lane in lanes:
        if not isinstance(lane, (tuple, list)) or len(lane) < 2 or lane[1] not in range(len(devices)):
            raise HierAllreduceError(f"lanes: {lane!r}: {expected}")
    checked = sorted((Lane(*lane) for lane in lanes), key=lambda lane: lane.tower)
    counts = [sum(lane.tower == tower for lane in checked) for tower in range(len(devices))]
    if len(set(counts)) > 1:
        each = ", ".join(f"tower {tower} has {number}" for tower, number in enumerate(counts))
        raise HierAllreduceError(f"every tower must have the same number of lanes: {each}")
    names = [f"tower {lane.tower}, lane {number % counts[0]}" for number, lane in enumerate(checked)]
    strings = [lane._replace(device=_device_string(name, lane.device)) for name, lane in zip(names, checked)]
    places = Places(devices, tuple(strings))
    if strings:
        _check_lanes(places, [*(f"tower {tower}" for tower in range(len(devices))), *names])
    return places


def _is_list(value: Any) -> bool:
    return not isinstance(value, (str, bytes, set, frozenset)) and hasattr(value, "__iter__")


def _check_lanes(places: Places, names: Sequence[str]) -> None:
    """Check that each lane is alone on a device of its tower's kind; ``names`` are those of ``places.devices``."""
    devices = places.devices
    for device, name in zip(devices, names):
        if not isinstance(device, str) or None in device_fields(device)[3:]:
            raise HierAllreduceError(
                f"{name}: {device!r} may be any device; with lanes give every tower and lane a name with a number,"
                " such as '/gpu:0'"
            )
    for number, lane in enumerate(places.lanes, len(places.towers)):
        same = next((other for other in range(number) if devices_match(devices[other], lane.device)), None)
        if same is not None:
            raise HierAllreduceError(
                f"{names[number]} ({lane.device}) is also the device of {names[same]} ({devices[same]}); a lane"
                " needs a device of its own"
            )
        if device_fields(lane.device)[3] != device_fields(devices[lane.tower])[3]:
            raise HierAllreduceError(
                f"{names[number]} is {lane.device}, of another kind than its tower ({devices[lane.tower]}); a lane is a"
                " logical device of the same GPU"
            )


def _device_string(name: str, device: Any) -> Any:
    if device is None or device == "":
        return device
    if isinstance(device, str):
        return _parsed(name, device, device)
    if hasattr(device, "to_string"):  # a DeviceSpec, of either version
        return device.to_string()
    if type(device).__name__ == "LogicalDevice":
        return _parsed(name, device, device.name)
    if callable(device) and not tf.executing_eagerly():
        return device
    hint = f" (did you mean '/gpu:{device}'?)" if isinstance(device, int) and not isinstance(device, bool) else ""
    if type(device).__name__ == "PhysicalDevice":
        hint = " (take the names from tf.config.list_logical_devices())"
    raise HierAllreduceError(f"{name}: {device!r} is not a device: {_EXPECTED}{hint}")


def _parsed(name: str, device: Any, text: str) -> str:
    try:
        index = tf.DeviceSpec.from_string(text).device_index
    except ValueError as error:
        raise HierAllreduceError(f"{name}: {device!r} cannot be read as a device ({error}); {_EXPECTED}") from None
    if index is not None and index < 0:
        raise HierAllreduceError(f"{name}: {device!r} has a number below 0; {_EXPECTED}")
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
