"""The update of K towers, for every front end: one optimizer updates each tower's variables."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import is_resource, outer_graph, tf1
from ..configs import is_whole_number
from ..errors import HierAllreduceError
from ..graph.columns import (
    VAR_LIST_ADVICE,
    check_average,
    checked_pairs,
    dtype_of,
    grads_in,
    static_shape,
    variables_in,
)
from ..graph.devices import device_fields
from ..graph.names import where
from .replicas import (
    ReplicatedVariables,
    all_variables,
    find_copies,
    note_copies,
    with_created,
)
from .views import TowerViews
from .wrappers import held_by, once, patched
from .writes import Expressions, let_writes_wait, unequal_ops, without_gpu_kernel, written_by

Pairs = Sequence[Tuple[Any, Any]]  # N (gradient, variable) pairs of one tower

_AT_MAINS = "or use update='main', which updates each variable once"


def check_options(average: Any, update: Any, **counts: Any) -> None:
    """Raise a HierAllreduceError if an option of a front end is invalid."""
    check_average(average)
    if update not in ("replicated", "main"):
        raise HierAllreduceError(f"update={update!r} is unknown; there are 'replicated', 'main'")
    for name, value in counts.items():
        if not is_whole_number(value):
            raise HierAllreduceError(f"{name}={value!r}: expected a number of steps, or 0")


def check_variables(
    rows: Any, devices: Sequence[Any], earlier: Sequence[Sequence[Any]] = ()
) -> Sequence[Pairs]:
    """Return K rows of N (gradient, variable) pairs, as tuples.

    Raises:
        HierAllreduceError: as :func:`.columns.checked_pairs`; or towers share a variable, or pair
            it with others than ``earlier`` copies do; or it is a reference variable, or does not
            fit its gradient.
    """
    rows = checked_pairs(rows, devices)
    owner: Dict[int, int] = {}  # the tower of each id(variable)
    columns: Dict[int, Any] = {}  # the column of each id(variable)
    for column in zip(*earlier):
        columns.update({id(var): column for var in column})
    for tower, row in enumerate(rows):
        names = [var.op.name for _, var in row]
        for n, (grad, var) in enumerate(row):
            first = rows[0][n][1]
            fault = _fault_of_variable(var, grad)
            if owner.setdefault(id(var), tower) != tower:
                fault = (
                    f"the same variable is in the row of {where(owner[id(var)], devices)}; give"
                    f" every tower a copy; {VAR_LIST_ADVICE}"
                )
            known = columns.get(id(var)) or columns.get(id(first))
            if known and not fault and (known[0] is not first or known[tower] is not var):
                fault = (
                    f"it is listed as a copy of {first.op.name!r}, but in an earlier"
                    f" apply_gradients {known[tower].op.name!r} was the copy of"
                    f" {known[0].op.name!r}; list the variables in one order on every tower"
                )
            if fault:
                raise HierAllreduceError(f"{where(tower, devices, n, names)}: {fault}")
    return rows


def _fault_of_variable(var: Any, grad: Any) -> str:
    """Return why a variable cannot be updated with a gradient; "" if it can."""
    if not is_resource(var):
        return (
            "a reference variable, which an update may overwrite while a gradient still reads it;"
            " create it with use_resource=True, or call tf.compat.v1.enable_resource_variables()"
            " first"
        )
    if not isinstance(grad, (tf.Tensor, tf.IndexedSlices)):
        return ""  # None; anything else is refused before it is added up
    shape = static_shape(grad)
    if dtype_of(grad) == dtype_of(var) and shape.is_compatible_with(var.shape):
        return ""
    return (
        f"a gradient of {grad.dtype.name} {shape} for {var.dtype.name} {var.shape}; pair each"
        " gradient with its variable, and cast it to the variable's dtype"
    )


def update_towers(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    scope: Callable[[int], ContextManager] = lambda tower: contextlib.nullcontext(),
    arguments: Optional[Dict[str, Any]] = None,
) -> Tuple[Any, ReplicatedVariables]:
    """Update the variables of each tower on its device.

    Returns the op, and the copies among the variables that it updates or created.

    The towers share ``optimizer``. In every update it sees the variables under tower 0's names, and
    has a state of the tower: see ``views.py``. Only a loss scale is one for all towers, and is
    adapted once, from the first tower's gradients.

    Args:
        optimizer: a ``tf.compat.v1.train.Optimizer``.
        rows: K×N reduced gradients and variables.
        devices: K devices.
        scope: ``scope(tower)`` is the context of a tower's update.
        arguments: more arguments of the optimizer's ``apply_gradients``.

    Raises:
        HierAllreduceError: an earlier update has the same optimizer, and it has a state of its own.
            Or, found only once the ops are there: updates of several towers write one variable, or
            do not compute alike from their own towers' variables, or one draws random numbers,
            calls Python or reads the clock. Then the graph keeps the ops: build the model in a new
            graph.
    """
    optimizers = held_by(optimizer)
    if len(devices) > 1:
        _check_has_no_state(optimizers)
    variables = list(map(variables_in, rows))
    views = TowerViews(variables, optimizers, arguments)
    graph = tf1.get_default_graph()
    ops: List[Any] = []
    created = []
    added = []
    with patched(_loss_scales(optimizers), "update", once):
        for tower, device in enumerate(devices):
            earlier_ops = len(graph.get_operations())
            earlier_variables = set(map(id, all_variables()))
            given = views.arguments(tower)
            with tf1.device(device), scope(tower), views.update_of(tower):
                grads = map(with_rows_on_gpu, grads_in(rows[tower]))
                pairs = list(zip(grads, views.rows[tower]))
                name = f"apply_grad_{tower}"
                ops.append(optimizer.apply_gradients(pairs, name=name, **given))
            now = all_variables()
            created.append([var for var in now if id(var) not in earlier_variables])
            added.append(graph.get_operations()[earlier_ops:])
            let_writes_wait(added[tower], rows[tower])
    copies = with_created(variables, created, views.names_on_tower_0)
    if len(devices) > 1:
        kind = type(optimizer).__name__
        _check_updates(kind, rows, devices, added)
        _check_expressions(kind, rows, devices, added, copies, created)
    warn_of_moved_updates(type(optimizer).__name__, list(itertools.chain(*added)))
    note_copies(copies, devices)
    return tf.group(*ops), copies


def _loss_scales(optimizers: Sequence[Any]) -> List[Any]:
    """Return the dynamic loss scales of optimizers."""
    scales = [getattr(inner, "_loss_scale", None) for inner in optimizers]
    return [scale for scale in scales if hasattr(scale, "update")]


def with_rows_on_gpu(grad: Any) -> Any:
    """Return a gradient whose indices, if it is sparse, are int64 on a GPU.

    There TensorFlow has int32 in host memory. An optimizer that adds up rows of equal indices would
    wait in each step until the GPU has come so far that its unique indices can be copied to the
    host.
    """
    if not isinstance(grad, tf.IndexedSlices) or grad.indices.dtype != tf.int32:
        return grad
    if device_fields(grad.values.device)[3] != "GPU":
        return grad
    return tf.IndexedSlices(grad.values, tf.cast(grad.indices, tf.int64), grad.dense_shape)


def warn_of_moved_updates(kind: str, ops: Sequence[Any]) -> None:
    """Warn if an optimizer's ``ops`` have updates that TensorFlow cannot make on their GPU."""
    for op_type, names in without_gpu_kernel(ops).items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        advice = "use another optimizer"
        if "Sparse" in op_type:
            advice = (
                "use an optimizer whose sparse update has one (Adagrad, Adam, Ftrl, gradient"
                " descent), or Strategy(sparse='dense'), with which a step also changes the rows"
                " that it did not read"
            )
        warnings.warn(
            f"{kind}: TensorFlow has no GPU kernel of {op_type}, which updates"
            f" {names[0]!r}{others}. With allow_soft_placement=True it keeps these variables on"
            f" the CPU and says nothing, else the session fails; {advice}",
            stacklevel=5,  # the call of apply_gradients
        )


