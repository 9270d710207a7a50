"""What some towers' gradients need, but not all: no update of all towers may use it.

An optimizer may keep something of ``compute_gradients`` for its update: the loss, the norm of the
gradients, in an attribute, a collection, a variable. It is that of one tower, and the update would
take it for that of the whole batch. The graph shows it, wherever Python keeps it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any, Dict, Iterable, List, Sequence, Set

import tensorflow as tf

from ..compat import outer_graph, tensor_of
from ..errors import HierAllreduceError
from ..graph.names import where
from ..graph.record import all_reduces
from ..graphs import needed_by
from .reads import (
    WITHOUT_BATCH,
    Uses,
    may_write,
    ops_of_gradients,
    outer_ops,
    uses_by_variable,
)
from .towers import Column, Towers


class Sources:
    """The ops that the gradients of some, but not all, of K towers need."""

    def __init__(self, towers: Towers):
        self._towers = towers
        needed = [needed_by(ops_of_gradients(grads)) for grads in towers.grads]
        common = set.intersection(*needed)
        self._towers_by_op: Dict[Any, Set[int]] = defaultdict(set)
        for tower, ops in enumerate(needed):
            for op in ops - common:
                self._towers_by_op[op].add(tower)
        self._uses = uses_by_variable(self._towers_by_op)

    def read(self) -> Dict[Any, Set[int]]:
        """Return the towers that use a variable, by the op that makes it, if not all do."""
        # What all towers share, such as a table of the program's own, needs no copies.
        read = {source: self._towers_of(ops) for source, ops in self._uses.items()}
        return {source: k for source, k in read.items() if len(k) < len(self._towers.devices)}

    def check(
        self, ends: Sequence[Any], uses: Uses, columns: Sequence[Column], optimizer: str
    ) -> None:
        """Check that an update uses nothing that only some towers compute or write.

        And that what it writes has copies, if only some towers read it.

        Args:
            ends: its last ops, or tensors.
            uses: its ops that use a variable.
            columns: variables of which every tower has a copy.
            optimizer: its class.
        """
        # What is computed of all towers, such as their mean loss, belongs to none.
        found = self._found(ends, uses)
        towers = self._towers_of(found)
        if 0 < len(towers) < len(self._towers.devices):
            raise self._refusal(optimizer, min(op.name for op in found), towers)
        # A forward pass may write what is trained, such as a start that depends on the data.
        trained = {tensor_of(var).op for var in chain(*self._towers.columns)}
        copied = {tensor_of(var).op for var in chain(*columns)}
        both = self._uses.keys() & uses.keys() - trained
        for source in sorted(both, key=lambda op: str(op.name)):
            readers = self._towers_of(self._uses[source])
            if any(map(may_write, self._uses[source])):
                raise self._refusal(optimizer, source.name, readers)
            is_alone = len(readers) < len(self._towers.devices) and source not in copied
            if is_alone and any(map(may_write, uses[source])):
                raise HierAllreduceError(
                    f"{where(min(readers), self._towers.devices)}: the update writes"
                    f" {source.name!r}, which only this tower's gradients read; nobody can tell"
                    " what copies of it the other towers have. Let names differ by the tower's"
                    " scope only, or give TowerOptimizer(…, scopes=…), or list it in the rows, at"
                    " one place on every tower, with the gradient None"
                )
        # No update on one device uses another tower's variable, because there is none.
        for column in columns if self._towers.update == "once" else ():
            for tower, var in enumerate(column[1:], 1):
                if tensor_of(var).op in uses:
                    raise self._refusal(optimizer, var.op.name, {tower})

    def _towers_of(self, ops: Iterable[Any]) -> Set[int]:
        return set(chain(*map(self._towers_by_op.__getitem__, ops)))

    def _refusal(self, optimizer: str, name: str, towers: Set[int]) -> HierAllreduceError:
        return HierAllreduceError(
            f"{optimizer}: the update uses {name!r}, of {where(min(towers), self._towers.devices)}"
            " only, and would take it for that of all. Use the variables that apply_gradients gets,"
            " and compute all else there, from the reduced gradients, or before the towers, or from"
            " all towers'"
        )

    def _found(self, ends: Sequence[Any], uses: Uses) -> List[Any]:
        """Return the ops of some towers that an update needs beside the gradients."""
        outside = outer_ops(outer_graph())
        all_reduced = tuple(built.scope for built in all_reduces())

        def is_of_some(op: Any) -> bool:
            is_handle = all(tensor.dtype == tf.resource for tensor in op.outputs)
            is_read = is_handle or op.type in WITHOUT_BATCH
            return op in self._towers_by_op and not is_read and not op.name.startswith(all_reduced)

        def data_of(op: Any) -> List[Any]:
            is_end = op.name.startswith(all_reduced) or is_of_some(op)
            inputs = () if is_end else op.inputs
            return [outside.get(tensor.op, tensor.op) for tensor in inputs]

        last = [getattr(end, "op", end) for end in ends]
        return list(filter(is_of_some, needed_by([*last, *chain(*uses.values())], (), data_of)))
