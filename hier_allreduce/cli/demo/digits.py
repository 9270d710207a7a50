"""Handwritten digits: a small convnet on K devices, checked against one device with the K-fold batch.

The data are scikit-learn's: 1797 images of 8×8 pixels, from the UCI repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorpack.callbacks import ScheduledHyperParamSetter
from tensorpack.dataflow import DataFlow
from tensorpack.tfutils.summary import add_moving_summary
from tensorpack.train import ModelDesc, SimpleTrainer
from tqdm import tqdm

from ...formatting import table
from ...graph import gpu_count, tf1
from ...integrations.tensorpack import HierarchicalTrainer
from ...planning import Strategy, strategy_from
from .tensorpack_run import Run, largest_difference, predict, train
from .terminal import pause

EPOCHS = 60
SEED = 0
TESTED = 360  # examples kept for the test
RATE, MOMENTUM = 0.1, 0.9
BATCH = 128  # examples in a step, over all devices
ACCURACY = 0.98  # required on the test, after EPOCHS or more: fewer may be too few to learn so much
DIFFERENCE = 1e-5  # allowed: of a loss, or of a weight, from training on one device


class Examples(NamedTuple):
    """``images`` (N×8×8×1, 0 to 1) and ``labels`` (N)."""

    images: np.ndarray
    labels: np.ndarray


def load() -> Tuple[Examples, Examples]:
    """Return the examples to train on, and others to test on, split at random."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    order = np.random.RandomState(SEED).permutation(len(images))
    test, train = order[:TESTED], order[TESTED:]
    return Examples(images[train], labels[train]), Examples(images[test], labels[test])


class Batches(DataFlow):
    """Epochs of ``steps`` steps, each of ``parts`` batches: the same examples in the same order for any ``parts``.

    Every image is shifted by up to one pixel in each direction, at random.
    """

    def __init__(self, examples: Examples, steps: int, parts: int, batch: int):
        self._examples, self._batches, self._batch = examples, steps * parts, batch
        self._random = np.random.RandomState(SEED)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[List[np.ndarray]]:
        order = self._random.permutation(len(self._examples.labels))
        shifts = self._random.randint(3, size=(len(order), 2))
        padded = np.pad(self._examples.images, ((0, 0), (1, 1), (1, 1), (0, 0)), "constant")
        for number in range(self._batches):
            batch = order[number * self._batch : (number + 1) * self._batch]
            images = [padded[i, y : y + 8, x : x + 8] for i, (y, x) in zip(batch, shifts[batch])]
            yield [np.array(images), self._examples.labels[batch]]


class Convnet(ModelDesc):
    """Two convolutions and two fully connected layers, smooth throughout.

    A ReLU or a maximum turns a rounding error of 1e-8 into another gradient once in a while. The comparison with one
    device would then show that instead of the all-reduce.
    """

    def inputs(self) -> List[Any]:
        """Return what a batch holds (tensorpack's hook)."""
        return [tf.TensorSpec((None, 8, 8, 1), tf.float32, "image"), tf.TensorSpec((None,), tf.int32, "label")]

    def build_graph(self, image: Any, label: Any) -> Any:
        """Return the cost of one tower (tensorpack's hook)."""
        x = self._layer(0, image, [3, 3, 1, 32], _convolution, tf.nn.swish)
        x = self._layer(1, x, [3, 3, 32, 64], _convolution, tf.nn.swish)
        x = tf.reshape(tf.nn.avg_pool2d(x, 2, 2, "VALID"), [-1, 4 * 4 * 64])
        x = self._layer(2, x, [4 * 4 * 64, 64], tf.matmul, tf.nn.swish)
        logits = self._layer(3, x, [64, 10], tf.matmul, tf.identity)
        tf.argmax(logits, 1, name="digit")
        cost = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits)
        cost = tf.reduce_mean(cost, name="cost")
        add_moving_summary(cost)
        return cost

    def _layer(self, number: int, x: Any, shape: List[int], op: Any, activation: Any) -> Any:
        with tf1.variable_scope(f"layer{number}"):
            # Each layer has its own seed, so that every graph starts from the same weights, with any number of towers.
            initializer = tf1.variance_scaling_initializer(2.0, seed=number)
            weights = tf1.get_variable("W", shape, initializer=initializer, use_resource=True)
            bias = tf1.get_variable("b", shape[-1:], initializer=tf1.zeros_initializer(), use_resource=True)
            return activation(op(x, weights) + bias)

    def optimizer(self) -> Any:
        """Return the optimizer, with a learning rate that a callback lowers (tensorpack's hook)."""
        rate = tf1.get_variable("learning_rate", initializer=RATE, trainable=False, use_resource=True)
        return tf1.train.MomentumOptimizer(rate, MOMENTUM)


