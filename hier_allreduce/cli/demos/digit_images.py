"""scikit-learn's handwritten digits: 1797 images of 8×8 pixels, from the UCI repository."""

from __future__ import annotations

from typing import NamedTuple, Tuple

import numpy as np
from sklearn.datasets import load_digits

TESTED = 360  # examples kept for the test
# learning rates at which the demos' networks learn the digits
RATES = {"sgd": 0.3, "momentum": 0.1, "adam": 0.003, "adagrad": 0.05, "rmsprop": 0.001}


class Examples(NamedTuple):
    """``images`` (N×8×8×1, 0 to 1) and ``labels`` (N)."""

    images: np.ndarray
    labels: np.ndarray


def load(seed: int, testing: int = TESTED) -> Tuple[Examples, Examples]:
    """Return the examples to train on, and ``testing`` others to test on, split at random."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    order = np.random.RandomState(seed).permutation(len(images))
    test, train = order[:testing], order[testing:]
    return Examples(images[train], labels[train]), Examples(images[test], labels[test])
