"""Every decision about one K×N matrix, before the first op: what is reduced, in which chunks, by which plan.

::

    grads ─► units: which sparse gradients are gathered         devices, hosts, bytes
      K×N      │
               ▼
            chunks and plan: for the links of a machine,        topology, devices
               │             or by the strategy alone
               ▼
            kinds: how each chunk is added up                   dtypes
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import accumulate
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..errors import HierAllreduceError
from ..formatting import count
from ..planning import (
    Bucketing,
    Chunk,
    Lanes,
    Plan,
    PlanningTarget,
    Strategy,
    check_groups,
    on_lanes,
    plan_cut,
    plan_unplanned,
    plan_whole,
    verify,
)
from ..topology import Topology, flat_host, subset, this_machine
from .devices import Places, all_on_cpu, device_numbers
from .gradients import NARROW_DTYPES, Column, Matrix, column_of
from .names import op_names
from .units import DENSE, Unit, find_units, moves_fewer_bytes


class Layout(NamedTuple):
    """The units of K towers in C chunks.

    Attributes:
        units: what each tower has; a piece's ``number`` is that of its unit.
        chunks: C chunks.
        names: for each chunk the names of its parts: one, or those of a sparse gradient.
        plan: how the chunks travel.
        kinds: how each chunk is added up: a 16-bit dtype that is added in float32, or its unit's first part.
        places: the towers' devices and their lanes.
        half: ``"both"`` halves of a plan, or only ``"reduce"`` or ``"copy"``.
        in_order: whether copies leave in the plan's order: in a plan that was made for a machine's links, unless
            gradients stay whole.
        machine: the topology of the K devices for which the plan was made, if it was made for one.
    """

    units: List[Unit]
    chunks: List[Chunk]
    names: List[Tuple[str, ...]]
    plan: Plan
    kinds: List[str]
    places: Places
    half: str = "both"
    in_order: bool = False
    machine: Optional[Topology] = None

    def given(self, tower: int) -> List[int]:
        """Return the chunks that a tower gives: all, or in the copy half those whose root it is."""
        return self._chunks_of(tower if self.half == "copy" else None)

    def wanted(self, tower: int) -> List[int]:
        """Return the chunks of which a tower gets the result: all, or after the reduce half those whose root it is."""
        return self._chunks_of(tower if self.half == "reduce" else None)

    def _chunks_of(self, root: Optional[int]) -> List[int]:
        roots = self.plan.roots if root is not None else (None,) * len(self.chunks)
        return [chunk for chunk, own in enumerate(roots) if own == root]

    def plan_of_parts(self) -> Plan:
        """Return the plan in which each part of a sparse gradient is a chunk, as its tensors are copied."""
        parts = [range(end - len(names), end) for names, end in zip(self.names, accumulate(map(len, self.names)))]
        buckets = [self.plan.buckets[chunk] for chunk, own in enumerate(parts) for _ in own if self.plan.buckets]
        steps = tuple(step._replace(chunk=part) for step in self.plan.steps for part in parts[step.chunk])
        chunks = sum(map(len, parts))
        return dataclasses.replace(self.plan, chunks=chunks, steps=steps, buckets=tuple(buckets), shares=())

    def mains(self) -> Dict[int, int]:
        """Return the tower on which each reduced variable is complete first, ``{variable: tower}``.

        Raises:
            HierAllreduceError: a variable is cut over several mains.
        """
        mains: Dict[int, int] = {}
        for chunk, root in enumerate(self.plan.roots):
            for column in columns_in(self.chunks[chunk], self.units):
                if mains.setdefault(column.variable, root) != root:
                    raise HierAllreduceError(
                        "this strategy cuts gradients over several mains (splits), but here each variable needs"
                        " one; leave it at 0"
                    )
        return mains

    def reduce_half(self) -> Layout:
        """Return the layout that only reduces, each chunk to its root."""
        return self._replace(plan=self.plan.reduce_half(), half="reduce", in_order=False)

    def copy_half(self, values: Sequence[Any]) -> Layout:
        """Return the layout that copies dense values of N variables back from the roots, on the same ways."""
        towers = len(self.places.towers)
        columns = [unit.columns[0] for unit in self.units]
        dense = [Unit((column_of(c.variable, c.name, [values[c.variable]] * towers),)) for c in columns]
        return self._replace(
            units=dense,
            names=[names[:1] for names in self.names],
            plan=self.plan.copy_half(),
            kinds=[DENSE] * len(self.kinds),
            half="copy",
            in_order=False,
        )


def lay_out(grads: Matrix, strategy: Strategy, one_main: bool = False, hosts: int = 1) -> Layout:
    """Decide everything about a K×N matrix.

    Args:
        grads: the matrix.
        strategy: how to reduce.
        one_main: whether every variable must have one main; a planned strategy then leaves gradients whole.
        hosts: the number of hosts that have such a matrix.

    Raises:
        HierAllreduceError: see :func:`.units.find_units`; or a sparse gradient is to be gathered from several hosts; or
            the groups, the main, the topology or the plan do not fit K towers; or the function of an algorithm returns
            wrong steps.
    """
    places, bucketing = grads.places, strategy.bucketing
    joining = Bucketing(pack_below=0) if one_main or len(places.towers) == 1 else bucketing
    units = find_units(grads, _gathered(grads, strategy, hosts), strategy.missing, joining)
    machine = _machine(strategy, [f"/gpu:{gpu}" for gpu in places.gpus] or places.towers)
    lanes = places.lanes_each
    in_order = False
    given = strategy.given_plan()
    links = machine if given is None else _any_machine(given, places, one_main or hosts > 1)
    if links is None:
        chunks, plan = _by_strategy(units, places.towers, strategy, hosts)
    else:
        scale = 0.5 if strategy.wire_dtype else 1.0
        target = PlanningTarget(
            links,
            strategy.algorithm,
            scale,
            hosts,
            lanes if hosts == 1 else 0,
            strategy.backward,
            given,
        )
        specs = [unit.spec for unit in units]
        chunks, plan = plan_whole(specs, target, bucketing) if one_main else plan_cut(specs, target)
        in_order = hosts == 1 and not one_main
    if lanes and not plan.lanes:
        # a variable's update, and a sum over several hosts, are made on a tower
        plan = on_lanes(plan, Lanes(lanes, by_chunk=_lane_by_chunk(plan, lanes)), sum_on_tower=one_main or hosts > 1)
    kinds = [_kind(first_unit(chunk, units), strategy, len(places.towers) * hosts) for chunk in chunks]
    return Layout(units, chunks, _names(chunks, units), verify(plan), kinds, places, "both", in_order, machine)


# ---- sparse gradients ------------------------------------------------------------------------------


def _gathered(grads: Matrix, strategy: Strategy, hosts: int) -> Set[int]:
    """Return the variables whose rows are gathered; the rows of other sparse gradients become dense."""
    sparse = strategy.sparse
    if sparse == "auto" and hosts > 1:
        sparse = "dense"  # hosts have different numbers of rows, and a collective needs equal shapes
    elif sparse == "auto" and all_on_cpu(grads.places.towers):
        sparse = "gather"  # between CPU devices bytes cost nothing, and making rows dense does
    if sparse == "dense":
        return set()
    columns = [column for column in grads.columns if column.is_sparse]
    if sparse == "auto":
        return {column.variable for column in columns if moves_fewer_bytes(column)}
    if columns and hosts > 1:
        raise HierAllreduceError(
            f"variable {columns[0].variable} ({columns[0].name!r}): sparse gradients cannot be gathered from several"
            " hosts; choose sparse='dense' or 'auto', which add them up as dense ones"
        )
    return {column.variable for column in columns}


# ---- chunks and plan: for a machine ----------------------------------------------------------------


def _machine(strategy: Strategy, devices: Sequence[Any]) -> Optional[Topology]:
    """Return the topology of the K towers' devices, or None if there is nothing to plan for."""
    if strategy.topology is None or len(devices) == 1:
        return None
    machine = strategy.machine()
    try:
        if machine is None:
            # CPU devices share one memory: there are no links to plan for
            return None if all_on_cpu(devices) else this_machine([str(device) for device in devices])
        return subset(machine, device_numbers(devices))
    except HierAllreduceError as error:
        raise HierAllreduceError(
            f"topology={strategy.topology!r} does not fit devices {list(devices)}: {error}"
        ) from None


