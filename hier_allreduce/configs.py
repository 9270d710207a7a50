"""The files of ``configs/strategies``, found by name or path, and values as people write them."""

from __future__ import annotations

import contextlib
import operator
import os
from pathlib import Path
from typing import Any, Iterable, Optional, Union

import numpy as np

from .errors import HierAllreduceError
from .formatting import shown

# In a checkout configs is a link to the folder beside the package.
_STRATEGIES = Path(__file__).resolve().parent / "configs" / "strategies"


# ---- files ---------------------------------------------------------------------------------------


def find(name_or_path: Union[str, os.PathLike], also: Iterable[str]) -> Path:
    """Return the file of a preset's name, or of a path.

    Args:
        name_or_path: the name, or the path.
        also: further names that the caller knows, to be listed too.

    Raises:
        HierAllreduceError: it is neither; the message lists the presets.
    """
    name = os.fspath(name_or_path)
    # A path that is too long, or contains a null character, is no file.
    if os.path.isfile(name):
        return Path(name)
    presets = {path.stem: path for path in sorted(_STRATEGIES.glob("*.yaml"))}
    if name in presets:
        return presets[name]
    raise HierAllreduceError(
        f"{shown(name)} is neither a file nor one of the strategies; there are"
        f" {', '.join([*also, *presets])}"
    )


# ---- values --------------------------------------------------------------------------------------


def refusal(written: Any, where: str, expected: str) -> HierAllreduceError:
    """Return the error about a value that an option does not take."""
    return HierAllreduceError(f"{where}={shown(written)}: expected {expected}")


def whole_number(written: Any, where: str, least: int = 0) -> int:
    """Return a whole number, NumPy's included; a bool is none."""
    number = least - 1
    # Python counts bools as integers, but a user who writes True for a number is mistaken.
    if not isinstance(written, (bool, np.bool_)):
        with contextlib.suppress(TypeError, AttributeError):  # the second one is an eager tensor's
            number = operator.index(written)
    if number < least:
        raise refusal(written, where, f"a whole number of {least} or more")
    return number


def one_of(written: Any, where: str, known: Iterable[Any]) -> Any:
    """Return one of some words, which may be None, True and False, too; 1 and 0 mean the last."""
    # An array would be compared with each word element by element.
    is_word = isinstance(written, (str, int, np.bool_, type(None)))
    if not is_word or written not in known:
        raise refusal(written, where, f"one of {', '.join(map(str, known))}")
    return written


def is_step_to_compare(step: int, every: Optional[int] = None) -> bool:
    """Return whether towers, or hosts, are compared after so many steps.

    By default that is after 1, 2, 4, 8, … and each thousandth: most faults show at once.
    """
    if every is None:
        return step & (step - 1) == 0 or step % 1000 == 0
    return bool(every) and step % every == 0
