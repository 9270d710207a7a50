"""Sessions that have the towers' devices, and those that know the other hosts."""

from __future__ import annotations

import copy
import os
from typing import Any, Sequence

import tensorflow as tf
from tensorpack.tfutils.sesscreate import NewSessionCreator

from ...cluster import Cluster
from ...compat import tf1
from ...errors import ClusterError
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
    if len(devices) > 1:
        # tensorpack stages each tower's input with an op that blocks its thread until the tower
        # has taken the previous input. With too few threads, all towers wait forever.
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


def creator_for_hosts(creator: Any, cluster: Cluster, devices: Sequence[str]) -> Any:
    """Return a session creator whose session knows the other hosts.

    Raises:
        ClusterError: ``creator`` is not a ``NewSessionCreator``.
        HierAllreduceError: a tower's device does not exist; the message names those that do.
    """
    if not isinstance(creator, NewSessionCreator):
        raise ClusterError(
            f"{type(creator).__name__} makes a session that does not know the other hosts; omit"
            " session_creator, or use NewSessionCreator(config=…)"
        )
    creator = creator_for_towers(creator, devices)

    def create_session() -> Any:
        # Local variables are initialized too, because all towers but the first have local ones.
        initializers = [
            tf1.global_variables_initializer(),
            tf1.local_variables_initializer(),
            tf1.tables_initializer(),
        ]
        session = cluster.session(tf1.get_default_graph(), creator.config)
        session.run(initializers)
        return session

    creator.create_session = create_session
    return creator
