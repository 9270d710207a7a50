"""Control edges inside each tower: they limit how far the host runs ahead of the sums.

::

    tower 2, a GPU      gradient 9 ─────► sum of its chunk, on tower 2
                                                  │ control edge
                        first op that gradients 4, 3, … need, and 5 to 9 do not

TensorFlow adds up on the stream that computes gradients. The operands of a sum come from other GPUs,
so the host can queue the sum only when they have arrived. A host that runs far ahead has queued the
whole backward pass by then: the sum waits for its end, and no copy back overlaps with it. So the
later part of a tower's backward pass waits, on the host, until earlier sums of this tower are
queued. For the distance between them the GPU has work. `benchmarks/emulated.py` measures the effect.

No cycle: an op that waits for the sum of chunk c is needed by no gradient and no sum of chunks 0 to
c, on no tower, by data or control edges. This includes edges of an earlier all-reduce, and of a user
who checks all gradients before any is reduced. An edge of this call leads from a chunk to a later
one.

An op that waits was made after the first gradients, so no loss waits. A ``session.run`` that
fetches gradients before they are reduced also runs the sums that these wait for; it then needs
what the other towers are fed.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Dict, Iterable, List, Sequence, Set

import tensorflow as tf

from ..compat import add_control_edge, is_eager, takes_control_edges, tf1
from ..planning.plan import root_of, sums_in
from .devices import all_on_cpu
from .layout import Layout

DISTANCE = 0.5  # of the ops of a backward pass; less stops a host that is hardly ahead

# ops with a state that a tf.function does not order among each other: reads and random numbers
WITHOUT_ORDER = (
    *("ReadVariableOp", "ResourceGather", "VarHandleOp", "VariableShape"),
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"),
)


def limit_lead(layout: Layout, totals: Sequence[Any]) -> None:
    """Let the backward pass of each GPU run at most ``DISTANCE`` ahead of the sums on it.

    Results do not change. Ops in loops and branches are left alone, and so is a graph that a
    session knows: a session cannot run ops that got an edge after it had seen them.

    Args:
        layout: C chunks, in the order in which they become ready.
        totals: C complete sums, on the roots of the chunks.
    """
    nothing_travels = len(layout.devices) == 1 or not layout.chunks
    if nothing_travels or all_on_cpu(layout.devices) or not takes_control_edges():
        return
    grads = [_grads_of(layout, chunk) for chunk in range(len(layout.chunks))]
    parts = _parts(grads)
    starts = _starts(parts, grads[0])
    done = list(accumulate(len(part) for part in [[], *parts[1:]]))  # without the forward pass
    if _orders_effects(grads[0]):
        return
    needed: Set[Any] = set()  # by the sums so far, also through control edges of the user
    for chunk, (schedule, total) in enumerate(zip(layout.schedules, totals)):
        needed.update(_ancestors(_ops_of(total), needed))
        root = layout.columns[layout.chunks[chunk].ranges[0].number].grads[root_of(schedule)]
        is_direct = len(sums_in(schedule)) == 1  # a sum of sums comes too late for the pass
        if is_direct and _is_in_straight_line(total) and _is_of_this_graph(root):
            last = done[chunk] + DISTANCE * done[-1]
            later = [ops for ops, at in zip(starts, done) if at > last]
            for op in _first_on(root.op.device, later):
                if op not in needed:
                    add_control_edge(total.op, op)


def _grads_of(layout: Layout, chunk: int) -> List[Any]:
    """Return the ops of the gradients in a chunk, on all towers."""
    columns = [layout.columns[part.number] for part in layout.chunks[chunk].ranges]
    grads = [grad for column in columns for grad in column.grads]
    return [grad.op for grad in grads if _is_of_this_graph(grad)]


def _ops_of(total: Any) -> List[Any]:
    """Return the ops of a sum, which may be sparse."""
    tensors = [total.values, total.indices] if isinstance(total, tf.IndexedSlices) else [total]
    return [tensor.op for tensor in tensors if _is_of_this_graph(tensor)]


def _orders_effects(first_grads: Sequence[Any]) -> bool:
    """Return whether the graph is a ``tf.function``'s that has effects behind its first gradient.

    A ``tf.function`` runs ops with effects, such as prints and assignments, in the order in which
    they were made, and adds the edges for that when it is complete. Then an edge from a sum to an
    earlier op could close a cycle.
    """
    graph = tf1.get_default_graph()
    if not hasattr(graph, "capture"):
        return False
    ops = graph.get_operations()
    behind = ops[min(ops.index(op) for op in first_grads) :] if first_grads else ops
    return any(op.op_def.is_stateful and op.type not in WITHOUT_ORDER for op in behind)


def _parts(grads: Sequence[List[Any]]) -> List[List[Any]]:
    """Return for each chunk the ops that its gradients need, and those of earlier chunks do not."""
    known: Set[Any] = set()
    parts: List[List[Any]] = []
    for ends in grads:
        part = _ancestors(ends, known)
        known.update(part)
        parts.append(part)
    return parts


def _ancestors(ends: Iterable[Any], known: Set[Any]) -> List[Any]:
    """Return some ops and all that they need, but for known ones."""
    found: Dict[Any, None] = {}
    waiting = list(ends)
    while waiting:
        op = waiting.pop()
        if op not in known and op not in found:
            found[op] = None
            waiting.extend(tensor.op for tensor in op.inputs)
            waiting.extend(op.control_inputs)
    return list(found)


def _starts(parts: Sequence[List[Any]], first_grads: Iterable[Any]) -> List[List[Any]]:
    """Return the ops of each part by which the backward pass comes to it from earlier parts."""
    made = {op: place for place, op in enumerate(tf1.get_default_graph().get_operations())}
    begun: Dict[str, int] = {}  # on each device, the place of its first gradient
    for op in first_grads:
        begun[op.device] = min(made[op], begun.get(op.device, made[op]))
    known: Set[Any] = set()
    starts = []
    for part in parts:
        later = [op for op in part if made[op] > begun.get(op.device, len(made))]
        first = [op for op in later if _reads_only(op, known)]
        starts.append([op for op in first if op._get_control_flow_context() is None])
        known.update(part)
    return starts


def _reads_only(op: Any, known: Set[Any]) -> bool:
    sources = [tensor.op for tensor in op.inputs]
    return bool(sources) and all(source in known for source in sources)


def _first_on(device: str, starts: Sequence[List[Any]]) -> List[Any]:
    """Return the starts of the first part that has some on a device."""
    on_device = ([op for op in ops if op.device == device] for ops in starts)
    return next(filter(None, on_device), [])


def _is_of_this_graph(tensor: Any) -> bool:
    if not isinstance(tensor, tf.Tensor) or is_eager(tensor):
        return False
    return tensor.graph is tf1.get_default_graph()


def _is_in_straight_line(total: Any) -> bool:
    return _is_of_this_graph(total) and total.op._get_control_flow_context() is None
