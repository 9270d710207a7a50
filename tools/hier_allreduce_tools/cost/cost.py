"""What an all-reduce costs: one traced step of a training program, in pieces.

::

    step 104.4 ms; after the pass 1.9 ms: waiting for the processor 1.5, updates 0.1; …
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterable, NamedTuple, Optional, Tuple, Union

from hier_allreduce import AllReduce, all_reduces

from ..text import table
from . import picture
from .remedy import remedy_for
from .step import COPY, Step
from .times import PROCESSOR, TOWERS, Link, TowerTimes, links_of, towers_of

_SEEN = 0.05  # ms; the summary leaves out what is shorter, because it prints one digit


class Cost(NamedTuple):
    """What one step cost. ``print`` it, or its ``summary``.

    Attributes:
        towers: K towers.
        links: pairs of towers with copies; none on CPU devices.
        remedy: a sentence about what would help most, if the trace shows it; otherwise empty.
        bars: kernels and copies, for the picture: by kind, the tower, and their begin and end.
    """

    towers: Tuple[TowerTimes, ...]
    links: Tuple[Link, ...]
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
        after = self.last.after
        longest = sorted(after, key=after.__getitem__, reverse=True)
        pieces = [f"{piece} {after[piece]:.1f}" for piece in longest if after[piece] >= _SEEN]
        line = f"step {self.step:.1f} ms; after the pass {self.step - self.pass_end:.1f} ms"
        line = f"{line}: {', '.join(pieces)}" if pieces else line
        return f"{line}. {self.remedy}" if self.remedy else line

    def __str__(self) -> str:
        lines = [["ms", "pass ends", "for other towers", "for the processor", "ends"]]
        for tower in self.towers:
            waits = [tower.before[reason] for reason in (TOWERS, PROCESSOR)]
            times = [tower.pass_end, *waits, tower.end]
            lines.append([tower.place, *(f"{ms:.1f}" for ms in times)])
        return f"{self.summary}\n\n{table(lines)}"

    def to_json(self) -> str:
        """Return the summary and all numbers, in ms and bytes, as JSON. Bars are left out."""
        numbers: Dict[str, Any] = {"summary": self.summary, "step": self.step}
        for field in ("towers", "links"):
            numbers[field] = [piece._asdict() for piece in getattr(self, field)]
        return json.dumps(numbers, indent=1)

    def draw(self, path: Union[str, Path]) -> None:
        """Draw each tower's kernels and copies over time into a .png, .svg or .pdf."""
        places = [tower.place for tower in self.towers]
        pass_ends = [tower.pass_end for tower in self.towers]
        picture.draw(self.bars, places, self.summary, path, pass_ends)


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
        AuditError: the step, or the streams of its GPUs, were not traced; or it ran no sum of an
            all-reduce of the graph, or no kernel on the devices of its towers.
    """
    return cost_of(step.step_stats, all_reduces(graph))


def cost_of(step_stats: Any, built: Iterable[AllReduce]) -> Cost:
    """Return the cost of a step from its ``step_stats`` and the all-reduces of its graph."""
    step = Step(step_stats, built)
    bars: picture.Bars = defaultdict(list)
    for device, tower in step.towers.items():
        for begin, end, node in step.kernels[device]:
            bars[step.kinds[node]].append((tower, begin, end))
    for (src, _), copies in sorted(step.copies.items()):
        bars[COPY] += [(src, begin, end) for begin, end, _ in copies]
    towers = towers_of(step)
    links = links_of(step)
    return Cost(towers, links, remedy_for(towers, links), bars)
