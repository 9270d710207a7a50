"""The two halves of an all-reduce: each variable is reduced to its main, and copied from there."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

from ..planning import Strategy
from ..planning.chunks import Load
from ..planning.plan import copies_in, sums_in
from .allreduce import travel
from .layout import Layout, lay_out
from .matrix import column_of
from .sums import Shared


def first_half(layout: Layout) -> Layout:
    """Return a layout whose results are on the mains only: variable n's on tower ``layout.mains()[n]``."""
    return layout._replace(schedules=[sums_in(schedule) for schedule in layout.schedules])


def copy_from_mains(
    values: Sequence[Any], layout: Layout, name: str = "copy_from_mains"
) -> List[Tuple[Any, ...]]:
    """Copy N values to every tower: the second half of an all-reduce by this layout.

    ``values[n]`` is on the device of tower ``layout.mains()[n]``, and has the shape of a dense gradient.

    Returns:
        K tuples of N tensors, entry (k, n) on the device of tower k; None for variables without gradients.
    """
    mains, columns = layout.mains(), list(layout.columns)
    for n, main in mains.items():
        on_main = tuple(
            values[n] if tower == main else None for tower in range(len(layout.devices))
        )
        columns[n] = columns[n]._replace(
            grads=on_main, dtype="", is_sparse=False
        )  # nothing is added up
    copies = [copies_in(schedule) for schedule in layout.schedules]
    return travel(layout._replace(columns=columns, schedules=copies), Shared(layout.devices), name)


def copy_from_tower_0(values: Sequence[Any], devices: Sequence[Any]) -> List[Tuple[Any, ...]]:
    """Copy N tensors of any dtype from tower 0 to every tower, down a binomial tree; K×N out."""
    columns = [column_of(value.op.name, [value]) for value in values]
    everything_on_0 = Load([0] * len(columns), [0] * len(devices))
    strategy = Strategy(algorithm="tree", main=0)
    layout = lay_out(columns, devices, strategy, load=everything_on_0)
    return copy_from_mains(values, layout, "broadcast")