def _any_machine(given: Plan, places: Places, on_towers: bool) -> Topology:
    """Return a machine for a given plan, which needs no links.

    Args:
        given: the plan.
        places: the towers and their lanes.
        on_towers: whether sums must be formed on towers: for updates there, or over several hosts.

    Raises:
        HierAllreduceError: the plan is for other devices or lanes.
    """
    planned, found = (given.towers, given.lanes), (len(places.towers), places.lanes_each)
    if planned != found:
        plan, here = (
            f"{count(towers, 'device')} with {count(lanes, 'lane')} each" for towers, lanes in (planned, found)
        )
        raise HierAllreduceError(f"the plan is for {plan}, but here are {here}")
    if on_towers and given.lanes:
        raise HierAllreduceError("the plan forms sums on lanes; several hosts and update='main' need one without lanes")
    return flat_host(given.towers)


# ---- chunks and plan: by the strategy alone --------------------------------------------------------


def _by_strategy(
    units: Sequence[Unit], devices: Sequence[Any], strategy: Strategy, hosts: int
) -> Tuple[List[Chunk], Plan]:
    towers = len(devices)
    if strategy.groups is not None:
        check_groups(strategy.groups, towers)
    bucketing = strategy.bucketing if towers * hosts > 1 else Bucketing(pack_below=0)
    default = "flat" if all_on_cpu(devices) and strategy.groups is None else "hierarchical"
    chunks, plan = plan_unplanned([unit.spec for unit in units], strategy, towers, default, bucketing)
    steps = plan.steps
    if hosts > 1 and plan.buckets:  # collectives may follow each other, and a bucket is ready with its last gradient
        steps = tuple(sorted(steps, key=lambda step: plan.buckets[step.chunk]))
    return chunks, dataclasses.replace(plan, steps=steps, buckets=())


