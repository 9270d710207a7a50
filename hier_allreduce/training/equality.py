"""Equal towers: a state of the session, which steps take and give back; copies; comparisons.

::

    init_op: copies ─► equal ── a step takes it ──► writes, copies ──► equal
                         │                             └─ fails half-way, or a part of it ran ─┐
                         └─ an initializer or a restore of a trained variable ─► not equal ◄───┘

A flag vouches for the variables that an update writes. It is a resource of the session: it exists
if the towers are equal. A step destroys it before it uses a variable, in one atomic op, which fails
if there is none. So of two steps at once one fails, and has trained nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..cluster.collectives import fingerprint
from ..compat import add_control_edge, outer_graph, outside_control_flow, tf1
from ..errors import HierAllreduceError
from ..graph.collectives import broadcast as copies_of
from ..graph.lead import may_have_session
from ..graph.names import where
from .options import Options
from .replicas import Names, kept, names_of
from .towers import Column

# TensorFlow shows both names if a flag is missing.
_TAKE = "hier_allreduce/towers_are_not_equal_run_init_op"
_GIVE = "hier_allreduce/towers_are_equal"
_FLAG = "hier_allreduce_the_towers_are_equal_since_init_op_has_run"


# ---- the flags of updates ------------------------------------------------------------------------


class Flag(NamedTuple):
    """The variables that a flag vouches for, by K devices and the names of their columns."""

    devices: Tuple[Any, ...]
    names: Tuple[Names, ...]

    def take(self, is_needed: bool = True) -> Any:
        """Return an op after which no step trains; a step needs the flag, and else fails."""
        with tf1.device("/cpu:0"):
            return tf.raw_ops.DestroyResourceOp(
                resource=self._handle(), ignore_lookup_error=not is_needed, name=_TAKE
            )

    def give(self) -> Any:
        """Return an op after which a step may train."""
        with tf1.device("/cpu:0"):
            return tf.raw_ops.AssignVariableOp(
                resource=self._handle(), value=tf.constant(True), name=_GIVE
            )

    def _handle(self) -> Any:
        # It is in no collection, so that nothing else initializes or saves it.
        digest = hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16]
        return tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=f"{_FLAG}_{digest}")


def flags_of(written: Sequence[Column], devices: Sequence[Any]) -> List[Flag]:
    """Return the flags that vouch for columns, with a new one for those that have none yet."""
    flags = kept().flags
    vouched = {names for flag in flags if flag.devices == tuple(devices) for names in flag.names}
    new = [names for names in names_of(written) if names not in vouched]
    if new and len(devices) > 1:
        flags.append(Flag(tuple(devices), tuple(new)))
    # A step also takes the flags of other towers that have one of its variables.
    names = {var.op.name for column in written for var in column}
    return [flag for flag in flags if any(names.intersection(column) for column in flag.names)]


def watch(trained: Iterable[Column] = ()) -> None:
    """Let initializers of ``trained`` columns, and each restore that there is, clear the flags.

    Initializers of slots do not, because a warm restart leaves the towers equal.
    """
    graph = outer_graph()
    # A session that exists would not see the edges.
    if may_have_session(graph):
        return
    with outside_control_flow():
        restores = [op for op in graph.get_operations() if op.type == "RestoreV2"]
        initializers = [var.initializer for column in trained for var in column]
        ops = [op for op in [*restores, *initializers] if op is not None]
        for flag in kept().flags if ops else ():
            cleared = flag.take(is_needed=False)
            for op in ops:
                add_control_edge(cleared, op)


# ---- copies and comparisons ----------------------------------------------------------------------


def broadcast(
    columns: Sequence[Column], devices: Sequence[Any], unsaid: Sequence[Column] = ()
) -> Any:
    """Return an op that copies tower 0's variables to the other towers, which then are equal.

    It ends with an error if towers differ in ``unsaid`` columns.

    Raises:
        HierAllreduceError: a variable has another dtype or shape than the copy on tower 0.
    """
    # Variables that are found by their names alone may differ, and TensorFlow would name no tower.
    for column in columns:
        kinds = [f"{var.dtype.base_dtype.name} {var.shape}" for var in column]
        for tower, var in enumerate(column):
            is_alike = var.shape.is_compatible_with(column[0].shape)
            if not is_alike or var.dtype.base_dtype != column[0].dtype.base_dtype:
                raise HierAllreduceError(
                    f"{where(tower, devices)}: {var.op.name!r} is {kinds[tower]}, and cannot be"
                    f" a copy of tower 0's {column[0].op.name!r}, which is {kinds[0]}; give them"
                    " one dtype and shape or, if each tower has its own, names that differ by more"
                    " than the towers' scopes"
                )
    on_tower_0 = []
    for column in columns:
        with _device_of(column[0]):
            on_tower_0.append(column[0].read_value())
    ends = [_assert_equal(unsaid)] if unsaid else []
    for column, values in zip(columns, zip(*copies_of(on_tower_0, devices))):
        for var, new_value in zip(column[1:], values[1:]):
            with _device_of(var):
                ends.append(var.assign(new_value).op)
    watch()
    with tf.control_dependencies(ends):
        flags = [flag.give() for flag in kept().flags if flag.devices == tuple(devices)]
        return tf.group(*ends, *flags)


def _assert_equal(columns: Sequence[Column]) -> Any:
    """Return an op that fails, and names the columns, if their variables are not equal."""
    equal = []
    for column in columns:
        values = tf.stack([_fingerprint_of(var) for var in column])
        equal.append(tf.reduce_all(tf.equal(values, values[0])))
    with tf1.device("/cpu:0"):
        names = tf.constant([column[0].op.name for column in columns])
        return tf1.Assert(
            tf.reduce_all(equal),
            [
                "hier_allreduce: towers differ in variables that their gradients read, and nobody"
                " said whose they are. Add tower 0's to the collection MODEL_VARIABLES, with which"
                " init_op copies it, such as a frozen layer; or to LOCAL_VARIABLES, if each tower"
                " has its own, such as its share of the data:",
                tf.boolean_mask(names, tf.logical_not(tf.stack(equal))),
            ],
            summarize=len(columns),
        )


def _device_of(var: Any) -> Any:
    """Return a context for ops of a variable: the tower's GPU may have no kernel of its dtype.

    TensorFlow places the ops of a variable without a device where it places the variable.
    """
    return tf1.device(var.device or None)


class Drift(NamedTuple):
    """How the towers of this host differ.

    Attributes:
        variables: names on tower 0 of those that are not the same, to the bit, on all towers.
        tower: the first one that differs from tower 0.
        own: variables that no update keeps equal, because each tower may have its own.
    """

    variables: Tuple[str, ...] = ()
    tower: int = 0
    own: Tuple[str, ...] = ()

    def __str__(self) -> str:
        sentence = "all towers are equal"
        if self.variables:
            more = f" and {len(self.variables) - 1} more" if self.variables[1:] else ""
            verb = "differ" if more else "differs"
            sentence = f"{self.variables[0]!r}{more} {verb} between tower 0 and tower {self.tower}"
        if self.own:
            listed = ", ".join(map(repr, self.own[:3])) + (", …" if self.own[3:] else "")
            sentence += f"; not compared, because each tower may have its own: {listed}"
        return sentence


def comparison(columns: Sequence[Column], devices: Sequence[Any]) -> Callable[[Any], Drift]:
    """Return a function that compares all towers in a session; its ops are added now."""
    names = [column[0].op.name for column in columns]
    fingerprints: List[List[Any]] = [[] for _ in devices]  # K×V
    before: List[Any] = []
    for column in columns:
        for var, fingerprints_there in zip(column, fingerprints):
            # One after another, because the CPU needs a copy of each value that is on a GPU.
            with tf.control_dependencies(before):
                before = [_fingerprint_of(var)]
            fingerprints_there += before

    def compare(session: Any) -> Drift:
        values = np.array(session.run(fingerprints))
        differ = values != values[0]
        different = [names[n] for n in np.flatnonzero(differ.any(axis=0))]
        towers = np.flatnonzero(differ.any(axis=1))
        return Drift(tuple(different), int(towers[0])) if different else Drift()

    return compare


def _fingerprint_of(var: Any) -> Any:
    """Return the fingerprint of a variable's value, which is read where the variable is."""
    with _device_of(var):
        return fingerprint(var.read_value())


