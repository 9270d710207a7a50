"""The demo's options as objects, the same for every job."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import tensorflow as tf

from ...errors import DeviceError
from ...graph import device_strings, gpu_count
from ...planning import Strategy, strategy_from


def chosen_devices(text: str) -> List[Any]:
    """Return the devices that ``--devices`` names: a number of them, or names or GPU ids separated by commas."""
    if "," in text or not text.isdigit():
        return [int(name) if name.isdigit() else name for name in text.split(",")]
    kind = "gpu" if gpu_count() >= int(text) else "cpu"
    return [f"/{kind}:{number}" for number in range(int(text))]


def named_devices(text: str) -> Tuple[Tuple[str, ...], int]:
    """Return the names of the devices that ``--devices`` names, and how many logical CPU devices they need.

    Raises:
        DeviceError: an invalid device, or a GPU that does not exist.
    """
    names = device_strings([f"/gpu:{name}" if isinstance(name, int) else name for name in chosen_devices(text)])
    specs = [tf.DeviceSpec.from_string(name) for name in names]
    gpus = gpu_count()
    missing = [name for name, spec in zip(names, specs) if _number(spec, "GPU") >= gpus]
    if missing:
        raise DeviceError(f"these devices do not exist: {', '.join(missing)}. TensorFlow finds {gpus} GPUs here")
    return names, 1 + max(0, *(_number(spec, "CPU") for spec in specs))  # TensorFlow always has one


def _number(spec: Any, kind: str) -> int:
    """Return a device's number among those of its kind; -1 if it is of another kind."""
    return (spec.device_index or 0) if spec.device_type == kind else -1


def chosen_strategy(name: Optional[str]) -> Strategy:
    """Return the strategy that ``--strategy`` names; by default the hierarchical one."""
    return strategy_from(name) if name else Strategy(algorithm="hierarchical")
