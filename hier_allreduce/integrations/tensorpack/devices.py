"""The towers' devices: their names, and sessions that have these devices."""

from __future__ import annotations

import copy
import operator
import os
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np
import tensorflow as tf
from tensorpack.tfutils.sesscreate import NewSessionCreator, SessionCreatorAdapter

from ...errors import HierAllreduceError
from ...graph import Lane, device_fields, device_strings, devices_match, tf1
from ...logical import MOST_GPUS, LogicalDevices


def tower_devices(devices: Any) -> List[Any]:
    """Return ``devices`` as a list for ``tf.device``.

    Args:
        devices: the number of GPUs, or a list of K GPU ids or devices. A GPU id becomes ``/gpu:id``.

    Raises:
        HierAllreduceError: no devices, or an invalid one.
    """
    count = _as_integer(devices)
    if count is not None:
        if count < 1:
            raise HierAllreduceError(f"devices={devices}: training needs at least one GPU; or give a list of devices")
        if count > MOST_GPUS:
            raise HierAllreduceError(
                f"devices={devices}: expected the number of GPUs of one machine, at most {MOST_GPUS}"
            )
        devices = range(count)
    if isinstance(devices, Iterable) and not isinstance(devices, (str, bytes, set, frozenset)):
        devices = [_gpu_string(tower, device) for tower, device in enumerate(devices)]
    try:
        return list(device_strings(devices))
    except HierAllreduceError as error:
        raise HierAllreduceError(f"{error}; or give the number of GPUs, or a list of ids such as [0, 1]") from None


def _as_integer(value: Any) -> Optional[int]:
    """Return the value of any integer, also one of NumPy's; None for everything else."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _gpu_string(tower: int, device: Any) -> Any:
    """Return ``/gpu:id`` for an id, and anything else as it is."""
    number = _as_integer(device)
    if number is None:
        return device
    if number < 0:
        raise HierAllreduceError(
            f"tower {tower}: GPU {number} cannot exist, GPUs count from 0; give ids such as [0, 1]"
        )
    return f"/gpu:{number}"


# ---- sessions ----------------------------------------------------------------------------------------


def creator_for_towers(creator: Any, changed: Callable[[Any], Any]) -> Any:
    """Return a session creator whose sessions have what the towers need: ``changed(configuration)``.

    That is a changed copy of tensorpack's own creators. Any other creator is returned as it is, because its
    configuration is not accessible.
    """
    if not isinstance(creator, (NewSessionCreator, SessionCreatorAdapter)):
        return creator
    creator = copy.copy(creator)
    if isinstance(creator, NewSessionCreator):
        creator.config = changed(creator.config)
    else:
        creator._creator = creator_for_towers(creator._creator, changed)
    return creator


def config_for_towers(config: Any, devices: Sequence[Any], logical: Optional[LogicalDevices] = None) -> Any:
    """Return a copy of a session's configuration with the CPU devices and threads that K towers need.

    All CPU devices share one processor, so they are created as requested, unless ``config`` sets their number.

    Args:
        config: the configuration.
        devices: K devices.
        logical: the towers and their lanes, if they have any.

    Raises:
        HierAllreduceError: ``config`` has other logical GPUs than the lanes.
    """
    changed = type(config)()
    changed.CopyFrom(logical.added_to(config) if logical else config)
    named = [device_fields(device) for device in devices if isinstance(device, str)]
    cpus = [index or 0 for *_, kind, index in named if kind == "CPU"]
    if cpus and "CPU" not in changed.device_count:
        changed.device_count["CPU"] = max(cpus) + 1
    if len(devices) > 1:
        # tensorpack stages each tower's input with an op that blocks its thread until the tower has taken the previous
        # input. With too few threads, all towers wait forever.
        threads = len(devices) + max(2, os.cpu_count() or 1)
        changed.inter_op_parallelism_threads = max(changed.inter_op_parallelism_threads, threads)
        # without this, the first session of the process sets the number of threads for all later ones
        changed.use_per_session_threads = True
    return changed


class CheckedSessionCreator(tf1.train.SessionCreator):
    """Creates another creator's session, and checks that it has the towers' devices."""

    def __init__(self, creator: Any, devices: Mapping[str, Any]):
        self._creator, self._devices = creator, devices

    def create_session(self) -> Any:
        session = self._creator.create_session()
        refuse_missing(self._devices, session.list_devices())
        return session


def named_devices(devices: Sequence[Any], lanes: Sequence[Lane]) -> Dict[str, Any]:
    """Return the devices of towers and lanes by what messages call them."""
    named = {f"tower {tower}": device for tower, device in enumerate(devices)}
    each = len(lanes) // len(devices)
    named.update({f"tower {lane.tower}, lane {number % each}": lane.device for number, lane in enumerate(lanes)})
    return named


def refuse_missing_in(creator: Any, devices: Mapping[str, Any]) -> None:
    """Check devices in an empty session with the configuration of a ``NewSessionCreator``.

    Raises:
        HierAllreduceError: as :func:`refuse_missing`.
    """
    with tf1.Session(creator.target, tf.Graph(), creator.config) as probe:
        refuse_missing(devices, probe.list_devices())


def refuse_missing(devices: Mapping[str, Any], existing: Sequence[Any]) -> None:
    """Check that each device is in ``existing``, the result of ``session.list_devices()``.

    Args:
        devices: from :func:`named_devices`.
        existing: the devices of a session.

    Raises:
        HierAllreduceError: one is missing; the message names the towers, and the devices there are.
    """
    names = [device.name for device in existing]
    # device functions and None are left to TensorFlow
    named = [(place, device) for place, device in devices.items() if isinstance(device, str)]
    missing = [(place, device) for place, device in named if not any(devices_match(name, device) for name in names)]
    if not missing:
        return
    gpus = sum(_kind(name) == "GPU" for name in names)
    hint = f" TensorFlow finds {gpus} GPUs here." if any(_kind(device) == "GPU" for _, device in missing) else ""
    places = ", ".join(f"{place}: {device}" for place, device in missing)
    available = ", ".join(_short_name(name) for name in names if not _kind(name).startswith("XLA_"))
    raise HierAllreduceError(
        f"these devices do not exist: {places}.{hint} There are {available};"
        ' without GPUs, devices=["/cpu:0", "/cpu:1", …] creates every CPU device that it names'
    )


def _kind(device: str) -> str:
    return device_fields(device)[3] or ""


def _short_name(device: str) -> str:
    job, *_, index = device_fields(device)
    return f"/{_kind(device).lower()}:{index}" if job in (None, "localhost") else device
