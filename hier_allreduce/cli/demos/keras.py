"""Handwritten digits by Keras ``fit`` on one device, 3 and all: our ops and TensorFlow's HierarchicalCopy compared."""

from __future__ import annotations

import argparse
import contextlib
from typing import IO, Any, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow as tf

from ...bench import make_keras_optimizer
from ...errors import DeviceError, StrategyError
from ...formatting import table
from ...graph import IS_TF2, make_logical_cpus
from ...integrations.distribute import HierarchicalAllReduce
from . import digit_images
from .digit_images import Examples
from .options import chosen_strategy, named_devices

EPOCHS = 25
BATCH = 240  # examples in a step, over all devices; nearly that many where the devices do not divide it
TESTED = 357  # examples kept for the test
DIFFERENCE = 1e-5  # allowed: of a weight, from training on one device
RATES = {**digit_images.RATES, "momentum": 0.05}
_OURS = "HierarchicalAllReduce"


class Training(NamedTuple):
    """A training: what reduced the gradients of how many devices, the test accuracy, and the weights at the end."""

    name: str
    devices: int
    accuracy: float
    weights: List[np.ndarray]

    def difference(self, other: Training) -> float:
        """Return the largest difference between two weights."""
        return max(float(np.abs(a - b).max()) for a, b in zip(self.weights, other.weights))


def run(args: argparse.Namespace, terminal: IO[str]) -> int:
    """Train, and print the comparison. Return 0 if our weights are those of one device, else 1.

    Raises:
        DeviceError: TensorFlow 1, fewer than 2 devices, or devices that do not exist.
        StrategyError: ``--update main``, which ``MirroredStrategy`` cannot do.
    """
    if args.update != "replicated":
        raise StrategyError(f"--update {args.update}: MirroredStrategy updates every replica; leave it out")
    if not IS_TF2:
        raise DeviceError(f"Keras 3 needs TensorFlow 2.16 or later, and this is {tf.__version__}; take another --job")
    devices, cpus = named_devices(args.devices)
    if len(devices) < 2:
        raise DeviceError(f"--devices: {len(devices)} device has nothing to reduce with; give 2 or more")
    make_logical_cpus(cpus)
    ours = HierarchicalAllReduce(chosen_strategy(args.strategy))
    batch = _batch(len(devices))
    training, testing = digit_images.load(args.seed, TESTED)
    trained = len(training.labels) // batch * batch
    training = Examples(training.images[:trained], training.labels[:trained])
    print(f"{trained} digits, {batch} in a step over all devices", file=terminal)

    def fitted(name: str, count: int, cross_device_ops: Any = None) -> Training:
        print(f"training: {name}, {count} devices" if count > 1 else "training: one device", file=terminal, flush=True)
        strategy = tf.distribute.MirroredStrategy(devices[:count], cross_device_ops) if count > 1 else None
        model = _fitted_model(args, training, batch, strategy)
        guesses = model(testing.images).numpy().argmax(1)
        return Training(name, count, float(np.mean(guesses == testing.labels)), model.get_weights())

    one = fitted("one device", 1)
    many = []
    for count in sorted({min(3, len(devices)), len(devices)}):
        many.append(fitted(_OURS, count, ours))
        many.append(fitted("TensorFlow's HierarchicalCopy", count, tf.distribute.HierarchicalCopyAllReduce()))
    print(f"\n{comparison(one, many)}", file=terminal)
    return 1 if any(result.name == _OURS and result.difference(one) > DIFFERENCE for result in many) else 0


def comparison(one: Training, trainings: Sequence[Training]) -> str:
    """Return the comparison with one device as a table."""
    rows = [
        ("", "devices", "test accuracy", "weights differ from one device's by"),
        (one.name, "1", f"{one.accuracy:.1%}", ""),
    ]
    for training in trainings:
        difference = training.difference(one)
        verdict = " WRONG" if difference > DIFFERENCE else ""
        rows.append((training.name, f"{training.devices}", f"{training.accuracy:.1%}", f"{difference:.1e}{verdict}"))
    return table(rows)


def _batch(count: int) -> int:
    """Return about BATCH examples that both 3 and ``count`` devices share evenly."""
    divisor = int(np.lcm(3, count))
    return max(1, BATCH // divisor) * divisor


def _fitted_model(args: argparse.Namespace, training: Examples, batch: int, strategy: Optional[Any]) -> Any:
    import keras

    keras.utils.set_random_seed(args.seed)
    optimizer = args.optimizer or "momentum"
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = _network(keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make_keras_optimizer(optimizer, RATES[optimizer]), loss)
    epochs = args.epochs or EPOCHS
    steps = epochs * -(-len(training[0]) // batch)  # Keras 2 cannot count those of a distributed data set
    model.fit(_batches(training, batch, epochs, strategy), steps_per_epoch=steps, shuffle=False, verbose=0)
    return model


def _batches(examples: Examples, batch: int, epochs: int, strategy: Optional[Any]) -> Any:
    """Return all epochs as one long epoch; each replica reads its part of every batch.

    ``fit`` would also distribute arrays. But TensorFlow autotunes the iterator that it uses for them, on a thread of
    each device. On a busy machine these threads are slow to end: they can take as long as they have lived.
    """

    def part(context: Any) -> Any:
        shards, number = context.num_input_pipelines, context.input_pipeline_id
        options = tf.data.Options()
        options.autotune.enabled = False
        data = tf.data.Dataset.from_tensor_slices(tuple(examples)).shard(shards, number)
        return data.batch(batch // shards).repeat(epochs).with_options(options)

    if strategy is None:
        return part(tf.distribute.InputContext())
    options = tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_fetch_to_device=False,
        experimental_place_dataset_on_device=True,
    )
    return strategy.distribute_datasets_from_function(part, options)


def _network(keras: Any) -> Any:
    # smooth throughout: a maximum turns a rounding error of 1e-8 into another gradient once in a while
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, strides=2, activation="swish"),
            layers.Flatten(),
            layers.Dense(64, activation="swish"),
            layers.Dense(10),
        ]
    )
