"""What several commands share: options, readers of their values, the import of TensorFlow, the progress bar."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

from .._lazy import advice
from ..errors import HierAllreduceError
from ..presets import why_unwritable

MODEL = "resnet50"
MOST = 1_000_000
MOST_DEVICES = 256  # on one host: TensorFlow starts threads for each
MOST_LANES = 16

# ---- options -----------------------------------------------------------------------------------------


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Add ``--devices``, for ``bench.devices_here(args.devices)``."""
    default = "all GPUs if two or more, else 8 CPU devices"
    parser.add_argument("--devices", metavar="K", type=device_count, help=f"how many (default: {default})")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, for ``bench.load_model(args.model or MODEL)``."""
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="a table of gradient shapes: a shipped one, or your own, which save_shapes of hier_allreduce.tuning writes"
        f" (default: {MODEL})",
    )


# ---- readers of values -------------------------------------------------------------------------------


def count(text: str, least: int = 1, most: int = MOST) -> int:
    """Read a whole number from ``least`` to ``most``: of hosts, rounds."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} to {most}")
    return number


def device_count(text: str) -> int:
    """Read a number of devices on one host, or of hosts that are processes of it."""
    return count(text, most=MOST_DEVICES)


def lane_count(text: str) -> int:
    """Read the number of lanes of each tower, 0 or more."""
    return count(text, 0, MOST_LANES)


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


# ---- while a command runs ----------------------------------------------------------------------------


def import_tensorflow(feature: str) -> None:
    """Import TensorFlow and let it find the GPUs, without the lines that both print; later it logs its warnings.

    Raises:
        HierAllreduceError: it is missing.
    """
    with installed(feature, "tf,bench"), quiet_start():
        importlib.import_module("tensorflow")
        importlib.import_module("hier_allreduce.graph").gpu_count()


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Hide what TensorFlow prints when it starts, some of which no log level stops; show it if it cannot start.

    ``TF_CPP_MIN_LOG_LEVEL=0`` or ``1`` shows it.
    """
    shows = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2") in ("0", "1")
    if shows or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except HierAllreduceError:  # one line, which nothing should bury
            raise
        except BaseException:
            kept.seek(0)
            os.write(shown, kept.read())
            raise
        finally:
            os.dup2(shown, 2)
            os.close(shown)


@contextlib.contextmanager
def installed(feature: str, extras: str) -> Iterator[None]:
    """Explain which module ``feature`` needs and cannot import, and which extras of this package install it.

    Raises:
        HierAllreduceError: a module that is imported inside the ``with`` block is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise HierAllreduceError(advice(feature, str(error.name), extras)) from None


def progress(parts: Optional[int]) -> Any:
    """Return a bar of ``parts`` stages, or one without an end if their number is not known, on standard error.

    There is none where that is not a terminal.
    """
    from tqdm import tqdm

    end = "{bar:40} {n_fmt}/{total_fmt} {elapsed}" if parts else "{elapsed}"
    return tqdm(total=parts, file=sys.stderr, leave=False, disable=None, bar_format="{desc:24}" + end)


def say(bar: Any, text: str) -> None:
    """Print a line on standard error, above the bar."""
    bar.write(text, file=sys.stderr)


def ticking(bar: Any) -> Callable[[str], None]:
    """Return a function that shows a stage and counts it."""

    def tick(stage: str) -> None:
        bar.set_description_str(stage, refresh=not bar.total)
        bar.update()

    return tick
