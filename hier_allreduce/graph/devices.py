"""Devices as users write them, as values that ``tf.compat.v1.device`` takes in both TensorFlows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError

_EXPECTED = (
    "a device is a string such as '/gpu:0', a tf.DeviceSpec, or a tf.config.LogicalDevice, as"
    " tf.config.list_logical_devices() returns them"
)


def device_strings(devices: Sequence[Any]) -> Tuple[Any, ...]:
    """Return K values for ``tf.compat.v1.device``: strings, None, or, in graphs, device functions.

    Raises:
        HierAllreduceError: an entry is not a device, or not a valid device name.
    """
    listed = _listed(devices)
    if listed is None:
        raise HierAllreduceError(
            f"devices must be a list with one device for each tower, not {devices!r}; {_EXPECTED}"
        )
    strings: List[Any] = []
    for tower, device in enumerate(listed):
        is_function = callable(device) and not tf.executing_eagerly()
        if device is None or is_function:
            strings.append(device)
            continue
        name = getattr(device, "name", device)
        if hasattr(device, "to_string"):  # a DeviceSpec
            name = device.to_string()
        if not _is_device(name):
            hint = f" (did you mean '/gpu:{device}'?)" if str(device).isdigit() else ""
            fault = f"{device!r} is not a device{hint}; {_EXPECTED}"
            raise HierAllreduceError(f"tower {tower}: {fault}")
        strings.append(name)
    if not strings:
        raise HierAllreduceError(f"devices is empty: give one device for each tower; {_EXPECTED}")
    return tuple(strings)


def _listed(devices: Any) -> Optional[List[Any]]:
    """Return what can be iterated, in order, as a list; None for anything else."""
    if isinstance(devices, (str, bytes, set, frozenset)):
        return None
    try:
        return list(devices)
    except TypeError:  # a number, an array without dimensions, a tensor in a graph
        return None


def _is_device(name: Any) -> bool:
    """Return whether ``name`` is the name of a device."""
    if not isinstance(name, str):
        return False
    try:
        number = device_fields(name)[4]
    except ValueError:
        return False
    return number is None or number >= 0


@lru_cache(maxsize=4096)
def device_fields(device: Optional[str]) -> Tuple[Any, ...]:
    """Return job, replica, task, type and number of a device's name; None for missing ones."""
    spec = tf.DeviceSpec.from_string(device or "")
    return spec.job, spec.replica, spec.task, spec.device_type, spec.device_index


def devices_match(device: Optional[str], wanted: Optional[str]) -> bool:
    """Return whether two names may mean one device: either may leave out the job, or more."""
    for field, wanted_field in zip(device_fields(device), device_fields(wanted)):
        if None not in (field, wanted_field) and field != wanted_field:
            return False
    return True


def any_on_gpu(devices: Sequence[Any]) -> bool:
    """Return whether some device is known to be a GPU."""
    return any(isinstance(device, str) and device_fields(device)[3] == "GPU" for device in devices)


def all_on_cpu(devices: Sequence[Any]) -> bool:
    """Return whether every device is known to be a CPU."""
    return all(isinstance(device, str) and device_fields(device)[3] == "CPU" for device in devices)
