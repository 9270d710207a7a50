"""``hier-allreduce calibrate`` over several hosts: measure what crosses between them.

Every host runs the command. Host 0 prints what was measured, and writes it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional

from ..cluster import from_tf_config, read_config
from ..errors import ClusterError
from ..formatting import duration
from ..topology import Network
from .progress import progress

if TYPE_CHECKING:
    from ..calibration import NetworkCalibration
    from ..cluster import Cluster

_START = 300.0  # seconds for which a host waits for the others to start
_STALL = 120.0  # seconds that a host may take over one run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for several hosts."""
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="measure between the hosts of a YAML file for Cluster.load; every host runs the command, with its --task."
        " Default: the hosts of TF_CONFIG, as `hier-allreduce launch` sets it; without it, this machine's links",
    )
    parser.add_argument("--task", type=_task, metavar="N", help="this host's index in the --cluster, from 0")
    parser.add_argument(
        "--network",
        metavar="NAME|FILE",
        help="the network that joins the hosts as far as it is known: its cards are kept, as no program can see them",
    )


def _task(text: str) -> int:
    if not text.isdigit() or len(text) > 6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected the index of a host: 0, 1, …")
    return int(text)


class Hosts(NamedTuple):
    """The hosts that measure together: arguments of ``Cluster``, and the network that joins them, if that is known."""

    arguments: Dict[str, Any]
    network: Optional[Network]


def hosts_of(args: argparse.Namespace) -> Optional[Hosts]:
    """Return the hosts that the arguments or TF_CONFIG name; None if this is the only one.

    Raises:
        ClusterError: options that do not fit together, an invalid cluster, or an unknown network.
    """
    if args.task is not None and not args.cluster:
        raise ClusterError("--task is this host's index in a --cluster: give --cluster too")
    if args.cluster and args.task is None:
        raise ClusterError(f"--cluster {args.cluster} needs --task: this host's index in its hosts, from 0")
    found = _from_file(args.cluster, args.task) if args.cluster else _from_environment()
    several = len(found.arguments["hosts"]) > 1
    if args.cluster and not several:
        raise ClusterError(f"{args.cluster}: between one host and itself there is no network; list two hosts or more")
    if args.network and not several:
        raise ClusterError("--network is for several hosts: give --cluster, or start them by hier-allreduce launch")
    if args.split_gpu and several:
        raise ClusterError("--split-gpu is for one host: each of several takes all of a GPU's memory")
    if args.network:
        found = found._replace(network=Network.load(args.network))
    return found if several else None


def _from_file(name: str, task: int) -> Hosts:
    content = read_config(name, task)
    return Hosts({**content, "task": task, "network": None, "stall_timeout": _STALL}, content["network"])


def _from_environment() -> Hosts:
    hosts, task = from_tf_config(os.environ.get("TF_CONFIG", ""))
    return Hosts({"hosts": hosts, "task": task, "start_timeout": _START, "stall_timeout": _STALL}, None)


def run(args: argparse.Namespace, hosts: Hosts) -> int:
    """Measure as one of the hosts; on host 0, print and write what was found."""
    from ..cluster import Cluster
    from ..graph import gpu_count

    began = time.monotonic()
    devices = args.devices or hosts.arguments.get("devices_per_host") or max(1, gpu_count())
    cluster = Cluster(**{**hosts.arguments, "devices_per_host": devices})
    with progress(None) as bar:
        calibration = _measured(args.noise, cluster, hosts.network, _ticking(bar, cluster.is_chief))
    if not cluster.is_chief:
        print(f"host {cluster.task} ({cluster.hosts[cluster.task]}) is done: host 0 has the result")
        return 0
    print(f"{calibration}\n\nmeasured in {duration(time.monotonic() - began)}")
    print(_kept(calibration, args.output, cluster.size))
    return 0


def _measured(
    noise: Optional[float], cluster: Cluster, assumed: Optional[Network], tick: Callable[[str], None]
) -> NetworkCalibration:
    from ..bench import devices_here
    from ..calibration import NETWORK_SIZES, NOISE, NetworkRuns, calibrate_network, versions
    from ..cluster import NetworkTimer

    noise = noise or NOISE
    devices = devices_here(cluster.devices_per_host)
    tick(f"waiting for {cluster.size} hosts")
    with contextlib.closing(NetworkTimer(cluster, devices, NETWORK_SIZES[-1], {"--noise": noise})) as timer:
        runs = NetworkRuns(cluster.hosts, timer.sums, timer.copies, timer.hops)
        return calibrate_network(runs, noise, versions(), assumed, tick)


def _kept(calibration: NetworkCalibration, file: Optional[str], hosts: int) -> str:
    """Write the network; return what to do with it."""
    if not file:
        return "not written: -o FILE writes it, for `hier-allreduce plan --network FILE` and Cluster(network=FILE)"
    return (
        f"written: {calibration.save(file)}\n  hier-allreduce plan TOPOLOGY --hosts {hosts} --network {file}\n"
        f"  Cluster(…, network={file!r})"
    )


def _ticking(bar: Any, is_chief: bool) -> Callable[[str], None]:
    """Return a function that shows each stage: in a bar on a terminal, else by a line of host 0."""
    stages: Dict[str, float] = {}

    def tick(stage: str) -> None:
        if stage not in stages:
            stages[stage] = time.monotonic()
            if bar.disable and is_chief:
                passed = duration(stages[stage] - min(stages.values()))
                print(f"calibrate: {stage}, after {passed}", file=sys.stderr, flush=True)
            bar.set_description_str(stage)
        bar.update()

    return tick
