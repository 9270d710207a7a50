"""One form for every option of every command.

Times and sizes have a unit, and the folders of a file to write are made::

    hier-allreduce tune --patience 60s -o folder/best.yaml --json -- python train.py

A reader raises ``argparse.ArgumentTypeError`` with the right form; :class:`Parser` puts the
option's name before it.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NoReturn, Sequence, Tuple

from .. import configs
from ..errors import HierAllreduceError

_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SIZES = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a :class:`.HierAllreduceError` of one line."""

    def __init__(self, **keywords: Any):
        keep_lines = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=keep_lines, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise an error that begins with the option and ends with the right form.

        ``message`` is that of argparse. A reader's own message quotes the value, and has the form.
        """
        text = re.sub(r"^argument (?:-\w/)?", "", message)
        text = text.replace("ignored explicit argument", "takes no value, not")
        option, _, fault = text.partition(": ")
        if not fault.startswith("'"):
            text += self._form_of(option)
        raise HierAllreduceError(text)

    def _form_of(self, option: str) -> str:
        """Return an option's value and help, or where to find the form."""
        for action in self._actions:
            if option in action.option_strings and action.metavar:
                return f" {action.metavar}, {action.help}"
        return f"; `{self.prog} --help` shows the form"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Tuple[Any, List[str]]:
        """Return the values of all arguments.

        Raises:
            HierAllreduceError: an argument is unknown; the message names the nearest option.
        """
        found, unknown = super().parse_known_args(args, namespace)
        unknown = [argument for argument in unknown if argument != "--"]
        if unknown:
            self._refuse(unknown[0], getattr(found, "program", []), args)
        return found, []

    def _refuse(self, argument: str, program: Sequence[str], args: Sequence[str]) -> NoReturn:
        """Raise an error for an unknown argument, which may be one of the user's program."""
        if program and "--" not in args:
            raise HierAllreduceError(f"write -- before the program: {self.prog} -- {program[0]} …")
        if argument.startswith("-"):
            options = [name for name in self._option_string_actions if name != "-h"]
            hint = configs.nearest(argument.partition("=")[0], options)
            raise HierAllreduceError(f"{argument}: no such option{hint}")
        raise HierAllreduceError(
            f"{argument!r} is one argument too many; `{self.prog} --help` shows the form"
        )


def time(text: str) -> float:
    """Read a time such as ``60ms``, up to a day, as seconds."""
    return _number(text, _TIMES, 86400, "a time above 0, up to a day", "60ms", "{0}ms or {0}s")


def size(text: str) -> int:
    """Read bytes such as ``16MB`` (powers of 1000) or ``4MiB`` (of 1024), up to 1000 GB."""
    return round(
        _number(text, _SIZES, 1e12, "bytes above 0, up to 1000GB", "16MB", "{0}MB or {0}B")
    )


def _number(
    text: str, units: Mapping[str, float], most: float, kind: str, example: str, forms: str
) -> float:
    """Return a number times its unit, above 0.

    An error for a number without a unit shows its ``forms``.
    """
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*$", text)
    number, unit = match.groups() if match else ("0", "?")
    if not unit:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit; write {forms.format(number)}")
    value = float(number) * units.get(unit, 0)
    if not 0 < value <= most:
        names = ", ".join(units)
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected {kind}, in {names}, such as {example}"
        )
    return value


def output(text: str) -> Path:
    """Read the path of a file to write; its folders are made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not text or path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is no name of a file, such as folder/file")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: its folder cannot be made: {error}") from None
    return path


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Put an option's name before the message of an error of this package."""
    try:
        yield
    except HierAllreduceError as error:
        raise HierAllreduceError(f"{option}: {error}") from None
