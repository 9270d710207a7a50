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

No result changes: an op that waits reads tensors, and no state that an update may change.

An op that waits was made after the first gradients of its tower. So a loss that was built before
them never waits. A ``session.run`` that fetches gradients before they are reduced also runs the
sums for which these wait, and it then needs the inputs of all towers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate
from typing import Any, DefaultDict, Dict, List, Sequence, Set

from ..compat import add_control_edge, takes_control_edges, tf1
from ..needs import needed_by, sources
from ..planning.chunks import Chunk
from .columns import Column
from .devices import any_on_gpu

# The launching thread may be ahead of a sum by this part of a backward pass's ops. A smaller part
# would also stop a thread that is barely ahead.
DISTANCE = 0.5

# A sum of two towers waits for one copy only, and edges then cost more than they gain.
FEWEST_TOWERS = 3
REFERENCE_VARIABLES = ("Variable", "VariableV2")

Starts = DefaultDict[str, DefaultDict[int, List[Any]]]  # ops by device and chunk


def takes_edges(columns: Sequence[Column], devices: Sequence[Any]) -> bool:
    """Return whether the backward passes of K towers of one host can wait for sums.

    Four kinds of graphs are left alone: those of a ``tf.function``, which orders the effects of its
    ops later, and in its own way; those that a session may know, because it does not follow edges
    that it has not seen; those with reference variables; and loops and branches.
    """
    if len(devices) < FEWEST_TOWERS or not any_on_gpu(devices) or not takes_control_edges():
        return False
    # An update may overwrite a reference variable before an op that waits has read it.
    return not any(op.type in REFERENCE_VARIABLES for op in needed_by(_ends_of(columns)))


def limit_lead(columns: Sequence[Column], chunks: Sequence[Chunk], totals: Sequence[Any]) -> None:
    """Let the backward pass of each GPU run at most ``DISTANCE`` ahead of the sums on it.

    Results do not change.

    Args:
        columns: N columns of gradients.
        chunks: C chunks, in the order in which they become ready.
        totals: C complete sums, on the roots of the chunks.
    """
    # Number the ops of the backward pass by the first sum that needs them. Ops of the all-reduce
    # get no number, because they follow the pass.
    ends = _ends_of(columns)
    of_pass = needed_by(ends)
    index_by_op: Dict[Any, int] = {}
    for index, total in enumerate(totals):
        new = needed_by([total.op], without=index_by_op)
        index_by_op.update(dict.fromkeys(new, index))
    index_by_op = {op: index for op, index in index_by_op.items() if op in of_pass}
    starts = _starts(index_by_op, ends, columns[chunks[0].first].grads)

    # Count the ops that a pass has done when each chunk is ready. Those of chunk 0 do not count,
    # because the forward pass is among them.
    ops_of_chunk = Counter(index_by_op.values())
    ops_of_chunk[0] = 0
    done = list(accumulate(ops_of_chunk[index] for index in range(len(totals))))

    # Let the first ops that are too far ahead of a sum wait for it, on the sum's tower. All later
    # ops come behind them.
    for index, (chunk, total) in enumerate(zip(chunks, totals)):
        grad = columns[chunk.first].grads[chunk.root]
        if grad is None:
            continue
        allowed = done[index] + DISTANCE * done[-1]
        too_far = (ops for later, ops in starts[grad.device].items() if done[later] > allowed)
        for op in next(too_far, []):
            add_control_edge(total.op, op)


def _ends_of(columns: Sequence[Column]) -> Set[Any]:
    """Return the ops of all gradients. The pass does not go on there, so they need not wait."""
    return {grad.op for column in columns for grad in column.grads if grad is not None}


def _starts(index_by_op: Dict[Any, int], ends: Set[Any], first_grads: Sequence[Any]) -> Starts:
    """Return the ops by which the backward pass of each GPU comes from a chunk to a later one."""
    # A tower's backward pass begins with its first gradient, because nothing tells it from the
    # forward pass but the order in which ops were made.
    place_by_op = {op: place for place, op in enumerate(tf1.get_default_graph().get_operations())}
    begin_by_device: Dict[str, int] = {}
    for grad in first_grads:
        if grad is not None and any_on_gpu([grad.device]):
            begin = begin_by_device.get(grad.device, len(place_by_op))
            begin_by_device[grad.device] = min(place_by_op[grad.op], begin)
    backward = set()
    for op in index_by_op:
        if place_by_op[op] >= begin_by_device.get(op.device, len(place_by_op)):
            backward.add(op)

    # Sort the ops by chunk, and in a chunk as they were made, because TensorFlow lists the control
    # inputs of an op in an order that differs between processes.
    starts: Starts = defaultdict(lambda: defaultdict(list))
    for op in sorted(backward, key=lambda op: (index_by_op[op], place_by_op[op])):
        index = index_by_op[op]
        is_start = any(src in backward and index_by_op[src] < index for src in sources(op))
        # An op waits only if it reads no state, which an update may change, and is in no loop or
        # branch, which edges from outside do not enter.
        may_wait = not op.op_def.is_stateful and op._get_control_flow_context() is None
        if is_start and may_wait and op not in ends:
            starts[op.device][index].append(op)
    return starts
