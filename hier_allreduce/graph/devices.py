"""Devices as users write them, in the one spelling that the rest of the package sees.

::

    /gpu:0   /GPU:0   /device:GPU:0   /job:localhost/replica:0/task:0/gpu:0   /gpu   ─►   /gpu:0
    /job:worker/task:1/device:GPU:0                              ─►   /job:worker/task:1/gpu:0
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Iterable, List, Optional, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import devices_of_eager_calls
from ..errors import HierAllreduceError

if TYPE_CHECKING:
    from ..cluster import Cluster

_EXPECTED = (
    "a device is a string such as '/gpu:0', a tf.DeviceSpec, or a tf.config.LogicalDevice, as"
    " tf.config.list_logical_devices() returns them"
)
_SPLIT = "tf.config.set_logical_device_configuration splits a device into several"


def device_strings(devices: Sequence[Any]) -> Tuple[Any, ...]:
    """Return K values for ``tf.compat.v1.device``: strings, None, or, in graphs, device functions.

    Two names of one device become equal strings.

    Raises:
        HierAllreduceError: an entry is not a device, or not a valid device name.
    """
    # It has an order, and parts.
    parts_of_one = (str, bytes, set, frozenset)
    if not hasattr(devices, "__iter__") or isinstance(devices, parts_of_one):
        raise HierAllreduceError(
            f"devices must be a list with one device for each tower, not {devices!r}; {_EXPECTED}"
        )
    strings: List[Any] = []
    for tower, device in enumerate(devices):
        is_function = callable(device) and not tf.executing_eagerly()
        if device is None or is_function:
            strings.append(device)
            continue
        # A DeviceSpec has a method for its text, and a LogicalDevice has a name.
        spelling = getattr(device, "name", device)
        if hasattr(device, "to_string"):
            spelling = device.to_string()
        # TensorFlow reads no device in the text of something else.
        try:
            strings.append(_spelled(str(spelling)))
        except ValueError:
            fault = f"{device!r} is not a device; {_EXPECTED}"
            raise HierAllreduceError(f"tower {tower}: {fault}") from None
    if not strings:
        raise HierAllreduceError(f"devices is empty: give one device for each tower; {_EXPECTED}")
    return tuple(strings)


@lru_cache(maxsize=4096)
def _spelled(device: str) -> str:
    """Return the one spelling of a device's name."""
    named = device_fields(device)
    # The job is dropped if it is this process, because a name without a job means that, too.
    spec = tf.DeviceSpec(job=named.job, replica=named.replica, task=named.task)
    if named.job == "localhost":
        spec = tf.DeviceSpec()
    index = named.device_index or 0  # TensorFlow takes the first device of a type without a number
    if index < 0:
        raise ValueError(f"{device!r} has a number below 0")
    if named.device_type is None:
        return str(spec.to_string())
    short = f"/device:{named.device_type}"
    if named.device_type in ("CPU", "GPU"):
        short = f"/{named.device_type.lower()}"
    return f"{spec.to_string()}{short}:{index}"


def check_existence(
    devices: Sequence[Any], existing: Sequence[str] = (), advice: str = _SPLIT
) -> None:
    """Check that K devices are among the existing ones, by default those of eager calls.

    Soft placement would move their ops to another device in silence. Ops that are added for a
    session are checked with its own devices.
    """
    existing = existing or devices_of_eager_calls()
    for tower, device in enumerate(devices if existing else ()):
        # Device functions and None are left to TensorFlow, which knows where they lead.
        if isinstance(device, str) and not any(devices_match(one, device) for one in existing):
            listed = ", ".join(dict.fromkeys(map(_spelled, existing)))
            raise HierAllreduceError(
                f"tower {tower}: {device} does not exist. There are {listed}; {advice}"
            )


@lru_cache(maxsize=4096)
def device_fields(device: Optional[str]) -> Any:
    """Return what the name of a device says, as a ``tf.DeviceSpec``; what it leaves out is None."""
    return tf.DeviceSpec.from_string(device or "")


def _said(device: Optional[str]) -> Tuple[Any, ...]:
    spec = device_fields(device)
    return spec.job, spec.replica, spec.task, spec.device_type, spec.device_index


@lru_cache(maxsize=4096)
def devices_match(device: Optional[str], wanted: Optional[str]) -> bool:
    """Return whether two names may mean one device: either may leave out the job, or more."""
    # A field that a name leaves out matches any.
    for field, wanted_field in zip(_said(device), _said(wanted)):
        if None not in (field, wanted_field) and field != wanted_field:
            return False
    return True


def tower_at(device: str, devices: Sequence[Any]) -> Optional[int]:
    """Return the first tower whose device is the executed ``device``; None if there is none.

    Of several names that may mean it, such as ``""`` and ``"/cpu:1"``, the one that says most
    counts.
    """
    towers = [tower for tower, wanted in enumerate(devices) if devices_match(device, wanted)]
    return min(towers, key=lambda tower: _said(devices[tower]).count(None), default=None)


def types_of(devices: Iterable[Any]) -> Set[Optional[str]]:
    """Return which types devices have: ``"GPU"``, ``"CPU"``, …, or None where no name tells it."""
    names = [device if isinstance(device, str) else "" for device in devices]
    return {device_fields(name).device_type for name in names}


def hosts_of(cluster: Optional[Cluster]) -> int:
    """Return H, the number of hosts; without a cluster there is this one."""
    return 1 if cluster is None else cluster.size


def cpus_named_by(devices: Sequence[Any]) -> int:
    """Return how many CPU devices this process needs to have all that K towers name."""
    numbers = [-1]
    for device in devices:
        if isinstance(device, str):
            named = device_fields(device)
            if named.device_type == "CPU" and named.job is None:
                numbers.append(named.device_index or 0)
    return max(numbers) + 1
