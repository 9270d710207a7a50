"""What the ops of a call add up: every result holds what the plan says, each tower's contribution once.

TensorFlow's optimizers merge, split and fold what they execute, so that executed additions are not those of the plan.
Counted are the ops as they were built::

    gradient of tower 0 ─► AddN ─► Mul ─► Identity ─► result of tower 0
    gradient of tower 1 ─►         mean   copy        holds {gradient of tower 0: 1, gradient of tower 1: 1}
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from ..graph import Emitted
from ..planning import Counting, run
from .executed import ChunkOf

_ADDED = {"Add": slice(None), "AddV2": slice(None), "AddN": slice(None), "ConcatV2": slice(-1)}  # type → their inputs
_HANDED_ON = (
    *("Identity", "PlaceholderWithDefault", "Reshape", "Cast", "Bitcast"),
    "Mul",  # by a number
    *("CollectiveReduce", "CollectiveReduceV2"),
)


class WrongSum(NamedTuple):
    """A result that does not hold what the plan says: its chunk, its tower, and tensors by how often they are in it."""

    chunk: int
    tower: int
    held: Counter
    planned: Counter

    def __str__(self) -> str:
        faults = {
            "missing": self.planned - self.held,
            "counted too often": Counter({name: self.held[name] for name in self.held - self.planned}),
        }
        named = [f"{fault} {', '.join(map(repr, sorted(names)))}" for fault, names in faults.items() if names]
        return f"tower {self.tower}: {'; '.join(named)}"


def wrong_sums(call: Emitted, chunk_of: ChunkOf, graph: Any) -> Iterator[WrongSum]:
    """Yield the results of a call that do not hold what its plan says.

    Joined rows of sparse gradients, which are cut and put in another order, are not counted.
    """
    contributions = [[Counter({name: 1}) for name in row] for row in call.contributions]
    planned = run(call.plan, contributions, Counting())
    held = _held(call, chunk_of, graph)
    for tower, row in enumerate(call.results):
        for chunk, result in enumerate(row):
            counts = held[chunk].get(result) if result else None
            if counts is not None and counts != planned[tower][chunk]:
                yield WrongSum(chunk, tower, counts, planned[tower][chunk])


def _held(call: Emitted, chunk_of: ChunkOf, graph: Any) -> List[Dict[str, Optional[Counter]]]:
    """Return for each chunk what its tensors hold, by their names; None is what cannot be counted."""
    held: List[Dict[str, Optional[Counter]]] = [
        {name: Counter({name: 1}) for name in names} for names in zip(*call.contributions)
    ]
    for op in graph.get_operations():  # each after those whose results it reads
        chunk = chunk_of(op.name)
        if chunk is not None:
            total = _total(op, chunk, held)
            for tensor in op.outputs:
                held[chunk].setdefault(tensor.name, total)
    return held


def _total(op: Any, chunk: int, held: List[Dict[str, Optional[Counter]]]) -> Optional[Counter]:
    """Return the contributions in an op's output. A tensor from outside the chunk counts as itself."""
    if op.type not in _ADDED and op.type not in _HANDED_ON:
        return None
    read = op.inputs[_ADDED[op.type]] if op.type in _ADDED else op.inputs[:1]
    total: Counter = Counter()
    for tensor in read:
        counts = held[chunk].get(tensor.name, Counter({tensor.name: 1}))
        if counts is None:
            return None
        total += counts
    return total
