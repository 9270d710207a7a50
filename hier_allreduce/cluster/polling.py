"""Polling until a deadline."""

from __future__ import annotations

import time
from typing import Iterator

POLL = 0.1  # seconds between two attempts


def attempts(seconds: float, every: float = POLL) -> Iterator[None]:
    """Yield at least once, then every ``every`` seconds until ``seconds`` have passed.

    ::

        for _ in attempts(30.0):
            if server_answers():
                return
        raise ClusterError("the server does not answer")
    """
    end = time.monotonic() + seconds
    yield
    while time.monotonic() < end:
        time.sleep(every)
        yield
