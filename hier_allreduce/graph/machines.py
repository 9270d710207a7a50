"""The machine whose links a plan is made for."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, List, Optional, Sequence

from ..errors import HierAllreduceError
from ..planning.strategy import AUTO, THIS_MACHINE, Strategy
from ..topology import Topology, this_machine
from .devices import all_on_cpu, device_fields

_log = logging.getLogger("hier_allreduce")


def machine_of(strategy: Strategy, devices: Sequence[Any]) -> Optional[Topology]:
    """Return the topology of K devices; None if there is nothing to plan for.

    Args:
        strategy: ``topology`` names a machine; ``algorithm`` tells whether its links decide anything.
        devices: K devices.

    Raises:
        HierAllreduceError: the strategy's machine lacks some of the devices.
    """
    machine = strategy.topology
    is_named = machine not in (None, THIS_MACHINE)
    if len(devices) == 1 or (machine is None and strategy.algorithm != AUTO) or (not is_named and all_on_cpu(devices)):
        return None
    try:
        if is_named:
            return (machine if isinstance(machine, Topology) else _loaded(machine)).subset(_numbers(devices))
        return this_machine(_numbers(devices)) if _are_gpus(devices) else None
    except HierAllreduceError as error:
        if machine is not None:
            raise HierAllreduceError(f"topology={machine!r} does not fit devices {list(devices)}: {error}") from None
        log_once(f"this machine is not planned for, since devices {list(devices)} are not those of nvidia-smi: {error}")
        return None


@lru_cache(maxsize=16)  # an eager program asks at every step
def _loaded(name: Any) -> Topology:
    return Topology.load(name)


def _numbers(devices: Sequence[Any]) -> List[int]:
    """Return the number of each device; the tower's where the device has none."""
    numbers = [device_fields(device)[4] if isinstance(device, str) else None for device in devices]
    return [tower if number is None else number for tower, number in enumerate(numbers)]


def _are_gpus(devices: Sequence[Any]) -> bool:
    """Return whether all devices are different GPUs of one process, by number."""
    fields = [device_fields(device) for device in devices if isinstance(device, str)]
    numbers, process = {field[4] for field in fields} - {None}, {field[:3] for field in fields}
    return {field[3] for field in fields} == {"GPU"} and len(process) == 1 and len(numbers) == len(devices)


@lru_cache(maxsize=None)
def log_once(line: str) -> None:
    """Log a line, the same one once in a process."""
    _log.info(line)
