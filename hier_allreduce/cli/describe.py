"""Topologies and plans, on one machine and on several, as text for people."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import Dict, Iterable, List, Sequence, Set, Tuple

from ..formatting import amount, count, duration, percent, rate, table
from ..planning import (
    Choice,
    HostsChoice,
    Plan,
    Reduce,
    choose,
    nic_of,
    nics_used,
    pack,
    seconds_by_algorithm,
    wire_seconds,
)
from ..topology import (
    GB,
    Network,
    Topology,
    balanced_chunk,
    guessed,
    latency_overtakes,
    ring_seconds,
    tree_pays_from,
    tree_seconds,
)


def describe(topology: Topology) -> str:
    """What was understood of a machine: its table, its kinds of links with their speeds, what is shared, its bound."""
    devices = len(topology)
    gpu = f", {topology.gpu}" if topology.gpu else ""
    parts = [f"{topology.name}: {count(devices, 'device')}{gpu}", topology.table().rstrip()]
    kinds = Counter(topology.kinds[i][j] for i in range(devices) for j in range(i))
    speeds = link_speeds(topology)
    if kinds:
        rows = [("links", "pairs", "GB/s each way")]
        rows += [(kind, str(pairs), speeds[kind]) for kind, pairs in sorted(kinds.items())]
        parts.append(table(rows))
    ports = switch_ports(topology)
    if ports:
        parts.append(
            f"The NVLinks end in an NVSwitch: each GPU has one port out and one port in, of {_either(ports)} GB/s, "
            "that all its NV pairs share."
        )
    shared = [(name, f"{speed / GB:.4g}") for name, speed in topology.shared if " of " in name]
    if shared:
        parts.append(table([("shared by", "GB/s"), *shared]))
    if devices > 1:
        parts.append(
            f"At most {pack(topology).bound / GB:.4g} GB/s of gradients can be all-reduced under TensorFlow's rule "
            f"(one outgoing copy a device at a time); {pack(topology, ideal_links=True).bound / GB:.4g} GB/s if links "
            "worked side by side."
        )
    return "\n\n".join([*parts, *remarks(topology)])


def remarks(topology: Topology) -> List[str]:
    """The warnings about a machine, and whose speeds it was given where nobody said what GPUs it has."""
    guess = "" if topology.gpu else guessed(topology)
    how = "guessed from the links; give `gpu:`, or paste `nvidia-smi -L` along"
    warnings = [f"warning: {warning}" for warning in topology.warnings]
    return warnings + [f"speeds as of {guess} ({how})"] * bool(guess)


def link_speeds(topology: Topology) -> Dict[str, str]:
    """GB/s of each kind of link, the fastest first: ``45.6``, or ``10 or 45.6`` where its pairs differ."""
    speeds: Dict[str, Set[float]] = {}
    for link in sorted(topology.links, key=lambda link: -link.bandwidth):
        speeds.setdefault(link.kind, set()).add(link.bandwidth)
    return {kind: _either(found) for kind, found in speeds.items()}


def switch_ports(topology: Topology) -> List[float]:
    """Bytes/s of the ports, one way, by which devices reach an NVSwitch; empty without one."""
    return [speed for name, speed in topology.shared if name.endswith(" NVSwitch out")]


def _either(speeds: Iterable[float]) -> str:
    """GB/s: ``10 or 45.6``, and ``10 to 45.6`` if there are more than two."""
    different = list(dict.fromkeys(f"{speed / GB:.4g}" for speed in sorted(speeds)))
    return " or ".join(different) if len(different) < 3 else f"{different[0]} to {different[-1]}"


def describe_hosts(topology: Topology, hosts: int, network: Network) -> str:
    """Hosts × devices: which device uses which network card, and the bounds inside a host and between them."""
    parts = [hosts_line(topology, hosts, network)]
    speed = f"{network.nic / GB:.4g}"
    parts.append(
        table([("card", "GB/s each way", "used by"), *((c, speed, used) for c, used in _cards(topology, network))])
    )
    moved = f"at most {network.engine / GB:.4g} GB/s in and out of a host, by all cards together"
    parts.append(f"TensorFlow moves {moved}; a hop of a ring takes it {duration(network.hop)}.")
    rates = [(f"inside each host, of {len(topology)} devices", pack(topology).bound)] if len(topology) > 1 else []
    if hosts > 1:
        rates.append((f"between {hosts} hosts, by the cards", 1 / wire_seconds(hosts, 1, network)))
        rates.append((f"between {hosts} hosts, by TensorFlow, hops aside", 1 / ring_seconds(hosts, 1, 0, network)))
    if rates:
        parts.append(table([("gradients all-reduced", "GB/s"), *((what, f"{rate / GB:.4g}") for what, rate in rates)]))
    return "\n\n".join(parts)


def hosts_line(topology: Topology, hosts: int, network: Network) -> str:
    """``4 hosts × 8 devices = 32, joined by InfiniBand EDR, 4 cards a host``; one card goes without saying."""
    devices = len(topology)
    cards = f", {count(network.nics, 'card')} a host" if network.nics > 1 else ""
    return f"{count(hosts, 'host')} × {count(devices, 'device')} = {hosts * devices}, joined by {network.name}{cards}"


def _cards(topology: Topology, network: Network) -> List[Tuple[str, str]]:
    """For each network card of a host the devices that use it; those that none uses share a row."""
    users: Dict[int, List[str]] = {}
    for device, name in enumerate(topology.devices):
        users.setdefault(nic_of(device, len(topology), network), []).append(name)
    rows = [(f"NIC{nic}", ", ".join(names)) for nic, names in users.items()]
    spare = network.nics - nics_used(len(topology), network)
    return rows + [(f"{spare} more", "no device")] * (spare > 0)


def describe_choice(choice: Choice, topology: Topology, steps: bool = False) -> str:
    """A plan for people: the time it takes, how near to the bound that is, the other algorithms, the chunks' ways."""
    seconds = seconds_by_algorithm(topology, choice.size)
    others = _compared(choice, seconds)
    chosen = choice.recipe == choose(topology, choice.size).recipe  # and not asked for
    if chosen and min(seconds.values()) < 0.99 * choice.seconds:
        others += "\nWhat is faster here is slower in another order of the copies, or for some bytes more or less:"
        others += "\ndocs/cost-model.md."
    parts = [_what(choice, topology), _times(choice), others, *_how(choice, topology, steps)]
    return "\n\n".join(part for part in parts if part)


