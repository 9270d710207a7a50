"""What an all-reduce costs: one traced step of a training program, in pieces.

::

    step 103.7 ms; after the pass 3.1 ms: updates 1.9, waiting for copies 1.1, sums 0.1; …
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, DefaultDict, NamedTuple, Optional, Sequence, Tuple, Union

from hier_allreduce.compat import tf1
from hier_allreduce.errors import AuditError
from hier_allreduce.formatting import amount, count, rate, table
from hier_allreduce.graph.devices import is_gpu
from hier_allreduce.graph.record import AllReduce, all_reduces
from . import picture
from .gaps import COPIES, PROCESSOR, Gaps
from .pieces import ChunkTimes, Link, TowerTimes, chunks_in, links_in, tower_of
from .remedy import remedy_for
from .trace import Trace
from .traced import COPY, PACK, PASS, SUM, UNPACK, UPDATE, TracedStep

# What follows the pass, in the words of the summary.
_WORDS = {
    UPDATE: "updates",
    COPIES: "waiting for copies",
    SUM: "sums",
    UNPACK: "unpacking",
    PACK: "packing",
    PASS: "other kernels",
}
# The summary leaves out what takes fewer ms, because it prints one digit.
_SEEN = 0.05


class Cost(NamedTuple):
    """What one step cost. ``print`` it, or its ``summary``.

    Attributes:
        towers: K towers.
        chunks: of this package's all-reduces, in the order in which they are ready.
        links: pairs of towers with copies.
        processor_ahead: ms from the begin of an op on the processor to that of its kernel: the
            median over the kernels of all passes. On CPU devices 0.
        remedy: a sentence about what would help most, if the trace shows it; otherwise empty.
        bars: kernels and copies, for the picture.
    """

    towers: Tuple[TowerTimes, ...]
    chunks: Tuple[ChunkTimes, ...]
    links: Tuple[Link, ...]
    processor_ahead: float
    remedy: str
    bars: Tuple[picture.Bar, ...]

    @property
    def last(self) -> TowerTimes:
        """The tower that ends last."""
        return max(self.towers, key=lambda tower: tower.end)

    @property
    def step(self) -> float:
        """The ms from the step's first kernel to the end of the last one."""
        return self.last.end

    @property
    def summary(self) -> str:
        """The step in one line, as its last tower sees it, and the remedy."""
        last_tower = self.last
        clauses = [f"step {self.step:.1f} ms"]
        longest_first = sorted(last_tower.after.items(), key=lambda kind_and_ms: -kind_and_ms[1])
        long = [f"{_WORDS[kind]} {ms:.1f}" for kind, ms in longest_first if ms >= _SEEN]
        after = f"after the pass {last_tower.end - last_tower.pass_end:.1f} ms"
        clauses.append(f"{after}: {', '.join(long)}" if long else after)
        # The latest chunk tells whether the sums, or what comes after them, end the step.
        latest = max(self.chunks, key=lambda chunk: chunk.complete, default=None)
        if latest is not None:
            late = latest.complete - last_tower.pass_end
            where = f"{abs(late):.1f} ms {'after' if late > 0 else 'before'} its end"
            clauses.append(f"last chunk everywhere {where} ({count(latest.hops, 'hop')})")
        ms_by_src: DefaultDict[int, float] = defaultdict(float)
        for link in self.links:
            ms_by_src[link.src] += link.ms
        if ms_by_src:
            busiest = max(ms_by_src, key=lambda src: ms_by_src[src])
            place = self.towers[busiest].place
            clauses.append(f"busiest sender {place}: {ms_by_src[busiest]:.1f} ms")
        # On a CPU device nobody launches kernels, so that there is no lead.
        if is_gpu(last_tower.device):
            clauses.append(f"the processor was {self.processor_ahead:.1f} ms ahead")
        line = "; ".join(clauses)
        return f"{line}. {self.remedy}" if self.remedy else line

    def __str__(self) -> str:
        lines = [["ms", "pass ends", "gaps", "for copies", "for the processor", "after it", "ends"]]
        for tower in self.towers:
            waits = [tower.gaps.get(reason, 0.0) for reason in (COPIES, PROCESSOR)]
            gaps = [sum(tower.gaps.values()), *waits]
            times = [tower.pass_end, *gaps, tower.end - tower.pass_end, tower.end]
            lines.append([tower.place, *(f"{time:.1f}" for time in times)])
        tables = [table(lines)]
        if self.chunks:
            lines = [["chunk, ms", "root", "hops", "ready", "sent", "summed", "copied", "updated"]]
            for chunk in self.chunks:
                times_of_chunk = ["–" if ms is None else f"{ms:.1f}" for ms in chunk.times]
                lines.append([chunk.name, str(chunk.root), str(chunk.hops), *times_of_chunk])
            tables.append(table(lines))
        # From line to column: the bytes, and the speed while they were copied.
        if self.links:
            link_by_pair = {(link.src, link.dst): link for link in self.links}
            places = [tower.place for tower in self.towers]
            lines = [["from, to", *places]]
            for src, place in enumerate(places):
                cells = [place]
                for dst in range(len(places)):
                    link = link_by_pair.get((src, dst))
                    cells.append(f"{amount(link.bytes)}, {rate(link.speed)}" if link else ".")
                lines.append(cells)
            tables.append(table(lines, all_right=True))
        return "\n\n".join([self.summary, *tables])

    def to_json(self) -> str:
        """Return the summary and all numbers, in ms and bytes, as JSON. Bars are left out."""
        fields = self._asdict()
        del fields["bars"]
        for field in ("towers", "chunks", "links"):
            fields[field] = [piece._asdict() for piece in fields[field]]
        return json.dumps({"summary": self.summary, "step": self.step, **fields}, indent=1)

    def draw(self, path: Union[str, Path]) -> None:
        """Draw each tower's kernels and copies over time into a .png, .svg or .pdf.

        Raises:
            HierAllreduceError: matplotlib is missing, or has no such format.
        """
        places = [tower.place for tower in self.towers]
        ends = [tower.pass_end for tower in self.towers]
        words = "ms after the first kernel of the step"
        picture.draw(self.bars, places, self.summary, path, ends, words)


