"""The rule: the plan of a strategy that leaves the choice open. It sees K and the bytes only.

::

    GPUs, up to 4 towers      flat            chunks of 4 MiB   ┐ of 16 MiB from 200 MB
    GPUs, more towers         hierarchical    chunks of 8 MiB   ┘ of gradients on
    CPU devices               flat            gradients below 64 KiB packed up to 10 MiB, others whole

No rule knows how far the host is ahead of the GPUs, and that decides which plan is the fastest.
``hier-allreduce tune`` measures it.
"""

from __future__ import annotations

from typing import Sequence

from .algorithms import BY_NAME, schedules_of
from .chunks import GradientSize
from .plan import Plan

KIB, MIB = 1 << 10, 1 << 20
FLAT_TOWERS = 4  # at most
LARGE = 200e6  # bytes of gradients


def rule(gradients: Sequence[GradientSize], towers: int, on_cpu: bool = False) -> Plan:
    """Return the plan of the rule for N gradients on K towers, which are GPUs or CPU devices."""
    if on_cpu:
        # CPU devices share one memory: `make bench` measures packed and whole gradients on them
        schedules = schedules_of(BY_NAME["flat"], towers)
        return Plan(towers, schedules, 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    is_flat = towers <= FLAT_TOWERS
    name = "flat" if is_flat else "hierarchical"
    size = 4 * MIB if is_flat else 8 * MIB
    if sum(gradient.bytes for gradient in gradients) >= LARGE:
        size = 16 * MIB
    return Plan(towers, schedules_of(BY_NAME[name], towers), size, name)