def _lane_by_chunk(plan: Plan, lanes: int) -> Tuple[int, ...]:
    """Return each chunk's lane. Chunks of one root, whose tower has the most traffic, are on different lanes."""
    earlier: Counter = Counter()  # chunks of each root so far
    chosen = []
    for root in plan.roots:
        chosen.append((root + earlier[root]) % lanes)
        earlier[root] += 1
    return tuple(chosen)


# ---- each chunk ------------------------------------------------------------------------------------


def first_unit(chunk: Chunk, units: Sequence[Unit]) -> Unit:
    """Return a chunk's first unit: all its units have one dtype, and a sparse gradient is alone."""
    return units[chunk.pieces[0].number]


def columns_in(chunk: Chunk, units: Sequence[Unit]) -> List[Column]:
    """Return the columns in a chunk."""
    return [column for piece in chunk.pieces for column in units[piece.number].columns]


def _kind(unit: Unit, strategy: Strategy, contributions: int) -> str:
    """Return how a chunk is added up: by its 16-bit dtype, if it travels in one, else by its first part."""
    if unit.parts[0] != DENSE:
        return unit.parts[0]
    wire = strategy.wire_dtype if unit.spec.dtype == "float32" else unit.spec.dtype
    return DENSE if wire is None or wire not in NARROW_DTYPES or contributions == 1 else wire


def _names(chunks: Sequence[Chunk], units: Sequence[Unit]) -> List[Tuple[str, ...]]:
    """Return the names of each chunk's parts: of its variable, or of the first one in a bucket."""
    names: List[List[str]] = []
    for chunk in chunks:
        columns = columns_in(chunk, units)
        name = f"{columns[0].name}.bucket" if len(columns) > 1 else columns[0].name
        names.append([name if part == DENSE else f"{name}.{part}" for part in first_unit(chunk, units).parts])
    distinct = iter(op_names([name for own in names for name in own]))
    return [tuple(next(distinct) for _ in own) for own in names]
