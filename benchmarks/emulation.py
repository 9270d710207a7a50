"""The emulated GPUs of ``tests/emulated_gpu`` in timed mode, as environment variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Dict, Optional

from machines import Machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from emulated_gpu import plugin  # the tests are no installed package

MEMORY_MB = 16000  # of a GPU; address space only, since nothing is computed


def environment(machine: Machine, scale: float, trace: Optional[str] = None) -> Dict[str, str]:
    """Return the environment of a process that sees the GPUs of a machine.

    Args:
        machine: its number of GPUs, and its links.
        scale: by how much all times are stretched.
        trace: a file that gets each kernel and copy: device, what, queued, begin, end.
    """
    emulated = plugin.environment(
        count=machine.gpus,
        memory_mb=MEMORY_MB,
        machine=str(machine.path),
        timing=scale,
        trace=trace,
    )
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **emulated}
