"""What more hosts cost, on paper: the ring that TensorFlow has between hosts, and a tree that it has not.

For C collectives of N bytes together between H hosts, whose links carry B bytes/s and where every hop of every
collective takes α seconds of its own::

    ring   C · 2(H-1) · α        +  2(H-1)/H · N/B      each host sends almost 2N bytes, in H parts
    tree   C · 2⌈log₂H⌉ · α      +  2 · N/B             a double binary tree, its pieces overlapping

Hops of different collectives do not overlap in α: it is the time of a host's processor, not of the wire. Sources: the
ring is Patarasuk and Yuan's (2009), the tree Sanders, Speck and Träff's (2009). ``python -m hier_allreduce.scaling``
prints the tables of docs/scaling.md.
"""

from __future__ import annotations

import math
from typing import List, NamedTuple, Optional, Sequence


class Network(NamedTuple):
    """``bytes_per_second`` of one host's link in one direction; ``hop_seconds`` is α."""

    bytes_per_second: float
    hop_seconds: float


def ring_seconds(hosts: int, size: float, collectives: int, network: Network) -> float:
    """``collectives`` ring all-reduces of ``size`` bytes together; 0 for one host."""
    hops = 2 * (hosts - 1)
    return collectives * hops * network.hop_seconds + hops / hosts * size / network.bytes_per_second


def tree_seconds(hosts: int, size: float, collectives: int, network: Network) -> float:
    """The same by double binary trees; 0 for one host."""
    if hosts == 1:
        return 0.0
    hops = 2 * math.ceil(math.log2(hosts))
    return collectives * hops * network.hop_seconds + 2 * size / network.bytes_per_second


def tree_pays_from(size: float, collectives: int, network: Network, at_most: int = 4096) -> Optional[int]:
    """The smallest number of hosts from which on the tree is faster; None if that is more than ``at_most``."""
    slower = [
        hosts
        for hosts in range(2, at_most + 1)
        if tree_seconds(hosts, size, collectives, network) >= ring_seconds(hosts, size, collectives, network)
    ]
    first = max(slower, default=1) + 1
    return first if first <= at_most else None


def efficiency(step_seconds: float, network_seconds: float) -> float:
    """How much of H times one host's speed is left, if nothing overlaps with the step."""
    return step_seconds / (step_seconds + network_seconds)


# ---- the tables of docs/scaling.md ---------------------------------------------------------------------

HOSTS = (2, 4, 8, 16, 32, 64, 128)
HOP = 0.3e-3  # seconds: a collective between two processes of one machine takes 0.6 ms, and that is two hops
NETWORKS = {"10 Gbit/s": Network(1.25e9, HOP), "100 Gbit/s": Network(12.5e9, HOP)}
MODELS = {"ResNet-50": (102.2e6, 0.300), "BERT-large": (1340e6, 1.000)}  # bytes of gradients, assumed seconds a step
BUCKET = 10 << 20


def table(hosts: Sequence[int] = HOSTS) -> str:
    """For each model and network: seconds between hosts, the efficiency, and from where on a tree would pay."""
    lines: List[str] = []
    for model, (size, step) in MODELS.items():
        for collectives in (math.ceil(size / BUCKET), 1):
            for name, network in NETWORKS.items():
                pays = tree_pays_from(size, collectives, network)
                lines += [
                    f"{model}, {size / 1e6:.0f} MB in {collectives} collectives, {name}; a tree pays from {pays} hosts",
                    _row("hosts", hosts),
                    _row("ring, ms", [f"{1e3 * ring_seconds(h, size, collectives, network):.0f}" for h in hosts]),
                    _row("tree, ms", [f"{1e3 * tree_seconds(h, size, collectives, network):.0f}" for h in hosts]),
                    _row(
                        f"of a {step:g} s step",
                        [f"{efficiency(step, ring_seconds(h, size, collectives, network)):.0%}" for h in hosts],
                    ),
                    "",
                ]
    return "\n".join(lines)


def _row(head: str, cells: Sequence[object]) -> str:
    return f"{head:16}" + "".join(f"{cell!s:>8}" for cell in cells)


if __name__ == "__main__":
    print(table())
