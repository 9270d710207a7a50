"""Every decision about one K×N matrix, before the first op: what is reduced, in which chunks, by which plan.

::

    grads ─► entries: which sparse gradients are gathered       devices, hosts, bytes
      K×N       │
                ▼
             chunks and plan: for the links of a machine,       topology, devices
                │             or by the strategy alone
                ▼
             kinds: how each chunk is added up                  dtypes
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from ..errors import GradientError, StrategyError, TopologyError
from ..planning import (
    Bucketing,
    Chunk,
    Lanes,
    Plan,
    PlanningTarget,
    Step,
    Strategy,
    balanced,
    check_groups,
    make_buckets,
    on_lanes,
    plan_cut,
    plan_of,
    plan_whole,
    turns_by_root,
    verify,
)
from ..topology import Topology, subset, this_machine
from .devices import NO_LANES, LaneDevices, all_on_cpu, device_numbers
from .entries import COUNTS, DENSE, INDICES, VALUES, Entry, entry_spec, find_entries
from .gradients import NARROW_DTYPES, Matrix, is_sparse
from .joining import join_entries
from .names import op_names


class Rows(NamedTuple):
    """Which rows of sparse gradients a chunk holds.

    Attributes:
        variables: V variables, joined if there are several.
        known: K×V numbers of rows of joined ones, if all are known when the graph is built.
        counts: else the chunk that has them.
    """

    variables: Tuple[int, ...]
    known: Tuple[Tuple[int, ...], ...]
    counts: int


class Layout(NamedTuple):
    """E entries of each tower in C chunks.

    Attributes:
        entries: the E tensors of each tower.
        chunks: C chunks; a piece's ``variable`` is the number of its entry.
        names: C names of the chunks.
        plan: how the chunks travel.
        kinds: how each chunk is added up: see :func:`~hier_allreduce.graph.emit.reductions_of`.
        in_order: whether copies leave in the plan's order: in a plan that was made for a machine's links, unless
            gradients stay whole.
        lanes: the lanes of the towers' devices.
        variables: the names of each chunk's variables.
        machine: the topology of the K devices for which the plan was made, if it was made for one.
    """

    entries: List[Entry]
    chunks: List[Chunk]
    names: List[str]
    plan: Plan
    kinds: List[str]
    in_order: bool = False
    lanes: LaneDevices = NO_LANES
    variables: Sequence[Tuple[str, ...]] = ()
    machine: Optional[Topology] = None

    def mains(self) -> Dict[int, int]:
        """Return the tower on which each reduced variable is complete first, ``{variable: tower}``.

        Raises:
            StrategyError: a variable is cut over several mains.
        """
        mains: Dict[int, int] = {}
        for chunk, root in zip(self.chunks, self.plan.roots):
            for piece in chunk.pieces:
                for variable in self.entries[piece.variable].variables:
                    if mains.setdefault(variable, root) != root:
                        raise StrategyError(
                            "this strategy cuts gradients over several mains (splits), but here each variable needs"
                            " one; leave it at 0"
                        )
        return mains

    def sparse_rows(self) -> Dict[int, Rows]:
        """Return the chunks with values, indices or numbers of rows of sparse gradients, and what they hold."""
        chunk_of = {chunk.pieces[0].variable: number for number, chunk in enumerate(self.chunks)}
        rows = {}
        for number, chunk in enumerate(self.chunks):
            first = chunk.pieces[0].variable
            entry = self.entries[first]
            if entry.part != DENSE:
                counts = number if entry.rows else chunk_of.get(first - entry.follows + 2, number)
                rows[number] = Rows(entry.variables, entry.rows, counts)
        return rows

    def copy_half(self) -> Layout:
        """Return the layout that copies dense values of the variables back, without the indices of sparse ones."""
        plan = self.plan.copy_half()
        kept = [number for number, kind in enumerate(self.kinds) if kind != INDICES]
        renumbered = {chunk: number for number, chunk in enumerate(kept)}
        steps = tuple(step._replace(chunk=renumbered[step.chunk]) for step in plan.steps if step.chunk in renumbered)
        return self._replace(
            chunks=[self.chunks[chunk] for chunk in kept],
            names=[self.names[chunk] for chunk in kept],
            plan=dataclasses.replace(plan, chunks=len(kept), steps=steps, buckets=()),
            kinds=[DENSE] * len(kept),
            in_order=False,
            variables=[self.variables[chunk] for chunk in kept],
        )


def lay_out(grads: Matrix, strategy: Strategy, one_main: bool = False, hosts: int = 1) -> Layout:
    """Decide everything about a K×N matrix.

    Args:
        grads: the matrix.
        strategy: how to reduce.
        one_main: whether every variable must have one main; a planned strategy then leaves gradients whole.
        hosts: the number of hosts that have such a matrix.

    Raises:
        GradientError: see :func:`find_entries`; or a sparse gradient is to be gathered from several hosts.
        StrategyError: the groups, the main or the topology do not fit K towers.
    """
    entries = find_entries(grads, _gathered(grads, strategy, hosts), strategy.missing)
    if len(grads.rows) > 1 and not one_main:
        entries = join_entries(entries, grads, strategy.bucketing)
    machine = _machine(strategy, [f"/gpu:{gpu}" for gpu in grads.lanes.gpus] or grads.devices)
    lanes = grads.places.lanes_each
    in_order = False
    if machine is None:
        chunks, plan = _by_strategy(entries, grads.devices, strategy, hosts)
    else:
        scale = 0.5 if strategy.wire_dtype else 1.0
        target = PlanningTarget(
            machine, strategy.algorithm, scale, hosts, lanes if hosts == 1 else 0, strategy.backward
        )
        chunks, plan = _by_machine(entries, target, strategy.bucketing if one_main else None)
        in_order = hosts == 1 and not one_main
    plan = _parts_together(entries, chunks, plan)
    if lanes and not plan.lanes:
        # a variable's update, and a sum over several hosts, are made on a tower
        plan = on_lanes(plan, Lanes(lanes, by_chunk=_lane_by_chunk(plan, lanes)), sum_on_tower=one_main or hosts > 1)
    return Layout(
        entries,
        chunks,
        op_names([_chunk_name(chunk, entries, grads.names) for chunk in chunks]),
        verify(plan),
        [_kind(chunk, entries, strategy, len(grads.devices) * hosts) for chunk in chunks],
        in_order,
        grads.lanes,
        variables=[_variables(chunk, entries, grads.names) for chunk in chunks],
        machine=machine,
    )


# ---- sparse gradients ------------------------------------------------------------------------------


def _gathered(grads: Matrix, strategy: Strategy, hosts: int) -> Set[int]:
    """Return the variables whose rows are gathered; the rows of other sparse gradients become dense."""
    sparse = strategy.sparse
    if sparse == "auto" and hosts > 1:
        sparse = "dense"  # hosts have different numbers of rows, and a collective needs equal shapes
    elif sparse == "auto" and all_on_cpu(grads.devices):
        sparse = "gather"  # between CPU devices bytes cost nothing, and making rows dense does
    if sparse == "dense":
        return set()
    columns = {variable: column for variable, column in enumerate(grads.columns) if _is_all_sparse(column)}
    if sparse == "auto":
        return {variable for variable, column in columns.items() if _moves_fewer_bytes(column)}
    if columns and hosts > 1:
        variable = min(columns)
        raise GradientError(
            f"variable {variable} ({grads.names[variable]!r}): sparse gradients cannot be gathered from several hosts;"
            " choose sparse='dense' or 'auto', which add them up as dense ones"
        )
    return set(columns)


def _is_all_sparse(column: Sequence[Any]) -> bool:
    present = [grad for grad in column if grad is not None]
    return bool(present) and all(is_sparse(grad) for grad in present)


def _moves_fewer_bytes(column: Sequence[Any]) -> bool:
    """Return whether gathering rows moves no more bytes than adding up dense gradients, as far as is known."""
    dense, values, indices = (entry_spec(column, part) for part in (DENSE, VALUES, INDICES))
    if None in (dense.elements, values.elements, indices.elements):
        return True
    # K-1 towers send their own rows and get those of all, or send a dense gradient and get one
    rows = values.bytes + indices.bytes
    return rows / len(column) + rows <= 2 * dense.bytes


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
    except TopologyError as error:
        raise StrategyError(f"topology={strategy.topology!r} does not fit devices {list(devices)}: {error}") from None


def _by_machine(
    entries: Sequence[Entry], target: PlanningTarget, whole: Optional[Bucketing]
) -> Tuple[List[Chunk], Plan]:
    """Return chunks and plan for a machine's links; ``whole``: the buckets of gradients that are not to be cut."""
    specs = [entry.spec for entry in entries]
    return plan_cut(specs, target) if whole is None else plan_whole(specs, target, whole)


