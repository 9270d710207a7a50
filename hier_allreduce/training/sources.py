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

from ..compat import outer_graph
from ..errors import HierAllreduceError
from ..graph.names import where
from ..graph.record import all_reduces
from ..graphs import needed_by
from .reads import (
    WITHOUT_BATCH,
    Step,
    Uses,
    inputs_of,
    ops_of_gradients,
    outer_ops,
    uses_by_variable,
    writers_by_variable,
)
from .towers import Column, Towers


class Sources:
    """The ops that the gradients of some, but not all, of K towers need.

    Args:
        optimizer: the class of the one that updates.
        towers: the towers.
    """

    def __init__(self, optimizer: str, towers: Towers):
        self._optimizer = optimizer
        self._towers = towers
        towers_by_op: Dict[Any, Set[int]] = defaultdict(set)
        for tower, grads in enumerate(towers.grads):
            for op in needed_by(ops_of_gradients(grads)):
                towers_by_op[op].add(tower)
        self._towers_by_op = self._of_some(towers_by_op)
        self._uses = uses_by_variable(self._towers_by_op)
        # The towers that use a variable, by the op that makes it. What all towers share, such as a
        # table of the program's own, needs no copies.
        read = {source: self._towers_of(ops) for source, ops in self._uses.items()}
        self.read = self._of_some(read)

    def check(self, ends: Sequence[Any], step: Step, columns: Sequence[Column]) -> None:
        """Check that an update uses nothing that only some towers compute or write.

        And that what it writes has copies, if only some towers read it.

        Args:
            ends: its last ops, or tensors.
            step: its step.
            columns: variables of which every tower has a copy.
        """
        # What is computed of all towers, such as their mean loss, belongs to none.
        found = self._found(ends, step.uses)
        towers = self._towers_of(found)
        if towers and len(towers) < len(self._towers.devices):
            raise self._refusal(min(op.name for op in found), towers)
        # A forward pass may write what is trained, such as a start that depends on the data.
        trained = {var.op for var in chain(*self._towers.columns)}
        copied = {var.op for var in chain(*columns)}
        writes = writers_by_variable(self._uses)
        both = self._uses.keys() & step.uses.keys() - trained
        for source in sorted(both, key=lambda op: str(op.name)):
            if source in writes:
                raise self._refusal(source.name, self._towers_of(self._uses[source]))
            if source in self.read.keys() & step.writers.keys() - copied:
                raise HierAllreduceError(
                    f"{where(min(self.read[source]), self._towers.devices)}: the update writes"
                    f" {source.name!r}, which only this tower's gradients read; nobody can tell"
                    " what copies of it the other towers have. Let names differ by the tower's"
                    " scope only, or give TowerOptimizer(…, scopes=…), or list it in the rows, at"
                    " one place on every tower, with the gradient None"
                )
        # No update on one device uses another tower's variable, because there is none.
        for column in columns if self._towers.update == "once" else ():
            for tower, var in enumerate(column[1:], 1):
                if var.op in step.uses:
                    raise self._refusal(var.op.name, {tower})

    def _of_some(self, towers: Dict[Any, Set[int]]) -> Dict[Any, Set[int]]:
        """Return what has some, but not all, towers."""
        return {key: some for key, some in towers.items() if len(some) < len(self._towers.devices)}

    def _towers_of(self, ops: Iterable[Any]) -> Set[int]:
        return set(chain(*map(self._towers_by_op.__getitem__, ops)))

    def _refusal(self, name: str, towers: Set[int]) -> HierAllreduceError:
        tower = where(min(towers), self._towers.devices)
        return HierAllreduceError(
            f"{self._optimizer}: the update uses {name!r}, of {tower}"
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
            return [] if is_end else [outside.get(source, source) for source in inputs_of(op)]

        last = [getattr(end, "op", end) for end in ends]
        return list(filter(is_of_some, needed_by([*last, *chain(*uses.values())], (), data_of)))
