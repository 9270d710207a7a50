"""Control edges inside each tower: they limit how far the host runs ahead of the sums.

::

    tower 2, a GPU      gradient 9 ─────► sum of its chunk, on tower 2
                                                  │ control edge
                        first op that gradients 4, 3, … need, and 5 to 9 do not

TensorFlow adds up on the stream that computes gradients. The operands of a sum come from other
GPUs, so the host can queue the sum only when they have arrived. A host that runs far ahead has
queued the whole backward pass by then: the sum waits for its end, and no copy back overlaps with
it. So the later part of a tower's backward pass waits, on the host, until earlier sums of this
tower are queued. For the distance between them the GPU has work. `benchmarks/emulated.py` measures
the effect.

No cycle: give each op the number of the first sum that needs it, by data or control edges, on any
tower. Along an edge of the graph this number never falls. An edge of this module leads from the sum
of chunk c to an op with a number above c. So no path leads back.

No result changes: an op that waits reads tensors, and no state that an update may change.

An op that waits was made after the first gradients of its tower. So a loss that was built before
them never waits. A ``session.run`` that fetches gradients before they are reduced also runs the
sums for which these wait, and it then needs the inputs of all towers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import accumulate
from typing import Any, DefaultDict, Dict, List, Sequence, Set

from ..compat import add_control_edge, tf1
from ..planning.plan import is_direct
from .devices import any_on_gpu
from .edges import ends_of, first_needs, sources
from .layout import Layout

DISTANCE = 0.5  # of the ops of a backward pass; less stops a host that is hardly ahead

Starts = DefaultDict[str, DefaultDict[int, List[Any]]]  # ops by device and chunk


def limit_lead(layout: Layout, totals: Sequence[Any]) -> None:
    """Let the backward pass of each GPU run at most ``DISTANCE`` ahead of the sums on it.

    Results do not change. Nothing is done if the layout has no edges.

    Args:
        layout: C chunks, in the order in which they become ready.
        totals: C complete sums, on the roots of the chunks.
    """
    are_direct = [is_direct(chunk.steps) for chunk in layout.chunks]
    if not layout.has_edges or not any(are_direct):
        return  # there are copies only in the second part of an all-reduce
    needed_by = first_needs([total.op] for total in totals)
    # the ops of the pass, in the order of chunks, without those of the all-reduce
    ends = ends_of(layout.columns)
    of_pass = first_needs([ends])
    needed_by = {op: chunk for op, chunk in needed_by.items() if op in of_pass}
    starts = _starts(needed_by, ends, layout.column_of(layout.chunks[0]).grads)
    sizes = Counter(needed_by.values())
    sizes[0] = 0  # it has the forward pass
    done = list(accumulate(sizes[chunk] for chunk in range(len(totals))))
    for number, (chunk, total) in enumerate(zip(layout.chunks, totals)):
        grad = layout.column_of(chunk).grads[chunk.root]
        if grad is None or not are_direct[number]:
            continue
        last = done[number] + DISTANCE * done[-1]
        later = (ops for part, ops in starts[grad.device].items() if done[part] > last)
        for op in next(later, []):
            add_control_edge(total.op, op)


def _starts(needed_by: Dict[Any, int], ends: Set[Any], first_grads: Sequence[Any]) -> Starts:
    """Return the ops by which the backward pass of each GPU comes from a chunk to a later one."""
    made = {op: place for place, op in enumerate(tf1.get_default_graph().get_operations())}
    begun: Dict[str, int] = {}  # on each GPU, the place of its first gradient
    for grad in first_grads:
        if grad is not None and any_on_gpu([grad.device]):
            begun[grad.device] = min(made[grad.op], begun.get(grad.device, len(made)))
    backward = {op for op in needed_by if made[op] >= begun.get(op.device, len(made))}
    starts: Starts = defaultdict(lambda: defaultdict(list))
    for op in filter(backward.__contains__, needed_by):  # in the order of chunks
        chunk = needed_by[op]
        is_start = any(src in backward and needed_by[src] < chunk for src in sources(op))
        if is_start and op not in ends and _may_wait(op):
            starts[op.device][chunk].append(op)
    return starts


def _may_wait(op: Any) -> bool:
    """Return whether an op may wait: it reads no state, and is in no loop and no branch."""
    return not op.op_def.is_stateful and op._get_control_flow_context() is None
