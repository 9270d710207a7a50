"""What an all-reduce costs: one traced step of a training program, in pieces.

::

    step 104.4 ms; after the pass 1.9 ms: waiting for the processor 1.5, updates 0.1; …
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple, Union

from hier_allreduce import AllReduce, Reduce, all_reduces

from ..text import table
from . import picture
from .remedy import remedy_for
from .step import COPY, PACK, PASS, SUM, UNPACK, UPDATE, Step, is_gpu
from .times import (
    BETWEEN,
    PROCESSOR,
    TOWERS,
    Link,
    TowerTimes,
    complete_by_chunk,
    links_in,
    pass_end_of,
    tower_of,
)

# What follows the passes, in the words of the summary.
_WORDS = {
    UPDATE: "updates",
    SUM: "sums",
    UNPACK: "unpacking",
    PACK: "packing",
    PASS: "other kernels",
    PROCESSOR: "waiting for the processor",
    BETWEEN: "between kernels",
}
# The summary leaves out what takes fewer ms, because it prints one digit.
_SEEN = 0.05


class Cost(NamedTuple):
    """What one step cost. ``print`` it, or its ``summary``.

    Attributes:
        towers: K towers.
        chunks: the ms at which all towers have the sum of a chunk, by its name.
        links: pairs of towers with copies; none on CPU devices.
        processor_ahead: ms from the begin of an op on the processor to that of its kernel: the
            median over the kernels of all passes. On CPU devices 0.
        remedy: a sentence about what would help most, if the trace shows it; otherwise empty.
        bars: kernels and copies, for the picture: by tower and kind, when they began, and their ms.
    """

    towers: Tuple[TowerTimes, ...]
    chunks: Dict[str, float]
    links: Tuple[Link, ...]
    processor_ahead: float
    remedy: str
    bars: picture.Bars

    @property
    def last(self) -> TowerTimes:
        """The tower that ends last."""
        return max(self.towers, key=lambda tower: tower.end)

    @property
    def step(self) -> float:
        """The ms from the step's first kernel to the end of the last one."""
        return self.last.end

    @property
    def pass_end(self) -> float:
        """The ms from the step's first kernel to the end of the last tower's pass."""
        return max(tower.pass_end for tower in self.towers)

    @property
    def summary(self) -> str:
        """The step in one line, and the remedy."""
        clauses = [f"step {self.step:.1f} ms"]
        waiting = "waiting for copies" if self.links else "waiting for other towers"
        pieces = sorted(self.last.after.items(), key=lambda kind_and_ms: -kind_and_ms[1])
        long = [f"{_WORDS.get(kind, waiting)} {ms:.1f}" for kind, ms in pieces if ms >= _SEEN]
        after = f"after the pass {self.step - self.pass_end:.1f} ms"
        clauses.append(f"{after}: {', '.join(long)}" if long else after)
        # The latest chunk tells whether the sums, or what comes after them, end the step.
        if self.chunks:
            late = max(self.chunks.values()) - self.pass_end
            where = "after" if late > 0 else "before"
            clauses.append(f"last chunk everywhere {abs(late):.1f} ms {where} its end")
        # On a CPU device nobody launches kernels, so that there is no lead.
        if is_gpu(self.last.device):
            clauses.append(f"the processor was {self.processor_ahead:.1f} ms ahead")
        line = "; ".join(clauses)
        return f"{line}. {self.remedy}" if self.remedy else line

    def __str__(self) -> str:
        lines = [["ms", "pass ends", "for other towers", "for the processor", "ends"]]
        for tower in self.towers:
            waits = [tower.before.get(reason, 0.0) for reason in (TOWERS, PROCESSOR)]
            times = [tower.pass_end, *waits, tower.end]
            lines.append([tower.place, *(f"{ms:.1f}" for ms in times)])
        return f"{self.summary}\n\n{table(lines)}"

    def to_json(self) -> str:
        """Return the summary and all numbers, in ms and bytes, as JSON. Bars are left out."""
        numbers: Dict[str, Any] = {"summary": self.summary, "step": self.step}
        for field in ("towers", "links"):
            numbers[field] = [piece._asdict() for piece in getattr(self, field)]
        numbers.update(chunks=self.chunks, processor_ahead=self.processor_ahead)
        return json.dumps(numbers, indent=1)

    def draw(self, path: Union[str, Path]) -> None:
        """Draw each tower's kernels and copies over time into a .png, .svg or .pdf."""
        places = [tower.place for tower in self.towers]
        ends = [tower.pass_end for tower in self.towers]
        words = "ms after the first kernel of the step"
        picture.draw(self.bars, places, self.summary, path, ends, words)


def cost(step: Any, graph: Optional[Any] = None) -> Cost:
    """Tell what one traced step cost, and why.

    ::

        from hier_allreduce_tools.cost import cost

        traced = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        seen = tf.compat.v1.RunMetadata()
        session.run(train_op, options=traced, run_metadata=seen)
        print(cost(seen, session.graph))

    :class:`CostHook` does this in a ``MonitoredSession`` or an estimator, ``CostCallback`` in
    tensorpack. Trace a step that others have preceded, because the first ones also allocate and
    compile. Times are those of CUPTI's streams on GPUs, and those of ops on CPU devices.

    Args:
        step: the RunMetadata of a ``session.run`` with ``trace_level=FULL_TRACE``.
        graph: the session's graph, by default the current one.

    Returns:
        The step in pieces, in ms.

    Raises:
        AuditError: the step, or the streams of its GPUs, were not traced; or it ran no all-reduce
            of several towers of the graph, or no kernel on their devices.
    """
    return cost_of(step.step_stats, all_reduces(graph))


def cost_of(step_stats: Any, built: Sequence[AllReduce]) -> Cost:
    """Return the cost of a step from its ``step_stats`` and the all-reduces of its graph.

    Raises: as :func:`cost`.
    """
    told = []
    for one in built:
        moves = [move for tensor in one.tensors for move in tensor.schedule]
        # Copies of variables have no sum, and one tower has none either. A trace cannot tell which
        # device a function has chosen.
        has_sum = len(one.devices) > 1 and any(isinstance(move, Reduce) for move in moves)
        if has_sum and not any(map(callable, one.devices)):
            told.append(one)
    step = Step(step_stats, told)
    last_pass_end = max(pass_end_of(step, device) for device in step.devices)
    towers = tuple(tower_of(step, device, last_pass_end) for device in step.devices)
    bars: picture.Bars = defaultdict(list)
    # The median tells the lead, because a processor that stops for one op makes the mean long.
    ahead = []
    for tower, device in enumerate(step.devices):
        for kernel in step.kernels[device]:
            kind = step.kind(kernel.node)
            bars[tower, kind].append((kernel.begin, kernel.end - kernel.begin))
            if kind == PASS:
                ahead.append(kernel.begin - step.nodes[kernel.node].start)
    for copy in step.copies:
        bars[copy.src, COPY].append((copy.begin, copy.end - copy.begin))
    links = tuple(links_in(step.copies))
    lead = max(0.0, median(ahead)) if ahead else 0.0
    remedy = remedy_for(towers, links)
    return Cost(towers, complete_by_chunk(step), links, lead, remedy, bars)
