"""Pictures in files, drawn by matplotlib without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .errors import HierAllreduceError


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``, set up to draw into files.

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
    """Check before the work that its picture can be drawn.

    Raises:
        HierAllreduceError: matplotlib is missing, or does not write files with this ending.
    """
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    # without pgf, which needs LaTeX, and without raw and rgba, which are bare bytes
    kinds = sorted(set(FigureCanvasBase.get_supported_filetypes()) - {"pgf", "raw", "rgba"})
    ending = Path(path).suffix.lstrip(".").lower()
    if ending and ending not in kinds:
        raise HierAllreduceError(f"{path!r}: no kind of picture ends in .{ending}; there are {', '.join(kinds)}")


def save_picture(figure: Any, path: str) -> None:
    """Save a figure in a file and close it. The ending selects PNG, PDF, SVG, …; without one, .png is added.

    Raises:
        HierAllreduceError: the file cannot be written.
    """
    file = Path(path if Path(path).suffix else f"{path}.png")
    drawn = io.BytesIO()  # so that an error while drawing leaves no file
    try:
        figure.savefig(drawn, format=file.suffix[1:].lower(), dpi=130, facecolor="white")
        file.write_bytes(drawn.getvalue())
    except (OSError, ValueError) as cause:
        raise HierAllreduceError(f"the picture cannot be written to {path!r}: {cause}") from None
    finally:
        pyplot().close(figure)
