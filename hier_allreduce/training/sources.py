"""What some towers' gradients need, but not all: no update of all towers may use it.

An optimizer may keep something of ``compute_gradients`` for its update: the loss, the norm of the
gradients, in an attribute, a collection, a variable. It is that of one tower, and the update would
take it for that of the whole batch. The graph shows it, wherever Python keeps it.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Set

from ..compat import outer_graph, tensor_of
from ..errors import HierAllreduceError
from ..graph.names import where
from ..graph.record import all_reduces
from ..needs import needed_by
from .reads import (
    Uses,
    has_batch,
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

    def check_update(self, ends: Sequence[Any], uses: Uses, known: Set[Any], name: str) -> None:
        """Check that an update uses no result of some towers only, nor a variable that they write.

        Args:
            ends: the update's last ops, or tensors.
            uses: its ops that use a variable.
            known: the ops that make variables of which every tower has a copy.
            name: the optimizer's class.
        """
        towers: Set[int] = set()
        found = self._found(ends, uses)
        for op in found:
            towers |= self._towers_by_op[op]
        fault = ""
        # What is computed of all towers, such as their mean loss, belongs to none.
        if 0 < len(towers) < len(self._devices):
            fault = f"the update uses {min(op.name for op in found)!r}"
        for source, ops in self._uses.items():
            if source in uses and source not in known and any(map(may_write, ops)):
                fault = f"the update uses {source.name!r}, which gradients write"
                towers = self._towers_by_op[ops[0]]
        if fault:
            raise HierAllreduceError(
                f"{name}: {fault}, of {where(min(towers), self._devices)} only, and would take it"
                " for that of all. Compute it in apply_gradients, from the reduced gradients, or"
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
            if op in self._towers_by_op and has_batch(op):
                found.append(op)
                continue
            waiting += [outside.get(tensor.op, tensor.op) for tensor in op.inputs]
        return found

    def check_copies(self, columns: Sequence[Column], uses: Uses) -> None:
        """Check that ``columns`` have what an update writes and only some towers read."""
        copied = {tensor_of(var).op for column in columns for var in column}
        for source, towers in self.read().items():
            is_written = any(map(may_write, uses.get(source, ())))
            if is_written and source not in copied and len(towers) < len(self._devices):
                raise HierAllreduceError(
                    f"{where(min(towers), self._devices)}: the update writes {source.name!r}, which"
                    f" only this tower's gradients read; {WITHOUT_COPIES}"
                )
