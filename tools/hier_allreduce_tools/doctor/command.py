"""The command's options, and the text that it prints."""

from __future__ import annotations

import argparse
import re
import sys
from typing import List

from hier_allreduce import HierAllreduceError

from ..text import count
from .copies import copy_all, problems, report
from .machine import ask_tensorflow, findings, groups_line
from .nvidia_smi import ask_nvidia_smi
from .topology import linked_groups, read_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    one = parser.add_mutually_exclusive_group()
    copies = (
        "copy between all pairs of GPUs, or of these devices of TensorFlow (/gpu:0,/gpu:1): bits"
        " compared, GB/s"
    )
    one.add_argument("--copies", type=devices_in, nargs="?", const=[], metavar="A,B", help=copies)
    topo = "output of `nvidia-smi topo -m` (- is standard input): print its groups, nothing else"
    one.add_argument("--topo", type=text_of, metavar="FILE", help=topo)


def devices_in(argument: str) -> List[str]:
    """Read two or more different devices, such as ``/gpu:0,/gpu:1``."""
    devices = argument.split(",")
    are_named = all(re.match(r"/[cg]pu:\d+$", device) for device in devices)
    if not are_named or len(devices) < 2 or len(set(devices)) < len(devices):
        raise argparse.ArgumentTypeError(
            f"{argument!r}: expected two or more different devices, such as /gpu:0,/gpu:1"
        )
    return devices


def text_of(file: str) -> str:
    """Read the text of a file, or of standard input."""
    try:
        with open(0 if file == "-" else file, encoding="utf-8", errors="replace") as saved:
            return saved.read()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there are problems."""
    if args.topo is not None:
        return _print_groups(args.topo)
    # A broken driver answers neither of the two for minutes, so a line says who is asked.
    print("asking nvidia-smi …", file=sys.stderr)
    nvidia = ask_nvidia_smi()
    print("asking TensorFlow for its devices …", file=sys.stderr)
    tensorflow = ask_tensorflow()
    found = list(findings(nvidia, tensorflow))

    lines = list(map(str, found))
    if args.copies is not None:
        gpus = [f"/gpu:{gpu}" for gpu in range(len(tensorflow.gpus))]
        devices = args.copies or gpus
        if len(devices) < 2:
            seen = f"TensorFlow sees {count(len(gpus), 'GPU')}"
            raise HierAllreduceError(f"{seen}: name devices, such as --copies /cpu:0,/cpu:1")
        print("copying …", file=sys.stderr)
        copy_by_pair = copy_all(devices)
        broken = problems(copy_by_pair)
        lines += ["", report(devices, copy_by_pair), *map(str, broken)]
        found += broken
    number = sum(bool(finding.remedy) for finding in found)
    end = f"{count(number, 'problem')}, marked with !" if number else "no known problems"
    print("\n".join([*lines, "", end]))
    return 1 if number else 0


def _print_groups(output: str) -> int:
    """Print the groups in a saved output of nvidia-smi."""
    groups = linked_groups(read_table(output))
    default = "keep the default, and write no groups=: no others follow the links better"
    print(groups_line(groups) if groups else default)
    return 0
