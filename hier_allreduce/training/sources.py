"""What some towers' gradients need, but not all: no update of all towers may use it.

An optimizer may keep something of ``compute_gradients`` for its update: the loss, the norm of the
gradients, in an attribute, a collection, a variable. It is that of one tower, and the update would
take it for that of the whole batch. The graph shows it, wherever Python keeps it.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Set

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
from .replicas import WITHOUT_COPIES
from .towers import Column, Towers


class Sources:
    """The ops that the gradients of some, but not all, of K towers need."""

    def __init__(self, towers: Towers):
        self._devices = towers.devices
        # A forward pass may write what is trained, such as a start that depends on the data.
        self._trained = {tensor_of(var).op for column in towers.columns for var in column}
        needed = [needed_by(ops_of_gradients(grads)) for grads in towers.grads]
        common = set.intersection(*needed)
        self._towers_by_op: Dict[Any, Set[int]] = {}
        for tower, ops in enumerate(needed):
            for op in ops - common:
                self._towers_by_op.setdefault(op, set()).add(tower)
        self._uses = uses_by_variable(self._towers_by_op)

    def read(self) -> Dict[Any, Set[int]]:
        """Return the towers that use each variable, by the op that makes it."""
        return {
            source: set().union(*map(self._towers_by_op.__getitem__, ops))
            for source, ops in self._uses.items()
        }

    def read_by_some(self) -> Dict[str, Set[int]]:
        """Return the names of variables that not all towers use, with the towers that do."""
        # What all towers share, such as a table of the program's own, needs no copies.
        read = self.read().items()
        return {source.name: there for source, there in read if len(there) < len(self._devices)}

    def check(
        self, ends: Sequence[Any], uses: Uses, columns: Sequence[Column], optimizer: str
    ) -> None:
        """Check that an update uses no result of some towers only, nor a variable that they write.

        And that what it writes has copies, if only some towers read it.

        Args:
            ends: its last ops, or tensors.
            uses: its ops that use a variable.
            columns: variables of which every tower has a copy.
            optimizer: its class.
        """
        copied = {tensor_of(var).op for column in columns for var in column}
        found = self._found(ends, uses)
        towers: Set[int] = set().union(*map(self._towers_by_op.__getitem__, found))
        fault = ""
        # What is computed of all towers, such as their mean loss, belongs to none.
        if 0 < len(towers) < len(self._devices):
            fault = f"the update uses {min(op.name for op in found)!r}"
        for source, readers in self.read().items():
            if source in self._trained or source not in uses:
                continue
            if any(map(may_write, self._uses[source])):
                fault, towers = f"the update uses {source.name!r}, which gradients write", readers
            elif source in copied:
                continue
            elif any(map(may_write, uses[source])) and len(readers) < len(self._devices):
                raise HierAllreduceError(
                    f"{where(min(readers), self._devices)}: the update writes {source.name!r},"
                    f" which only this tower's gradients read; {WITHOUT_COPIES}"
                )
        if fault:
            raise HierAllreduceError(
                f"{optimizer}: {fault}, of {where(min(towers), self._devices)} only, and would take"
                " it for that of all. Compute it in apply_gradients, from the reduced gradients, or"
                " before the towers, or from all towers'"
            )

    def _found(self, ends: Sequence[Any], uses: Uses) -> List[Any]:
        """Return the ops of some towers that an update needs beside the gradients."""
        outside = outer_ops(outer_graph())
        all_reduced = tuple(built.scope for built in all_reduces())
        waiting = [getattr(end, "op", end) for end in ends]
        for ops in uses.values():
            waiting += ops
        seen: Set[Any] = set()
        found = []
        while waiting:
            op = waiting.pop()
            if op in seen or op.name.startswith(all_reduced):
                continue
            seen.add(op)
            is_handle = all(tensor.dtype == tf.resource for tensor in op.outputs)
            if op in self._towers_by_op and op.type not in WITHOUT_BATCH and not is_handle:
                found.append(op)
                continue
            waiting += [outside.get(tensor.op, tensor.op) for tensor in op.inputs]
        return found
