"""Optimizers by name, for the bench and the demos. No TensorFlow until one is made."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple


class _Classes(NamedTuple):
    """A class of ``tf.compat.v1.train``, the same optimizer's class of Keras, and options that both take."""

    v1: str
    keras: str
    options: Dict[str, float]


OPTIMIZERS = {
    "sgd": _Classes("GradientDescentOptimizer", "SGD", {}),
    "momentum": _Classes("MomentumOptimizer", "SGD", {"momentum": 0.9}),
    "adam": _Classes("AdamOptimizer", "Adam", {}),
    "adagrad": _Classes("AdagradOptimizer", "Adagrad", {}),
    "rmsprop": _Classes("RMSPropOptimizer", "RMSprop", {}),
}


def make_optimizer(name: str, rate: Any) -> Any:
    """Return the optimizer of ``tf.compat.v1.train`` with a learning rate."""
    from ..graph import tf1

    classes = OPTIMIZERS[name]
    return getattr(tf1.train, classes.v1)(rate, **classes.options)


def make_keras_optimizer(name: str, rate: float) -> Any:
    """Return the optimizer of Keras with a learning rate."""
    import keras

    classes = OPTIMIZERS[name]
    return getattr(keras.optimizers, classes.keras)(rate, **classes.options)