def describe_hosts_choice(
    choice: HostsChoice, topology: Topology, scaled: Sequence[HostsChoice], steps: bool = False
) -> str:
    """The same for several hosts, with where the time goes, and what more hosts cost.

    Args:
        choice: the plan.
        topology: each of the hosts.
        scaled: the plans for other numbers of hosts, a row each.
        steps: list every step too.
    """
    bounds = f"   inside a host {duration(choice.host_bound)}, cards {duration(choice.wire_bound)}"
    parts = [
        hosts_line(topology, choice.hosts, choice.network),
        _what(choice, topology),
        _times(choice, bounds * (choice.hosts > 1)),
        _spent(choice) if choice.hosts > 1 else "",
        _compared(choice, choice.others),
        _latency(choice),
        _scaling(scaled),
        *_how(choice, topology, steps),
    ]
    return "\n\n".join(part for part in parts if part)


def _spent(choice: HostsChoice) -> str:
    """Where the seconds go; what lies between the first and the last chunk's crossing hides the rest."""
    hops = f"{2 * (choice.hosts - 1) * choice.collectives} hops of {duration(choice.network.hop)}"
    moved = amount(2 * (choice.hosts - 1) / choice.hosts * choice.size)
    speed = f"{choice.network.bytes_per_second / GB:.4g} GB/s"
    rows = [
        ("of which", "", ""),
        ("in the host", duration(choice.before), "sums, before the first chunk crosses"),
        ("between hosts", duration(choice.across), f"{hops}, {moved} at {speed}"),
        ("in the host", duration(choice.seconds - choice.before - choice.across), "copies, after the last"),
    ]
    return table(rows)


def _what(choice: Choice, topology: Topology) -> str:
    sizes = choice.recipe.sizes(choice.size)
    return f"{topology.name}, {amount(choice.size)}: {choice.recipe.algorithm}, {_chunks(sizes)}"


def _chunks(sizes: Sequence[int]) -> str:
    most = f" to {amount(max(sizes))}" if max(sizes) > min(sizes) * 1.01 else ""
    return f"{count(len(sizes), 'chunk')} of {amount(min(sizes))}{most}"


def _times(choice: Choice, bounds: str = "") -> str:
    speed = f" ({rate(choice.size / choice.seconds)})" if choice.seconds else ""
    return (
        f"predicted    {duration(choice.seconds)}{speed}\nlower bound  {duration(choice.bound)}{bounds}\n"
        f"             {reached(choice)}"
    )


