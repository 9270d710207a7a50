"""Logical devices: a GPU cut into several, before TensorFlow starts.

::

    one GPU ── gpu_lanes ──► /gpu:0, its tower, and /gpu:1 …, the tower's lanes, which relay copies
    one GPU ── split_gpu ──► /gpu:0 … /gpu:7, a tower on each: to test and measure where there is only one
"""

from __future__ import annotations

from .lanes import MOST_GPUS, LogicalDevices, fitted, gpu_lanes, lane_numbers
from .splitting import split_gpu, with_logical_gpus

__all__ = [
    "MOST_GPUS",
    "LogicalDevices",
    "fitted",
    "gpu_lanes",
    "lane_numbers",
    "split_gpu",
    "with_logical_gpus",
]
