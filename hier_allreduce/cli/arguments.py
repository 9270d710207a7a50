"""What several commands read from their command lines, and say before they begin."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import Iterator

from ..errors import HierAllreduceError


def count(text: str) -> int:
    """A whole number of 1 or more: of devices, hosts, rounds."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return number


def gib(text: str) -> int:
    """GiB, 0 or more, as bytes."""
    try:
        size = float(text) * 2**30
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of GiB, 0 or more")
    return int(size)


def output(text: str) -> str:
    """A file that can be written: it or its folder is there, and lets us."""
    path = Path(text)
    if path.is_dir() or not text:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file, not a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
    if not os.access(str(path if path.exists() else path.parent), os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission")
    return text


def refuse_unused(args: argparse.Namespace, given: str, *others: str) -> None:
    """Refuse arguments that do nothing beside another one.

    Args:
        args: the command line.
        given: ``--table``, perhaps.
        others: what it makes no use of: ``--json``, or a positional one, ``TOPOLOGY``.

    Raises:
        HierAllreduceError: ``given`` is there, and some of the others; the message has all of them.
    """
    values = {name: getattr(args, name.lstrip("-").lower()) for name in (given, *others)}
    is_there = {name: value is not False and value not in (None, []) for name, value in values.items()}
    unused = [name for name in others if is_there[name]]
    if is_there[given] and unused:
        raise HierAllreduceError(f"{given} makes no use of {', '.join(unused)}; give one or the other")


@contextlib.contextmanager
def installed(who: str, extras: str) -> Iterator[None]:
    """Say in words what ``who`` needs and cannot import, and which of this package's extras bring it.

    Raises:
        HierAllreduceError: a module that is imported inside is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # in double quotes, which every shell understands, Windows' too
        what = f'{who} needs {error.name}: python -m pip install "hier_allreduce[{extras}]"'
        raise HierAllreduceError(what) from None
