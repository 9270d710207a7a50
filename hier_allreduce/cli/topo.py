"""``hier-allreduce topo``: a machine's links, their speeds, and the bound that they set."""

from __future__ import annotations

import argparse
import sys
from typing import Optional

from .. import presets
from ..errors import HierAllreduceError
from ..figures import check_picture
from ..formatting import table
from ..planning import THIS_MACHINE
from ..topology import Topology, decoded, from_text, load, this_machine
from .common import output, quiet_start, refuse_unused
from .describe import describe
from .machine_picture import draw_topology


def add_topology(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a machine."""
    parser.add_argument(
        "topology",
        nargs="?",
        metavar="TOPOLOGY",
        help="a name that `hier-allreduce topo --list` prints, a file whose name ends in .yaml, a file with the output"
        " of `nvidia-smi topo -m`, or - for this output on standard input; default: this machine",
    )
    parser.add_argument("--picture", metavar="FILE", type=output, help="draw a picture into FILE (.png, .pdf, .svg)")


def read_topology(name: Optional[str]) -> Topology:
    """Return the machine that the argument names.

    Raises:
        HierAllreduceError: the machine cannot be found or understood.
    """
    if name in (None, THIS_MACHINE):
        with quiet_start():
            return this_machine()
    if name == "-":
        if sys.stdin is None:
            raise HierAllreduceError("-: standard input is closed")
        return from_text(decoded(sys.stdin.buffer.read()), "standard input")
    return load(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_topology(parser)
    parser.add_argument("--yaml", action="store_true", help="print the machine as a YAML file instead")
    parser.add_argument("--list", action="store_true", help="print the machines that are known by name, and exit")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    refuse_unused(args, "--list", "TOPOLOGY", "--picture", "--yaml")
    if args.picture:
        check_picture(args.picture)
    if args.list:
        print(_machines())
        return 0
    machine = read_topology(args.topology)
    if args.picture:  # before the text: its reader may close the pipe early
        draw_topology(machine, args.picture)
    if args.yaml:
        print(machine.to_yaml())
        return 0
    print(describe(machine))
    return 0


def _machines() -> str:
    """Return a table of the machines that are known by name."""
    machines = {name: load(name) for name in presets.names("machines")}
    rows = [(name, str(len(machine)), machine.gpu, machine.name) for name, machine in machines.items()]
    return table([("name", "GPUs", "model", "machine"), *rows])