def _parts_together(entries: Sequence[Entry], chunks: Sequence[Chunk], plan: Plan) -> Plan:
    """Return the plan with each sparse gradient's parts together.

    What follows values travels on their way, numbers of rows before values, values before indices. Joined indices have
    their own way, at the end: the order of each gradient's rows is that of its values.
    """
    if all(entry.part == DENSE for entry in entries):
        return plan
    chunk_of = {chunk.pieces[0].variable: number for number, chunk in enumerate(chunks) if chunk.alone}
    led_by: Dict[int, List[int]] = {}
    at_the_end = set()
    for number, chunk in sorted(chunk_of.items()):
        entry = entries[number]
        if entry.follows:
            led_by.setdefault(chunk_of[number - entry.follows], [chunk_of[number - entry.follows]]).append(chunk)
        elif entry.part == INDICES:
            at_the_end.add(chunk)
    following = {chunk for leader, chunks in led_by.items() for chunk in chunks if chunk != leader}
    counts = {chunk_of[number] for number in chunk_of if entries[number].part == COUNTS}
    steps: List[Step] = []
    for step in plan.steps:
        if step.chunk not in following:
            together = sorted(led_by.get(step.chunk, [step.chunk]), key=lambda chunk: chunk not in counts)
            steps += [step._replace(chunk=chunk) for chunk in together]
    steps.sort(key=lambda step: step.chunk in at_the_end)
    return dataclasses.replace(plan, steps=tuple(steps))


