"""Topologies and plans as text for people."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Dict, Iterable, List, Sequence, Set, Tuple

from ..formatting import amount, count, duration, percent, rate, table
from ..planning import (
    Choice,
    Plan,
    TrainingChoice,
    exposed_by_algorithm,
    lane_bytes,
    operands,
    pack,
    seconds_by_algorithm,
)
from ..topology import GB, Topology, guessed

Way = Tuple[Tuple[Tuple[int, ...], int], ...]  # a chunk's reductions as (srcs, dst)


# ---- machines ----------------------------------------------------------------------------------------


def describe(topology: Topology) -> str:
    """Describe a machine: its matrix, its kinds of links with their speeds, what they share, and its bound."""
    gpu = f", {topology.gpu}" if topology.gpu else ""
    parts = [
        f"{topology.name}: {count(len(topology), 'device')}{gpu}",
        topology.table().rstrip(),
        _kinds(topology),
        _switch(topology),
        _shared(topology),
        _bound(topology),
        *remarks(topology),
    ]
    return _paragraphs(parts)


def _paragraphs(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _kinds(topology: Topology) -> str:
    devices = len(topology)
    kinds = Counter(topology.kinds[i][j] for i in range(devices) for j in range(i))
    speeds = link_speeds(topology)
    rows = [(kind, str(pairs), speeds[kind]) for kind, pairs in sorted(kinds.items())]
    return table([("links", "pairs", "GB/s each way"), *rows]) if rows else ""


def _switch(topology: Topology) -> str:
    ports = switch_ports(topology)
    if not ports:
        return ""
    return (
        f"The NVLinks end in an NVSwitch: each GPU has one port out and one port in, of {_range(ports)} GB/s, "
        "that all its NV pairs share."
    )


def _shared(topology: Topology) -> str:
    # each device has ports, so these are not worth a line, unless they were measured
    rows = [(name, f"{speed / GB:.4g}") for name, speed in topology.shared if topology.measured or " of " in name]
    return table([("shared by", "GB/s"), *rows]) if rows else ""


def _bound(topology: Topology) -> str:
    if len(topology) == 1:
        return ""
    rule = "under TensorFlow's rule (one outgoing copy a device at a time)"
    tensorflow = f"At most {pack(topology).bound / GB:.4g} GB/s of gradients can be all-reduced {rule}"
    if topology.measured:  # how fast all links of a device are together cannot be measured with one copy at a time
        return f"{tensorflow}."
    return f"{tensorflow}; {pack(topology, ideal_links=True).bound / GB:.4g} GB/s if links worked side by side."


def remarks(topology: Topology) -> List[str]:
    """Return the warnings about a machine, and where its speeds come from."""
    lines = [f"warning: {warning}" for warning in topology.warnings]
    return [*lines, _source_of_speeds(topology)]


def _source_of_speeds(topology: Topology) -> str:
    """Return whether speeds were measured, or whose were assumed."""
    when = topology.measured
    if when:
        return (
            f"speeds measured on {when.date} with TensorFlow {when.tensorflow}, by hier_allreduce {when.hier_allreduce}"
        )
    assumed = "" if topology.gpu else guessed(topology)
    if assumed:
        return f"speeds as of {assumed} (guessed from the links; give `gpu:`, or put `nvidia-smi -L` above the table)"
    given = ", some of them overridden" if topology.overrides else ""
    return f"speeds of {topology.gpu or 'this kind of device'} from docs/cost-model.md{given}; not measured"


def link_speeds(topology: Topology) -> Dict[str, str]:
    """Return the GB/s of each kind of link, the fastest first: ``45.6``, or ``10 or 45.6`` where its pairs differ."""
    speeds: Dict[str, Set[float]] = {}
    for link in sorted(topology.links, key=lambda link: -link.bandwidth):
        speeds.setdefault(link.kind, set()).add(link.bandwidth)
    return {kind: _range(bandwidths) for kind, bandwidths in speeds.items()}


def switch_ports(topology: Topology) -> List[float]:
    """Return the bytes/s of each device's port to an NVSwitch, one way; nothing without a switch."""
    return [speed for name, speed in topology.shared if name.endswith(" NVSwitch out")]


def _range(speeds: Iterable[float]) -> str:
    """Return GB/s as ``10 or 45.6``, or as ``10 to 45.6`` if there are more than two."""
    distinct = list(dict.fromkeys(f"{speed / GB:.4g}" for speed in sorted(speeds)))
    return " or ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} to {distinct[-1]}"


# ---- plans -------------------------------------------------------------------------------------------


def describe_choice(choice: Choice, topology: Topology, steps: bool = False) -> str:
    """Describe a plan: its time, how near to the bound that is, the other algorithms, and the chunks' ways.

    Args:
        choice: the plan.
        topology: the machine.
        steps: list every step too.
    """
    if isinstance(choice, TrainingChoice) and choice.schedule.buckets > 1:
        compared = _compared(choice.exposed, exposed_by_algorithm(choice, topology), "exposed")
    else:
        compared = _compared(choice.seconds, seconds_by_algorithm(topology, choice.size))
    title, ways = _headline(choice, topology), _steps_and_remarks(choice, topology, steps)
    return _paragraphs([title, _exposed(choice), _times(choice, topology), _work(choice), compared, *ways])


