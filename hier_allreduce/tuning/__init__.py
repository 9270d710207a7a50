"""The fastest strategy for some gradients, measured on the devices that will run it.

::

    shapes: K×N gradients ─► a table
                               │
    candidates: strategies ─► search: rounds of all, then of the better ones ─► tuned: a strategy, how sure, its file
                               │
    backward: a stand-in for the backward pass

``candidates`` needs no TensorFlow, so this package imports lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .candidates import MINUTES as MINUTES
    from .search import tune as tune
    from .shapes import save_shapes as save_shapes
    from .tuned import Tuned as Tuned

__all__ = ["MINUTES", "Tuned", "save_shapes", "tune"]
__getattr__ = lazy(
    __name__, {"candidates": ["MINUTES"], "search": ["tune"], "shapes": ["save_shapes"], "tuned": ["Tuned"]}
)
