"""What travels, and how: everything about one K×N matrix that is decided before the first op."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Union

from .algorithms import ALGORITHMS
from .buckets import Bucketing, Chunk, balanced, buckets
from .devices import all_on_cpu
from .errors import StrategyError
from .gradients import Matrix
from .kinds import DENSE, INDICES, Entry, entries, op_names
from .plan import Copy, Plan, verify
from .strategy import Strategy


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
        kept = [chunk for chunk in range(len(self.chunks)) if self.entry(chunk).part != INDICES]
        number = {chunk: new for new, chunk in enumerate(kept)}
        steps = tuple(
            Copy(number[step.chunk], step.src, step.dst)
            for step in self.plan.copy_half().steps
            if isinstance(step, Copy) and step.chunk in number
        )
        names = [self.names[chunk] for chunk in kept]
        return self._replace(
            chunks=[self.chunks[chunk] for chunk in kept],
            names=names,
            plan=Plan(self.plan.devices, len(kept), steps, self.plan.algorithm),
        )


def lay_out(grads: Matrix, strategy: Strategy) -> Layout:
    """Decide everything about a K×N matrix before the first op.

    Raises:
        GradientError: see :func:`hier_allreduce.kinds.entries`.
        StrategyError: the groups, or the main, do not fit K towers.
    """
    towers = len(grads.devices)
    found = entries(grads, strategy)
    how = strategy.bucketing if towers > 1 else Bucketing(pack_below=0)
    chunks = buckets([entry.spec for entry in found], how)
    algorithm = _algorithm(strategy, grads.devices)
    turns = _turns(found, chunks, towers, strategy.mains_for(algorithm))
    plan = verify(ALGORITHMS[algorithm](towers, turns, strategy.groups))
    return Layout(found, chunks, op_names([_chunk_name(chunk, found, grads.names) for chunk in chunks]), plan)


def _algorithm(strategy: Strategy, devices: Sequence[Any]) -> str:
    if strategy.algorithm != "auto":
        return strategy.algorithm
    return "flat" if all_on_cpu(devices) and strategy.groups is None else "hierarchical"


def _turns(found: Sequence[Entry], chunks: Sequence[Chunk], towers: int, mains: Union[int, str]) -> List[int]:
    """A turn for each chunk; the indices of a sparse gradient take the same way as its values."""
    if isinstance(mains, int):
        if mains >= towers:
            raise StrategyError(f"mains={mains}: there are towers 0 to {towers - 1} only")
        return [mains] * len(chunks)
    start = [min(chunk.pieces) for chunk in chunks]
    leading = [c for c in range(len(chunks)) if found[start[c].variable].part != INDICES]
    if mains == "rotate":
        turn = {start[c]: number for number, c in enumerate(sorted(leading, key=lambda c: start[c]))}
    else:
        turn = dict(zip((start[c] for c in leading), balanced([chunks[c].bytes for c in leading], towers)))
    # the values of a sparse gradient are the entry before its indices
    return [turn[s] if s in turn else turn[s._replace(variable=s.variable - 1)] for s in start]


def _chunk_name(chunk: Chunk, found: Sequence[Entry], names: Sequence[str]) -> str:
    """What a chunk is called in op names: its variable, or the first of those that share a bucket."""
    entry = found[chunk.pieces[0].variable]
    name = names[entry.variable]
    if entry.part != DENSE:
        return f"{name}.{entry.part}"
    return f"{name}.bucket" if len(chunk.pieces) > 1 else name
