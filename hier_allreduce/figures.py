"""Pictures in files, drawn by matplotlib without a display."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .errors import HierAllreduceError

# Okabe and Ito (2008), "Color Universal Design": people with any kind of colour blindness tell these apart
BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, YELLOW, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#000000"
COLORS = (BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, BLACK)
INK, PALE = "#22262b", "#d9dde2"  # text and outlines; what is in the background


def ink_on(color: str) -> str:
    """Return the colour of text on a background ``#rrggbb``: white on dark ones."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


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
        figure.savefig(
            drawn, format=file.suffix[1:].lower(), dpi=130, facecolor="white", bbox_inches="tight", pad_inches=0.12
        )
        file.write_bytes(drawn.getvalue())
    except (OSError, ValueError) as cause:
        raise HierAllreduceError(f"the picture cannot be written to {path!r}: {cause}") from None
    finally:
        pyplot().close(figure)
