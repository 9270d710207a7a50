"""A machine's copies between devices, measured with TensorFlow: bits, bytes/s, starts, groups at once."""

from __future__ import annotations

from .links import Measured, measure, with_figures
from .report import as_json, faults, report

__all__ = ["Measured", "as_json", "faults", "measure", "report", "with_figures"]
