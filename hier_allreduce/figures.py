"""Pictures in files: what every picture needs of matplotlib, without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .errors import HierAllreduceError


def pyplot() -> Any:
    """``matplotlib.pyplot``, drawing into files.

    Raises:
        HierAllreduceError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise HierAllreduceError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_picture(path: str) -> None:
    """Say before the work what would keep its picture from being drawn.

    Raises:
        HierAllreduceError: matplotlib is missing, or the file's ending names no kind of picture.
    """
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(set(FigureCanvasBase.get_supported_filetypes()) - {"pgf", "raw", "rgba"})  # LaTeX; bare bytes
    ending = Path(path).suffix.lstrip(".").lower()
    if ending and ending not in kinds:
        raise HierAllreduceError(f"{path!r}: no kind of picture ends in .{ending}; there are {', '.join(kinds)}")


def save_picture(figure: Any, path: str) -> None:
    """A figure in a file (PNG, PDF, SVG by its ending; PNG, added to the name, without one); it is closed.

    Raises:
        HierAllreduceError: the file cannot be written.
    """
    file = Path(path if Path(path).suffix else f"{path}.png")
    drawn = io.BytesIO()  # what cannot be drawn to its end leaves no file behind
    try:
        figure.savefig(drawn, format=file.suffix[1:].lower(), dpi=130, facecolor="white")
        file.write_bytes(drawn.getvalue())
    except (OSError, ValueError) as cause:
        raise HierAllreduceError(f"the picture cannot be written to {path!r}: {cause}") from None
    finally:
        pyplot().close(figure)
