"""What travels, and how: everything about one K×N matrix that is decided before the first op."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from ..errors import GradientError, StrategyError, TopologyError
from ..planning import (
    ALGORITHMS,
    BY_ROOT,
    Bucketing,
    Chunk,
    Copy,
    Plan,
    PlanningTarget,
    Spec,
    Step,
    Strategy,
    balanced,
    make_buckets,
    plan_cut,
    plan_whole,
    verify,
)
from ..topology import Network, Topology, subset, this_machine
from .devices import all_on_cpu, device_numbers
from .entries import DENSE, INDICES, Entry, find_entries, op_names
from .gradients import Matrix


class Layout(NamedTuple):
    """E entries of each tower in C chunks, with the chunks' names and their plan."""

    entries: List[Entry]
    chunks: List[Chunk]
    names: List[str]
    plan: Plan

    def entry(self, chunk: int) -> Entry:
        """The first entry of a chunk: all of them have one dtype, and a part of a sparse gradient is alone."""
        return self.entries[self.chunks[chunk].pieces[0].variable]

    def mains(self) -> Dict[int, int]:
        """The tower on which each variable that travels is complete first, ``{variable: tower}``.

        Raises:
            StrategyError: a variable is cut over several.
        """
        found: Dict[int, int] = {}
        for chunk, root in zip(self.chunks, self.plan.roots):
            for piece in chunk.pieces:
                if found.setdefault(self.entries[piece.variable].variable, root) != root:
                    raise StrategyError(
                        "this strategy cuts gradients over several mains (splits, split_above), but here each variable"
                        " needs one; leave both at 0"
                    )
        return found

    def way_back(self) -> Layout:
        """The copy half, for dense values of the variables: the indices of sparse ones stay at home."""
        half = self.plan.copy_half()
        kept = [chunk for chunk in range(len(self.chunks)) if self.entry(chunk).part != INDICES]
        number = {chunk: new for new, chunk in enumerate(kept)}
        steps = tuple(
            Copy(number[step.chunk], step.src, step.dst)
            for step in half.steps
            if isinstance(step, Copy) and step.chunk in number
        )
        names = [self.names[chunk] for chunk in kept]
        return self._replace(
            chunks=[self.chunks[chunk] for chunk in kept],
            names=names,
            plan=dataclasses.replace(half, chunks=len(kept), steps=steps),
        )


def lay_out(
    grads: Matrix, strategy: Strategy, one_main: bool = False, hosts: int = 1, network: Optional[Network] = None
) -> Layout:
    """Decide everything about a K×N matrix before the first op.

    Args:
        grads: the matrix.
        strategy: how to reduce.
        one_main: every variable must have one main: a planned strategy then cuts none.
        hosts: how many hosts have such a matrix. Between hosts sparse gradients become dense: they have different
            numbers of rows, and a collective wants equal shapes.
        network: what joins them, if that is known: with a topology it is planned for too.

    Raises:
        GradientError: see :func:`hier_allreduce.kinds.entries`; or a sparse gradient is to be gathered from several
            hosts.
        StrategyError: the groups, the main or the topology do not fit K towers.
    """
    if hosts > 1 and strategy.sparse == "auto":
        strategy = strategy.with_sparse("dense")
    found = find_entries(grads, strategy)
    if hosts > 1:
        _refuse_sparse(found, grads)
    specs = [entry.spec for entry in found]
    machine = _machine(strategy, grads.devices)
    if machine is None:
        chunks, plan = _unplanned(found, specs, grads.devices, strategy, hosts)
    else:
        algorithm = None if strategy.algorithm == "auto" else strategy.algorithm
        links = PlanningTarget(machine, algorithm, 0.5 if strategy.wire_dtype else 1.0, hosts, network)
        if one_main or strategy.whole:
            chunks, plan = plan_whole(specs, links, strategy.bucketing)
        else:
            chunks, plan = plan_cut(specs, links)
        plan = _with_indices_beside_values(found, chunks, plan)
    return Layout(found, chunks, op_names([_chunk_name(chunk, found, grads.names) for chunk in chunks]), verify(plan))


def _refuse_sparse(found: Sequence[Entry], grads: Matrix) -> None:
    for entry in found:
        if entry.part != DENSE:
            raise GradientError(
                f"variable {entry.variable} ({grads.names[entry.variable]!r}): sparse gradients cannot be gathered from"
                " several hosts; choose sparse='dense' or 'auto', which add them up as dense ones"
            )


def _unplanned(
    found: Sequence[Entry], specs: Sequence[Spec], devices: Sequence[Any], strategy: Strategy, hosts: int
) -> Tuple[List[Chunk], Plan]:
    towers = len(devices)
    chunks = make_buckets(specs, strategy.bucketing if towers * hosts > 1 else Bucketing(pack_below=0))
    algorithm = _algorithm(strategy, devices)
    mains = strategy.mains_for(algorithm)
    build = ALGORITHMS if mains == "rotate" else BY_ROOT
    return chunks, build[algorithm](towers, _turns_or_roots(found, chunks, towers, mains), strategy.groups)


def _machine(strategy: Strategy, devices: Sequence[Any]) -> Optional[Topology]:
    """The topology of the K towers' devices, or None to do without."""
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


def _with_indices_beside_values(found: Sequence[Entry], chunks: Sequence[Chunk], plan: Plan) -> Plan:
    """The plan with the indices of sparse gradients on the same way as their values."""
    at = {chunk.pieces[0].variable: number for number, chunk in enumerate(chunks) if chunk.alone}
    beside = {at[e - 1]: at[e] for e in at if found[e].part == INDICES}
    indices = set(beside.values())
    steps: List[Step] = []
    for step in plan.steps:
        if step.chunk not in indices:
            steps += [step, *([step._replace(chunk=beside[step.chunk])] if step.chunk in beside else [])]
    return dataclasses.replace(plan, steps=tuple(steps))


def _algorithm(strategy: Strategy, devices: Sequence[Any]) -> str:
    if strategy.algorithm in ALGORITHMS:  # the planner's own need links, and there are none to plan for
        return strategy.algorithm
    return "flat" if all_on_cpu(devices) and strategy.groups is None else "hierarchical"


def _turns_or_roots(found: Sequence[Entry], chunks: Sequence[Chunk], towers: int, mains: Union[int, str]) -> List[int]:
    """A turn for each chunk where mains rotate, else a root; the indices of a sparse gradient go with its values."""
    if isinstance(mains, int):
        if mains >= towers:
            raise StrategyError(f"mains={mains}: there are towers 0 to {towers - 1} only")
        return [mains] * len(chunks)
    start = [min(chunk.pieces) for chunk in chunks]
    leading = [c for c in range(len(chunks)) if found[start[c].variable].part != INDICES]
    if mains == "rotate":
        number = {start[c]: turn for turn, c in enumerate(sorted(leading, key=lambda c: start[c]))}
    else:
        number = dict(zip((start[c] for c in leading), balanced([chunks[c].bytes for c in leading], towers)))
    # the values of a sparse gradient are the entry before its indices
    return [number[s] if s in number else number[s._replace(variable=s.variable - 1)] for s in start]


def _chunk_name(chunk: Chunk, found: Sequence[Entry], names: Sequence[str]) -> str:
    """What a chunk is called in op names: its variable, or the first of those that share a bucket."""
    entry = found[chunk.pieces[0].variable]
    name = names[entry.variable]
    if entry.part != DENSE:
        return f"{name}.{entry.part}"
    return f"{name}.bucket" if len(chunk.pieces) > 1 else name
