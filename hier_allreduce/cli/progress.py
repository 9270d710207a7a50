"""The progress bar of commands that measure, on standard error; none where that is not a terminal."""

from __future__ import annotations

import sys
from typing import Any, Callable, Optional


def progress(parts: Optional[int]) -> Any:
    """Return a bar of ``parts`` stages, or one without an end if their number is not known."""
    from tqdm import tqdm

    end = "{bar:40} {n_fmt}/{total_fmt} {elapsed}" if parts else "{elapsed}"
    return tqdm(total=parts, file=sys.stderr, leave=False, disable=None, bar_format="{desc:24}" + end)


def ticking(bar: Any) -> Callable[[str], None]:
    """Return a function that shows a stage and counts it."""

    def tick(stage: str) -> None:
        bar.set_description_str(stage, refresh=not bar.total)
        bar.update()

    return tick
