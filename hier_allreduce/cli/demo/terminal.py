"""Keep the terminal for what people should read, and send everything else to a file."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, Iterator


def pause(terminal: IO[str]) -> float:
    """Return the seconds between two updates of a progress bar: a log needs few."""
    return 0.3 if terminal.isatty() else 10.0


@contextlib.contextmanager
def only_for_us(log: IO[str]) -> Iterator[IO[str]]:
    """Send to ``log`` what this process prints, including TensorFlow's C++; yield the original standard output.

    This redirects the file descriptors, because C++ does not use ``sys.stderr``, and also Python's streams, because a
    stream that was opened on a Windows console can write to nothing else. Loggers keep a reference to the redirected
    streams, so ``log`` must stay open afterwards.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    originals = [os.dup(number) for number in (1, 2)]
    terminal = os.fdopen(os.dup(originals[0]), "w", encoding=sys.stdout.encoding, errors="replace")
    with terminal, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
            yield terminal
        finally:
            log.flush()
            for number, original in zip((1, 2), originals):
                os.dup2(original, number)
                os.close(original)
