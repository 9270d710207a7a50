"""Control edges inside each tower: they limit how far the launching thread runs ahead of the sums.

::

    tower 2, a GPU      gradient 9 ─────► sum of its chunk, on tower 2
                                                  │ control edge
                        first op that gradients 4, 3, … need, and 5 to 9 do not

TensorFlow adds up on the stream that computes gradients. The operands of a sum come from other
GPUs, so the launching thread can queue the sum only when they have arrived. A thread that runs far
ahead has queued the whole backward pass by then: the sum waits for its end, and no copy back
overlaps with it. So the later part of a tower's backward pass waits, before it is launched, until
earlier sums of this tower are queued. For the distance between them the GPU has work.
`benchmarks/emulated.py` measures the effect.

Why there is no cycle: number each op by the first sum that needs it, by data or control edges, on
any tower. Along an edge that exists this number never falls. An edge of this module leads from the
sum of chunk c to an op with a number above c. So no path leads back.

In a ``tf.function`` more edges come later. When it is complete, TensorFlow lets ops with an effect
wait for each other: those that keep a state, or take a resource, such as a variable. Each such edge
leads to an op that was made later. So here every op with an effect counts as if it waited for the
one before it, which is more than TensorFlow will ask for, and the number never falls along these
edges either. Ops that are made after the all-reduce can wait for it, but nothing before waits for
them.

No result changes: an op that waits reads tensors, and no state that an update may change.

The number also tells where a gradient is made, whatever happens to it afterwards: an op that casts,
scales or clips one gradient has the number of this gradient's sum. The forward pass has number 0,
since the first sum needs it. An exception is what only later gradients need, such as the loss of an
early layer. It has one number, and only an op between two numbers above 0 waits.

A ``session.run`` that fetches gradients before they are reduced also runs the sums for which these
wait, and it then needs the inputs of all towers. A session that has run since the pass was built
does not see the edges: TensorFlow logs so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate
from typing import Any, DefaultDict, Dict, List, Optional, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import add_control_edge, orders_effects, tf1
from ..graphs import needed_by, sources
from ..planning.plan import reductions
from .devices import types_of
from .layout import Layout

# The launching thread may be ahead of a sum by this part of a backward pass's ops. A smaller part
# would also stop a thread that is barely ahead.
DISTANCE = 0.5

# A sum of two towers waits for one copy only, and edges then cost more than they gain.
FEWEST_TOWERS = 3
REFERENCE_VARIABLES = ("Variable", "VariableV2")

Edge = Tuple[str, str]  # the op of a sum, and the one that waits for it
Starts = DefaultDict[str, DefaultDict[int, List[Any]]]  # ops by device and chunk


def limit_lead(
    grads: Sequence[Sequence[Any]], layout: Layout, totals: Sequence[Any]
) -> Optional[List[Edge]]:
    """Let the backward pass of each GPU run at most ``DISTANCE`` ahead of the sums on it.

    ``grads`` are K×N gradients, and ``totals`` C complete sums, on the roots of the chunks. Results
    do not change. Return the edges; there are none in a graph that cannot take any. If the pass
    ends before the second sum can begin, there is nothing to hold: None.
    """
    if not layout.edges or not _takes_edges(layout.devices):
        return []
    present = [grad for row in grads for grad in row if grad is not None]
    # A function can also reduce eager tensors, or those of a graph around it.
    if {getattr(grad, "graph", None) for grad in present} != {tf1.get_default_graph()}:
        return []
    ends = {grad.op for grad in present}
    of_pass = needed_by(ends)
    # An update may overwrite a reference variable before an op that waits has read it.
    if any(op.type in REFERENCE_VARIABLES for op in of_pass):
        return []
    index_by_op = _first_sums(of_pass, totals)
    starts = _starts(index_by_op, ends)
    if starts is None:
        return None

    # Count the ops that a pass has done when each chunk is ready. Those of chunk 0 do not count,
    # because the forward pass is among them.
    ops_of_chunk = Counter(index for index in index_by_op.values() if index > 0)
    done = list(accumulate(ops_of_chunk[index] for index in range(len(totals))))

    # The first ops that are too far ahead of a sum wait for it, on the sum's tower. All later ops
    # come behind them.
    edges: List[Edge] = []
    for chunk, total, done_so_far in zip(layout.chunks, totals, done):
        grad = grads[chunk.root][chunk.first]
        # A sum of sums comes too late for the pass.
        if grad is not None and len(reductions(chunk.schedule)) == 1:
            starts_there = starts[grad.device]
            allowed = done_so_far + DISTANCE * done[-1]
            too_far = [later for later in starts_there if done[later] > allowed]
            for op in starts_there[min(too_far)] if too_far else ():
                add_control_edge(total.op, op)
                edges.append((total.op.name, op.name))
    return edges


def _takes_edges(devices: Sequence[Any]) -> bool:
    """Return whether the current graph lets backward passes of K towers wait for sums.

    An op in a loop or a branch cannot wait for one outside. Where TensorFlow orders effects, it
    orders those in loops and branches of TensorFlow 1 in its own way.
    """
    if len(devices) < FEWEST_TOWERS or "GPU" not in types_of(devices) or tf.executing_eagerly():
        return False
    graph = tf1.get_default_graph()
    if graph._get_control_flow_context() is not None:
        return False
    if not orders_effects(graph):
        return True
    return not any(op._get_control_flow_context() for op in graph.get_operations())


def _first_sums(of_pass: Set[Any], totals: Sequence[Any]) -> Dict[Any, int]:
    """Return the number of the first sum that needs an op, for each op of the passes."""
    # Ops of the all-reduce get no number, because they follow the pass.
    earlier = _earlier_effects(tf1.get_default_graph())
    index_by_op: Dict[Any, int] = {}
    for index, total in enumerate(totals):
        needed = needed_by([total.op], index_by_op, lambda op: sources(op) + earlier.get(op, []))
        index_by_op.update(dict.fromkeys(needed, index))
    return {op: index for op, index in index_by_op.items() if op in of_pass}


def _earlier_effects(graph: Any) -> Dict[Any, List[Any]]:
    """Return, by op with an effect, the one before it; nothing where TensorFlow orders no effects.

    Some ops of datasets wait for resources that they do not take: those of the functions in them.
    So the resource does not count.
    """
    earlier: Dict[Any, List[Any]] = {}
    last: List[Any] = []
    for op in graph.get_operations() if orders_effects(graph) else ():
        if op.op_def.is_stateful or any(tensor.dtype == tf.resource for tensor in op.inputs):
            earlier[op] = last
            last = [op]
    return earlier


def _starts(index_by_op: Dict[Any, int], ends: Set[Any]) -> Optional[Starts]:
    """Return the ops that can hold the rest of a GPU's backward pass, by the chunk they enter.

    None: it enters no chunk.
    """
    # The pass enters a chunk where an op on a GPU reads what an earlier chunk needs, too. The
    # forward pass, in chunk 0, enters none. Sort the ops by chunk, and in a chunk as they were
    # made, because TensorFlow lists the control inputs of an op in an order that differs between
    # processes.
    gpus = {op.device for op in ends if types_of([op.device]) == {"GPU"}}
    place_by_op = {op: place for place, op in enumerate(tf1.get_default_graph().get_operations())}
    left_by_op: Dict[Any, int] = {}  # the last chunk that it comes from, of each op that enters one
    for op in sorted(index_by_op, key=lambda op: (index_by_op[op], place_by_op[op])):
        indices = [index_by_op.get(src, 0) for src in sources(op)]
        left = max((index for index in indices if index < index_by_op[op]), default=0)
        if left > 0 and op.device in gpus:
            left_by_op[op] = left
    if not left_by_op:
        return None

    # The pass goes on from an op that a later chunk needs too, and in the last chunk from what
    # comes latest. Another op only finishes a gradient, as clipping does, and holds nothing else.
    before: List[Any] = []
    for op in left_by_op:
        before += sources(op)
    goes_on = needed_by(before)
    latest = max(((index_by_op[op], left) for op, left in left_by_op.items()), default=None)
    starts: Starts = defaultdict(lambda: defaultdict(list))
    for op, left in left_by_op.items():
        index = index_by_op[op]
        is_latest = (index, left) == latest and op not in ends
        # An op waits only if it reads no state, which an update may change, and is in no loop or
        # branch, which edges from outside do not enter.
        may_wait = not op.op_def.is_stateful and op._get_control_flow_context() is None
        if may_wait and (op in goes_on or is_latest):
            starts[op.device][index].append(op)
    return starts
