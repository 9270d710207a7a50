"""Handwritten digits by Keras ``fit``: on one device, on 3, and on all; beside TensorFlow's own hierarchical copy.

The data is scikit-learn's bundled set: 1797 images of 8×8 pixels, from the UCI repository.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import IO, Any, List, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from ...errors import DeviceError, StrategyError
from ...graph import IS_TF2, make_logical_cpus
from ...integrations.distribute import HierarchicalAllReduce
from .options import chosen_strategy, named_devices

EPOCHS = 25
BATCH = 240  # examples in a step, over all devices; about so many where the devices do not divide it
TRAINED = 1440  # examples, at most; the others are for the test
DIFFERENCE = 1e-5  # at most: of a weight, to training on one device


class Training(NamedTuple):
    """Who reduced the gradients of how many devices; the test accuracy and the weights that came out."""

    name: str
    devices: int
    accuracy: float
    weights: List[np.ndarray]

    def difference(self, other: Training) -> float:
        """The largest one between two weights."""
        return max(float(np.abs(a - b).max()) for a, b in zip(self.weights, other.weights))


def run(args: argparse.Namespace, terminal: IO[str]) -> int:
    """Train, print the comparison; 0 if our weights are those of one device.

    Raises:
        DeviceError: no TensorFlow 2, fewer than 2 devices, or devices that do not exist.
        StrategyError: ``--update main``, which is no choice of ``MirroredStrategy``.
    """
    if args.update != "replicated":
        raise StrategyError(f"--update {args.update}: MirroredStrategy updates every replica; leave it out")
    if not IS_TF2:
        raise DeviceError(f"Keras 3 needs TensorFlow 2.16 or later, and this is {tf.__version__}; take another --job")
    devices, cpus = named_devices(args.devices)
    if len(devices) < 2:
        raise DeviceError(f"--devices: {len(devices)} device has nothing to reduce with; give 2 or more")
    make_logical_cpus(cpus)
    batch = _batch(len(devices))
    ours = HierarchicalAllReduce(chosen_strategy(args.strategy))
    theirs = tf.distribute.HierarchicalCopyAllReduce()
    print(f"{TRAINED // batch * batch} digits, {batch} in a step over all devices", file=terminal)

    def fitted(name: str, count: int, cross_device_ops: Any) -> Training:
        print(f"training: {name}, {count} devices" if count > 1 else "training: one device", file=terminal, flush=True)
        strategy = tf.distribute.MirroredStrategy(devices[:count], cross_device_ops) if count > 1 else None
        return _fitted(args, name, count, batch, strategy)

    one = fitted("one device", 1, None)
    trainings = [
        fitted(name, count, cross_device_ops)
        for count in sorted({min(3, len(devices)), len(devices)})
        for name, cross_device_ops in (("HierarchicalAllReduce", ours), ("TensorFlow's HierarchicalCopy", theirs))
    ]
    print(text(one, trainings), file=terminal)
    return 1 if any(t.difference(one) > DIFFERENCE for t in trainings[::2]) else 0


def text(one: Training, trainings: Sequence[Training]) -> str:
    """The comparison as a table."""
    rows = [("", "devices", "test accuracy", "weights differ from one device's by"), (one.name, "1", _percent(one), "")]
    for training in trainings:
        difference = training.difference(one)
        wrong = " WRONG" * (difference > DIFFERENCE)
        rows.append((training.name, f"{training.devices}", _percent(training), f"{difference:.1e}{wrong}"))
    return "\n".join(["", *(f"{a:31}{b:>7}{c:>15}   {d}".rstrip() for a, b, c, d in rows)])


def _percent(training: Training) -> str:
    return f"{training.accuracy:.1%}"


def _batch(count: int) -> int:
    """About BATCH examples that both 3 and ``count`` devices share out evenly."""
    both = int(np.lcm(3, count))
    return max(1, BATCH // both) * both


def _fitted(args: argparse.Namespace, name: str, count: int, batch: int, strategy: Optional[Any]) -> Training:
    import keras

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.RandomState(args.seed).permutation(len(images))
    train, test = order[: TRAINED // batch * batch], order[TRAINED:]
    keras.utils.set_random_seed(args.seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = _network(keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(_optimizer(keras, args.optimizer or "momentum"), loss)
    data = _batches(images[train], labels[train], batch, args.epochs or EPOCHS, strategy)
    model.fit(data, shuffle=False, verbose=0)
    guesses = model(images[test]).numpy().argmax(1)
    return Training(name, count, float(np.mean(guesses == labels[test])), model.get_weights())


def _batches(images: np.ndarray, labels: np.ndarray, batch: int, epochs: int, strategy: Optional[Any]) -> Any:
    """All epochs as one long one; each replica reads its part of every batch.

    ``fit`` would share out arrays as well. But the iterator that TensorFlow uses for that is autotuned on a thread of
    each device, and on a busy machine these are slow to end: up to as long as they have lived.
    """

    def part(context: Any) -> Any:
        shards, number = context.num_input_pipelines, context.input_pipeline_id
        options = tf.data.Options()
        options.autotune.enabled = False
        data = tf.data.Dataset.from_tensor_slices((images, labels)).shard(shards, number)
        return data.batch(batch // shards).repeat(epochs).with_options(options)

    if strategy is None:
        return part(tf.distribute.InputContext())
    replicated = tf.distribute.InputReplicationMode.PER_REPLICA
    how = {"experimental_fetch_to_device": False, "experimental_place_dataset_on_device": True}
    options = tf.distribute.InputOptions(experimental_replication_mode=replicated, **how)
    return strategy.distribute_datasets_from_function(part, options)


def _network(keras: Any) -> Any:
    """Smooth throughout: a maximum turns a rounding error of 1e-8 into another gradient once in a while."""
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


def _optimizer(keras: Any, name: str) -> Any:
    optimizers = keras.optimizers
    return {
        "sgd": lambda: optimizers.SGD(0.3),
        "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: optimizers.Adam(0.003),
        "adagrad": lambda: optimizers.Adagrad(0.05),
        "rmsprop": lambda: optimizers.RMSprop(0.001),
    }[name]()
