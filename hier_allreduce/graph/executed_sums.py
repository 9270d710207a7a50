"""What the executed ops add up: every sum that leaves a chunk holds what the plan says, each contribution once.

::

    gradient ─► _Send ┄ _Recv ─► sum ─► mean ─► _Send ┄ _Recv ─► copy ─► unpack, or whatever reads the result
    of tower 1                 {0: 1, 1: 1}                      here it must be {0: 1, 1: 1, 2: 1, …}

A tensor from outside of the chunk's sums counts as the contribution of the tower on whose device it is made. Where an
optimizer of TensorFlow has made ops of its own or left out zeros, and where rows are joined instead of added, nothing
can be counted in this way, and nothing is said.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..planning import Counting, run
from .emit import Emitted
from .executed import ChunkOf, DeviceFinder
from .partitions import read_by

_REDUCING = ("sum", "copy", "turn", "column", "mean", "sent", "share", "across")  # ops of a chunk, by their names
_PACKING = ("pack", "unpack")
_LEAVING = ("column", "sent", "turn")  # on its way out of its tower; as a constant, it is what this tower contributes
_ADDS = ("Add", "AddV2", "AddN")
_ONES = ("Identity", "Snapshot")
_HANDS_ON = (*_ONES, "PlaceholderWithDefault", "Reshape", "Cast", "CollectiveReduce", "CollectiveReduceV2")
_SCALES = "Mul"
# words that TensorFlow's optimizers put into the names of their ops: …/ArithmeticOptimizer/AddOpsRewrite_sum
_OPTIMIZERS = ("ArithmeticOptimizer", "ConstantFolding", "MemoryOptimizer")
# two additions made one, a factor taken out of a sum, a cast past a reshape: counted like the ops that they replace
_WRITTEN_ANEW = re.compile(
    r"(ArithmeticOptimizer/)+"
    r"(AddOpsRewrite_(Leaf_\d+_)?|HoistCommonFactor_(Add|Mul)_|(ReorderCastLikeAndValuePreserving_[a-z0-9]+_)+)"
)


class WrongSum(NamedTuple):
    """A sum that left a chunk: the device of what reads it, and how often it holds each tower's contribution."""

    chunk: int
    reader: str
    counts: Counter
    planned: Counter

    def __str__(self) -> str:
        towers = sorted({*self.counts, *self.planned})
        lists = {
            "missing": [tower for tower in towers if self.counts[tower] < self.planned[tower]],
            "counted too often": [tower for tower in towers if self.counts[tower] > self.planned[tower]],
        }
        faults = ", ".join(f"{fault} {found}" for fault, found in lists.items() if found)
        return f"on {self.reader}: {faults}"


def wrong_sums(call: Emitted, chunk_of: ChunkOf, places: DeviceFinder, partitions: Sequence[Any]) -> List[WrongSum]:
    """Return the sums of a call that do not hold what its plan says, one of each chunk.

    Args:
        call: the all-reduce as it was built; its towers have devices of their own.
        chunk_of: see :func:`.chunk_finder`.
        places: the call's towers.
        partitions: of the step.
    """
    plan, sums = call.plan, _Sums(call, chunk_of, places, partitions)
    held = run(plan, [[Counter({tower: 1})] * plan.chunks for tower in range(plan.towers)], Counting())
    wrong: Dict[int, WrongSum] = {}
    for op, reader in sums.leaving():
        chunk = sums.region[op]
        counts, planned = sums.counts(op), held[plan.tower(plan.roots[chunk])][chunk]
        if counts is not None and counts != planned:
            wrong.setdefault(chunk, WrongSum(chunk, reader, counts, planned))
    return list(wrong.values())


class _Sums:
    """The executed ops that add up the chunks of a call.

    Attributes:
        region: the chunk of each op that adds up, scales or hands on; chunks of another kind are left out.
    """

    def __init__(self, call: Emitted, chunk_of: ChunkOf, places: DeviceFinder, partitions: Sequence[Any]):
        self._scope, self._places = call.scope, places
        self._nodes = {node.name: node for part in partitions for node in part.node}
        self._constants = {name for name, node in self._nodes.items() if node.op == "Const"}
        self._inputs = read_by(partitions)
        self._known: Dict[str, Optional[Counter]] = {}
        self._parts: Dict[str, str] = {}
        chunks: Dict[str, int] = {}
        for name, node in self._nodes.items():
            inner = _WRITTEN_ANEW.sub("", name) if node.op in (*_ADDS, _SCALES, *_HANDS_ON) else name
            chunk = chunk_of(inner) if inner.startswith(call.scope) else None
            if chunk is not None:
                part = inner[len(call.scope + call.names[chunk]) + 1 :].partition("/")[0]
                self._parts[name], chunks[name] = re.sub(r"_\d+$", "", part), chunk
        known = (*_REDUCING, *_PACKING, *_OPTIMIZERS)
        others = {chunks[name] for name, part in self._parts.items() if part not in known}
        self.region = {
            name: chunks[name] for name, part in self._parts.items() if part in _REDUCING and chunks[name] not in others
        }

    def leaving(self) -> Iterator[Tuple[str, str]]:
        """Yield what leaves the sums of all chunks: (op, device of what reads it).

        What another chunk reads is left out: TensorFlow makes sums of the same gradients only once.
        """
        for name, inputs in self._inputs.items():
            if name not in self.region and not self._is_written_anew(name):
                sums = (source for source in inputs if source in self.region and source not in self._constants)
                yield from ((source, self._nodes[name].device) for source in sums)

    def _is_written_anew(self, name: str) -> bool:
        """Return whether one of TensorFlow's optimizers has made an op of the call that cannot be counted."""
        ours = self._scope in name and name not in self.region
        return ours and any(f"{optimizer}/" in name for optimizer in _OPTIMIZERS)

    def counts(self, name: str) -> Optional[Counter]:
        """Return how often an op's tensor holds each tower's contribution; None if that cannot be counted."""
        if name not in self._known:
            self._known[name] = self._counted(name)
        return self._known[name]

    def _counted(self, name: str) -> Optional[Counter]:
        node = self._nodes.get(name)
        if node is None:  # fed by the client
            return None
        folded = name in self._constants and self._parts.get(name) in _LEAVING
        if name not in self.region or folded:
            place = self._places.find(node.device)
            return None if self._is_written_anew(name) or isinstance(place, str) else Counter({place: 1})
        if node.op in _ONES and self._parts[name] == "sum":  # an addition of zeros, which TensorFlow leaves out
            return None
        if node.op == _SCALES:
            scaled = [source for source in self._inputs[name] if source not in self._constants]
            return self.counts(scaled[0]) if len(scaled) == 1 else None
        if node.op in _HANDS_ON:
            return self.counts(self._inputs[name][0])
        inputs = [self.counts(source) for source in self._inputs[name]] if node.op in _ADDS else [None]
        return None if None in inputs else sum((counts for counts in inputs if counts is not None), Counter())
