"""When each copy and each sum of an all-reduce happened, predicted and executed.

::

    plan, machine ──predicted_run──► Run ─┐
                                          ├─ Trace ─► summary (bars), Chrome JSON (trace_file)
    RunMetadata (tracing) ─────────► Run ─┘
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Sequence, Tuple

from ..planning import (
    IDLE,
    BackwardPass,
    Copy,
    Plan,
    Prediction,
    Reduce,
    Timing,
    idle_bound,
    ready_times,
    simulate,
)
from ..presets import write_text
from ..topology import Topology, with_lanes
from .bars import COPY, PREDICTED, SUM, Bar, Run
from .trace_file import trace_json


@dataclass(frozen=True)
class Trace:
    """The runs of one all-reduce, executed and predicted, on the same devices. ``print`` shows their summary.

    Attributes:
        runs: at most one of each kind.
        notes: what a reader has to know about the numbers.
    """

    runs: Tuple[Run, ...]
    notes: Tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*(run.summary() for run in self.runs), *self.notes])

    def write(self, path: str) -> None:
        """Write Chrome's JSON trace, which ``ui.perfetto.dev`` and ``chrome://tracing`` open.

        Raises:
            HierAllreduceError: the file cannot be written.
        """
        write_text(path, trace_json(self.runs))


# ---- the predicted run -------------------------------------------------------------------------------


def predicted_run(
    plan: Plan,
    topology: Topology,
    sizes: Sequence[float],
    names: Sequence[str] = (),
    devices: Sequence[str] = (),
    backward: BackwardPass = IDLE,
) -> Run:
    """Simulate a plan and return its bars.

    Args:
        plan: for the topology's devices.
        topology: the machine.
        sizes: bytes of each chunk.
        names: of the chunks (default: none).
        devices: their names (default: the topology's).
        backward: the backward pass that goes on meanwhile; by default all gradients are ready at time 0.

    Raises:
        HierAllreduceError: the plan has another number of devices or chunks.
    """
    total = round(sum(sizes))
    whole = {type(step) for step in plan.steps} == {Reduce, Copy}  # the bound is that of an all-reduce
    bound = idle_bound(topology, total) if total and whole and not backward.seconds else None
    timing = simulate(plan, topology, sizes, backward=backward)
    gradients = ready_times(plan.buckets or (0,) * plan.chunks, sizes, backward)
    bars = _predicted_bars(plan, topology, timing, sizes, names, gradients)
    labels = tuple(devices or with_lanes(topology, plan.lanes).devices)
    return Run(PREDICTED, labels, bars, backward.seconds, bound)


def predicted_trace(prediction: Prediction) -> Trace:
    """Return the run of a prediction, with its backward pass."""
    plan, sizes = prediction.plan, prediction.plan.sizes(prediction.size)
    return Trace((predicted_run(plan, prediction.topology, sizes, backward=prediction.backward),))


def _predicted_bars(
    plan: Plan,
    topology: Topology,
    timing: Timing,
    sizes: Sequence[float],
    names: Sequence[str],
    gradients: Sequence[float],
) -> Tuple[Bar, ...]:
    """Return the bars of a simulated run, each with when its values were there."""
    ends = {(step, src): end for step, src, _, _, end in timing.spans}
    arrival = topology.speeds.arrival
    held: Dict[Tuple[int, int], float] = {}  # (device, chunk) → since when its host can use it
    ready: Dict[Tuple[int, int], float] = {}  # (step, src of a copy, or dst of a sum)
    for number, step in enumerate(plan.steps):
        chunk, dst = step.chunk, step.dst
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        for src in sources:
            ready[number, src] = held.get((src, chunk), gradients[chunk])
        arrived = max(ends[number, src] for src in sources) + arrival
        if (number, dst) in ends:
            ready[number, dst] = max(arrived, held.get((dst, chunk), gradients[chunk]))
            held[dst, chunk] = ends[number, dst]
        else:
            held[dst, chunk] = arrived
    bars = []
    for number, src, dst, start, end in timing.spans:
        chunk = plan.steps[number].chunk
        kind, way = (COPY, f"{src}→{dst}") if src != dst else (SUM, f"sum on {dst}")
        name = f"{chunk_name(chunk, names)} {way}"
        bars.append(Bar(kind, name, src, dst, min(ready[number, src], start), start, end, sizes[chunk]))
    return tuple(bars)


def chunk_name(chunk: int, names: Sequence[str] = ()) -> str:
    """Return ``c3 conv1/W``: a chunk's number, and its name if it has one."""
    return f"c{chunk} {names[chunk]}" if chunk < len(names) else f"c{chunk}"
