"""Keeping the terminal for what people should read, and everything else for a file."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, Iterator


def pause(terminal: IO[str]) -> float:
    """Seconds between two states of a progress bar: a log needs few."""
    return 0.3 if terminal.isatty() else 10.0


@contextlib.contextmanager
def only_for_us(log: IO[str]) -> Iterator[IO[str]]:
    """Send what this process prints to ``log``, TensorFlow's C++ included; yields standard output as it was.

    Done on file descriptors, because C++ knows nothing of ``sys.stderr``, and on Python's streams, because one that
    began as a Windows console can write to nothing else. Loggers keep those: ``log`` stays open afterwards.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    terminal = os.fdopen(os.dup(kept[0]), "w", encoding=sys.stdout.encoding, errors="replace")
    with terminal, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            yield terminal
        finally:
            log.flush()
            for number, original in zip((1, 2), kept):
                os.dup2(original, number)
                os.close(original)
