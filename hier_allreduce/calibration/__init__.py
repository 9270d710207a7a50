"""Measurements of this machine: how fast its links are, and which copies wait for each other.

::

    DeviceTimer: copies and sums in one session           device_timer (timer: what the analysis knows of it)
        │ seconds
        ▼
    one copy, several sizes ─► start, bytes/s             speeds, samples
    several copies at once ──► what they share            sharing
        │
        ▼
    Measurement ─► Topology ─► YAML                       measurement, machine, report, calibrating

Only ``calibrating`` and ``device_timer`` need TensorFlow, so this package imports lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .calibrating import NOISE as NOISE
    from .calibrating import Calibration as Calibration
    from .calibrating import calibrate as calibrate
    from .calibrating import is_whole as is_whole

__all__ = ["NOISE", "Calibration", "calibrate", "is_whole"]
__getattr__ = lazy(__name__, {"calibrating": ["NOISE", "Calibration", "calibrate", "is_whole"]})
