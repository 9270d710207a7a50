"""Values and checks that several commands share: counts, sizes, output files, options without effect."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Iterator

from ..errors import HierAllreduceError
from ..presets import why_unwritable

MOST = 1_000_000
MOST_DEVICES = 256  # on one host: TensorFlow starts threads for each
MOST_LANES = 16


def count(text: str, most: int = MOST) -> int:
    """Read a whole number from 1 to ``most``: of hosts, rounds."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 to {most}")
    return number


def device_count(text: str) -> int:
    """Read a number of devices on one host, or of hosts that are processes of it."""
    return count(text, MOST_DEVICES)


def lane_count(text: str) -> int:
    """Read the number of lanes of each tower, 0 or more."""
    if not text.strip().isdecimal() or len(text) > 9 or int(text) > MOST_LANES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to {MOST_LANES} lanes, for instance 4")
    return int(text)


def device_names(text: str) -> str:
    """Read a number of devices, or a list of them separated by commas, which is checked with TensorFlow."""
    if text.isdigit():
        device_count(text)
    return text


def milliseconds(text: str) -> float:
    """Read milliseconds, 0 or more."""
    return number(text, 0.0, "a number of milliseconds, 0 or more")


def minutes(text: str) -> float:
    """Read minutes, 0.001 or more."""
    return number(text, 1e-3, "a number of minutes, 0.001 or more")


def number(text: str, least: float, expected: str) -> float:
    """Read a finite number, ``least`` or more; ``expected`` says in an error what it should be."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return value


def output(text: str) -> str:
    """Read the path of a file that can be written."""
    reason = why_unwritable(text)
    if reason:
        raise argparse.ArgumentTypeError(reason)
    return text


def folder(text: str) -> str:
    """Read the path of a folder in which files can be written."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such folder; make it first")
    if not os.access(text, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission")
    return text


def refuse_unused(args: argparse.Namespace, option: str, *others: str) -> None:
    """Refuse arguments that have no effect together with ``option``.

    Args:
        args: the command line.
        option: for example ``--list``.
        others: arguments that it ignores: ``--json``, or a positional one such as ``TOPOLOGY``.

    Raises:
        HierAllreduceError: ``option`` was passed, and so were some of the others; the message names all of them.
    """
    values = {name: getattr(args, name.lstrip("-").replace("-", "_").lower()) for name in (option, *others)}
    passed = {name: value is not False and value not in (None, []) for name, value in values.items()}
    unused = [name for name in others if passed[name]]
    if passed[option] and unused:
        raise HierAllreduceError(f"{option} makes no use of {', '.join(unused)}; give one or the other")


@contextlib.contextmanager
def installed(feature: str, extras: str) -> Iterator[None]:
    """Explain which module ``feature`` needs and cannot import, and which extras of this package install it.

    Raises:
        HierAllreduceError: a module that is imported inside the ``with`` block is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # double quotes: every shell understands them, also on Windows
        message = f'{feature} needs {error.name}: python -m pip install "hier_allreduce[{extras}]"'
        raise HierAllreduceError(message) from None
