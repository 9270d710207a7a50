"""Sessions that have the towers' devices."""

from __future__ import annotations

import copy
import os
from typing import Any, Sequence

import tensorflow as tf

from ...compat import tf1
from ...errors import HierAllreduceError
from ...graph.devices import device_fields, devices_match


def creator_for_towers(creator: Any, devices: Sequence[Any]) -> Any:
    """Return a copy of a ``NewSessionCreator`` with the CPU devices and threads that K towers need.

    All CPU devices share one processor, so they are created as requested, unless the configuration
    sets their number.

    Raises:
        HierAllreduceError: a tower's device does not exist. Soft placement would move it to another
            one in silence.
    """
    creator = copy.copy(creator)
    creator.config = config = copy.deepcopy(creator.config)
    named = [device_fields(device) for device in devices if isinstance(device, str)]
    # CPU devices that the towers name are created, because a process has one by default.
    cpus = [index or 0 for *_, kind, index in named if kind == "CPU"]
    if cpus and "CPU" not in config.device_count:
        config.device_count["CPU"] = max(cpus) + 1
    if len(devices) > 1:
        # tensorpack stages each tower's input with an op that blocks its thread until the tower
        # has taken the previous input. With too few threads, all towers wait forever.
        threads = len(devices) + max(2, os.cpu_count() or 1)
        config.inter_op_parallelism_threads = max(config.inter_op_parallelism_threads, threads)
        # Without this, the process's first session sets the number of threads for all later ones.
        config.use_per_session_threads = True
    with tf1.Session(creator.target, tf.Graph(), config) as probe:
        existing = [device.name for device in probe.list_devices()]
    for tower, device in enumerate(devices):
        # Device functions and None are left to TensorFlow, which knows where they lead.
        if isinstance(device, str) and not any(devices_match(there, device) for there in existing):
            local = "/job:localhost/replica:0/task:0/device:"
            listed = ", ".join(there.replace(local, "/") for there in existing)
            raise HierAllreduceError(
                f"tower {tower}: {device} does not exist. There are {listed};"
                ' without GPUs, devices=["/cpu:0", "/cpu:1", …] creates all CPU devices in it'
            )
    return creator
