"""The command's options, and the text that it prints."""

from __future__ import annotations

import argparse
from typing import List

from hier_allreduce import HierAllreduceError

from ..text import names_in
from .copies import copies_between
from .machine import ask_tensorflow, findings
from .topology import groups_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    one = parser.add_mutually_exclusive_group()
    copies = "copy between all pairs of GPUs, or of those with these numbers: bits compared, GB/s"
    one.add_argument("--copies", type=gpu_numbers, nargs="?", const=[], metavar="0,1", help=copies)
    topo = "output of `nvidia-smi topo -m` (- is standard input): print its groups, nothing else"
    one.add_argument("--topo", metavar="FILE", help=topo)


def gpu_numbers(argument: str) -> List[int]:
    """Read ``0,1``, each number once."""
    return [int(number) for number in names_in(argument)]


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there are problems."""
    if args.topo is not None:
        file = 0 if args.topo == "-" else args.topo
        with open(file, encoding="utf-8", errors="replace") as saved:
            print(groups_in(saved.read()))
        return 0
    tensorflow = ask_tensorflow()
    lines = list(findings(tensorflow))
    if args.copies is not None:
        gpus = args.copies or range(len(tensorflow["gpus"]))
        if len(gpus) < 2:
            raise HierAllreduceError(f"copies are between two GPUs or more, not {len(gpus)}")
        lines += ["", *copies_between([f"/gpu:{gpu}" for gpu in gpus])]
    number = sum(line.startswith("! ") for line in lines)
    end = f"problems: {number}, marked with !" if number else "no known problems"
    print("\n".join([*lines, "", end]))
    return 1 if number else 0
