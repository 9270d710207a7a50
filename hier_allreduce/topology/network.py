"""What more hosts cost, on paper: the ring that TensorFlow has between hosts, and a tree that it has not.

For C collectives of N bytes together between H hosts, of which each moves B bytes/s in each direction, and where every
hop of every collective takes α seconds of its own::

    ring   C · 2(H-1) · α        +  2(H-1)/H · N/B      each host sends almost 2N bytes, in H parts
    tree   C · 2⌈log₂H⌉ · α      +  2 · N/B             a double binary tree, its pieces overlapping

Hops of different collectives do not overlap in α: it is the time of a host's processor, not of the wire. The ring's two
terms are equal for chunks of H·α·B bytes, and for C chunks at H = N/(C·α·B) hosts. Sources: the ring is Patarasuk and
Yuan's (2009), the tree Sanders, Speck and Träff's (2009).
"""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple, Optional

from .. import presets
from ..errors import ClusterError

# What TensorFlow's collectives reach, whatever the wire: docs/scaling.md says where both numbers come from.
HOP = 0.3e-3  # seconds
ENGINE = 0.8e9  # bytes/s


class Network(NamedTuple):
    """What joins the hosts.

    Attributes:
        nic: bytes/s of one network card, in each direction at once.
        hop: α, seconds of a host's processor for each hop of each collective.
        nics: network cards of each host.
        engine: the most bytes/s that the runtime sends, and receives, through all cards of a host.
        name: what reports call it.
    """

    nic: float
    hop: float = HOP
    nics: int = 1
    engine: float = ENGINE
    name: str = "network"

    @classmethod
    def load(cls, name_or_path: str) -> Network:
        """A network of ``configs/networks`` by name, or from a YAML file: the keys are the fields of :class:`Network`.

        Raises:
            ClusterError: neither preset nor file, a key that is unknown or missing, a value that is no positive number,
                or a name that is no text.
        """
        path = presets.find("networks", name_or_path, ClusterError)
        values = presets.read_yaml(path, ClusterError)
        presets.refuse_unknown(values, list(cls._fields), str(path), ClusterError)
        if "nic" not in values:
            raise ClusterError(f"{path}: nic is missing: the bytes/s of one network card, such as 1.25e9")
        return cls.from_values({"name": path.stem, **values}, str(path))

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str) -> Network:
        """A network from its fields.

        Raises:
            ClusterError: a value that is no positive number, or a name that is no text; names ``source``.
        """
        return cls(**{key: _checked(source, key, values[key]) for key in values})

    @property
    def wire(self) -> float:
        """Bytes/s that all cards of a host carry in each direction."""
        return self.nics * self.nic

    @property
    def bytes_per_second(self) -> float:
        """B: what the cards carry or the runtime moves, whichever is less."""
        return min(self.wire, self.engine)


def ring_seconds(hosts: int, size: float, collectives: int, network: Network) -> float:
    """``collectives`` ring all-reduces of ``size`` bytes together; 0 for one host."""
    hops = 2 * (hosts - 1)
    return collectives * hops * network.hop + hops / hosts * size / network.bytes_per_second


def tree_seconds(hosts: int, size: float, collectives: int, network: Network) -> float:
    """The same by double binary trees; 0 for one host."""
    if hosts == 1:
        return 0.0
    hops = 2 * math.ceil(math.log2(hosts))
    return collectives * hops * network.hop + 2 * size / network.bytes_per_second


def tree_pays_from(size: float, collectives: int, network: Network, at_most: int = 4096) -> Optional[int]:
    """The smallest number of hosts from which on the tree is faster; None if that is more than ``at_most``."""
    slower = [
        hosts
        for hosts in range(2, at_most + 1)
        if tree_seconds(hosts, size, collectives, network) >= ring_seconds(hosts, size, collectives, network)
    ]
    first = max(slower, default=1) + 1
    return first if first <= at_most else None


def balanced_chunk(hosts: int, network: Network) -> float:
    """Bytes of a chunk that spends as long on the ring's hops as on its bytes: H·α·B. Smaller ones mostly wait."""
    return hosts * network.hop * network.bytes_per_second


def latency_overtakes(size: float, collectives: int, network: Network) -> float:
    """The number of hosts at which the ring spends as long on hops as on bytes: N/(C·α·B)."""
    return size / (collectives * balanced_chunk(1, network)) if network.hop else math.inf


def _checked(source: str, key: str, value: Any) -> Any:
    if key == "name":
        if not isinstance(value, str) or not value.strip():
            raise ClusterError(f"{source}: name: expected text, such as '10 Gbit/s Ethernet', not {value!r}")
        return value
    unit = {"nics": "cards", "hop": "seconds"}.get(key, "bytes/s")
    number = presets.number_of(unit, f"{source}: {key}", value, ClusterError)
    return int(number) if key == "nics" else number
