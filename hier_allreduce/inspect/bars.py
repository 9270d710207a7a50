"""The timeline of an all-reduce, predicted or executed, with statistics of links and senders."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..formatting import amount, duration, percent, rate, table

COPY, SUM = "copy", "sum"
PREDICTED, EXECUTED = "predicted", "executed"
_LINKS = 12  # links that the summary lists

Interval = Tuple[float, float]


class Bar(NamedTuple):
    """A copy from device ``src`` to ``dst``, or something on ``dst`` alone; times in seconds.

    Attributes:
        kind: ``COPY``, or ``SUM`` (any computation).
        name: the chunk, its variables, and from → to.
        src: the number of the sending device; ``dst`` itself unless it is a copy.
        dst: the number of the receiving device.
        ready: when everything that it needs was there.
        start: when it began.
        end: when it was done.
        size: bytes.
        exact: False for a copy of which only the latest possible end is known.
        op: the op's name in the graph, by which TensorBoard lists it too.
    """

    kind: str
    name: str
    src: int
    dst: int
    ready: float
    start: float
    end: float
    size: float = 0.0
    exact: bool = True
    op: str = ""


@dataclass(frozen=True)
class Run:
    """The bars of one run.

    Attributes:
        kind: ``PREDICTED`` or ``EXECUTED``.
        devices: the name of each device.
        bars: copies and computations of the all-reduce.
        last_gradient: when the last gradient was there, in seconds; 0 if that is not known.
        bound: the seconds that the links need at least, without latency; None if the links are not known.
    """

    kind: str
    devices: Tuple[str, ...]
    bars: Tuple[Bar, ...]
    last_gradient: float = 0.0
    bound: Optional[float] = None

    @property
    def begin(self) -> float:
        """When the first of its values was ready, in seconds."""
        return min((bar.ready for bar in self.bars), default=0.0)

    @property
    def end(self) -> float:
        """When the last bar ended, in seconds."""
        return max((bar.end for bar in self.bars), default=self.begin)

    @property
    def seconds(self) -> float:
        """From the first value that was ready to the end of the last bar."""
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        """The seconds from the last gradient to the end: what the backward pass did not hide."""
        return max(0.0, self.end - self.last_gradient)

    def moved(self, seconds: float) -> Run:
        """Return the run with all its times later by ``seconds``."""
        bars = [
            bar._replace(ready=bar.ready + seconds, start=bar.start + seconds, end=bar.end + seconds)
            for bar in self.bars
        ]
        return replace(self, bars=tuple(bars), last_gradient=self.last_gradient + seconds)

    @property
    def copies(self) -> List[Bar]:
        """The copies."""
        return [bar for bar in self.bars if bar.kind == COPY]

    def links(self) -> Dict[Tuple[int, int], Tuple[float, float]]:
        """Return bytes and busy seconds of each link used, ``{(src, dst): (bytes, seconds)}``: exact copies only."""
        by_link: Dict[Tuple[int, int], List[Bar]] = defaultdict(list)
        for bar in self.copies:
            if bar.exact:
                by_link[bar.src, bar.dst].append(bar)
        return {
            link: (sum(bar.size for bar in bars), length(union((bar.start, bar.end) for bar in bars)))
            for link, bars in sorted(by_link.items())
        }

    def sending(self) -> Dict[int, float]:
        """Return the seconds during which each sender sent something, ``{device: seconds}``: exact copies only."""
        return {
            src: length(union((bar.start, bar.end) for bar in self.copies if bar.src == src and bar.exact))
            for src in sorted({bar.src for bar in self.copies})
        }

    def summary(self) -> str:
        """Return the lines of the summary."""
        copies = self.copies
        lines = [
            f"{self.kind}: {duration(self.seconds)} from the first ready gradient to the end,"
            f" {len(copies)} copies, {amount(sum(bar.size for bar in copies))} in all",
        ]
        if self.bound is not None and self.seconds:
            lines.append(f"  bound {duration(self.bound)}: {percent(self.bound / self.seconds)} of it reached")
        if self.kind == EXECUTED and self.last_gradient:
            lines.append(f"  exposed after the last gradient: {duration(self.exposed)}")
        lines += self._link_lines()
        return "\n".join(lines)

    def _link_lines(self) -> Iterator[str]:
        sending, links = self.sending(), self.links()
        unknown = sum(not bar.exact for bar in self.copies)
        if unknown:
            yield (
                f"  {unknown} of {len(self.copies)} copies: only the latest possible end is known, since the op that"
                " read them waited for other values too; links and senders are without them"
            )
        if any(sending.values()):
            busiest = max(sending, key=lambda device: sending[device])
            share = percent(sending[busiest] / self.seconds)
            yield f"  busiest sender: {self.devices[busiest]}, {duration(sending[busiest])} ({share} of the time)"
        most = sorted(links, key=lambda link: -links[link][0])[:_LINKS]
        rows = [
            [f"{self.devices[src]} → {self.devices[dst]}", amount(size), rate(size / busy) if busy else "–"]
            for (src, dst), (size, busy) in ((link, links[link]) for link in most)
        ]
        if rows:
            yield from (f"  {line}" for line in table([["link", "bytes", "while it was busy"], *rows]).splitlines())
        if len(links) > _LINKS:
            yield f"  and {len(links) - _LINKS} more links"


# ---- intervals ---------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> List[Interval]:
    """Return disjoint intervals, in order, that cover the same."""
    merged: List[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
