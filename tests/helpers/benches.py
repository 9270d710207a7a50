"""Small cases for the bench, what it measures on them, and reports with known times."""

import tensorflow as tf

from helpers.graphs import cpus
from hier_allreduce.bench import measuring, results
from hier_allreduce.bench.case import Case
from hier_allreduce.bench.contenders import Contender
from hier_allreduce.bench.models import GradientShape

measuring._BUILDS = 1  # instead of the median of three

MIB = 1 << 20
SMALL = (
    GradientShape("kernel", (64, 32), "float32"),
    GradientShape("scale", (), "float32"),
    GradientShape("embedding", (50, 4), "float32", sparse=True),
    GradientShape("counts", (7,), "int32"),
)


def case(columns=SMALL, devices=4, **how):
    """Return a case on logical CPU devices whose sparse gradients have 8 rows."""
    return Case(columns, tuple(cpus(devices)), rows=8, **how)


def measure_one(build, columns=SMALL[:2], devices=3, **how):
    """Return what the bench measures of one contender in one round."""
    report = measuring.measure(case(columns, devices, **how), [Contender("it", build)], rounds=1, floor=False)
    return report.contenders[0]


def flat_sum(grads, devices, average):
    """Add up everything on the first device, and copy the sums to all."""
    with tf.device(devices[0]):
        total = [tf.add_n(column) for column in zip(*grads)]
    rows = []
    for device in devices:
        with tf.device(device):
            rows.append([tf.identity(value) for value in total])
    return rows


def made_up(**step_seconds):
    """Return a report with these step times by contender, and a baseline of one second."""
    measured = [results.Measured(name, step_seconds=seconds) for name, seconds in step_seconds.items()]
    return results.Report(case(), results.Measured("baseline", step_seconds=[1.0, 1.0, 9.0]), measured)
