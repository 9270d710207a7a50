"""What the demo's options say, as objects; the same for every job."""

from __future__ import annotations

from typing import Any, List, Optional

import tensorflow as tf

from ..compat import tf1
from ..strategy import Strategy, strategy_from


def chosen_devices(text: str) -> List[Any]:
    """What ``--devices`` says: a number, or device names or GPU ids separated by commas."""
    if "," in text or not text.isdigit():
        return [int(name) if name.isdigit() else name for name in text.split(",")]
    gpus = tf.config.experimental.list_physical_devices("GPU")
    kind = "gpu" if len(gpus) >= int(text) else "cpu"
    return [f"/{kind}:{number}" for number in range(int(text))]


def chosen_strategy(name: Optional[str]) -> Strategy:
    """What ``--strategy`` says; hierarchical if nothing."""
    return strategy_from(name) if name else Strategy(algorithm="hierarchical")


def chosen_optimizer(name: str, rate: Any) -> Any:
    """What ``--optimizer`` says, with a learning rate."""
    train = tf1.train
    return {
        "sgd": lambda: train.GradientDescentOptimizer(rate),
        "momentum": lambda: train.MomentumOptimizer(rate, 0.9),
        "adam": lambda: train.AdamOptimizer(rate),
        "adagrad": lambda: train.AdagradOptimizer(rate),
        "rmsprop": lambda: train.RMSPropOptimizer(rate),
    }[name]()
