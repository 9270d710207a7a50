"""Plans as text for people: what was chosen, what it is predicted to take, and why the next best take longer."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Dict, List, Sequence, Tuple

from ..formatting import amount, count, duration, percent, rate, table
from ..planning import Plan, Prediction, alternatives, idle_bound, lane_bytes, pack
from .describe import paragraphs, remarks

Way = Tuple[Tuple[Tuple[int, ...], int], ...]  # a chunk's sums as (srcs, dst)
_REASONS = (
    "copies after the pass: {} on the busiest link",
    "its last bucket alone takes {}",
    "its ops: {} of the host",
)


def describe_prediction(prediction: Prediction, steps: bool = False) -> str:
    """Describe a plan: buckets and algorithms, its times, its cost for the host, the next best ones, and its ways.

    Args:
        prediction: the plan.
        steps: list every step too.
    """
    plan = prediction.plan
    return paragraphs(
        [
            _headline(prediction),
            _times(prediction),
            _lanes(prediction),
            _compared(prediction),
            describe_ways(plan, plan.sizes(prediction.size)),
            str(plan) if steps else "",
            *remarks(prediction.topology),
        ]
    )


def _headline(prediction: Prediction) -> str:
    plan, sizes = prediction.plan, prediction.plan.sizes(prediction.size)
    lanes = f" over {count(plan.lanes, 'lane')}" if plan.lanes else ""
    largest = f" to {amount(max(sizes))}" if max(sizes) > min(sizes) * 1.01 else ""
    chunks = f"{count(len(sizes), 'chunk')} of {amount(min(sizes))}{largest}"
    return f"{prediction.topology.name}, {amount(prediction.size)}: {algorithms_of(prediction)}{lanes}, {chunks}"


def algorithms_of(prediction: Prediction) -> str:
    """Return ``flat in 8 buckets``, or ``flat in 6 buckets, then two-group in 2``."""
    if prediction.buckets == 1:
        return prediction.plan.algorithm
    runs = [(name, len(list(same))) for name, same in groupby(prediction.algorithms)]
    (name, first), *others = runs
    return ", then ".join([f"{name} in {count(first, 'bucket')}", *(f"{name} in {number}" for name, number in others)])


def _times(prediction: Prediction) -> str:
    size, backward, plan = prediction.size, prediction.backward, prediction.plan
    idle, dispatch = prediction.idle_seconds, prediction.topology.speeds.dispatch
    speed = f" ({rate(size / idle)})" if idle else ""
    lines = [f"idle machine {duration(idle)}{speed}, {reached(prediction, idle)}"]
    if backward.seconds and prediction.seconds:
        share = percent(prediction.bound / prediction.seconds)
        lines = [
            f"exposed      {duration(prediction.seconds)} after a backward pass of {duration(backward.seconds)}"
            f" ({rate(size / backward.seconds)} of gradients; --backward changes it)",
            f"             no plan leaves less than {duration(prediction.bound)}, {share} of it: a loose bound",
            *lines,
        ]
    ops = f"{count(plan.copies, 'copy').replace('copys', 'copies')} and {count(plan.sums, 'sum')}"
    host = f", {duration(prediction.host_seconds)} of the host at {duration(dispatch)} for an op" if dispatch else ""
    return "\n".join([*lines, f"to dispatch  {ops}{host}"])


def reached(prediction: Prediction, seconds: float) -> str:
    """Return ``98% of TensorFlow's limit, 31% of the limit of the links``, for so many seconds on an idle machine."""
    topology, size = prediction.topology, prediction.size
    if not seconds:
        return "nothing to reduce"
    share = percent(idle_bound(topology, size, prediction.plan.lanes) / seconds)
    if topology.measured:
        return f"{share} of TensorFlow's limit"
    of_links = size / pack(topology, ideal_links=True).limit / seconds
    return f"{share} of TensorFlow's limit, {percent(of_links)} of the limit of the links"


