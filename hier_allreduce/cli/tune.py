"""``hier-allreduce tune``: the fastest strategy for a model's gradients on this machine."""

from __future__ import annotations

import argparse
import importlib
import os

from .arguments import count, device_count, installed, lane_count, milliseconds, minutes, output
from .progress import progress, ticking

MODEL = "resnet50"
MINUTES = 5.0
ROWS = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--model", metavar="NAME", help=f"a shipped table of gradient shapes (default: {MODEL})")
    table.add_argument("--shapes", metavar="FILE", help="your own table: hier_allreduce.save_shapes writes it")
    add("-o", "--output", metavar="FILE", type=output, help="write the strategy, a YAML file for every strategy=")
    add(
        "--devices",
        metavar="K",
        type=device_count,
        help="how many (default: all GPUs if two or more, else 8 CPU devices)",
    )
    add("--sum", action="store_true", help="the sum instead of the mean")
    add("--backward-ms", metavar="MS", type=milliseconds, help="the length of the backward pass (default: as long as"
        " the default strategy takes); 0: all gradients are ready at once")  # fmt: skip
    add("--topology", metavar="NAME", nargs="+", default=[], help="try plans for these machines too (on GPUs, those for"
        " this machine are always tried)")  # fmt: skip
    add("--wire-dtype", metavar="DTYPE", nargs="+", default=[], help="float16, bfloat16: gradients may travel in these")
    add("--lanes", metavar="L", type=lane_count, help="cut each GPU into its tower's device and L lanes, and try"
        " strategies over them too")  # fmt: skip
    add("--minutes", metavar="M", type=minutes, default=MINUTES, help=f"how long to measure (default: {MINUTES:g})")
    add("--rows", metavar="N", type=count, default=ROWS, help=f"rows in each sparse gradient (default: {ROWS})")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with installed("tune", "tf,bench"):
        importlib.import_module("tensorflow")
        importlib.import_module("tqdm")
    from ..bench import devices_here
    from ..tuning import tune

    with progress(None) as bar:
        tuned = tune(
            args.shapes or args.model or MODEL,
            devices_here(args.devices),
            average=not args.sum,
            backward_ms=args.backward_ms,
            topologies=args.topology,
            wire_dtypes=args.wire_dtype,
            minutes=args.minutes,
            file=args.output,
            rows=args.rows,
            lanes=args.lanes or 0,
            tick=ticking(bar),
        )
    print(tuned)
    return 0