def cost(step: Any, graph: Optional[Any] = None) -> Cost:
    """Tell what one traced step cost, and why.

    ::

        traced = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        seen = tf.compat.v1.RunMetadata()
        session.run(train_op, options=traced, run_metadata=seen)
        print(hier_allreduce.cost(seen, session.graph))

    :class:`CostHook` does this in a ``MonitoredSession`` or an estimator, ``CostCallback`` in
    tensorpack. Trace a step that others have preceded, because the first ones also allocate and
    compile. Times are those of CUPTI's streams on GPUs, and those of ops on CPU devices, where
    copies take none. If no all-reduce of this package was built in ``graph``, the towers are the
    GPUs, an all-reduce begins where one reads from another, and there are no chunks.

    Args:
        step: the RunMetadata of a ``session.run`` with ``trace_level=FULL_TRACE``.
        graph: the session's graph, by default the current one.

    Returns:
        The step in pieces, in ms.

    Raises:
        AuditError: the step, or the streams of its GPUs, were not traced; or it ran none of the
            graph's all-reduces, or no kernel on their devices.
    """
    all_reduces = all_reduces(graph or tf1.get_default_graph())
    if not hasattr(step, "step_stats"):
        raise AuditError(f"{step!r}: expected the RunMetadata of a session.run")
    return cost_of(step.step_stats, all_reduces)


def cost_of(step_stats: Any, all_reduces: Sequence[AllReduce] = ()) -> Cost:
    """Return the cost of a step from its ``step_stats`` and the all-reduces of its graph.

    Raises: as :func:`cost`.
    """
    # One tower has nothing to send, and its all-reduces have no steps.
    all_reduces = [built for built in all_reduces if len(built.devices) > 1]
    step = TracedStep(Trace(step_stats), all_reduces)
    if all_reduces and not step.all_reduces:
        raise AuditError("the run has none of the graph's all-reduces; fetch the updates")
    gaps = Gaps(step)
    segments = [gaps.segments(device) for device in step.devices]  # of K towers
    towers = [tower_of(step, device, spans) for device, spans in zip(step.devices, segments)]
    chunks = chunks_in(step)
    links = links_in(step.copies)
    # The median tells the lead, because a processor that stops for one op makes the mean long.
    ahead = []
    bars = []
    for tower, device in enumerate(step.devices):
        for kernel in step.trace.kernels[device]:
            kind = step.kind(kernel.node)
            bars.append(picture.Bar(tower, kind, kernel.begin, kernel.end))
            if kind == PASS:
                ahead.append(kernel.begin - step.trace.nodes[kernel.node].start)
    for copy in step.copies:
        bars.append(picture.Bar(copy.src, COPY, copy.begin, copy.end))
    # The tower that ends last tells what the step waited for.
    ends_last = max(range(len(towers)), key=lambda tower: towers[tower].end)
    return Cost(
        tuple(towers),
        tuple(chunks),
        tuple(links),
        max(0.0, median(ahead)) if ahead else 0.0,
        remedy_for(towers, ends_last, segments[ends_last], chunks, links, step.copies),
        tuple(bars),
    )
