"""The function behind ``hier-allreduce calibrate``."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence

import tensorflow as tf

from .._version import __version__
from ..errors import HierAllreduceError
from ..graph import device_fields, device_strings
from ..sampling import Tick
from ..topology import Topology, calibration_file, detected, device_names, flat_host
from .device_timer import DeviceTimer
from .machine import measured_machine
from .measurement import Measurement, measure
from .report import report_text
from .speeds import SIZES

NOISE = 0.25
_MOST_OF_CPUS = 16 << 20  # bytes of a copy: more says nothing more about memory


class Calibration(NamedTuple):
    """What a calibration found. ``print(calibration)`` shows it next to what is assumed without one.

    Attributes:
        machine: the measured machine, for ``Strategy(topology=…)``.
        assumed: the same machine with the speeds of the table.
        measurement: each single speed, with its spread.
        whole: whether these are all GPUs of this machine, so that ``"this machine"`` can use them.
    """

    machine: Topology
    assumed: Topology
    measurement: Measurement
    whole: bool

    def __str__(self) -> str:
        when = self.machine.measured
        head = (
            f"{self.machine.name}: {len(self.machine)} devices, {when.date}, TensorFlow {when.tensorflow}"
            if when
            else ""
        )
        return f"{head}\n\n{report_text(self.measurement, self.assumed)}"

    def save(self, file: Optional[str] = None) -> str:
        """Write the machine as YAML, which ``topo``, ``plan`` and ``Strategy(topology=…)`` read; return the path.

        Args:
            file: a path; None is the file in the user's cache folder that ``Strategy(topology="this machine")`` uses.

        Raises:
            HierAllreduceError: without a file, these are not all GPUs of this machine; or the file cannot be written.
        """
        if file is None and not self.whole:
            raise HierAllreduceError(
                "only a calibration of all GPUs of this machine can be kept for 'this machine': give a file"
            )
        path = Path(file) if file is not None else calibration_file()
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(self.machine.to_yaml(), encoding="utf-8")
            partial.replace(path)  # another program never reads half a file
        except OSError as cause:
            raise HierAllreduceError(f"{path}: cannot be written: {cause.strerror}") from None
        return str(path)


def calibrate(
    devices: Optional[Sequence[Any]] = None, noise: float = NOISE, tick: Optional[Tick] = None
) -> Calibration:
    """Measure this machine's links, sums, and which copies wait for each other, with TensorFlow's own copies.

    It takes up to 90 s for 8 GPUs, and up to 512 MiB of each. Nothing else should use the devices meanwhile.

    Args:
        devices: K device strings, all GPUs or all CPUs; None is all GPUs. On CPU devices the speeds are the memory's.
        noise: the widest distance of the quartiles of a measurement, as a share of its median.
        tick: called with the stage (``"links"``, ``"starts"``, ``"sums"``, ``"copies together"``), many times in each.

    Raises:
        HierAllreduceError: fewer than two devices, devices of several kinds, or measurements that are too noisy; or not
            a device.
    """
    names = _checked(devices)
    on_cpu = _kinds(names) == {"CPU"}
    assumed = _assumed(names, on_cpu)
    timer = DeviceTimer(names, _MOST_OF_CPUS if on_cpu else SIZES[-1])
    try:
        sizes = [size for size in SIZES if not on_cpu or size <= _MOST_OF_CPUS]
        measurement = measure(timer, sizes, noise, tick or (lambda stage: None))
    finally:
        timer.close()
    hardware = [f"CPU{number}" for number in range(len(names))] if on_cpu else device_names(len(names))
    stamp = {
        "date": datetime.date.today().isoformat(),
        "tensorflow": tf.__version__,
        "hier_allreduce": __version__,
        "devices": hardware,
    }
    machine = measured_machine(measurement, assumed, stamp)
    return Calibration(machine, assumed, measurement, is_whole(names))


def is_whole(devices: Sequence[Any]) -> bool:
    """Return whether these are all GPUs of this machine, so that ``"this machine"`` can use their calibration."""
    return tuple(devices) == tuple(_all_gpus())


def _assumed(names: Sequence[str], on_cpu: bool) -> Topology:
    """Return the machine as it is without a measurement."""
    if on_cpu:
        return flat_host(len(names), "this host's memory")
    return detected(names)


def _all_gpus() -> List[str]:
    return [f"/gpu:{number}" for number, _ in enumerate(tf.config.experimental.get_visible_devices("GPU"))]


def _kinds(names: Sequence[str]) -> Any:
    return {device_fields(name)[3] for name in names}


def _checked(devices: Optional[Sequence[Any]]) -> Any:
    names = device_strings(devices if devices is not None else _all_gpus() or ["/cpu:0"])
    if len(names) < 2:
        raise HierAllreduceError(f"{', '.join(map(str, names))}: expected two devices or more, between which to copy")
    if _kinds(names) not in ({"GPU"}, {"CPU"}):
        raise HierAllreduceError(f"{', '.join(map(str, names))}: expected GPUs only, or CPUs only, such as '/gpu:0'")
    if len(set(names)) < len(names):
        raise HierAllreduceError(f"{', '.join(map(str, names))}: expected each device once")
    return names
