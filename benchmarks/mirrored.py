"""MirroredStrategy with each ``cross_device_ops`` object: step time and graph size. The numbers of docs/distribute.md.

::

    python benchmarks/mirrored.py --model resnet50 --devices 8

The model is a table of shapes. A variable's gradient on replica k is (k + 1) times the variable. A step subtracts the
scaled reduced gradient from every replica's copy. Contenders differ in the all-reduce only. TensorFlow 2.
"""

import argparse
import math
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from hier_allreduce.bench import WARM_UP, devices_here, load_model
from hier_allreduce.formatting import table
from hier_allreduce.graph.compat import make_logical_cpus
from hier_allreduce.integrations.distribute import HierarchicalAllReduce
from hier_allreduce.sampling import in_turn, quartiles, timed

RATE = 1e-3  # small, so that the variables keep their magnitude over the rounds
OURS, BASELINE = "HierarchicalAllReduce", "no reduction"
CONTENDERS = {
    OURS: HierarchicalAllReduce,
    "ReductionToOneDevice": tf.distribute.ReductionToOneDevice,
    "HierarchicalCopyAllReduce": tf.distribute.HierarchicalCopyAllReduce,
    "HierarchicalCopyAllReduce(num_packs=0)": lambda: tf.distribute.HierarchicalCopyAllReduce(num_packs=0),
    "default (NCCL on GPUs, ring on CPUs)": lambda: None,
}


def built(shapes, devices, cross_device_ops, reduces):
    """Return a step, the number of ops in its graph, and the last variable."""
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=cross_device_ops)
    with strategy.scope():
        variables = [tf.Variable(tf.fill(shape.shape, 0.01)) for shape in shapes]

    def update(strategy, *values):
        for variable, value in zip(variables, values):
            strategy.extended.update(variable, lambda v, g: v.assign_sub(RATE * g), args=(value,))

    def replica():
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        grads = [number * variable for variable in variables]
        context.merge_call(update, context.all_reduce(tf.distribute.ReduceOp.SUM, grads) if reduces else grads)

    step = tf.function(lambda: strategy.run(replica), autograph=False)
    return step, len(step.get_concrete_function().graph.get_operations()), variables[-1]


def is_right(step, variable, count):
    """Return whether one step changes a variable by the sum of the replicas' gradients: 1, 2, … K times its value."""
    before = np.mean(variable.numpy().astype(np.float64))
    step()
    change = 1 - np.mean(variable.numpy().astype(np.float64)) / before
    return math.isclose(change, RATE * count * (count + 1) / 2, rel_tol=1e-3)


def report(ops, right, seconds):
    """Return a table with a line for each contender."""
    idle = np.median(seconds[BASELINE])
    net = {name: np.array(steps) - idle for name, steps in seconds.items()}
    rows = [["", "ms over no reduction", "quartiles", "times ours", "ops in the graph", ""]]
    for name in CONTENDERS:
        low, median, high = quartiles(1e3 * net[name])
        cells = [f"{median:.1f}", f"{low:.1f}–{high:.1f}", f"{np.median(net[name] / net[OURS]):.2f}", f"{ops[name]}"]
        rows.append([name, *cells, "" if right[name] else "WRONG"])
    baseline = f"without reduction a step takes {1e3 * idle:.1f} ms and its graph has {ops[BASELINE]} ops"
    return "\n".join([table(rows, all_right=True), baseline])


def main():
    """Measure all contenders in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="resnet50", metavar="NAME|FILE", help="a table of dense float32 gradients")
    parser.add_argument("--devices", type=int, metavar="K")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    args = parser.parse_args()
    shapes, devices = load_model(args.model), devices_here(args.devices)
    others = [shape.name for shape in shapes if shape.sparse or shape.dtype != "float32"]
    if others:
        parser.error(f"{', '.join(others)}: expected dense float32 gradients")
    if "cpu" in devices[0]:
        make_logical_cpus(len(devices))
    ops, right, steps = {}, {}, {}
    for name, make in {BASELINE: lambda: None, **CONTENDERS}.items():
        step, ops[name], variable = built(shapes, devices, make(), reduces=name != BASELINE)
        right[name], steps[name] = is_right(step, variable, len(devices)), timed(step)
    seconds = in_turn(steps, args.rounds, WARM_UP, lambda stage: None)
    print(f"{args.model}, MirroredStrategy on {len(devices)} devices ({devices[0]} …)\n{report(ops, right, seconds)}")


if __name__ == "__main__":
    main()
