"""What people say about a cluster, in Python or in a YAML file: checked in one place, without TensorFlow.

::

    hosts: [10.0.0.1:2222, 10.0.0.2:2222]
    devices_per_host: 8
    timeout: 30            # seconds; this and what follows may be left out
    start_timeout: 600
    stall_timeout: 3600
    network: 25gbe         # what joins the hosts: a name of configs/networks, or a file
"""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Sequence, Union

from .. import presets
from ..errors import ClusterError
from ..topology import Network
from . import liveness as alive

_NEEDED = ["hosts", "devices_per_host"]
_KEYS = [*_NEEDED, "timeout", "start_timeout", "stall_timeout", "network"]


def read_config(name_or_path: str, task: int = 0) -> Dict[str, Any]:
    """What ``configs/clusters/NAME.yaml``, or the YAML file at a path, says.

    Args:
        name_or_path: of the file.
        task: which of its hosts this process is to be.

    Returns:
        Cluster's arguments except its task.

    Raises:
        ClusterError: no such file or name, a key that is unknown or missing, or a value that is refused.
    """
    path = presets.find("clusters", name_or_path, ClusterError)
    values: Dict[str, Any] = presets.read_yaml(path, ClusterError)
    presets.refuse_unknown(values, _KEYS, str(path), ClusterError)
    for key in _NEEDED:
        if key not in values:
            raise ClusterError(f"{path}: {key} is missing: expected hosts: [HOST:PORT, …] and devices_per_host: NUMBER")
    network = values.pop("network", None)
    try:
        check_config(task=task, **values)
        return {**values, "network": network_from(network)}
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def check_config(hosts: Sequence[str], task: int, devices_per_host: int, **times: float) -> None:
    """Check the arguments of :class:`hier_allreduce.Cluster`.

    Raises:
        ClusterError: no hosts, an address that is none or that is there twice, a task that is not in the list, or a
            number that is not positive.
    """
    if isinstance(hosts, str) or not isinstance(hosts, Sequence) or not hosts:
        raise ClusterError(f"hosts={hosts!r}: expected a list of addresses such as ['10.0.0.1:2222', …]")
    for address in hosts:
        alive.split_address(address)
    twice = sorted({address for address in hosts if hosts.count(address) > 1})
    if twice:
        raise ClusterError(f"hosts={list(hosts)}: {', '.join(twice)} is there more than once")
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < len(hosts):
        raise ClusterError(f"task={task!r}: there are hosts 0 to {len(hosts) - 1}")
    if isinstance(devices_per_host, bool) or not isinstance(devices_per_host, int) or devices_per_host < 1:
        raise ClusterError(f"devices_per_host={devices_per_host!r}: expected a whole number of 1 or more")
    for name, seconds in times.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ClusterError(f"{name}={seconds!r}: expected seconds, more than 0 and finite")


def network_from(network: Union[str, Network, None]) -> Optional[Network]:
    """What joins the hosts: a ``Network``, the name or path of its YAML file, or None where it is not known.

    Raises:
        ClusterError: it is none of these.
    """
    if isinstance(network, str):
        return Network.load(network)
    if network is None:
        return None
    if isinstance(network, Network):
        return Network.from_values(network._asdict(), str(network))
    raise ClusterError(
        f"network={network!r}: expected a name of configs/networks, a YAML file, or a hier_allreduce.Network"
    )
