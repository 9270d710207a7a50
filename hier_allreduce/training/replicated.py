"""``update="replicated"``: every tower updates its variables with the same optimizer.

This is right if an update depends on nothing but the variable, its slots, its gradient and rates.
TensorFlow's own optimizers are such. Of any other nobody can tell, so it runs ``once``.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any, Dict, List, Set

import tensorflow as tf

from ..compat import outer_graph, slots_in_any_scope, tf1
from ..errors import HierAllreduceError
from ..graph.layout import Layout
from ..graphs import needed_by
from ..planning.strategy import AUTO
from .reads import identity
from .replicas import by_names, hold_owners, kept
from .towers import Applied, Towers, added_ops

_train = tf1.train
# Each applies one kernel to a variable, its slots, its gradient and rates, in TensorFlow 1.15 too.
# Adam alone has other state: the powers of its betas, which advance once a step.
KNOWN = (
    _train.GradientDescentOptimizer,
    _train.MomentumOptimizer,
    _train.AdamOptimizer,
    _train.AdagradOptimizer,
    _train.AdagradDAOptimizer,
    _train.AdadeltaOptimizer,
    _train.RMSPropOptimizer,
    _train.FtrlOptimizer,
    _train.ProximalGradientDescentOptimizer,
    _train.ProximalAdagradOptimizer,
)
# The attributes in which these have their rates.
_RATES = (
    *("_learning_rate", "_lr", "_momentum", "_decay", "_rho", "_epsilon"),
    *("_beta", "_beta1", "_beta2", "_global_step"),
)
# To these a gradient of slices and its dense one are the same: where that is 0, neither moves
# anything, or both move the slice alike. Others, such as Momentum and Ftrl, leave out unread ones.
_ALIKE_ON_SLICES = (
    _train.GradientDescentOptimizer,
    _train.AdamOptimizer,
    _train.AdagradOptimizer,
)


def why_once(optimizer: Any, towers: Towers) -> str:
    """Return why an optimizer has to be called once for all towers; "" if it need not."""
    optimizer_class = type(optimizer)
    if optimizer_class not in KNOWN:
        return f"{optimizer_class.__name__} is not one of TensorFlow's own optimizers"
    # A method of the user's, in the object or in a class, may do anything.
    theirs = [key for key, held in vars(optimizer).items() if callable(held)]
    replaced = [key for key in theirs if hasattr(optimizer_class, key)]
    for base in optimizer_class.__mro__[:-1]:
        for key, method in vars(base).items():
            is_function = inspect.isfunction(method)
            if is_function and not method.__globals__["__name__"].startswith("tensorflow"):
                replaced.append(key)
    if replaced:
        return f"{replaced[0]} of this {optimizer_class.__name__} was replaced"
    for variables in towers.variables:
        seen: Set[Any] = set()
        for var in variables:
            if getattr(var, "constraint", None) is not None:
                return f"{var.op.name!r} has a constraint"
            # Nothing orders its two updates, so that towers would differ.
            if identity(var.op) in seen:
                return f"{var.op.name!r} is twice in its row"
            seen.add(identity(var.op))
    return ""


def with_slices(optimizer: Any, towers: Towers) -> Towers:
    """Return towers whose slices stay slices, unless the user or the optimizer says otherwise.

    Else the number of towers, or of slices in a batch, would decide how the rest of a table is
    trained.
    """
    options = towers.options
    if options.strategy.sparse != AUTO or type(optimizer) in _ALIKE_ON_SLICES:
        return towers
    strategy = replace(options.strategy, sparse="rows")
    return towers._replace(options=options._replace(strategy=strategy))


def apply_replicated(
    optimizer: Any, towers: Towers, layout: Layout, arguments: Dict[str, Any]
) -> Applied:
    """Update each tower's variables on its device, by ``KNOWN`` optimizers, and count the step.

    Raises:
        HierAllreduceError: it has powers of beta already, from an earlier update in this graph.
    """
    variables = towers.variables
    every = tuple(range(len(variables)))
    hold_owners(optimizer, towers, dict.fromkeys(range(len(variables[0])), every))
    if any(key[1] is outer_graph() for key in optimizer._non_slot_dict):
        raise HierAllreduceError(
            f"{type(optimizer).__name__}: an earlier apply_gradients, or one that failed, made its"
            " powers of beta, and each train op would advance them, at no fixed time of the"
            " other's. Give each loss a TowerOptimizer with another optimizer, or add the losses"
            " up, or use update='once'"
        )
    reduced = towers.reduce(layout)
    rates = _rates_of(optimizer)
    ends: List[Any] = []
    owns: List[Any] = []
    state: List[List[Any]] = []
    with added_ops() as added:
        for tower, device in enumerate(towers.devices):
            # Slots are shared by variable, but each tower has its own powers of beta.
            own = _optimizer_of(tower, optimizer, rates, variables[tower])
            with tf1.device(device), towers.scope(tower), slots_in_any_scope():
                pairs = list(zip(reduced[tower], variables[tower]))
                ends.append(own.apply_gradients(pairs, name=f"apply_grad_{tower}"))
            owns.append(own)
            state.append(_state_of(own, variables[tower]))
        # What a tower's transform reads of the step is that before.
        with tf.control_dependencies(ends):
            ends += [tf1.assign_add(step, 1).op for step in arguments.values()]
    # What the update prepared, such as the tensor of a rate, is read by summaries.
    prepared = {key: held for key, held in vars(owns[0]).items() if key not in rates}
    vars(optimizer).update(prepared)
    kept().columns.update(by_names(zip(*state)))
    return Applied(ends, added & needed_by(ends), reduced)


def _rates_of(optimizer: Any) -> Dict[str, Any]:
    """Return the rates that are not numbers, each read once: all towers need one value."""
    rates = {}
    # A copy, because what TensorFlow gives of a reference variable is its memory.
    with tf1.device("/cpu:0"):
        for attribute in _RATES:
            rate = optimizer._call_if_callable(getattr(optimizer, attribute, None))
            if isinstance(rate, (tf.Variable, tf.Tensor)):
                rates[attribute] = tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(rate))
    return rates


def _optimizer_of(tower: int, optimizer: Any, rates: Dict[str, Any], variables: List[Any]) -> Any:
    """Return the optimizer with these rates; on other towers than 0 with other powers of beta.

    Slots are shared, because an optimizer keeps them by the variable.
    """
    own = copy.copy(optimizer)
    vars(own).update(rates)
    if not tower:
        return own
    # The powers have the tower's scope, and are local where its variables are: tensorpack makes
    # these local, so that they are not saved.
    local = {var.op for var in tf1.local_variables()}
    is_local = any(var.op in local for var in variables)

    def create_on_tower(creator: Any, **options: Any) -> Any:
        options["name"] = f"tower{tower}/{options['name']}"
        if is_local:
            options["collections"] = [tf1.GraphKeys.LOCAL_VARIABLES]
        return creator(**options)

    create = own._create_non_slot_variable

    def create_own(*args: Any, **options: Any) -> Any:
        with tf.variable_creator_scope(create_on_tower):
            power = create(*args, **options)
        # The user's optimizer has all state, so that its variables() can be reset.
        optimizer._non_slot_dict[power.op.name, power.graph] = power
        return power

    vars(own).update(_non_slot_dict={}, _create_non_slot_variable=create_own)
    return own


def _state_of(optimizer: Any, variables: List[Any]) -> List[Any]:
    """Return the slots of a tower's variables and its powers of beta, in one order."""
    graph = outer_graph()
    state = []
    for slot_name in optimizer.get_slot_names():
        slots = [optimizer.get_slot(var, slot_name) for var in variables]
        state += [slot for slot in slots if slot is not None]
    # A key has the graph too: an optimizer may have powers in several graphs.
    return state + [var for key, var in optimizer._non_slot_dict.items() if key[1] is graph]
