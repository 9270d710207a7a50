"""The machine whose links a plan is made for."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Optional, Sequence

from ..errors import HierAllreduceError
from ..planning.strategy import AUTO, THIS_MACHINE, Strategy
from ..topology import Topology, this_machine
from .devices import device_fields

_log = logging.getLogger("hier_allreduce")
_loaded = lru_cache(maxsize=16)(Topology.load)  # an eager program asks at every step


def machine_of(strategy: Strategy, devices: Sequence[Any]) -> Optional[Topology]:
    """Return the topology of K devices; None if the strategy names no machine, and its links decide nothing.

    Raises:
        HierAllreduceError: the strategy's machine lacks some of the devices.
    """
    machine = strategy.topology
    if len(devices) == 1 or (machine is None and strategy.algorithm != AUTO):
        return None
    fields = [device_fields(device if isinstance(device, str) else "") for device in devices]
    numbers = [tower if number is None else number for tower, (*_, number) in enumerate(fields)]
    try:
        if machine not in (None, THIS_MACHINE):
            return (machine if isinstance(machine, Topology) else _loaded(machine)).subset(numbers)
        are_of_one_process = len({field[:3] for field in fields}) == 1
        are_different_gpus = len(
            {field[4] for field in fields if field[3] == "GPU"} - {None}
        ) == len(devices)
        return this_machine(numbers) if are_of_one_process and are_different_gpus else None
    except HierAllreduceError as error:
        if machine is not None:
            raise HierAllreduceError(
                f"topology={machine!r} does not fit devices {list(devices)}: {error}"
            ) from None
        log_once(
            f"this machine is not planned for, since devices {list(devices)} are not those of nvidia-smi: {error}"
        )
        return None


@lru_cache(maxsize=None)
def log_once(line: str) -> None:
    """Log a line, the same one once in a process."""
    _log.info(line)
