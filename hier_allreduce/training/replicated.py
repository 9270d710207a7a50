"""``update="replicated"``: every tower updates its variables with the same optimizer.

This is right if an update depends on nothing but the variable, its slots, its gradient and rates.
TensorFlow's own optimizers are such. Of any other nobody can tell, so it runs ``once``.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Dict, List, Tuple

import tensorflow as tf

from ..compat import outer_graph, tf1
from ..errors import HierAllreduceError
from ..planning.strategy import AUTO
from .towers import ReplicatedVariables, Towers, check_slots, ops_of_update, warn_of_moved_updates

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
# To these a gradient of rows and its dense one are the same: where that is 0, neither moves
# anything, or both move the row alike. Others, such as Momentum and Ftrl, leave out unread rows.
_ALIKE_ON_ROWS = (
    _train.GradientDescentOptimizer,
    _train.AdamOptimizer,
    _train.AdagradOptimizer,
)


def why_once(optimizer: Any, towers: Towers) -> str:
    """Return why an optimizer has to be called once for all towers; "" if it need not."""
    optimizer_class = type(optimizer)
    if optimizer_class not in KNOWN:
        return f"{optimizer_class.__name__} is not one of TensorFlow's own optimizers"
    # A method of the class that became an attribute of the object may do anything.
    for attribute, value in vars(optimizer).items():
        if callable(value) and hasattr(optimizer_class, attribute):
            return f"{attribute} of this {optimizer_class.__name__} was replaced"
    for _, var in towers.rows[0]:
        if getattr(var, "constraint", None) is not None:
            return f"{var.op.name!r} has a constraint"
    return ""


def with_rows(optimizer: Any, towers: Towers) -> Towers:
    """Return towers whose rows stay rows, unless the user or the optimizer says otherwise.

    Else the number of towers, or of rows in a batch, would decide how other rows are trained.
    """
    options = towers.options
    if options.strategy.sparse != AUTO or type(optimizer) in _ALIKE_ON_ROWS:
        return towers
    strategy = replace(options.strategy, sparse="rows")
    return towers._replace(options=options._replace(strategy=strategy))


def why_not_replicated(optimizer: Any, towers: Towers) -> str:
    """Return why a ``KNOWN`` optimizer has to go on once; "" if it need not.

    Raises:
        HierAllreduceError: it has powers of beta already, from an earlier update in this graph.
    """
    graph = outer_graph()
    if any(var.graph is graph for var in optimizer._non_slot_dict.values()):
        raise HierAllreduceError(
            f"{type(optimizer).__name__}: an earlier apply_gradients has the same one, and each"
            " train op would advance its powers of beta, at no fixed time of the other's. Give each"
            " loss a TowerOptimizer with another optimizer, or add the losses up, or use"
            " update='once'"
        )
    # An earlier update may have left slots where tower 0 alone has them: it goes on there.
    for column in zip(*towers.variables):
        for slot_name in optimizer.get_slot_names():
            slots = [optimizer.get_slot(var, slot_name) for var in column]
            if slots[0] is not None and None in slots:
                return f"{column[0].op.name!r} has a slot on tower 0 only, of an earlier update"
    return ""


def update_replicated(optimizer: Any, towers: Towers) -> Tuple[Any, ReplicatedVariables]:
    """Update each tower's variables on its device, by one of the ``KNOWN`` optimizers.

    Returns the op, and the replicas: the variables, and the state that belongs to them.
    """
    variables = towers.variables
    # Slots are checked before the first op, so that an error leaves the graph as it was.
    for tower, variables_there in enumerate(variables):
        check_slots(optimizer, dict(enumerate(variables_there)), tower, towers.devices)
    reduced = towers.reduce()
    reads = towers.reads(reduced)
    # Rates that a callable or a variable gives are read once, because all towers need one value.
    rates = {}
    with tf1.device(towers.devices[0]):
        for attribute, rate in vars(optimizer).items():
            # Other attributes are the user's, because TensorFlow's own begin so.
            is_rate = attribute.startswith("_")
            if is_rate and (callable(rate) or isinstance(rate, tf.Variable)):
                rates[attribute] = tf.convert_to_tensor(rate() if callable(rate) else rate)
    ops: List[Any] = []
    replicas: ReplicatedVariables = []
    for tower, device in enumerate(towers.devices):
        # Slots are shared by variable, but each tower has its own powers of beta.
        own = _optimizer_of(tower, optimizer, rates, variables[tower])
        with tf1.device(device), towers.scope(tower), ops_of_update() as added:
            pairs = zip(reduced[tower], variables[tower])
            ops.append(own.apply_gradients(list(pairs), name=f"apply_grad_{tower}"))
        reads.hold_writes(variables[tower], added)
        if not tower:
            # What the update prepared, such as the tensor of a rate, is read by summaries.
            prepared = {key: held for key, held in vars(own).items() if key not in rates}
            vars(optimizer).update(prepared)
            warn_of_moved_updates(optimizer, variables[tower], added)
        replicas.append([*variables[tower], *_state_of(own, variables[tower])])
    return tf.group(*ops), replicas


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
    local_ids = set(map(id, tf1.local_variables()))
    is_local = not local_ids.isdisjoint(map(id, variables))

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

    vars(own)["_non_slot_dict"] = {}
    vars(own)["_create_non_slot_variable"] = create_own
    return own


def _state_of(optimizer: Any, variables: List[Any]) -> List[Any]:
    """Return the slots of a tower's variables and its powers of beta, in one order."""
    graph = outer_graph()
    state = []
    for slot_name in optimizer.get_slot_names():
        slots = [optimizer.get_slot(var, slot_name) for var in variables]
        state += [slot for slot in slots if slot is not None]
    # A key has the graph too: an optimizer may have powers in several graphs.
    powers = {key[0]: var for key, var in optimizer._non_slot_dict.items() if var.graph is graph}
    return state + [powers[power] for power in sorted(powers)]
