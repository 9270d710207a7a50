"""``hier-allreduce calibrate``: measure this machine's links with TensorFlow's own copies."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from ..formatting import count, duration
from ..topology import calibration_file
from .common import add_devices, import_tensorflow, number, output, progress, ticking

_NOT_WRITTEN = "not written: 'this machine' uses a calibration of all GPUs only; -o FILE writes this one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=output,
        help="write the machine into FILE, for topo, plan and Strategy(topology=…); default: into the user's cache "
        "folder, where 'this machine' finds it",
    )
    add_devices(parser)
    parser.add_argument(
        "--noise",
        type=_share,
        metavar="SHARE",
        help="the largest interquartile range of a measurement, as a share of its median (default 0.25)",
    )


def _share(text: str) -> float:
    return number(text, sys.float_info.min, "a number above 0, such as 0.25")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    import_tensorflow("calibrate")
    from ..bench import devices_here
    from ..calibration import NOISE, calibrate, is_whole

    devices = devices_here(args.devices)
    file = args.output or (str(calibration_file()) if is_whole(devices) else "")
    where = f"to be written: {file}" if file else _NOT_WRITTEN
    print(f"measuring {count(len(devices), 'device')}; {where}", file=sys.stderr)
    began = time.monotonic()
    with progress(None) as bar:
        calibration = calibrate(devices, args.noise or NOISE, ticking(bar))
    seconds = time.monotonic() - began
    print(f"{calibration}\n\nmeasured in {duration(seconds)}")
    print(_kept(calibration, args.output))
    return 0


def _kept(calibration: Any, file: str) -> str:
    """Write the machine where it belongs; return what to do with it."""
    if file:
        calibration.save(file)
        return f"written: {file}\n  hier-allreduce plan {file} --bytes 100MB\n  Strategy(topology={file!r})"
    if calibration.whole:
        used = '`hier-allreduce topo`, `plan` and Strategy(topology="this machine") use it'
        return f"written: {calibration.save()}\n  {used}"
    return _NOT_WRITTEN
