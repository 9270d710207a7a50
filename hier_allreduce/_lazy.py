"""Lazy attributes of a package (PEP 562): a name's first use imports its submodule."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from typing import Any, Callable, Mapping, Sequence

_EXTRAS = {
    "tensorflow": "tf",
    "tensorpack": "tensorpack",
    "matplotlib": "commands",
    "psutil": "commands",
    "tqdm": "commands",
}  # what installs a package that may be missing


def lazy(package: str, names_by_module: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a module-level ``__getattr__`` for ``package``.

    Args:
        package: the package's ``__name__``.
        names_by_module: ``{submodule: names}``.

    The function raises AttributeError for any other name, as a module does, and
    ModuleNotFoundError with advice where TensorFlow or tensorpack is missing.
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f".{module_of[name]}", package), name)
        except ModuleNotFoundError as error:
            raise with_advice(error, f"{package}.{name}") from None
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    return get


def with_advice(error: ModuleNotFoundError, feature: str) -> ModuleNotFoundError:
    """Return an error that names the extra of the missing package, if ``feature`` needs one."""
    if error.name not in _EXTRAS:
        return error
    return ModuleNotFoundError(advice(feature, error.name, _EXTRAS[error.name]), name=error.name)


def advice(feature: str, package: str, extras: str) -> str:
    """Return the command that installs the missing package, with quotes for every shell."""
    gpus = (
        " installs TensorFlow for CPUs; for GPUs see tensorflow.org/install"
        if package == "tensorflow"
        else ""
    )
    return f'{feature} needs {package}: python -m pip install ".[{extras}]" in the checkout{gpus}'


def keras_2_install(tensorflow: str) -> str:
    """Return the command that installs the Keras 2 of a TensorFlow's version, and no more.

    tf_keras depends on the package ``tensorflow``, which would overwrite ``tensorflow-cpu``.
    """
    release = re.match(r"\d+\.\d+", tensorflow)
    wanted = f"=={release.group()}.*" if release else ""
    return f'pip install --no-deps "tf_keras{wanted}"'


def require(package: str, feature: str) -> None:
    """Check that a package of an extra is installed, without importing it.

    Raises:
        ModuleNotFoundError: it is missing; the message says what installs it.
    """
    if importlib.util.find_spec(package) is None:
        raise with_advice(ModuleNotFoundError(name=package), feature)
