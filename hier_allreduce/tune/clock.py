"""Seconds of a step, from the times that a program's clock op has written: means over windows of steps.

GPUs work asynchronously, so that single differences tell little: a window of 20 steps does.
"""

from __future__ import annotations

from pathlib import Path
from typing import List

LEFT_OUT = 10  # steps: compilation, caches, the first batches
WINDOW = 20  # steps
LEAST, MOST = LEFT_OUT + WINDOW + 1, LEFT_OUT + 5 * WINDOW + 1  # steps of a run


def read_times(path: Path) -> List[float]:
    """Return the times in a clock file, in seconds; a line that is still being written is left out."""
    if not path.exists():
        return []
    return [float(line) for line in path.read_text(encoding="ascii").split("\n")[:-1] if line]


def windows(times: List[float]) -> List[float]:
    """Return the mean seconds of a step in every full window, without the first steps."""
    starts = range(LEFT_OUT, len(times) - WINDOW, WINDOW)
    return [(times[start + WINDOW] - times[start]) / WINDOW for start in starts]