def _convolution(x: Any, weights: Any) -> Any:
    return tf.nn.conv2d(x, weights, strides=[1, 1, 1, 1], padding="SAME")


# ---- the demo ----------------------------------------------------------------------------------------


def run(devices: str, strategy: Optional[str], epochs: int, out: Path, terminal: IO[str]) -> int:
    """Train on the devices, then on the first of them alone; print a report. Return 0 if all checks pass, else 1.

    Args:
        devices: a number of devices, or their names or GPU ids separated by commas.
        strategy: a name or file; None is the hierarchical one.
        epochs: passes over the data.
        out: the folder for the checkpoint.
        terminal: what people read.
    """
    chosen = strategy_from(strategy) if strategy else Strategy(algorithm="hierarchical")
    trainer = HierarchicalTrainer(chosen_devices(devices), strategy=chosen)
    count = len(trainer.devices)
    training, testing = load()
    batch = max(1, BATCH // count)
    steps = len(training.labels) // (batch * count)
    # the rate falls half way and near the end
    rates = [(1, RATE), (1 + epochs // 2, 0.3 * RATE), (1 + epochs * 5 // 6, 0.05 * RATE)]

    def trained(trainer: Any, parts: int, title: str, **options: Any) -> Run:
        data = Batches(training, steps, parts, batch * count // parts)
        rate = ScheduledHyperParamSetter("learning_rate", rates)
        with tqdm(total=steps * epochs, desc=title, file=terminal, unit="step", mininterval=pause(terminal)) as bar:
            return train(trainer, Convnet(), data, epochs, bar, [rate], **options)

    many = trained(trainer, count, f"{count} devices", out=out)
    one = trained(SimpleTrainer(), 1, f"one device, {count}-fold batch", device=trainer.devices[0])
    checkpoint = tf1.train.latest_checkpoint(str(out))
    digits = predict(Convnet(), checkpoint, list(testing), "digit")
    report = Report(many, one, float(np.mean(digits == testing.labels)), checkpoint, epochs >= EPOCHS)
    print(report, file=terminal)
    return 1 if report.faults else 0


def chosen_devices(text: str) -> List[Any]:
    """Return the devices that ``--devices`` names: a number of them, or names or GPU ids separated by commas."""
    if "," in text or not text.isdigit():
        return [int(name) if name.isdigit() else name for name in text.split(",")]
    kind = "gpu" if gpu_count() >= int(text) else "cpu"
    return [f"/{kind}:{number}" for number in range(int(text))]


class Report:
    """The runs on many devices and on one, compared; its text is what the demo prints."""

    def __init__(self, many: Run, one: Run, accuracy: float, checkpoint: str, judged: bool):
        self._many, self._accuracy, self._checkpoint, self._judged = many, accuracy, checkpoint, judged
        self._loss = float(np.max(np.abs(np.subtract(many.losses, one.losses))))
        self._weight = largest_difference(many.weights[0], one.weights[0])

    @property
    def faults(self) -> List[str]:
        """The checks that failed."""
        is_accurate = self._accuracy >= ACCURACY or not self._judged
        checks = {
            f"test accuracy {self._accuracy:.1%} is under {ACCURACY:.0%}": is_accurate,
            f"a loss differs by {self._loss:.1e}, more than {DIFFERENCE:.0e}": self._loss <= DIFFERENCE,
            f"a weight differs by {self._weight:.1e}, more than {DIFFERENCE:.0e}": self._weight <= DIFFERENCE,
            f"the towers' weights differ by up to {self._many.drift:.1e}": self._many.drift == 0,
        }
        return [fault for fault, passed in checks.items() if not passed]

    def __str__(self) -> str:
        count, steps = len(self._many.weights), len(self._many.losses)
        accuracy = f"(at least {ACCURACY:.0%})" if self._judged else f"(not judged: fewer than {EPOCHS} epochs)"
        difference = f"(at most {DIFFERENCE:.0e})"
        rows = [
            (f"test accuracy on {TESTED} digits, from the checkpoint", f"{self._accuracy:.1%}", accuracy),
            (f"{count} devices and one: loss, any of {steps} steps", f"{self._loss:.1e}", difference),
            (f"{count} devices and one: any weight at the end", f"{self._weight:.1e}", difference),
            (f"any weight between the {count} devices", f"{self._many.drift:g}", "(exactly 0)"),
        ]
        copies = str(self._many.audit or "one device: no copies")
        lines = ["", table(rows), "", copies, "", f"checkpoint: {self._checkpoint}"]
        return "\n".join([*lines, *(f"FAILED: {fault}" for fault in self.faults)])
