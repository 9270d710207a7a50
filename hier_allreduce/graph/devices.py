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
    """Return K values for ``tf.compat.v1.device``: strings, None, or (in graph mode) device functions.

    Raises:
        HierAllreduceError: an entry is not a device, or not a valid device name.
    """
    if isinstance(devices, (str, bytes, set, frozenset)) or not hasattr(devices, "__iter__"):
        raise HierAllreduceError(
            f"devices must be a list with one device for each tower, not {devices!r}; {_EXPECTED}"
        )
    strings: List[Any] = []
    for tower, device in enumerate(devices):
        if device is None or (callable(device) and not tf.executing_eagerly()):
            strings.append(device)
            continue
        name = (
            device.to_string() if hasattr(device, "to_string") else getattr(device, "name", device)
        )
        try:
            is_device = isinstance(name, str) and (device_fields(name)[4] or 0) >= 0
        except ValueError:
            is_device = False
        if not is_device:
            hint = f" (did you mean '/gpu:{device}'?)" if str(device).isdigit() else ""
            raise HierAllreduceError(
                f"tower {tower}: {device!r} is not a device{hint}; {_EXPECTED}"
            )
        strings.append(name)
    if not strings:
        raise HierAllreduceError(f"devices is empty: give one device for each tower; {_EXPECTED}")
    return tuple(strings)


@lru_cache(maxsize=4096)
def device_fields(device: Optional[str]) -> Tuple[Any, ...]:
    """Return job, replica, task, type and number of a device's name, None where the name leaves one out."""
    spec = tf.DeviceSpec.from_string(device or "")
    return spec.job, spec.replica, spec.task, spec.device_type, spec.device_index


def devices_match(device: Optional[str], wanted: Optional[str]) -> bool:
    """Return whether two names may mean one device: either may leave out the job, the task or more."""
    return all(
        None in pair or pair[0] == pair[1]
        for pair in zip(device_fields(device), device_fields(wanted))
    )


def any_on_gpu(devices: Sequence[Any]) -> bool:
    """Return whether some device is known to be a GPU."""
    return any(isinstance(device, str) and device_fields(device)[3] == "GPU" for device in devices)


def all_on_cpu(devices: Sequence[Any]) -> bool:
    """Return whether every device is known to be a CPU."""
    return all(isinstance(device, str) and device_fields(device)[3] == "CPU" for device in devices)
