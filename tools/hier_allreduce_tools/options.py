"""One form for every option of every command.

Times have a unit::

    hier-allreduce tune --patience 60s -o folder/best.yaml --json -- python train.py

A reader raises ``argparse.ArgumentTypeError`` with the right form; :class:`Parser` puts the
option's name before it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any, List, NoReturn, Tuple

from hier_allreduce.errors import HierAllreduceError

_SECONDS_BY_UNIT = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DAY = 86400.0


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a :class:`.HierAllreduceError` of one line."""

    takes_program = False  # whether a program and its arguments stand after --

    def __init__(self, **keywords: Any):
        # An abbreviation would change its meaning when a command gets another option.
        keep_lines = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=keep_lines, **keywords)

    def error(self, message: str) -> NoReturn:
        """Raise an error that begins with the option and ends with the right form.

        ``message`` is that of argparse. A reader's own message quotes the value, and has the form.
        """
        message = re.sub(r"^argument (?:-\w/)?", "", message)
        message = message.replace("ignored explicit argument", "takes no value, not")
        option, _, fault = message.partition(": ")
        if fault.startswith("'"):
            raise HierAllreduceError(message)
        for action in self._actions:
            if option in action.option_strings and action.metavar:
                raise HierAllreduceError(f"{message} {action.metavar}, {action.help}")
        raise HierAllreduceError(f"{message}; `{self.prog} --help` shows the form")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Tuple[Any, List[str]]:
        """Return the values of all arguments; a command that ``takes_program`` has it after ``--``.

        Raises:
            HierAllreduceError: an argument is unknown; the message lists the options.
        """
        given = list(args)
        # The program's own arguments look like options, so argparse must not see them.
        end = given.index("--") if self.takes_program and "--" in given else len(given)
        for argument in given[:end]:
            # argparse would read ``-output`` as ``-o utput``, and the run would write that file.
            if self.takes_program and re.match(r"-[A-Za-z][A-Za-z]", argument):
                self._fail_for(argument)
        read, unknown = super().parse_known_args(given[:end], namespace)

        # What is left belongs to no option; the message tells what its writer has meant.
        argument = next((argument for argument in unknown if argument != "--"), "")
        if argument.startswith("-"):
            self._fail_for(argument)
        if argument and not self.takes_program:
            raise HierAllreduceError(
                f"{argument!r} is one argument too many; `{self.prog} --help` shows the form"
            )
        if argument and end < len(given):
            raise HierAllreduceError(
                f"{unknown[0]!r} belongs to no option: names have commas between them (--only"
                " A,B), and -- stands before the program"
            )
        if argument:
            program = " ".join(unknown)
            python = "python " if unknown[0].endswith(".py") else ""
            raise HierAllreduceError(
                f"write -- before the program: {self.prog} -- {python}{program}"
            )
        if self.takes_program:
            read.program = given[end + 1 :]
        return read, []

    def _fail_for(self, argument: str) -> NoReturn:
        """Raise the error of an unknown option."""
        short = self._option_string_actions.get(argument[:2])
        if short is not None and short.metavar:
            raise HierAllreduceError(
                f"{argument}: no such option; write {argument[:2]} {short.metavar}"
            )
        options = [option for option in self._option_string_actions if option != "-h"]
        raise HierAllreduceError(f"{argument}: no such option; there are {', '.join(options)}")


def time(argument: str, unit: str) -> float:
    """Read a time such as ``60ms``, up to a day, as seconds; a number alone has the ``unit``."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*$", argument)
    # Without a match, or with an unknown unit, the time is 0, which is refused like a 0.
    digits, given = match.groups() if match else ("0", "")
    seconds = float(digits) * _SECONDS_BY_UNIT.get(given or unit, 0)
    if not 0 < seconds <= _DAY:
        raise argparse.ArgumentTypeError(
            f"{argument!r}: expected a time above 0, up to a day, in"
            f" {', '.join(_SECONDS_BY_UNIT)}, such as 10{unit}"
        )
    return seconds


def output(argument: str) -> Path:
    """Read the path of a file that can be written; nothing is left of the attempt."""
    path = Path(argument)
    missing: List[Path] = []
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(
                f"{argument!r} is no name of a file, such as folder/file"
            )
        # A pipe, a device or a link to nothing would swallow the file.
        if os.path.lexists(argument) and not path.is_file():
            raise argparse.ArgumentTypeError(f"{argument!r} exists, and is no file")
        # Only a file that was made proves that one can be: rights, quotas and mounts all count.
        missing = [folder for folder in path.absolute().parents if not folder.exists()]
        make_folder(path)
        with tempfile.TemporaryFile(dir=str(path.parent)):
            return path
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{argument!r} cannot be written: {error}") from None
    finally:
        # The innermost folder is the first one, because only an empty one can be removed.
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def make_folder(path: Path) -> None:
    """Make the folder of a file that is to be written now."""
    path.parent.mkdir(parents=True, exist_ok=True)
