"""``hier-allreduce tune``: the fastest strategy for a model's gradients on this machine."""

from __future__ import annotations

import argparse
import time

from ..bench import load_model
from ..tuning import MINUTES
from .common import (
    MODEL,
    add_devices,
    add_model,
    import_tensorflow,
    lane_count,
    milliseconds,
    minutes,
    output,
    progress,
    ticking,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add_model(parser)
    add("-o", "--output", metavar="FILE", type=output, help="write the strategy, a YAML file for every strategy=")
    add_devices(parser)
    add("--backward-ms", metavar="MS", type=milliseconds, help="the length of the backward pass (default: as long as"
        " the default strategy takes); 0: all gradients are ready at once")  # fmt: skip
    add("--topology", metavar="NAME", nargs="+", default=[], help="try plans for these machines too (on GPUs, those for"
        " this machine are always tried)")  # fmt: skip
    add("--lanes", metavar="L", type=lane_count, default=0, help="cut each GPU into its tower's device and L lanes, and"
        " try strategies over them too")  # fmt: skip
    add("--minutes", metavar="M", type=minutes, default=MINUTES, help="how long it takes, start included;"
        f" longer if building the candidates and a few steps of each take longer (default: {MINUTES:g})")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    began = time.monotonic()
    load_model(args.model or MODEL)  # a wrong name is told before TensorFlow is imported
    import_tensorflow("tune")
    from ..bench import devices_here
    from ..tuning import tune

    with progress(None) as bar:
        tuned = tune(
            args.model or MODEL,
            devices_here(args.devices),
            backward_ms=args.backward_ms,
            topologies=args.topology,
            minutes=max(0.0, args.minutes - (time.monotonic() - began) / 60),
            file=args.output,
            lanes_per_gpu=args.lanes,
            tick=ticking(bar),
        )
    print(tuned)
    return 0
