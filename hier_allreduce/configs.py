"""The files of ``configs/``, found by name or path, and values as people write them.

::

    "tensorpack" or a path ──find──► Path ──read_yaml──► {key: value}
"""

from __future__ import annotations

import contextlib
import operator
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Union

import numpy as np
import yaml

from .errors import HierAllreduceError
from .formatting import shown

# In a checkout it is a link to the folder beside the package.
_CONFIGS = Path(__file__).resolve().parent / "configs"


# ---- files ---------------------------------------------------------------------------------------


def presets(folder: str) -> List[str]:
    """List the presets in a folder: ``"strategies"``, ``"trainers"``."""
    return sorted(path.stem for path in (_CONFIGS / folder).glob("*.yaml"))


def find(folder: str, name_or_path: Union[str, os.PathLike], also: Sequence[str] = ()) -> Path:
    """Return the file of a preset's name, or of a path.

    Args:
        folder: as in :func:`presets`.
        name_or_path: the name, or the path.
        also: further names that the caller knows, to be listed too.

    Raises:
        HierAllreduceError: it is neither; the message lists the presets.
    """
    preset = _CONFIGS / folder / f"{name_or_path}.yaml"
    for path in (Path(name_or_path), preset):
        # A shell's pipe, <(nvidia-smi topo -m), is no regular file, but can be read. A path that is
        # too long, or contains a null character, is an error of the system.
        with contextlib.suppress(OSError, ValueError):
            if path.exists() and not path.is_dir():
                return path
    raise HierAllreduceError(
        f"{shown(os.fspath(name_or_path))} is neither a file nor one of the {folder}; there are"
        f" {', '.join([*also, *presets(folder)])}"
    )


def read_yaml(path: Path) -> Dict[str, Any]:
    """Return the ``key: value`` lines of a YAML file. No tag runs any code.

    Raises:
        HierAllreduceError: the file cannot be read, is not valid YAML, or has anything but such
            lines. The message is one line.
    """
    try:
        with path.open("rb") as stream:
            content = yaml.safe_load(stream)
    except OSError as cause:
        raise HierAllreduceError(f"{path}: {cause.strerror}") from None
    # PyYAML raises errors of many classes, such as ValueError for a date that does not exist.
    except Exception as cause:
        words = " ".join(str(cause).split())
        raise HierAllreduceError(f"{path}: not readable as YAML: {words}") from None
    if not isinstance(content, dict):
        found = type(content).__name__
        raise HierAllreduceError(f"{path}: expected `key: value` lines, not {found}")
    return content


def check_keys(keys: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Check that all keys are known; an error names the file, the key and the known ones."""
    known = list(known)
    for key in keys:
        if key not in known:
            raise HierAllreduceError(
                f"{where}: {shown(key)} is unknown; there are {', '.join(known)}"
            )


# ---- values --------------------------------------------------------------------------------------


def refusal(written: Any, where: str, expected: str) -> HierAllreduceError:
    """Return the error about a value that an option does not take."""
    return HierAllreduceError(f"{where}={shown(written)}: expected {expected}")


def whole_number(written: Any, where: str, least: int = 0) -> int:
    """Return a whole number. NumPy's integers are numbers, bools are not."""
    if not is_whole_number(written) or written < least:
        raise refusal(written, where, f"a whole number of {least} or more")
    return operator.index(written)


def one_of(written: Any, where: str, known: Iterable[Optional[str]]) -> Any:
    """Return one of some words, of which None may be one."""
    # An array would be compared with each word element by element.
    if not isinstance(written, (str, type(None))) or written not in known:
        raise refusal(written, where, f"one of {', '.join(map(str, known))}")
    return written


def function(written: Any, where: str, signature: str) -> Any:
    """Return a function, or None for none; an error shows its ``signature``."""
    if written is not None and not callable(written):
        raise refusal(written, where, f"a function {signature}")
    return written


def switch(written: Any, where: str) -> bool:
    """Return True or False; 1 and 0 mean them, too."""
    is_bool = isinstance(written, (bool, np.bool_))
    if not is_bool and not (is_whole_number(written) and written < 2):
        raise refusal(written, where, "True or False")
    return bool(written)


def is_step_to_compare(step: int, every: Optional[int] = None) -> bool:
    """Return whether towers, or hosts, are compared after so many steps.

    By default that is after 1, 2, 4, 8, … and each thousandth: most faults show at once.
    """
    if every is None:
        return step & (step - 1) == 0 or step % 1000 == 0
    return bool(every) and step % every == 0


def is_whole_number(written: Any) -> bool:
    """Return whether something is a whole number of 0 or more, NumPy's included; a bool is not."""
    # Python counts bools as integers, but a user who writes True for a number is mistaken.
    if isinstance(written, (bool, np.bool_)):
        return False
    try:
        return operator.index(written) >= 0
    except (TypeError, AttributeError):  # the second one is an eager tensor's
        return False
