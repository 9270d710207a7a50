"""Files that a calibration writes."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CalibrationError


def write_whole(path: Path, text: str) -> str:
    """Write a file at once, so that another program never reads half of it; return its path.

    Raises:
        CalibrationError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as cause:
        raise CalibrationError(f"{path}: cannot be written: {cause.strerror}") from None
    return str(path)
