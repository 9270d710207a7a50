"""What an all-reduce costs: one traced step of a training program, in pieces.

::

    step 103.7 ms; after the pass 3.1 ms: updates 1.9, waiting for copies 1.1, sums 0.1; …
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, DefaultDict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from ..compat import tf1
from ..errors import AuditError
from ..formatting import amount, count, rate, table
from ..graph.record import AllReduce, recorded_in
from . import picture
from .gaps import COPIES, HOST, Gaps
from .pieces import Chunk, Link, Tower, chunks_in, links_in, tower_of
from .remedy import place_of, remedy_for
from .trace import Trace
from .traced import COPY, PACK, PASS, SUM, UNPACK, UPDATE, TracedStep

# what follows the pass, in the words of the summary
_WORDS = {
    UPDATE: "updates",
    COPIES: "waiting for copies",
    SUM: "sums",
    UNPACK: "unpacking",
    PACK: "packing",
    PASS: "other kernels",
}
_SEEN = 0.05  # ms; what is shorter is left out of the summary


class Cost(NamedTuple):
    """What one step cost. ``print`` it, or its ``summary``.

    Attributes:
        step: ms from the step's first kernel to the end of the last one.
        towers: K towers.
        chunks: of this package's all-reduces, in the order in which they are ready.
        links: pairs of towers with copies.
        host_ahead: ms from the host's begin of an op to that of its kernel: the median over the
            kernels of all passes. On CPU devices 0.
        remedy: a sentence about what would help most, if the trace shows it; otherwise empty.
        bars: kernels and copies, for the picture.
    """

    step: float
    towers: Tuple[Tower, ...]
    chunks: Tuple[Chunk, ...]
    links: Tuple[Link, ...]
    host_ahead: float
    remedy: str
    bars: Tuple[picture.Bar, ...]

    @property
    def last(self) -> Tower:
        """The tower that ends last."""
        return max(self.towers, key=lambda tower: tower.end)

    @property
    def summary(self) -> str:
        """The step in one line, as its last tower sees it, and the remedy."""
        line = "; ".join(self._words())
        return f"{line}. {self.remedy}" if self.remedy else line

    def __str__(self) -> str:
        return "\n\n".join([self.summary, *self._tables()])

    def to_json(self) -> str:
        """Return the summary and all numbers, in ms and bytes, as JSON. Bars are left out."""
        fields = self._asdict()
        del fields["bars"]
        for name in ("towers", "chunks", "links"):
            fields[name] = [piece._asdict() for piece in fields[name]]
        return json.dumps({"summary": self.summary, **fields}, indent=1)

    def draw(self, path: Union[str, Path]) -> None:
        """Draw each tower's kernels and copies over time into a .png, .svg or .pdf.

        Raises:
            HierAllreduceError: matplotlib is missing, or has no such format.
        """
        rows = [place_of(tower.device) for tower in self.towers]
        ends = [tower.pass_end for tower in self.towers]
        words = "ms after the first kernel of the step"
        picture.draw(self.bars, rows, self.summary, path, ends, words)

    def _words(self) -> Iterator[str]:
        last = self.last
        pieces = sorted(last.after.items(), key=lambda piece: -piece[1])
        long = [f"{_WORDS[kind]} {ms:.1f}" for kind, ms in pieces if ms >= _SEEN]
        yield f"step {self.step:.1f} ms"
        after = f"after the pass {last.end - last.pass_end:.1f} ms"
        yield f"{after}: {', '.join(long)}" if long else after
        latest = max(self.chunks, key=lambda chunk: chunk.complete, default=None)
        if latest is not None:
            late = latest.complete - last.pass_end
            where = f"{abs(late):.1f} ms {'after' if late > 0 else 'before'} its end"
            yield f"last chunk everywhere {where} ({count(latest.hops, 'hop')})"
        sent: DefaultDict[int, float] = defaultdict(float)
        for link in self.links:
            sent[link.src] += link.ms
        if sent:
            busiest = max(sent, key=lambda tower: sent[tower])
            place = place_of(self.towers[busiest].device)
            yield f"busiest sender {place}: {sent[busiest]:.1f} ms"
        if "GPU:" in last.device:
            yield f"the host was {self.host_ahead:.1f} ms ahead"

    def _tables(self) -> Iterator[str]:
        rows = [["ms", "pass ends", "gaps", "for copies", "for the host", "after it", "ends"]]
        for tower in self.towers:
            waits = [tower.gaps.get(reason, 0.0) for reason in (COPIES, HOST)]
            gaps = [sum(tower.gaps.values()), *waits]
            times = [tower.pass_end, *gaps, tower.end - tower.pass_end, tower.end]
            rows.append([place_of(tower.device), *(f"{time:.1f}" for time in times)])
        yield table(rows)
        if self.chunks:
            yield table(_chunk_rows(self.chunks))
        if self.links:
            yield table(_link_rows(self.links, self.towers), all_right=True)


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
    all_reduces = recorded_in(graph or tf1.get_default_graph())
    if not hasattr(step, "step_stats"):
        raise AuditError(f"{step!r}: expected the RunMetadata of a session.run")
    return cost_of(step.step_stats, all_reduces)


def cost_of(step_stats: Any, all_reduces: Sequence[AllReduce] = ()) -> Cost:
    """Return the cost of a step from its ``step_stats`` and the all-reduces of its graph.

    Raises: as :func:`cost`.
    """
    all_reduces = [built for built in all_reduces if len(built.devices) > 1]
    step = TracedStep(Trace(step_stats), all_reduces)
    if all_reduces and not step.all_reduces:
        raise AuditError("the run has none of the graph's all-reduces; fetch the updates")
    gaps = Gaps(step)
    segments = [gaps.segments(device) for device in step.devices]  # of K towers
    towers = []
    for device, of_tower in zip(step.devices, segments):
        towers.append(tower_of(step, device, of_tower))
    chunks = chunks_in(step)
    links = links_in(step.copies)
    last = max(range(len(towers)), key=lambda tower: towers[tower].end)
    return Cost(
        towers[last].end,
        tuple(towers),
        tuple(chunks),
        tuple(links),
        _host_ahead(step),
        remedy_for(towers, chunks, links, step.copies, segments[last]),
        tuple(_bars(step)),
    )


def _host_ahead(step: TracedStep) -> float:
    """Return the median ms from the host's begin of an op of the passes to that of its kernel."""
    ahead = []
    for device in step.devices:
        for kernel in step.trace.kernels[device]:
            if step.kind(kernel.node) == PASS:
                ahead.append(kernel.begin - step.trace.nodes[kernel.node].start)
    return max(0.0, median(ahead)) if ahead else 0.0