def is_step_to_compare(step: int, every: Optional[int] = None) -> bool:
    """Return whether towers are compared after a step, counted from 1.

    By default that is in steps 1, 2, 4, 8, … and then each thousandth: most faults show at once.
    """
    if every is None:
        return step & (step - 1) == 0 or step % 1000 == 0
    return bool(every) and step % every == 0


class PeriodicComparison:
    """Compares towers after some steps of a training; a difference is an error.

    Args:
        compare: a function that :func:`comparison` has returned.
        options: of the training.

    Attributes:
        steps: those that were counted.
    """

    def __init__(self, compare: Callable[[Any], Drift], options: Options):
        self._compare = compare
        self._options = options
        self.steps = 0
        self._equal_after = 0  # the last step after which all towers were equal

    def after_step(self, session: Any) -> None:
        """Count a step, and compare if it is one to compare.

        Raises:
            HierAllreduceError: the towers differ.
        """
        self.steps += 1
        if not is_step_to_compare(self.steps, self._options.check_replicas_every):
            return
        drift = self._compare(session)
        if drift.variables:
            raise HierAllreduceError(
                f"after step {self.steps} {drift}; they were equal after step {self._equal_after}."
                " Either the program assigns to a variable on one tower only, or the transform does"
                " not do the same on each tower"
            )
        self._equal_after = self.steps
