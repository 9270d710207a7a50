"""How much longer Keras' step of ResNet-50 takes to trace with control edges.

::

    python benchmarks/tracing_time.py --json FILE

Emulated GPUs, MirroredStrategy, the default plan, Keras 3; nothing runs. A round traces the step of
``fit`` once with control edges and once without, in random order, each for a new model.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from emulated_gpu import plugin  # the tests are no installed package
from rounds import measured_rounds

REPLICAS, SIZE = 3, 64
EDGES, NONE = "with edges", "without"
# TensorFlow looks for devices when it is imported, so functions import what imports it.
os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", **plugin.environment(REPLICAS, memory_mb=4000))


def traced_s(edges: bool) -> float:
    """Return the processor seconds in which Keras' training step is traced."""
    import keras
    import tensorflow as tf

    from hier_allreduce import Strategy
    from hier_allreduce.integrations.distribute import HierarchicalAllReduce

    tf.config.set_soft_device_placement(True)  # some ops have no kernel on emulated GPUs
    keras.backend.clear_session()
    gc.collect()
    ours = HierarchicalAllReduce(Strategy("auto", edges=edges))
    mirrored = tf.distribute.MirroredStrategy(cross_device_ops=ours)
    batch = 2 * REPLICAS
    images = tf.zeros([2 * batch, SIZE, SIZE, 3])
    data = tf.data.Dataset.from_tensor_slices((images, tf.zeros([2 * batch, 1], tf.int32)))
    with mirrored.scope():
        model = keras.applications.ResNet50(weights=None, input_shape=(SIZE, SIZE, 3), classes=10)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.jit_compile = False  # XLA has no emulated GPU
        model._symbolic_build(data_batch=(images[:batch], tf.zeros([batch, 1], tf.int32)))
        model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    distributed = mirrored.experimental_distribute_dataset(data.batch(batch, drop_remainder=True))
    batches = iter(distributed)
    cells = [cell.cell_contents for cell in model.train_function.__closure__ or ()]
    traced = [*cells, model.train_function]
    step = next(candidate for candidate in traced if hasattr(candidate, "get_concrete_function"))
    started = time.process_time()
    step.get_concrete_function(batches)
    return time.process_time() - started


def main() -> None:
    """Trace in rounds, and print the medians."""
    from tables import check_files, write

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write the seconds of each round")
    options = parser.parse_args()
    check_files(options.json)
    kinds = {EDGES: partial(traced_s, True), NONE: partial(traced_s, False)}
    seconds = measured_rounds(kinds, 1 + options.rounds)
    counted = {kind: values[1:] for kind, values in seconds.items()}  # the first warms up
    with_edges, without = (statistics.median(counted[kind]) for kind in (EDGES, NONE))
    ratio = with_edges / without
    print(f"{with_edges:.1f} s with control edges, {without:.1f} s without: {ratio:.3f}")
    write(counted, options.json)


if __name__ == "__main__":
    main()