def reached(choice: Choice) -> str:
    """``98% of what this machine can do``."""
    machines = "these hosts" if isinstance(choice, HostsChoice) and choice.hosts > 1 else "this machine"
    return f"{percent(choice.share_of_bound)} of what {machines} can do"


def _compared(choice: Choice, seconds: Dict[str, float]) -> str:
    others = sorted(seconds.items(), key=lambda item: item[1])
    if isinstance(choice, HostsChoice) and choice.hosts > 1:
        alone = f"{choice.alone.algorithm}, {count(len(choice.alone.fractions), 'chunk')}"
        others.append((f"as one host alone would: {alone}", choice.alone_seconds))
        others.append(("TensorFlow alone: one ring over all devices", choice.flat_ring))
    if len(others) < 2 or not choice.seconds:
        return ""
    compared = [("algorithm", "time", "beside this plan")]
    compared += [(name, duration(taken), f"{taken / choice.seconds:.2f}x") for name, taken in others]
    return table(compared)


def _how(choice: Choice, topology: Topology, steps: bool) -> List[str]:
    plan = choice.recipe.plan()
    listed = [str(plan)] if steps else []
    return [
        ways(plan, choice.recipe.sizes(choice.size)),
        *listed,
        *remarks(topology),
    ]


def _latency(choice: HostsChoice) -> str:
    """Where hops cost as much as bytes, by chunk and by hosts, and from where on a tree would be faster."""
    network, chunks = choice.network, choice.collectives
    overtakes = max(2, math.ceil(latency_overtakes(choice.size, chunks, network)))
    pays = tree_pays_from(choice.size, chunks, network)
    return (
        f"A chunk of {amount(balanced_chunk(choice.hosts, network))} spends as long on hops as on bytes. With "
        f"{count(chunks, 'chunk')} the ring's hops outweigh its bytes from {overtakes} hosts on, "
        + (f"and a tree would be faster from {pays}." if pays else "and a tree would never be faster.")
    )


def _scaling(scaled: Sequence[HostsChoice]) -> str:
    """A row for each number of hosts."""
    rows: List[Sequence[object]] = [
        ("hosts", "devices", "chunks", "predicted", "ring", "tree", "lower bound", "reached", "TensorFlow alone")
    ]
    for choice in scaled:
        devices, chunks = choice.recipe.devices * choice.hosts, choice.collectives
        ring_and_tree = [
            seconds(choice.hosts, choice.size, chunks, choice.network) for seconds in (ring_seconds, tree_seconds)
        ]
        times = [choice.seconds, *ring_and_tree, choice.bound]
        share = percent(choice.share_of_bound)
        rows.append((choice.hosts, devices, chunks, *map(duration, times), share, duration(choice.flat_ring)))
    return table(rows)


def ways(plan: Plan, sizes: Sequence[int]) -> str:
    """The reductions of each different way, the bytes that take it, and whether the copies go the same way back."""
    taken: Dict[Tuple, int] = {}
    for chunk, way in sums_by_chunk(plan).items():
        taken[way] = taken.get(way, 0) + sizes[chunk]
    rows = [("sums", "bytes")]
    rows += [(_line(way), amount(size)) for way, size in taken.items()]
    there, back = plan.reduce_half().transfers(), plan.copy_half().transfers()
    same = all(back[dst, src] == chunks for (src, dst), chunks in there.items())
    note = "The copies of each sum go the same way back." if same else "The copies go another way back: see --steps."
    return f"{table(rows)}\n{note}" if any(taken) else ""


def _line(way: Sequence[Tuple[Tuple[int, ...], int]]) -> str:
    """``1,2,3→0  0→4``: neighbouring sums on the same device share a term."""
    terms = [(dst, [src for srcs, _ in hops for src in srcs]) for dst, hops in groupby(way, key=lambda hop: hop[1])]
    return "  ".join(f"{','.join(map(str, srcs))}→{dst}" for dst, srcs in terms)


def sums_by_chunk(plan: Plan) -> Dict[int, Tuple[Tuple[Tuple[int, ...], int], ...]]:
    """For each chunk its reductions as (srcs, dst)."""
    found: Dict[int, List[Tuple[Tuple[int, ...], int]]] = {chunk: [] for chunk in range(plan.chunks)}
    for step in plan.steps:
        if isinstance(step, Reduce):
            found[step.chunk].append((step.srcs, step.dst))
    return {chunk: tuple(hops) for chunk, hops in found.items()}
