"""Devices as users write them, as values that ``tf.compat.v1.device`` takes in both TensorFlows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

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

    def lanes_with_towers(self) -> Iterator[Tuple[int, int]]:
        """Yield each lane's number among ``devices``, and its tower's."""
        for tower in range(len(self.towers)):
            yield from ((number, tower) for number in self.lanes_of(tower))


class LaneDevices(NamedTuple):
    """The lanes of K towers.

    Attributes:
        devices: K×L, those of tower 0 first; none by default.
        memory: the bytes of each of a tower's L lanes; empty where they are not known.
        gpus: the number of each tower's GPU in the machine; empty where its device's own number is that.
    """

    devices: Tuple[Any, ...] = ()
    memory: Tuple[int, ...] = ()
    gpus: Tuple[int, ...] = ()


NO_LANES = LaneDevices()


class LaneRows(Tuple[Tuple[str, ...], ...]):
    """K rows of L lanes, ``rows[tower][lane]``, with what :class:`LaneDevices` says about them."""

    memory: Tuple[int, ...] = ()
    gpus: Tuple[int, ...] = ()


def device_strings(devices: Sequence[Any]) -> Tuple[Any, ...]:
    """Return K values for ``tf.compat.v1.device``: strings, None, or (in graph mode) device functions.

    Raises:
        DeviceError: an entry is not a device, or not a valid device name.
    """
    if not _is_list(devices):
        raise DeviceError(f"devices must be a list with one device for each tower, not {devices!r}; {_EXPECTED}")
    strings = tuple(_device_string(f"tower {tower}", device) for tower, device in enumerate(devices))
    if not strings:
        raise DeviceError(f"devices is empty: give one device for each tower; {_EXPECTED}")
    return strings


def lane_devices(lanes: Any, devices: Sequence[Any]) -> LaneDevices:
    """Return the lanes of K towers, checked.

    Args:
        lanes: K rows of L devices, ``lanes[tower][lane]``; None for no lanes; or this function's result.
        devices: K devices, from :func:`device_strings`.

    Raises:
        DeviceError: not K rows of equal length; or a lane is not a device by name, is of another kind than its tower,
            or may be the same device as another lane or a tower.
    """
    if lanes is None or isinstance(lanes, LaneDevices):
        return lanes or NO_LANES
    rows = _lane_rows(lanes, len(devices))
    names = [f"tower {tower}, lane {lane}" for tower, row in enumerate(rows) for lane in range(len(row))]
    flat = [device for row in rows for device in row]
    strings = tuple(_device_string(name, device) for name, device in zip(names, flat))
    if strings:
        _check_lanes(Places(tuple(devices), strings), [*(f"tower {tower}" for tower in range(len(devices))), *names])
    return LaneDevices(strings, getattr(lanes, "memory", ()), getattr(lanes, "gpus", ()))


def _lane_rows(lanes: Any, towers: int) -> List[List[Any]]:
    expected = f"lanes are one row for each of the {towers} towers, lanes[tower][lane], such as gpu_lanes(…).lanes"
    if not _is_list(lanes):
        raise DeviceError(f"lanes={lanes!r}: {expected}")
    rows = list(lanes)
    for tower, row in enumerate(rows):
        if not _is_list(row):
            raise DeviceError(f"tower {tower}: its row of lanes is {row!r}; {expected}")
    rows = [list(row) for row in rows]
    if len(rows) != towers:
        raise DeviceError(f"lanes has {len(rows)} rows; {expected}")
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        counts = ", ".join(f"tower {tower} has {len(row)}" for tower, row in enumerate(rows))
        raise DeviceError(f"every tower must have the same number of lanes: {counts}")
    return rows


def _is_list(value: Any) -> bool:
    return not isinstance(value, (str, bytes, set, frozenset)) and hasattr(value, "__iter__")


def _check_lanes(places: Places, names: Sequence[str]) -> None:
    """Check that each lane is alone on a device of its tower's kind; ``names`` are those of ``places.devices``."""
    devices = places.devices
    for device, name in zip(devices, names):
        if not isinstance(device, str) or None in device_fields(device)[3:]:
            raise DeviceError(
                f"{name}: {device!r} may be any device; with lanes give every tower and lane a name with a number,"
                " such as '/gpu:0'"
            )
    for number, tower in places.lanes_with_towers():
        same = next((other for other in range(number) if devices_match(devices[other], devices[number])), None)
        if same is not None:
            raise DeviceError(
                f"{names[number]} ({devices[number]}) is also the device of {names[same]} ({devices[same]}); a lane"
                " needs a device of its own"
            )
        if device_fields(devices[number])[3] != device_fields(devices[tower])[3]:
            raise DeviceError(
                f"{names[number]} is {devices[number]}, of another kind than its tower ({devices[tower]}); a lane is a"
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
    raise DeviceError(f"{name}: {device!r} is not a device: {_EXPECTED}{hint}")


def _parsed(name: str, device: Any, text: str) -> str:
    try:
        index = tf.DeviceSpec.from_string(text).device_index
    except ValueError as error:
        raise DeviceError(f"{name}: {device!r} cannot be read as a device ({error}); {_EXPECTED}") from None
    if index is not None and index < 0:
        raise DeviceError(f"{name}: {device!r} has a number below 0; {_EXPECTED}")
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
