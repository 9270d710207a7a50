"""``update="replicated"``: every tower updates its variables with the same optimizer.

This is right if an update depends on nothing but the variable, its slots, its gradient and rates.
TensorFlow's own optimizers are such. Of any other nobody can tell, so it runs ``once``.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Dict, Iterator, List, Tuple

import tensorflow as tf

from ..compat import outer_graph, slots_in_any_scope, tf1
from ..errors import HierAllreduceError
from .reads import Reads
from .towers import ReplicatedVariables, Towers, check_slots, warn_of_moved_updates

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


def why_once(optimizer: Any, towers: Towers) -> str:
    """Return why an optimizer has to be called once for all towers; "" if it need not."""
    kind = type(optimizer)
    if kind not in KNOWN:
        return f"{kind.__name__} is not one of TensorFlow's own optimizers"
    for name, value in vars(optimizer).items():
        if callable(value) and hasattr(kind, name):
            return f"{name} of this {kind.__name__} was replaced"
    for _, var in towers.rows[0]:
        if getattr(var, "constraint", None) is not None:
            return f"{var.op.name!r} has a constraint"
    return ""


def why_not_replicated(optimizer: Any, towers: Towers) -> str:
    """Return why a ``KNOWN`` optimizer has to go on once; "" if it need not.

    Raises:
        HierAllreduceError: it has powers of beta already, from an earlier update in this graph.
    """
    kind = type(optimizer)
    graph = outer_graph()
    if any(var.graph is graph for var in optimizer._non_slot_dict.values()):
        raise HierAllreduceError(
            f"{kind.__name__}: an earlier apply_gradients has the same one, and each train op would"
            " advance its powers of beta, at no fixed time of the other's. Give each loss a"
            " TowerOptimizer with another optimizer, or add the losses up, or use update='once'"
        )
    for column in zip(*towers.variables):
        for name in optimizer.get_slot_names():
            slots = [optimizer.get_slot(var, name) for var in column]
            if slots[0] is not None and None in slots:
                return f"{column[0].op.name!r} has a slot on tower 0 only, of an earlier update"
    return ""


def update_replicated(optimizer: Any, towers: Towers) -> Tuple[Any, ReplicatedVariables]:
    """Update each tower's variables on its device, by one of the ``KNOWN`` optimizers.

    Returns the op, and the copies: the variables, and the state that belongs to them.
    """
    reads = Reads(towers.grads)
    variables = towers.variables
    for tower, row in enumerate(variables):
        check_slots(optimizer, dict(enumerate(row)), tower, towers.devices)
    reduced = towers.reduce()
    graph = tf1.get_default_graph()
    rates = _shared_rates(optimizer, towers.devices[0])
    ops: List[Any] = []
    copies: ReplicatedVariables = []
    for tower, device in enumerate(towers.devices):
        own = _optimizer_of(tower, optimizer, rates, variables[tower])
        made_before = len(graph.get_operations())
        with tf1.device(device), towers.scope(tower), slots_in_any_scope():
            pairs = zip(reduced[tower], variables[tower])
            ops.append(own.apply_gradients(list(pairs), name=f"apply_grad_{tower}"))
        added = set(graph.get_operations()[made_before:])
        reads.hold_writes(variables[tower], added)
        if not tower:
            warn_of_moved_updates(optimizer, variables[tower], added)
        copies.append([*variables[tower], *_state_of(own, variables[tower])])
    return tf.group(*ops), copies


def _shared_rates(optimizer: Any, device: Any) -> Dict[str, Any]:
    """Return the rates that are callables or variables, as tensors: all towers read one value."""
    rates = {}
    with tf1.device(device):
        for name, value in vars(optimizer).items():
            if callable(value) or isinstance(value, tf.Variable):
                now = value() if callable(value) else value
                rates[name] = tf.convert_to_tensor(now)
    return rates


def _optimizer_of(tower: int, optimizer: Any, rates: Dict[str, Any], row: List[Any]) -> Any:
    """Return the optimizer with these rates; on other towers than 0 with other powers of beta.

    Slots are shared, because an optimizer keeps them by the variable.
    """
    own = copy.copy(optimizer)
    vars(own).update(rates)
    if tower:
        vars(own)["_non_slot_dict"] = {}
        create = own._create_non_slot_variable

        def create_own(*args: Any, **options: Any) -> Any:
            with _created_for(tower, row):
                return create(*args, **options)

        vars(own)["_create_non_slot_variable"] = create_own
    return own


@contextlib.contextmanager
def _created_for(tower: int, row: List[Any]) -> Iterator[None]:
    """Open a context in which a variable is created in a tower's scope, and is local if they are.

    tensorpack makes the variables of other towers local, so that they are not saved.
    """
    local = set(map(id, tf1.local_variables()))

    def create(creator: Any, **options: Any) -> Any:
        options["name"] = f"tower{tower}/{options['name']}"
        if not local.isdisjoint(map(id, row)):
            options["collections"] = [tf1.GraphKeys.LOCAL_VARIABLES]
        return creator(**options)

    with tf.variable_creator_scope(create):
        yield


def _state_of(optimizer: Any, row: List[Any]) -> List[Any]:
    """Return the slots of a tower's variables and its powers of beta, in one order."""
    graph = outer_graph()
    state = []
    for name in optimizer.get_slot_names():
        slots = [optimizer.get_slot(var, name) for var in row]
        state += [slot for slot in slots if slot is not None]
    powers = {key[0]: var for key, var in optimizer._non_slot_dict.items() if var.graph is graph}
    return state + [powers[name] for name in sorted(powers)]