def _bars(step: TracedStep) -> Iterator[picture.Bar]:
    for row, device in enumerate(step.devices):
        for kernel in step.trace.kernels[device]:
            yield picture.Bar(row, step.kind(kernel.node), kernel.begin, kernel.end)
    for copy in step.copies:
        yield picture.Bar(copy.src, COPY, copy.begin, copy.end)


def _chunk_rows(chunks: Sequence[Chunk]) -> List[List[str]]:
    """Return the header and the rows of the table of chunks."""
    rows = [["chunk, ms", "root", "hops", "ready", "sent", "summed", "copied", "updated"]]
    for chunk in chunks:
        texts = ["–" if time is None else f"{time:.1f}" for time in chunk.times]
        rows.append([chunk.name, str(chunk.root), str(chunk.hops), *texts])
    return rows


def _link_rows(links: Sequence[Link], towers: Sequence[Tower]) -> List[List[str]]:
    """Return a K×K table, from row to column: the bytes, and the speed while they were copied."""
    by_pair = {(link.src, link.dst): link for link in links}
    places = [place_of(tower.device) for tower in towers]
    rows = [["from, to", *places]]
    for src, place in enumerate(places):
        row = [place]
        for dst in range(len(towers)):
            link = by_pair.get((src, dst))
            row.append(f"{amount(link.bytes)}, {rate(link.speed)}" if link else ".")
        rows.append(row)
    return rows
