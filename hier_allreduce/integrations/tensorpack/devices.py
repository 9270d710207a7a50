"""The towers' devices: their names, and sessions that have these devices."""

from __future__ import annotations

import copy
import operator
import os
from typing import Any, Callable, Iterable, List, Optional, Sequence

import numpy as np
import tensorflow as tf
from tensorpack.tfutils.sesscreate import NewSessionCreator, SessionCreatorAdapter

from ...errors import HierAllreduceError
from ...graph import device_strings
from ...graph.devices import device_fields, devices_match
from ...graph.tf import tf1

MOST_GPUS = 256


def tower_devices(devices: Any) -> List[Any]:
    """Return K devices for ``tf.device``.

    Args:
        devices: the number of GPUs, or a list of K GPU ids or devices. A GPU id becomes ``/gpu:id``.

    Raises:
        HierAllreduceError: no devices, or an invalid one.
    """
    count = _as_integer(devices)
    if count is not None:
        if not 1 <= count <= MOST_GPUS:
            raise HierAllreduceError(
                f"devices={devices}: expected the number of GPUs of one machine, from 1 to {MOST_GPUS}, or a list of"
                " devices"
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


def checked_creator(creator: Any, devices: Sequence[Any], changed: Callable[[Any], Any]) -> Any:
    """Return a session creator whose sessions have the towers' devices.

    tensorpack's creators are copied, with the configuration ``changed(configuration)``. The configuration of any other
    creator is not accessible.

    Raises:
        HierAllreduceError: a device is missing. With a ``NewSessionCreator`` this is known now, before soft placement
            would move a tower to another device in silence; with others, once the session exists.
    """
    creator = _with_config(creator, changed)
    if not isinstance(creator, NewSessionCreator):
        return _CheckedSessionCreator(creator, devices)
    with tf1.Session(creator.target, tf.Graph(), creator.config) as probe:
        check_existing(devices, probe)
    return creator


def _with_config(creator: Any, changed: Callable[[Any], Any]) -> Any:
    if not isinstance(creator, (NewSessionCreator, SessionCreatorAdapter)):
        return creator
    creator = copy.copy(creator)
    if isinstance(creator, NewSessionCreator):
        creator.config = changed(creator.config)
    else:
        creator._creator = _with_config(creator._creator, changed)
    return creator


class _CheckedSessionCreator(tf1.train.SessionCreator):
    """Creates another creator's session, and checks that it has the towers' devices."""

    def __init__(self, creator: Any, devices: Sequence[Any]):
        self._creator, self._devices = creator, devices

    def create_session(self) -> Any:
        session = self._creator.create_session()
        check_existing(self._devices, session)
        return session


def config_for_towers(config: Any, devices: Sequence[Any]) -> Any:
    """Return a copy of a session's configuration with the CPU devices and threads that K towers need.

    All CPU devices share one processor, so they are created as requested, unless ``config`` sets their number.
    """
    changed = type(config)()
    changed.CopyFrom(config)
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


def check_existing(devices: Sequence[Any], session: Any) -> None:
    """Raise a HierAllreduceError if one of K devices is not in a session; it names towers, and the devices there."""
    names = [device.name for device in session.list_devices()]
    # device functions and None are left to TensorFlow
    missing = [
        (tower, device)
        for tower, device in enumerate(devices)
        if isinstance(device, str) and not any(devices_match(name, device) for name in names)
    ]
    if not missing:
        return
    gpus = sum(_kind(name) == "GPU" for name in names)
    hint = f" TensorFlow finds {gpus} GPUs here." if any(_kind(device) == "GPU" for _, device in missing) else ""
    towers = ", ".join(f"tower {tower}: {device}" for tower, device in missing)
    available = ", ".join(_short_name(name) for name in names if not _kind(name).startswith("XLA_"))
    raise HierAllreduceError(
        f"these devices do not exist: {towers}.{hint} There are {available};"
        ' without GPUs, devices=["/cpu:0", "/cpu:1", …] creates every CPU device that it names'
    )


def _kind(device: str) -> str:
    return device_fields(device)[3] or ""


def _short_name(device: str) -> str:
    job, *_, index = device_fields(device)
    return f"/{_kind(device).lower()}:{index}" if job in (None, "localhost") else device
