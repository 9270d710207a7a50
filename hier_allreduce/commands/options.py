"""One form for every option of every command.

Times and sizes have a unit::

    hier-allreduce tune --patience 60s -o folder/best.yaml --json -- python train.py

A reader raises ``argparse.ArgumentTypeError`` with the right form; :class:`Parser` puts the
option's name before it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, List, Mapping, NoReturn, Sequence, Tuple

from .. import configs
from ..errors import HierAllreduceError

_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DECIMAL_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_BINARY_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZES = {**_DECIMAL_SIZES, **_BINARY_SIZES}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a :class:`.HierAllreduceError` of one line."""

    takes_program = False  # whether a program and its arguments stand after --

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
        """Return the values of all arguments; a command that ``takes_program`` has it after ``--``.

        Raises:
            HierAllreduceError: an argument is unknown; the message names the nearest option.
        """
        given = sys.argv[1:] if args is None else list(args)
        end = given.index("--") if self.takes_program and "--" in given else len(given)
        self._check_short_options(given[:end])
        found, unknown = super().parse_known_args(given[:end], namespace)
        argument = next((argument for argument in unknown if argument != "--"), "")
        if argument.startswith("-"):
            self._fail_for(argument)
        if argument and self.takes_program:
            raise HierAllreduceError(_misplaced(self.prog, unknown, has_program=end < len(given)))
        if argument:
            raise HierAllreduceError(
                f"{argument!r} is one argument too many; `{self.prog} --help` shows the form"
            )
        if self.takes_program:
            found.program = given[end + 1 :]
        return found, []

    def _check_short_options(self, given: Sequence[str]) -> None:
        """Refuse ``-output``, which argparse would read as ``-o utput``."""
        for argument in given:
            if re.match(r"-[A-Za-z][A-Za-z]", argument) and self.takes_program:
                self._fail_for(argument)

    def _fail_for(self, argument: str) -> NoReturn:
        """Raise the error of an unknown option."""
        short = self._option_string_actions.get(argument[:2])
        if short is not None and short.metavar:
            raise HierAllreduceError(
                f"{argument}: no such option; write {argument[:2]} {short.metavar}"
            )
        names = [name for name in self._option_string_actions if name != "-h"]
        word = "--" + argument.lstrip("-").partition("=")[0]
        raise HierAllreduceError(f"{argument}: no such option{configs.nearest(word, names)}")


def _misplaced(command: str, unknown: Sequence[str], has_program: bool) -> str:
    """Return the error of arguments before ``--`` that belong to no option."""
    if has_program:
        return (
            f"{unknown[0]!r} belongs to no option: names have commas between them (--only A,B), and"
            " -- stands before the program"
        )
    python = "python " if unknown[0].endswith(".py") else ""
    return f"write -- before the program: {command} -- {python}{' '.join(unknown)}"


def time(text: str, unit: str) -> float:
    """Read a time such as ``60ms``, up to a day, as seconds; a number alone has the ``unit``."""
    return _number(text, _TIMES, 86400, "a time above 0, up to a day", f"10{unit}", unit)


def size(text: str) -> int:
    """Read bytes such as ``16MB`` (powers of 1000) or ``4MiB`` (of 1024), up to 1000 GB."""
    return round(_number(text, _SIZES, 1e12, "bytes above 0, up to 1000GB", "16MB"))


def _number(
    text: str, units: Mapping[str, float], most: float, kind: str, example: str, usual: str = ""
) -> float:
    """Return a number times its unit, or the ``usual`` one, above 0."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*$", text)
    number, unit = match.groups() if match else ("0", "")
    value = float(number) * units.get(unit or usual, 0)
    if not 0 < value <= most:
        names = ", ".join(units)
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected {kind}, in {names}, such as {example}"
        )
    return value


def output(text: str) -> Path:
    """Read the path of a file that can be written; nothing is left of the attempt."""
    path = Path(text)
    missing: List[Path] = []
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is no name of a file, such as folder/file")
        if os.path.lexists(text) and not path.is_file():  # a pipe, a device, a link to nothing
            raise argparse.ArgumentTypeError(f"{text!r} exists, and is no file")
        missing = [folder for folder in path.absolute().parents if not folder.exists()]
        make_folder(path)
        with tempfile.TemporaryFile(dir=str(path.parent)):
            return path
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error}") from None
    finally:
        for folder in missing:  # the innermost first
            with contextlib.suppress(OSError):
                folder.rmdir()


def make_folder(path: Path) -> None:
    """Make the folder of a file that is to be written now."""
    path.parent.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Put an option's name before the message of an error of this package."""
    try:
        yield
    except HierAllreduceError as error:
        raise HierAllreduceError(f"{option}: {error}") from None
