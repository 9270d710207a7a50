"""Devices as users write them, in the one spelling that the rest of the package sees.

::

    /gpu:0   /GPU:0   /device:GPU:0   /job:localhost/replica:0/task:0/gpu:0   /gpu   ─►   /gpu:0
    /job:worker/task:1/device:GPU:0                              ─►   /job:worker/task:1/gpu:0
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import devices_of_eager_calls
from ..errors import HierAllreduceError
from ..formatting import count

_EXPECTED = (
    "a device is a string such as '/gpu:0', a tf.DeviceSpec, or a tf.config.LogicalDevice, as"
    " tf.config.list_logical_devices() returns them"
)


def device_strings(devices: Sequence[Any]) -> Tuple[Any, ...]:
    """Return K values for ``tf.compat.v1.device``: strings, None, or, in graphs, device functions.

    Two names of one device become equal strings. Towers that share a device get a warning.

    Raises:
        HierAllreduceError: an entry is not a device, or not a valid device name, or one of XLA's.
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
        if str(device_fields(name)[3]).startswith("XLA_"):
            raise HierAllreduceError(
                f"tower {tower}: {name} is a device of XLA, on which TensorFlow runs compiled"
                " clusters only; name the device itself, such as '/gpu:0'"
            )
        strings.append(_spelled(name))
    if not strings:
        raise HierAllreduceError(f"devices is empty: give one device for each tower; {_EXPECTED}")
    _warn_of_shared(strings)
    return tuple(strings)


@lru_cache(maxsize=4096)
def _spelled(name: str) -> str:
    """Return the one spelling of a device's name."""
    job, replica, task, kind, number = device_fields(name)
    if job == "localhost":  # a name without a job is of this process too
        job = replica = task = None
    spec = tf.DeviceSpec(job=job, replica=replica, task=task)
    if kind is None:
        return str(spec.to_string())
    # TensorFlow takes the first device of a kind if there is no number
    short = f"/{kind.lower()}" if kind in ("CPU", "GPU") else f"/device:{kind}"
    return f"{spec.to_string()}{short}:{number or 0}"


def check_existence(devices: Sequence[Any]) -> None:
    """Check that K devices exist, if ops that are added now will run here, not in a session.

    Soft placement would move their ops to another device in silence.
    """
    there = devices_of_eager_calls()
    for tower, device in enumerate(devices if there else ()):
        if isinstance(device, str) and not any(devices_match(name, device) for name in there):
            names = ", ".join(dict.fromkeys(map(_spelled, there)))
            raise HierAllreduceError(
                f"tower {tower}: {device} does not exist. There are {names};"
                " tf.config.set_logical_device_configuration splits a device into several"
            )


def _warn_of_shared(devices: Sequence[Any]) -> None:
    """Warn the caller's caller of towers on one device, which gain nothing."""
    names = [device for device in devices if isinstance(device, str) and device_fields(device)[3]]
    for device in dict.fromkeys(names):
        if names.count(device) > 1:
            warnings.warn(
                f"{count(names.count(device), 'tower')} are on one device, {device}, and wait for"
                " each other; name another device for each tower",
                stacklevel=5,  # without_autograph is in between
            )


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
