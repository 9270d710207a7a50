"""``hier-allreduce topo``."""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple, Optional, Tuple

from .. import presets
from ..bench import published_markdown
from ..cluster import read_config
from ..errors import ClusterError, TopologyError
from ..figures import check_picture
from ..topology import Network, Topology, calibrated, decoded, from_text, load, read_calibration, subset, this_machine
from . import describe, pictures
from .arguments import count, output, refuse_unused


def add_topology(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """The arguments that name a machine."""
    parser.add_argument(
        "topology",
        nargs="?" if optional else None,
        metavar="TOPOLOGY",
        help="a preset's name, a YAML file, a file with the output of `nvidia-smi topo -m`, or - for standard input"
        + ("; without it, this machine" if optional else ""),
    )
    parser.add_argument("--calibration", metavar="FILE", help="YAML with speeds: and links: that override the defaults")
    parser.add_argument("--picture", metavar="FILE", type=output, help="draw it into FILE (.png, .pdf, .svg)")


def read_topology(name: Optional[str], calibration_file: Optional[str]) -> Topology:
    """The machine that the arguments name.

    Raises:
        TopologyError: it cannot be found or understood.
    """
    overrides = read_calibration(calibration_file)
    if name is None:
        return calibrated(this_machine(), overrides)
    if name == "-":
        if sys.stdin is None:
            raise TopologyError("-: standard input is closed")
        return from_text(decoded(sys.stdin.buffer.read()), "standard input", overrides)
    return load(name, calibration_file)


class Hosts(NamedTuple):
    """How many machines there are, each as ``topology`` says, and what joins them."""

    topology: Topology
    number: int
    network: Network


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how many of a machine there are."""
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--hosts", type=count, metavar="H", help="so many of this machine, joined by --network")
    many.add_argument(
        "--cluster", metavar="NAME|FILE", help="hosts, devices and network of a YAML file for Cluster.load"
    )
    parser.add_argument(
        "--network",
        metavar="NAME|FILE",
        help=f"what joins the hosts: a YAML file, or one of {', '.join(presets.names('networks'))}",
    )
    parser.add_argument("--nics", type=count, metavar="N", help="network cards of each host, instead of the network's")


def read_hosts(args: argparse.Namespace, machine: Topology) -> Optional[Hosts]:
    """The hosts that the arguments name; None without ``--hosts`` and ``--cluster``.

    Raises:
        ClusterError: no network, one that is unknown, or a cluster that does not fit the machine.
    """
    hosts, network = args.hosts, args.network and Network.load(args.network)
    if args.cluster:
        machine, hosts, found = _read_cluster(args.cluster, machine)
        network = network or found
    if hosts is None:
        if network or args.nics:
            raise ClusterError("--network and --nics are for several hosts: give --hosts or --cluster too")
        return None
    if not network:
        where = f"--network, or network: in {args.cluster}" if args.cluster else "--network"
        known = ", ".join(presets.names("networks"))
        raise ClusterError(f"what joins the {hosts} hosts? Give {where}: a YAML file, or one of {known}")
    return Hosts(machine, hosts, network._replace(nics=args.nics or network.nics))


def _read_cluster(name: str, machine: Topology) -> Tuple[Topology, int, Optional[Network]]:
    """As many devices of the machine as a cluster has on each host, the number of its hosts, and its network."""
    arguments = read_config(name)
    devices = arguments["devices_per_host"]
    if devices > len(machine):
        raise ClusterError(f"{name}: devices_per_host is {devices}, and {machine.name} has {len(machine)}")
    return subset(machine, range(devices)), len(arguments["hosts"]), arguments["network"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_topology(parser, optional=True)
    add_hosts(parser)
    parser.add_argument("--yaml", action="store_true", help="print the machine as a YAML file instead")
    parser.add_argument("--anchors", action="store_true", help="print predicted beside published times, and exit")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    hosts_and_more = ("--hosts", "--cluster", "--network", "--nics", "--yaml")
    refuse_unused(args, "--anchors", "TOPOLOGY", "--calibration", "--picture", *hosts_and_more)
    refuse_unused(args, "--yaml", "--hosts")
    if args.picture:
        check_picture(args.picture)
    if args.anchors:
        print(published_markdown())
        return 0
    machine = read_topology(args.topology, args.calibration)
    hosts = read_hosts(args, machine)
    machine = hosts.topology if hosts else machine
    if args.picture and hosts:  # before the text, whose reader may end early
        pictures.draw_hosts(*hosts, args.picture)
    elif args.picture:
        pictures.draw_topology(machine, args.picture)
    if args.yaml:
        print(machine.to_yaml())
        return 0
    print(describe.describe(machine))
    if hosts:
        print(f"\n{describe.describe_hosts(*hosts)}")
    return 0
