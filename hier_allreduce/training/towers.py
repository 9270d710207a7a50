"""What every update needs: K rows of gradients and variables, and how they are reduced."""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Sequence,
    Set,
    Tuple,
)

import tensorflow as tf

from ..compat import tf1
from ..errors import HierAllreduceError
from ..graph import all_reduce, checked_layout
from ..graph.columns import dtype_of, fits
from ..graph.layout import Layout
from ..graph.names import variable_names, where
from ..graph.rows import grads_in, variables_in
from ..graph.substitution import Call
from .options import Options
from .reads import has_state, initial_ops

Pairs = Sequence[Tuple[Any, Any]]  # N (gradient, variable) pairs of one tower
Column = Sequence[Any]  # the K replicas of one variable
GRADIENTS = (tf.Tensor, tf.IndexedSlices)


class Applied(NamedTuple):
    """An optimizer's update of some towers' variables, before anything is copied."""

    ends: List[Any]  # the last ops, or tensors
    added: Set[Any]  # all ops
    reduced: Sequence[Sequence[Any]]  # the rows of gradients that it got
    # If each variable has a root: that tower, by the variable's place in the row, and what copies N
    # values from there to all, K×N out.
    roots: Mapping[int, int] = MappingProxyType({})
    copy: Callable[[List[Any]], Sequence[Sequence[Any]]] = lambda values: ()


class Towers(NamedTuple):
    """K towers whose gradients are ready, for :func:`.update.update_towers`, which checks them."""

    rows: Sequence[Pairs]  # K×N gradients, which are not reduced, and variables
    devices: Sequence[Any]
    options: Options
    # The context of a tower's update.
    scope: Callable[[int], ContextManager] = lambda tower: contextlib.nullcontext()
    front_end: str = "towers"  # or "tensorpack"
    update: str = ""  # one of the three, once it is chosen

    @property
    def grads(self) -> List[Any]:
        """K×N gradients."""
        return list(map(grads_in, self.rows))

    @property
    def variables(self) -> List[List[Any]]:
        """K×N variables."""
        return list(map(variables_in, self.rows))

    @property
    def columns(self) -> List[Column]:
        """N columns of K variables."""
        return list(zip(*self.variables))

    def place(self, tower: int, n: int) -> str:
        """Return ``tower 3 (/gpu:3), variable 5 ('tower3/w')``, which begins an error message."""
        return where(tower, self.devices, n, self.rows[tower][n][1].op.name)

    def lay_out(self) -> Layout:
        """Return the layout of the all-reduce; ``"sharded"`` each variable has one root."""
        names = variable_names(self.variables, self.devices)
        options = self.options.average, self.options.strategy, self.options.cluster
        call = Call(self.grads, tuple(self.devices), *options, self.front_end, self.update)
        sizes = [var.dtype.size * (var.shape.num_elements() or 0) for var in self.variables[0]]
        return checked_layout(call, names, sizes if self.update == "sharded" else None)

    def reduce(self, layout: Layout) -> List[Sequence[Any]]:
        """Return K×N reduced gradients, transformed, on their towers."""
        reduced = all_reduce(self.grads, layout)
        return [self.transformed(tower, grads) for tower, grads in enumerate(reduced)]

    def transformed(self, tower: int, reduced: Sequence[Any]) -> Sequence[Any]:
        """Return a tower's N reduced gradients as its update gets them."""
        transform = self.options.transform
        if transform is None:
            return reduced
        with tf1.device(self.devices[tower]), tf1.name_scope("transform"), added_ops() as added:
            transformed = transform(list(reduced))
        # Where other towers than 0 have a call, too, its state would advance several times a step.
        states = sorted(op.name for op in added - initial_ops() if has_state(op)) if tower else ()
        if states:
            raise HierAllreduceError(
                f"{where(tower, self.devices)}: transform is called for each tower, and"
                f" {states[0]!r} in it has state, so that it would not do the same in each call;"
                " use update='once', with which it is called once, on tower 0"
            )
        # An update takes gradients by their place, so each must still fit the variable there.
        grads = list(transformed)
        if len(grads) != len(reduced):
            raise HierAllreduceError(
                f"{where(tower, self.devices)}: transform gets a list of {len(reduced)} gradients"
                f" and must return as many, in the same order, not {transformed!r}"
            )
        self.check_fit(tower, grads, "transform returned")
        return grads

    def check_fit(self, tower: int, grads: Sequence[Any], given: str) -> None:
        """Raise a HierAllreduceError if one of N gradients does not fit its variable.

        TensorFlow would end the process where its kernel gets another dtype.
        """
        for n, (grad, (_, var)) in enumerate(zip(grads, self.rows[tower])):
            if grad is not None and not (isinstance(grad, GRADIENTS) and fits(grad, var)):
                raise HierAllreduceError(
                    f"{self.place(tower, n)}: {given} {grad!r} for a variable of {dtype_of(var)}"
                    f" {var.shape}; give a gradient of this shape, and cast it to this dtype"
                )


@contextlib.contextmanager
def added_ops() -> Iterator[Set[Any]]:
    """Yield the set of the ops that are added in this context; it is empty until that closes."""
    graph = tf1.get_default_graph()
    made_before = len(graph.get_operations())
    added: Set[Any] = set()
    yield added
    added.update(graph.get_operations()[made_before:])
