"""A variable under another variable's name.

tensorpack's gradient processors, and the functions that users pass to ``PostProcessOptimizer``, choose variables by
``var.name`` or ``var.op.name``: they freeze ``hidden/.*``, say. Tower 1's variable is called ``tower1/hidden/W``, so
they would freeze the layer on tower 0 only, and the towers would diverge. They therefore get a view: an object that
reads and assigns tower 1's variable, but has the ``name`` and ``op`` of tower 0's. Its class is derived from the
variable's own, so that TensorFlow accepts it as a variable. The constructor of that class would add a variable to the
graph, so the view is made without it, and has all attributes of the variable. :mod:`.variable_names` decides where
views are used.
"""

from __future__ import annotations

import types
from functools import lru_cache
from typing import Any


def renamed(var: Any, named_like: Any) -> Any:
    """Return a view of ``var`` with the ``name`` and ``op`` of the variable ``named_like``."""
    view = object.__new__(_renamed_class(var.__class__))
    vars(view).update(vars(var), _named_like=named_like)
    return view


class _NamedLikeAnother:
    """Takes its name from another variable."""

    _named_like: Any

    @property
    def op(self) -> Any:
        return self._named_like.op

    @property
    def name(self) -> Any:
        return self._named_like.name


@lru_cache(maxsize=None)
def _renamed_class(kind: Any) -> Any:
    return types.new_class(f"Renamed{kind.__name__}", (_NamedLikeAnother, kind))