def _exposed(choice: Choice) -> str:
    """Return what is left after a backward pass, if the plan was chosen for one."""
    if not isinstance(choice, TrainingChoice) or not choice.backward.backlog:
        return ""
    return (
        f"exposed      {duration(choice.exposed)} after a backward pass of {duration(choice.backward.seconds)} with"
        f" {duration(choice.backward.backlog)} of kernels queued on each device\n"
        "             what the plan was chosen for; the next lines are for an idle machine (as with --backlog 0)"
    )


def _work(choice: Choice) -> str:
    """Return the number of copies and sums, and the memory that lanes need."""
    plan = choice.plan()
    sums = sum(added > 1 for added in operands(plan))
    line = f"{sum(plan.transfers().values())} copies and {count(sums, 'sum')} to dispatch"
    if not plan.lanes:
        return line
    buckets = len(set(plan.buckets)) or 1
    most = max(lane_bytes(plan, choice.sizes()))
    all_buckets = f", {amount(most)} if all buckets are under way at once" if buckets > 1 else ""
    return (
        f"{line}\nthe {count(plan.lanes, 'lane')} of a GPU together hold up to {amount(most / buckets)} for one bucket"
        f"{all_buckets}\n"
        "lanes are modelled, and executed by TensorFlow in emulated time only: see docs/lanes.md"
    )


def _headline(choice: Choice, topology: Topology) -> str:
    sizes = choice.sizes()
    buckets = len(set(choice.plan().buckets))
    in_buckets = f" in {buckets} buckets of {amount(choice.size / buckets)}" if buckets > 1 else ""
    lanes = f" over {count(choice.recipe.lanes.count, 'lane')}" if choice.recipe.lanes.count else ""
    largest = f" to {amount(max(sizes))}" if max(sizes) > min(sizes) * 1.01 else ""
    chunks = f"{count(len(sizes), 'chunk')} of {amount(min(sizes))}{largest}"
    return f"{topology.name}, {amount(choice.size)}{in_buckets}: {choice.recipe.algorithm}{lanes}, {chunks}"


def _times(choice: Choice, topology: Topology) -> str:
    speed = f" ({rate(choice.size / choice.seconds)})" if choice.seconds else ""
    return (
        f"predicted    {duration(choice.seconds)}{speed}\nlower bound  {duration(choice.bound)}\n"
        f"             {reached(choice, topology)}"
    )


def reached(choice: Choice, topology: Topology) -> str:
    """Return ``98% of TensorFlow's limit, 31% of the limit of the links``."""
    share = percent(choice.share_of_bound)
    if topology.measured or not choice.seconds:
        return f"{share} of TensorFlow's limit"
    of_links = choice.size / pack(topology, ideal_links=True).bound / choice.seconds
    return f"{share} of TensorFlow's limit, {percent(of_links)} of the limit of the links"


def _compared(own: float, seconds: Dict[str, float], what: str = "time") -> str:
    if len(seconds) < 2 or not own:
        return ""
    rows = [
        (algorithm, duration(predicted), f"{predicted / own:.2f}x")
        for algorithm, predicted in sorted(seconds.items(), key=lambda item: item[1])
    ]
    return table([("algorithm", what, "compared with this plan"), *rows])


def _steps_and_remarks(choice: Choice, topology: Topology, steps: bool) -> List[str]:
    plan = choice.plan()
    return [describe_ways(plan, choice.sizes()), str(plan) if steps else "", *remarks(topology)]


def describe_ways(plan: Plan, sizes: Sequence[int]) -> str:
    """Return each distinct way of the sums, the bytes that take it, and whether the copies go the same way back."""
    bytes_by_way: Dict[Way, int] = {}
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
    """Return ``1,2,3→0  0→4``: neighbouring sums on the same device share a term."""
    terms = [(dst, [src for srcs, _ in hops for src in srcs]) for dst, hops in groupby(way, key=lambda hop: hop[1])]
    return "  ".join(f"{','.join(map(str, srcs))}→{dst}" for dst, srcs in terms)


def sums_by_chunk(plan: Plan) -> Dict[int, Way]:
    """Return each chunk's reductions as (srcs, dst), of towers."""
    sums: Dict[int, List[Tuple[Tuple[int, ...], int]]] = {chunk: [] for chunk in range(plan.chunks)}
    for step in plan.steps:
        srcs = tuple(plan.tower(src) for src in getattr(step, "srcs", ()) if plan.tower(src) != plan.tower(step.dst))
        if srcs:  # what enters a tower's lane is no sum
            sums[step.chunk].append((srcs, plan.tower(step.dst)))
    return {chunk: tuple(hops) for chunk, hops in sums.items()}
