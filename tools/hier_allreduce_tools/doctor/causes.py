"""Why a process with TensorFlow ended."""

from __future__ import annotations

import re
import signal

# The time and place before a message are left out, so that equal causes have equal words.
_ERROR = re.compile(r"^(?:.*\.(?:cc|h):\d+\] )?(.*(?:Error|ERROR).*)", re.MULTILINE)
_FATAL = re.compile(r"^(?:\S+ \S+: F|F\d+) .*?\] (.*)", re.MULTILINE)


def cause_of_end(status: int, errors: str) -> str:
    """Return the signal that ended a process, and what it said; else its exit status."""
    # The last line with an error is the cause: those before it are handled, or its context. A line
    # with which TensorFlow ends itself says less, and any other line may be about something else.
    causes = _ERROR.findall(errors) or _FATAL.findall(errors)
    parts = [signal.Signals(-status).name] if status < 0 else []
    parts += [cause.strip()[:300] for cause in causes[-1:]]
    return ": ".join(parts) or f"status {status}"