# ---- chunks and plan: by the strategy alone --------------------------------------------------------


def _by_strategy(
    entries: Sequence[Entry], devices: Sequence[Any], strategy: Strategy, hosts: int
) -> Tuple[List[Chunk], Plan]:
    towers = len(devices)
    if strategy.groups is not None:
        check_groups(strategy.groups, towers)
    bucketing = strategy.bucketing if towers * hosts > 1 else Bucketing(pack_below=0)
    chunks = make_buckets([entry.spec for entry in entries], bucketing)
    name = _algorithm(strategy, devices)
    algorithm = strategy.function(name)
    turns = _turns(entries, chunks, strategy.mains_for(name), turns_by_root(algorithm, towers))
    return chunks, plan_of(algorithm, towers, turns, name)


def _algorithm(strategy: Strategy, devices: Sequence[Any]) -> str:
    if strategy.algorithm != "auto":
        return strategy.algorithm
    return "flat" if all_on_cpu(devices) and strategy.groups is None else "hierarchical"


def _turns(
    entries: Sequence[Entry], chunks: Sequence[Chunk], mains: Union[int, str], by_root: Dict[int, int]
) -> List[int]:
    """Return each chunk's turn of the algorithm; ``by_root`` has one for each main. Indices go with their values."""
    if isinstance(mains, int):
        if mains not in by_root:
            raise StrategyError(f"mains={mains}: there are towers 0 to {max(by_root)} only")
        return [by_root[mains]] * len(chunks)
    first = [min(chunk.pieces) for chunk in chunks]
    leading = [chunk for chunk in range(len(chunks)) if not entries[first[chunk].variable].follows]
    if mains == "rotate":
        turn = {first[chunk]: turn for turn, chunk in enumerate(sorted(leading, key=lambda chunk: first[chunk]))}
    else:
        roots = balanced([chunks[chunk].bytes for chunk in leading], sorted(by_root))
        turn = {first[chunk]: by_root[root] for chunk, root in zip(leading, roots)}
    return [turn[p._replace(variable=p.variable - entries[p.variable].follows)] for p in first]


def _lane_by_chunk(plan: Plan, lanes: int) -> Tuple[int, ...]:
    """Return each chunk's lane. Chunks of one root, whose tower has the most traffic, are on different lanes."""
    earlier: Counter = Counter()  # chunks of each root so far
    chosen = []
    for root in plan.roots:
        chosen.append((root + earlier[root]) % lanes)
        earlier[root] += 1
    return tuple(chosen)


# ---- each chunk ------------------------------------------------------------------------------------


def _kind(chunk: Chunk, entries: Sequence[Entry], strategy: Strategy, contributions: int) -> str:
    """Return how a chunk is added up: by its 16-bit dtype, if it travels in one, else by its part."""
    entry = _first_entry(chunk, entries)
    if entry.part != DENSE:
        return entry.part
    wire = strategy.wire_dtype if entry.spec.dtype == "float32" else entry.spec.dtype
    return DENSE if wire is None or wire not in NARROW_DTYPES or contributions == 1 else wire


def _chunk_name(chunk: Chunk, entries: Sequence[Entry], names: Sequence[str]) -> str:
    """Return the name of a chunk's variable, or of the first one in a bucket."""
    entry = _first_entry(chunk, entries)
    name = names[entry.variables[0]]
    if len(chunk.pieces) > 1 or len(entry.variables) > 1:
        name = f"{name}.bucket"
    return name if entry.part == DENSE else f"{name}.{entry.part}"


def _variables(chunk: Chunk, entries: Sequence[Entry], names: Sequence[str]) -> Tuple[str, ...]:
    """Return the names of a chunk's variables, each once."""
    return tuple(
        dict.fromkeys(names[variable] for piece in chunk.pieces for variable in entries[piece.variable].variables)
    )


def _first_entry(chunk: Chunk, entries: Sequence[Entry]) -> Entry:
    """Return a chunk's first entry: all its entries have one dtype, and a part of a sparse gradient is alone."""
    return entries[chunk.pieces[0].variable]
