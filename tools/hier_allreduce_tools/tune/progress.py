"""How far ``tune`` is: a bar that moves in a terminal, and a line now and then in a pipe."""

from __future__ import annotations

import sys
import time
from typing import Any

BETWEEN_LINES = 30.0  # seconds, in a pipe
BETWEEN_LOOKS = 0.5  # seconds, in a terminal
_FORM = "{percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s{postfix}"


class Progress:
    """The seconds of all runs, as they pass."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._begun = time.monotonic()
        self._told = self._begun
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None
        if is_terminal:
            from tqdm import tqdm  # an extra: `tune` has looked for it

            self._bar = tqdm(total=round(seconds), bar_format=_FORM, file=sys.stderr)

    def show(self, message: str) -> None:
        """Move the bar; in a pipe, print a line every 30 seconds."""
        now = time.monotonic()
        elapsed = now - self._begun
        if now - self._told < (BETWEEN_LINES if self._bar is None else BETWEEN_LOOKS):
            return
        self._told = now
        if self._bar is None:
            self.say(f"{elapsed:.0f} of {self._seconds:.0f} s, {message}")
            return
        self._bar.n = min(round(elapsed), self._bar.total)
        self._bar.set_postfix_str(message)

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            print(message, file=sys.stderr, flush=True)
        else:
            self._bar.write(message, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
