"""Equal towers: a state of the session, which steps take and give back; copies; comparisons.

::

    init_op: copies ─► equal ── a step takes it ──► writes, copies ──► equal
                         │                             └─ fails half-way, or a part of it ran ─┐
                         └─ an initializer, or a restore of what is equal ─────► not equal ◄───┘

A flag vouches for the variables that an update writes. It is a resource of the session: it exists
if the towers are equal. A step destroys it before it uses a variable, in one atomic op, which fails
if there is none. So of two steps at once one fails, and has trained nothing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from itertools import chain
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..cluster.collectives import fingerprint
from ..compat import outer_graph, outside_control_flow, tf1
from ..formatting import count
from ..graph.collectives import broadcast as copies_of
from ..graphs import needed_by
from .reads import identity, is_variable, uses_by_variable, wait
from .replicas import Names, by_names, kept
from .towers import Column

# TensorFlow shows both names if a flag is missing.
_TAKE = "hier_allreduce/towers_are_not_equal_run_init_op"
_GIVE = "hier_allreduce/towers_are_equal"
_FLAG = "hier_allreduce_the_towers_are_equal_since_init_op_has_run"


# ---- the flags of updates ------------------------------------------------------------------------


class Flag(NamedTuple):
    """The variables that a flag vouches for, by the names of their columns."""

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


def flags_of(written: Sequence[Column]) -> List[Flag]:
    """Return the flags that vouch for columns, with a new one for those that have none yet."""
    memory, names = kept(), by_names(written)
    vouched = set(chain(*(flag.names for flag in memory.flags)))
    new = tuple(of_column for of_column in names if of_column not in vouched)
    if new and len(memory.devices) > 1:
        memory.flags.append(Flag(new))
    return [flag for flag in memory.flags if not names.keys().isdisjoint(flag.names)]


def watch(trained: Sequence[Column] = ()) -> None:
    """Let initializers of ``trained`` columns clear the flags, and restores of what is equal.

    Equal is what updates write, and what ``init_op`` copies or compares. Initializers of slots do
    not clear them, because a warm restart leaves the towers equal. All of a graph's do, because a
    step may read what another one trains. TensorFlow logs a warning if a session has run before,
    and does not see an edge of an op that existed then.
    """
    memory, graph = kept(), outer_graph()
    initializers = (var.initializer for var in chain(*trained))
    memory.initializers += [op for op in initializers if op is not None]
    restores = (op for op in graph.get_operations() if op.type == "RestoreV2")
    restored: Dict[str, List[Any]] = defaultdict(list)
    for maker, ops in uses_by_variable(needed_by(restores, sources_of=_users_of_value)).items():
        name, *_ = identity(maker)
        restored[name] += ops
    with outside_control_flow():
        for flag in memory.flags:
            ops = list(memory.initializers if trained else ())
            for name in set(chain(*flag.names, *memory.vouched)):
                same, *_ = identity(graph.get_operation_by_name(name))
                ops += restored.get(same, ())
            wait(ops, [flag.take(is_needed=False)])


def _users_of_value(op: Any) -> List[Any]:
    """Return the ops that take a value from an op; none, if it puts that into a variable."""
    outputs = [] if any(map(is_variable, op.inputs)) else op.outputs
    return list(chain(*(tensor.consumers() for tensor in outputs)))


# ---- copies and comparisons ----------------------------------------------------------------------


def broadcast(columns: Sequence[Column], unsaid: Sequence[Column] = ()) -> Any:
    """Return an op that copies tower 0's variables to the other towers, which then are equal.

    It ends with an error if towers differ in ``unsaid`` columns.
    """
    ends = [_assert_equal(unsaid)] if unsaid else []
    ends += copied(columns)
    memory = kept()
    memory.vouched.update(by_names([*columns, *unsaid]))
    watch()
    with tf.control_dependencies(ends):
        return tf.group(*ends, *(flag.give() for flag in memory.flags))


def copied(columns: Sequence[Column]) -> List[Any]:
    """Return ops that give the other towers the values of tower 0's variables."""
    on_tower_0 = []
    for column in columns:
        with _device_of(column[0]):
            on_tower_0.append(column[0].read_value())
    ops = []
    for column, values in zip(columns, zip(*copies_of(on_tower_0, kept().devices))):
        for var, value in zip(column[1:], values[1:]):
            with _device_of(var):
                ops.append(var.assign(value).op)
    kept().copies.update(ops)
    return ops


def _assert_equal(columns: Sequence[Column]) -> Any:
    """Return an op that fails, and names the columns, if their variables are not equal."""
    fingerprints = _fingerprints(columns)
    with tf1.device("/cpu:0"):
        values = tf.reshape(tf.stack(fingerprints), [len(columns), -1])
        is_equal = tf.reduce_all(tf.equal(values, values[:, :1]), 1)
        names = tf.constant([column[0].op.name for column in columns])
        return tf1.Assert(
            tf.reduce_all(is_equal),
            [
                "hier_allreduce: towers differ in variables that their gradients read, and nobody"
                " said whose they are. Add tower 0's to the collection MODEL_VARIABLES, with which"
                " init_op copies it, such as a frozen layer; or to LOCAL_VARIABLES, if each tower"
                " has its own, such as its share of the data. If its name differs by more than the"
                " tower's scope, name the layer, or list the copies in the rows, with the gradient"
                " None:",
                tf.boolean_mask(names, tf.logical_not(is_equal)),
            ],
            summarize=len(columns),
        )


def _device_of(var: Any) -> Any:
    """Return a context for ops of a variable: the tower's GPU may have no kernel of its dtype.

    TensorFlow places the ops of a variable without a device where it places the variable.
    """
    return tf1.device(var.device or None)


def comparison(columns: Sequence[Column]) -> Callable[[Any], str]:
    """Return a function that compares all towers in a session, to the bit; its ops are added now.

    It returns which tower differs, and in which variables; "" if none does.
    """
    names = [column[0].op.name for column in columns]
    fingerprints = _fingerprints(columns)

    def compare(session: Any) -> str:
        values = np.array(session.run(fingerprints)).reshape(len(columns), -1).T  # K×V
        for tower, differ in enumerate(values != values[0]):
            if differ.any():
                variables = count(int(differ.sum()), "variable")
                first = names[int(differ.argmax())]
                return f"tower {tower} differs from tower 0 in {variables}, such as {first!r}"
        return ""

    return compare


def _fingerprints(columns: Sequence[Column]) -> List[Any]:
    """Return V·K fingerprints of the values of variables, read where these are."""
    fingerprints: List[Any] = []
    for var in chain(*columns):
        # One after another, because the CPU needs a copy of each value that is on a GPU.
        with tf.control_dependencies(fingerprints[-1:]), _device_of(var):
            fingerprints.append(fingerprint(var.read_value()))
    return fingerprints
