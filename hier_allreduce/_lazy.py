"""Lazy attributes of a package (PEP 562): a name's first use imports its submodule."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, Callable, Dict, Mapping, Sequence

# What installs a package which may be missing, with quotes for every shell.
_INSTALL = {
    "tensorflow": (
        'python -m pip install ".[tf]" in the checkout installs TensorFlow for CPUs; for GPUs see'
        " tensorflow.org/install"
    ),
    "tensorpack": 'python -m pip install ".[tensorpack]" in the checkout',
}


def lazy(package: str, names_by_module: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for ``package``.

    Args:
        package: the package's ``__name__``.
        names_by_module: ``{submodule: names}``.

    The function raises AttributeError for any other name, as a module does, and
    ModuleNotFoundError with advice where TensorFlow or tensorpack is missing.
    """
    module_by_name: Dict[str, str] = {}
    for module, exported in names_by_module.items():
        module_by_name.update(dict.fromkeys(exported, module))

    def get(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            submodule = importlib.import_module(f".{module_by_name[name]}", package)
            attribute = getattr(submodule, name)
        except ModuleNotFoundError as error:
            raise with_advice(error, f"{package}.{name}") from None
        # The package keeps the attribute, so that later uses do not call this function.
        setattr(sys.modules[package], name, attribute)
        return attribute

    return get


def with_advice(error: ModuleNotFoundError, feature: str) -> ModuleNotFoundError:
    """Return an error that says what installs the missing package, if ``feature`` needs one."""
    if error.name not in _INSTALL:
        return error
    install = f"{feature} needs {error.name}: {_INSTALL[error.name]}"
    return ModuleNotFoundError(install, name=error.name)


def require(package: str, feature: str) -> None:
    """Check that a package of an extra is installed, without importing it.

    Raises:
        ModuleNotFoundError: it is missing; the message says what installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise with_advice(ModuleNotFoundError(name=package), feature)
