"""Lazy attributes of a package (PEP 562): a submodule is imported when one of its names is first used."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable, Mapping, Sequence


def lazy(package: str, names_by_module: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for ``package``.

    Args:
        package: the package's ``__name__``.
        names_by_module: ``{submodule: names}``.

    The function raises AttributeError for any other name, as a module does.
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{module_of[name]}", package), name)
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    return get
