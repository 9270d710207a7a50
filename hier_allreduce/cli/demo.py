"""``hier-allreduce demo``: a job on real data, checked against the same job on one device."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from .._lazy import require
from ..bench import OPTIMIZERS
from ..errors import HierAllreduceError
from ..planning import strategy_from
from .arguments import count, device_count, device_names, installed
from .demos.terminal import only_for_us

# Each is a module of hier_allreduce.cli.demos with `run(args, terminal) -> exit status`.
JOBS = {
    "digits": "a convnet on scikit-learn's handwritten digits, trained by tensorpack",
    "text": "a language model with sparse embeddings on the standard library's English, trained by TowerOptimizer",
    "keras": "the digits by Keras fit under MirroredStrategy, compared with TensorFlow's HierarchicalCopy",
}
_PACKAGES = {
    "digits": ("tensorflow", "tensorpack", "sklearn"),
    "text": ("tensorflow",),
    "keras": ("tensorflow", "sklearn"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    jobs = "; ".join(f"{name}: {summary}" for name, summary in JOBS.items())
    parser.add_argument("--job", choices=JOBS, default="digits", help=f"what to train ({jobs})")
    parser.add_argument(
        "--devices",
        type=device_names,
        default="8",
        metavar="N|LIST",
        help="a number (GPUs if there are enough, else logical CPU devices), or a list: /gpu:0,/gpu:1 (default 8)",
    )
    parser.add_argument(
        "--hosts",
        type=device_count,
        default=1,
        metavar="N",
        help="train the digits on N hosts, processes on this machine with --devices each (default 1)",
    )
    parser.add_argument(
        "--strategy", metavar="NAME", help="how to reduce: a name or a YAML file (default hierarchical)"
    )
    parser.add_argument(
        "--update",
        choices=("replicated", "main"),
        default="replicated",
        help="where variables are updated: on every tower, or once at a main (default replicated)",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        help="default momentum for the digits, adagrad for the text",
    )
    parser.add_argument(
        "--epochs", type=count, metavar="N", help="passes over the data (default: digits 60, text 2, keras 25)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data, split and weights (default 0)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for checkpoint and logs (default train_log/JOB)"
    )


def main(args: argparse.Namespace) -> int:
    """Train, compare and report; return 0 if all checks pass, else 1.

    Raises:
        HierAllreduceError: a module that the demo needs is not installed, or ``--out`` cannot be written to.
        DeviceError: a device of ``--devices`` does not exist.
    """
    # A GPU's TF32 rounds to 1e-3, more than the differences that are checked. TensorFlow reads this when imported.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    if args.hosts > 1 and args.job != "digits":
        raise HierAllreduceError(f"--hosts is for --job digits, not {args.job}")
    _check(args)
    args.out = args.out or Path("train_log") / args.job
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        # line by line, because C++ writes to the file too
        log = (args.out / "training.log").open("w", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise HierAllreduceError(f"--out {args.out}: {error.strerror}") from None

    with only_for_us(log) as terminal:
        print(f"{args.job}: {JOBS[args.job]} (log: {log.name})", file=terminal, flush=True)
        with installed("the demo", "tf,demo"):
            name = "several_hosts" if args.hosts > 1 else args.job
            job = importlib.import_module(f".demos.{name}", __package__)
        return int(job.run(args, terminal))


def _check(args: argparse.Namespace) -> None:
    """Check what needs no TensorFlow before the folder of the log is made."""
    strategy_from(args.strategy)
    with installed("the demo", "tf,demo"):
        for package in _PACKAGES[args.job]:
            require(package, "the demo")
