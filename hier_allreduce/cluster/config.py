"""The description of a cluster: Cluster's arguments, a YAML file, or TF_CONFIG. No TensorFlow.

::

    hosts: [10.0.0.1:2222, 10.0.0.2:2222]
    devices_per_host: 8
"""

from __future__ import annotations

import json
import math
from typing import Any, Dict, List, Sequence, Tuple

from .. import presets
from ..errors import ClusterError
from .addresses import split_address

_REQUIRED = presets.Field(required="expected hosts: [HOST:PORT, …] and devices_per_host: NUMBER")
_FIELDS = {"hosts": _REQUIRED, "devices_per_host": _REQUIRED}
_JOBS = ("chief", "worker")
RING, NCCL, AUTO = ENGINES = ("ring", "nccl", "auto")


def read_config(name_or_path: str, task: int = 0) -> Dict[str, Any]:
    """Read ``configs/clusters/NAME.yaml``, or the YAML file at a path.

    Args:
        name_or_path: the file's name in ``configs/clusters``, or its path.
        task: the index of this process in the file's hosts.

    Returns:
        Cluster's ``hosts`` and ``devices_per_host``.

    Raises:
        HierAllreduceError: no such file or name, or an unknown or missing key.
        ClusterError: an invalid value.
    """
    path, values = presets.load("clusters", name_or_path, _FIELDS)
    try:
        check_config(task=task, **values)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None
    return values


def from_tf_config(text: str) -> Tuple[List[str], int]:
    """Parse TF_CONFIG, as launchers set it for ``tf.distribute``. Without a cluster in it, there is one host.

    ::

        {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}  ─►  ["a:1", "b:2"], 1

    The job ``chief``, if there is one, comes before the workers.

    Returns:
        The addresses of all hosts, and the index of this process.

    Raises:
        ClusterError: the text is not such a description, has other jobs, or does not contain this process.
    """
    try:
        content = json.loads(text) if text.strip() else {}
        jobs = content.get("cluster", {})
        if not any(jobs.values()):  # one host for TensorFlow's resolver too
            return ["127.0.0.1:2222"], 0
        this = content["task"]
        if not str(this["index"]).isdecimal():  # true, 1.7
            raise ValueError
        places = [(job, index) for job in _JOBS for index in range(len(jobs.get(job, ())))]
        hosts = [jobs[job][index] for job, index in places]
        task = places.index((this["type"], int(this["index"])))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ClusterError(
            f"TF_CONFIG={text.strip()!r}: expected"
            ' {"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": WHOLE NUMBER}}, with'
            " this process in the list"
        ) from None
    if set(jobs) - set(_JOBS):
        raise ClusterError(f"TF_CONFIG: only the jobs 'chief' and 'worker' are supported, not {sorted(jobs)}")
    return hosts, task


def check_config(
    hosts: Sequence[str], task: int, devices_per_host: int, communication: str = RING, **times: float
) -> None:
    """Check the arguments of :class:`hier_allreduce.Cluster`.

    Raises:
        ClusterError: no hosts, an invalid or repeated address, a task that is not an index of the list, an unknown
            engine, or a number that is not positive.
    """
    if isinstance(hosts, str) or not isinstance(hosts, Sequence) or not hosts:
        raise ClusterError(f"hosts={hosts!r}: expected a list of addresses such as ['10.0.0.1:2222', …]")
    for address in hosts:
        split_address(address)
    repeated = sorted({address for address in hosts if hosts.count(address) > 1})
    if repeated:
        raise ClusterError(f"hosts={list(hosts)}: {', '.join(repeated)} is there more than once")
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < len(hosts):
        raise ClusterError(f"task={task!r}: expected the index of a host, 0 to {len(hosts) - 1}")
    if isinstance(devices_per_host, bool) or not isinstance(devices_per_host, int) or devices_per_host < 1:
        raise ClusterError(f"devices_per_host={devices_per_host!r}: expected a whole number of 1 or more")
    if communication not in ENGINES:
        raise ClusterError(f"communication={communication!r}: expected one of {', '.join(ENGINES)}")
    for name, seconds in times.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ClusterError(f"{name}={seconds!r}: expected seconds, more than 0 and finite")
