"""``hier-allreduce topo``."""

from __future__ import annotations

import argparse
import sys
from typing import Optional

from .. import calibration, detect, report, topology


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
    parser.add_argument("--picture", metavar="FILE", help="draw it into FILE (.png, .pdf, .svg)")


def read_topology(name: Optional[str], calibration_file: Optional[str]) -> topology.Topology:
    """The machine that the arguments name.

    Raises:
        TopologyError: it cannot be found or understood.
    """
    if name is None:
        return detect.this_machine()
    if name == "-":
        text = topology.decoded(sys.stdin.buffer.read())
        return topology.from_text(text, "standard input", topology.read_calibration(calibration_file))
    return topology.load(name, calibration_file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_topology(parser, optional=True)
    parser.add_argument("--yaml", action="store_true", help="print the machine as a YAML file instead")
    parser.add_argument("--anchors", action="store_true", help="print predicted beside published times, and exit")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.anchors:
        print(calibration.markdown())
        return 0
    machine = read_topology(args.topology, args.calibration)
    print(machine.to_yaml() if args.yaml else report.describe(machine))
    if args.picture:
        report.draw_topology(machine, args.picture)
    return 0
