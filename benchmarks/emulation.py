"""The emulated GPUs of ``tests/emulated_gpu`` in timed mode, as environment variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Dict, Optional

from machines import Machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from emulated_gpu import plugin  # the tests are no installed package

MEMORY_MB = 16000  # of a GPU; address space only, since nothing is computed
# Measured on a host of an H100 with TensorFlow 2.21. The rest is in the machines' files.
EVENT_US = 3.7  # kernels are so much farther apart where a copy has recorded an event between them
POLL_US = 60.0  # TensorFlow looks for finished events after 10 µs of sleep and 50 of Linux' slack


def environment(machine: Machine, scale: float, trace: Optional[str] = None) -> Dict[str, str]:
    """Return the environment of a process that sees the GPUs of a machine.

    Args:
        machine: its number of GPUs, and its links.
        scale: by how much all times are stretched.
        trace: a file that gets each kernel and copy: device, what, queued, begin, end.
    """
    options: Dict[str, Any] = {"event_us": EVENT_US, **machine.options}
    emulated = plugin.environment(
        count=machine.gpus,
        memory_mb=MEMORY_MB,
        machine=str(machine.path),
        timing=scale,
        trace=trace,
        **options,
    )
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **emulated}
