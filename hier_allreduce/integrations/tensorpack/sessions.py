"""Sessions that have the towers' devices."""

from __future__ import annotations

import copy
import os
from typing import Any, Sequence

import tensorflow as tf

from ...compat import tf1
from ...graph.devices import check_existence, cpus_named_by


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
    # CPU devices that the towers name are created, because a process has one by default.
    cpus = cpus_named_by(devices)
    if cpus and "CPU" not in config.device_count:
        config.device_count["CPU"] = cpus
    # tensorpack stages each tower's input with an op that blocks its thread until the tower has
    # taken the previous input. With too few threads, all towers wait forever.
    threads = len(devices) + max(2, os.cpu_count() or 1)
    config.inter_op_parallelism_threads = max(config.inter_op_parallelism_threads, threads)
    # Without this, the process's first session sets the number of threads for all later ones.
    config.use_per_session_threads = True
    with tf1.Session(creator.target, tf.Graph(), config) as probe:
        existing = [device.name for device in probe.list_devices()]
    check_existence(
        devices,
        existing,
        'without GPUs, devices=["/cpu:0", "/cpu:1", …] creates all CPU devices in it',
    )
    return creator