def _lanes(prediction: Prediction) -> str:
    """Return the memory that lanes need."""
    plan = prediction.plan
    if not plan.lanes:
        return ""
    most = max(lane_bytes(plan, plan.sizes(prediction.size)))
    return (
        f"the {count(plan.lanes, 'lane')} of a GPU together hold up to {amount(most)}\n"
        "lanes are modelled, and executed by TensorFlow in emulated time only: see docs/lanes.md"
    )


def _compared(prediction: Prediction) -> str:
    """Return the next best plans, and what makes each of them take longer."""
    if not prediction.seconds:
        return ""
    rows = [
        (
            algorithms_of(other),
            duration(other.seconds),
            f"{other.seconds / prediction.seconds:.2f}x",
            str(other.plan.copies),
            _reason(other),
        )
        for other in alternatives(prediction)
    ]
    what = "exposed" if prediction.backward.seconds else "time"
    return table([("next best", what, "", "copies", "why"), *rows]) if rows else ""


def _reason(other: Prediction) -> str:
    """Return what a plan needs most of its time for."""
    most = max(range(len(other.needs)), key=other.needs.__getitem__)
    if most == 0 and not other.backward.seconds:
        return f"the busiest link: {duration(other.needs[0])}"
    return _REASONS[most].format(duration(other.needs[most]))


def describe_ways(plan: Plan, sizes: Sequence[float]) -> str:
    """Return each distinct way of the sums, the bytes that take it, and whether the copies go the same way back."""
    bytes_by_way: Dict[Way, float] = {}
    for chunk, way in sums_by_chunk(plan).items():
        bytes_by_way[way] = bytes_by_way.get(way, 0) + sizes[chunk]
    if not any(bytes_by_way):
        return ""
    rows = [(_way_text(way), amount(size)) for way, size in bytes_by_way.items()]
    there, back = (_between_towers(half) for half in (plan.reduce_half(), plan.copy_half()))
    same = all(back[dst, src] == chunks for (src, dst), chunks in there.items())
    note = "The copies of each sum go the same way back." if same else "The copies go another way back: see --steps."
    return f"{table([('sums', 'bytes'), *rows])}\n{note}"


def _between_towers(plan: Plan) -> Counter:
    sent: Counter = Counter()
    for (src, dst), copies in plan.transfers().items():
        if plan.tower(src) != plan.tower(dst):
            sent[plan.tower(src), plan.tower(dst)] += copies
    return sent


def _way_text(way: Way) -> str:
    """Return ``1,2,3→0  0→4``."""
    return "  ".join(f"{','.join(map(str, srcs))}→{dst}" for srcs, dst in way)


def sums_by_chunk(plan: Plan) -> Dict[int, Way]:
    """Return each chunk's sums as (srcs, dst), of towers, from the leaves to the root; not in which order they run."""
    sums: Dict[int, List[Tuple[Tuple[int, ...], int]]] = {chunk: [] for chunk in range(plan.chunks)}
    for step in plan.steps:
        srcs = tuple(plan.tower(src) for src in getattr(step, "srcs", ()) if plan.tower(src) != plan.tower(step.dst))
        if srcs:  # what enters a tower's lane is no sum
            sums[step.chunk].append((srcs, plan.tower(step.dst)))
    return {chunk: _from_leaves(hops) for chunk, hops in sums.items()}


def _from_leaves(hops: Sequence[Tuple[Tuple[int, ...], int]]) -> Way:
    height: Dict[int, int] = {}
    sources: Dict[int, List[int]] = {}
    for srcs, dst in hops:
        height[dst] = max(height.get(dst, 0), 1 + max(height.get(src, 0) for src in srcs))
        sources.setdefault(dst, []).extend(srcs)
    return tuple((tuple(sorted(sources[dst])), dst) for dst in sorted(sources, key=lambda dst: (height[dst], dst)))
