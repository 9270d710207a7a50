"""How long the ops of an all-reduce take to build, beside TensorFlow's ReductionToOneDevice.

::

    python benchmarks/build_time.py --json FILE

K = 8; nothing runs. A round builds each all-reduce once, in random order, each in a new graph. Only
the all-reduce is timed, not the gradients.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from functools import partial
from typing import Any, Dict, List

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from baselines import Build, reduction_to_one_device
from rounds import measured_rounds
from shapes import load_model
from tables import check_files, write

from hier_allreduce import allreduce_grads
from hier_allreduce.formatting import table

TOWERS = 8
OURS, THEIRS = "ours", "ReductionToOneDevice"
CONTENDERS: Dict[str, Build] = {OURS: allreduce_grads, THEIRS: reduction_to_one_device}


def build_s(build: Build, model: str, kind: str) -> float:
    """Return the seconds in which an all-reduce is built."""
    devices = [f"/{kind}:{tower}" for tower in range(TOWERS)]
    shapes = load_model(model)
    rows: List[List[Any]] = []
    with tf.Graph().as_default():
        for device in devices:
            with tf.device(device):
                rows.append([tf.zeros(shape.shape) for shape in shapes])
        gc.collect()
        started = time.perf_counter()
        build(rows, devices, True)
        return time.perf_counter() - started


def main() -> None:
    """Build all contenders in rounds, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write the seconds of each round")
    options = parser.parse_args()
    check_files(options.json)
    rows = [["model", "devices", OURS, THEIRS, "ours ÷ theirs"]]
    results = []
    for model in ("resnet50", "bert_base"):
        for kind in ("gpu", "cpu"):
            builds = {name: partial(build_s, CONTENDERS[name], model, kind) for name in CONTENDERS}
            seconds = measured_rounds(builds, 1 + options.rounds)
            counted = {name: values[1:] for name, values in seconds.items()}  # the first warms up
            results.append({"model": model, "devices": kind, "seconds": counted})
            ours, theirs = (statistics.median(counted[name]) for name in (OURS, THEIRS))
            rows.append([model, kind, f"{ours:.2f} s", f"{theirs:.2f} s", f"{ours / theirs:.2f}"])
    print(table(rows))
    write(results, options.json)


if __name__ == "__main__":
    main()
