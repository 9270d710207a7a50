"""``hier-allreduce demo``: a job on real data, checked against the same job on one device."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from ..._lazy import require
from ...errors import HierAllreduceError
from ...planning import strategy_from
from ..common import count, device_names, installed
from .terminal import only_for_us

OUT = Path("train_log") / "digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--devices",
        type=device_names,
        default="8",
        metavar="N|LIST",
        help="a number (GPUs if there are enough, else logical CPU devices), or a list: /gpu:0,/gpu:1 (default 8)",
    )
    parser.add_argument(
        "--strategy", metavar="NAME", help="how to reduce: a name or a YAML file (default hierarchical)"
    )
    parser.add_argument("--epochs", type=count, metavar="N", help="passes over the data (default 60)")


def main(args: argparse.Namespace) -> int:
    """Train, compare and report; return 0 if all checks pass, else 1.

    Raises:
        HierAllreduceError: a module that the demo needs is not installed, or the folder of its log cannot be made; or a
            device of ``--devices`` does not exist.
    """
    # A GPU's TF32 rounds to 1e-3, more than the differences that are checked. TensorFlow reads this when imported.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    strategy_from(args.strategy)
    with installed("the demo", "tf,demo"):
        for package in ("tensorflow", "tensorpack", "sklearn"):
            require(package, "the demo")
    try:
        OUT.mkdir(parents=True, exist_ok=True)
        # line by line, because C++ writes to the file too
        log = (OUT / "training.log").open("w", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise HierAllreduceError(f"{OUT}: the folder of the log cannot be made: {error.strerror}") from None
    with only_for_us(log) as terminal:
        print(
            f"a convnet on scikit-learn's handwritten digits, trained by tensorpack (log: {log.name})",
            file=terminal,
            flush=True,
        )
        with installed("the demo", "tf,demo"):
            job = importlib.import_module(".digits", __package__)
        return int(job.run(args.devices, args.strategy, args.epochs or job.EPOCHS, OUT, terminal))
