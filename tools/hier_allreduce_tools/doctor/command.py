"""The command's options, and the text that it prints."""

from __future__ import annotations

import argparse
import re
from typing import List

from hier_allreduce import HierAllreduceError

from ..text import names_in
from .copies import copy_all, report
from .machine import ask_tensorflow, findings, groups_line
from .topology import linked_groups, read_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    one = parser.add_mutually_exclusive_group()
    copies = (
        "copy between all pairs of GPUs, or of these devices of TensorFlow (/gpu:0,/gpu:1): bits"
        " compared, GB/s"
    )
    one.add_argument("--copies", type=_devices_in, nargs="?", const=[], metavar="A,B", help=copies)
    topo = "output of `nvidia-smi topo -m` (- is standard input): print its groups, nothing else"
    one.add_argument("--topo", metavar="FILE", help=topo)


def _devices_in(argument: str) -> List[str]:
    """Read ``/gpu:0,/gpu:1``, which TensorFlow also calls ``/device:GPU:0,/device:GPU:1``."""
    devices = names_in(argument.lower().replace("/device:", "/"))
    if not re.fullmatch(r"/[cg]pu:\d+(,/[cg]pu:\d+)+", ",".join(devices)):
        expected = "expected two or more different devices, such as /gpu:0,/gpu:1"
        raise argparse.ArgumentTypeError(f"{argument!r}: {expected}")
    return devices


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there are problems."""
    if args.topo is not None:
        file = 0 if args.topo == "-" else args.topo
        with open(file, encoding="utf-8", errors="replace") as saved:
            groups = linked_groups(read_table(saved.read()))
        default = "keep the default, and write no groups=: no others follow the links better"
        print(groups_line(groups) if groups else default)
        return 0
    tensorflow = ask_tensorflow()
    lines = list(findings(tensorflow))
    if args.copies is not None:
        gpus = tensorflow["gpus"]
        devices = args.copies or [f"/gpu:{gpu}" for gpu in range(len(gpus))]
        if len(devices) < 2:
            few = f"GPUs that TensorFlow uses: {len(gpus)}"
            raise HierAllreduceError(f"{few}; name two devices, such as --copies /cpu:0,/cpu:1")
        lines += ["", *report(devices, *copy_all(devices))]
    number = sum(line.startswith("! ") for line in lines)
    end = f"problems: {number}, marked with !" if number else "no known problems"
    print("\n".join([*lines, "", end]))
    return 1 if number else 0