def _check_has_no_state(optimizers: Sequence[Any]) -> None:
    """Check that no optimizer has variables of its own in this graph, from an earlier update."""
    graph = outer_graph()
    for inner in optimizers:
        if any(var.graph is graph for var in getattr(inner, "_non_slot_dict", {}).values()):
            raise HierAllreduceError(
                f"{type(inner).__name__}: an earlier apply_gradients has the same one. Each train"
                " op would change its state (Adam: the beta powers) once a step, so that the"
                " towers of the other one would use it half changed, and would diverge. Give each"
                " loss a TowerOptimizer with another optimizer, or add the losses up, or use"
                " update='main'"
            )


def _check_updates(
    kind: str, rows: Sequence[Pairs], devices: Sequence[Any], added: Sequence[Sequence[Any]]
) -> None:
    """Check that K updates, with K lists of ``added`` ops, are alike and share no variable."""
    for phrase in unequal_ops(added[0]):
        raise HierAllreduceError(
            f"{kind}: the update of {where(0, devices)} {phrase}, which no two towers would do"
            f" alike, and they would diverge. Do this once, before the all-reduce, {_AT_MAINS}"
        )
    writes = [written_by(ops) for ops in added]
    _check_each_writes_its_own(kind, devices, writes)
    for tower, row in enumerate(rows):
        for n, (_, var) in enumerate(row):
            first_var = rows[0][n][1]
            count = writes[tower][var.op.name]
            expected = writes[0][first_var.op.name]
            if count != expected:
                raise HierAllreduceError(
                    f"{kind}: the update of {where(tower, devices)} writes {var.op.name!r} {count}"
                    f" times, that of tower 0 writes {first_var.op.name!r} {expected} times, and"
                    " the towers would diverge. Let the optimizer do the same for every tower,"
                    f" {_AT_MAINS}"
                )


