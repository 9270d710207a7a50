"""``hier-allreduce topo``: a machine's links, their speeds, and the bound that they set."""

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
from .arguments import count, output, refuse_unused
from .describe import describe, describe_hosts
from .machine_picture import draw_topology


def add_topology(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add the arguments that name a machine."""
    sources = "a preset's name, a YAML file, a file with the output of `nvidia-smi topo -m`, or - for standard input"
    parser.add_argument(
        "topology",
        nargs="?" if optional else None,
        metavar="TOPOLOGY",
        help=f"{sources}; default: this machine" if optional else sources,
    )
    parser.add_argument("--calibration", metavar="FILE", help="YAML with speeds: and links: that override the defaults")
    parser.add_argument("--picture", metavar="FILE", type=output, help="draw a picture into FILE (.png, .pdf, .svg)")


def read_topology(name: Optional[str], calibration_file: Optional[str]) -> Topology:
    """Return the machine that the arguments name.

    Raises:
        TopologyError: the machine cannot be found or understood.
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
    """Several machines: each is ``topology``, there are ``number`` of them, and ``network`` joins them."""

    topology: Topology
    number: int
    network: Network


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for several machines."""
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--hosts", type=count, metavar="H", help="number of such machines, joined by --network")
    many.add_argument(
        "--cluster", metavar="NAME|FILE", help="hosts, devices and network of a YAML file for Cluster.load"
    )
    parser.add_argument(
        "--network",
        metavar="NAME|FILE",
        help=f"what joins the hosts: a YAML file, or one of {', '.join(presets.names('networks'))}",
    )
    parser.add_argument("--nics", type=count, metavar="N", help="network cards of each host (default: the network's)")


def read_hosts(args: argparse.Namespace, machine: Topology) -> Optional[Hosts]:
    """Return the hosts that the arguments name; None without ``--hosts`` and ``--cluster``.

    Raises:
        ClusterError: no network, an unknown network, or a cluster that does not fit the machine.
    """
    hosts, network = args.hosts, Network.load(args.network) if args.network else None
    if args.cluster:
        machine, hosts, cluster_network = _read_cluster(args.cluster, machine)
        network = network or cluster_network
    if hosts is None:
        if network or args.nics:
            raise ClusterError("--network and --nics are for several hosts: give --hosts or --cluster too")
        return None
    if not network:
        option = f"--network, or network: in {args.cluster}" if args.cluster else "--network"
        names = ", ".join(presets.names("networks"))
        raise ClusterError(f"what joins the {hosts} hosts? Give {option}: a YAML file, or one of {names}")
    return Hosts(machine, hosts, network._replace(nics=args.nics or network.nics))


def _read_cluster(name: str, machine: Topology) -> Tuple[Topology, int, Optional[Network]]:
    """Return the devices of the machine that each host of a cluster uses, its number of hosts, and its network."""
    arguments = read_config(name)
    devices = arguments["devices_per_host"]
    if devices > len(machine):
        raise ClusterError(f"{name}: devices_per_host is {devices}, but {machine.name} has {len(machine)}")
    return subset(machine, range(devices)), len(arguments["hosts"]), arguments["network"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_topology(parser, optional=True)
    add_hosts(parser)
    parser.add_argument("--yaml", action="store_true", help="print the machine as a YAML file instead")
    parser.add_argument(
        "--anchors", action="store_true", help="print a table of predicted and published times, and exit"
    )


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
    if args.picture:  # before the text: its reader may close the pipe early
        draw_topology(machine, args.picture)
    if args.yaml:
        print(machine.to_yaml())
        return 0
    print(describe(machine))
    if hosts:
        print(f"\n{describe_hosts(*hosts)}")
    return 0
