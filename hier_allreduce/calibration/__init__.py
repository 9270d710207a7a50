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

    between hosts: sums and copies ─► NetworkMeasurement ─► Network ─► YAML     network, network_calibration

Only ``calibrating`` and ``device_timer`` need TensorFlow, so this package imports lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .calibrating import NOISE as NOISE
    from .calibrating import Calibration as Calibration
    from .calibrating import calibrate as calibrate
    from .calibrating import versions as versions
    from .network import NETWORK_SIZES as NETWORK_SIZES
    from .network import NetworkRuns as NetworkRuns
    from .network_calibration import NetworkCalibration as NetworkCalibration
    from .network_calibration import calibrate_network as calibrate_network

__all__ = [
    "NETWORK_SIZES",
    "NOISE",
    "Calibration",
    "NetworkCalibration",
    "NetworkRuns",
    "calibrate",
    "calibrate_network",
    "versions",
]
__getattr__ = lazy(
    __name__,
    {
        "calibrating": ["NOISE", "Calibration", "calibrate", "versions"],
        "network": ["NETWORK_SIZES", "NetworkRuns"],
        "network_calibration": ["NetworkCalibration", "calibrate_network"],
    },
)