def _check_expressions(
    kind: str,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    added: Sequence[Sequence[Any]],
    copies: ReplicatedVariables,
    created: Sequence[Sequence[Any]],
) -> None:
    """Check that K updates write the same values, computed from each tower's own variables."""
    # a variable that only some updates created counts as any other
    shared: Dict[str, str] = {var.op.name: "" for var in itertools.chain(*created)}
    all_copies = find_copies(copies, devices)
    for variables in all_copies:
        shared.update({var.op.name: first.op.name for var, first in zip(variables, all_copies[0])})
    for row in rows:
        for n, (grad, _) in enumerate(row):
            shared.update({tensor.name: f"{part} of gradient {n}" for part, tensor in _parts(grad)})
    written = []
    for tower, ops in enumerate(added):
        # only the tower's own update may use these, because no order is set between two updates
        own = {var.op.name: f"its {first.op.name}" for var, first in zip(copies[tower], copies[0])}
        written.append(Expressions({**shared, **own}).written_by(ops))
    for tower, row in enumerate(rows):
        for (_, var), (_, first) in zip(row, rows[0]):
            if written[tower].get(var.op.name) != written[0].get(first.op.name):
                raise HierAllreduceError(
                    f"{kind}: the update of {where(tower, devices)} computes {var.op.name!r}"
                    f" otherwise than that of tower 0 computes {first.op.name!r}, and the towers"
                    " would diverge. If the optimizer chooses variables by id(), `is` or ref(), let"
                    " it choose by their names, which are tower 0's in every update; it must do the"
                    " same in each call, with the variables of that call"
                )


def _parts(grad: Any) -> List[Tuple[str, Any]]:
    """Return the tensors of a gradient, with what each is."""
    if not isinstance(grad, tf.IndexedSlices):
        return [] if grad is None else [("values", grad)]
    parts = [("values", grad.values), ("indices", grad.indices), ("shape", grad.dense_shape)]
    return [(part, tensor) for part, tensor in parts if tensor is not None]


def _check_each_writes_its_own(
    kind: str, devices: Sequence[Any], writes: Sequence[Counter]
) -> None:
    """Check that no variable is written by several towers' updates."""
    writer: Dict[str, int] = {}
    for tower, counts in enumerate(writes):
        for name in counts:
            first = writer.setdefault(name, tower)
            if first != tower:
                raise HierAllreduceError(
                    f"{kind}: the updates of {where(first, devices)} and of {where(tower, devices)}"
                    f" both write {name!r}, which would change more than once a step. Create one"
                    f" for each tower, {_AT_MAINS}"
                )
