"""What joins several machines, and what TensorFlow's ring all-reduce between them costs.

For C collectives of N bytes together between H hosts, of which each moves B bytes/s in each direction, and where every
hop of every collective takes α seconds::

    ring   C · 2(H-1) · α  +  2(H-1)/H · N/B      each host sends almost 2N bytes, in H parts

The hops of different collectives do not overlap: α is the time of a host's processor, not of the wire. Source of the
ring: Patarasuk and Yuan (2009).
"""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple

from .. import presets
from ..errors import ClusterError

# What TensorFlow's collectives reach over any wire; docs/scaling.md says where both numbers come from.
HOP = 0.3e-3  # seconds
ENGINE = 0.8e9  # bytes/s


def _display_name(value: Any, where: str, error: presets.Error) -> str:
    if not isinstance(value, str) or not value.strip():
        raise error(f"{where}: expected text, such as '10 Gbit/s Ethernet', not {value!r}")
    return value


_FIELDS = {
    "nic": presets.Field(presets.bytes_per_second, required="the bytes/s of one network card, such as 1.25e9"),
    "hop": presets.Field(presets.seconds),
    "nics": presets.Field(presets.whole_number),
    "engine": presets.Field(presets.bytes_per_second),
    "name": presets.Field(_display_name),
}


class Network(NamedTuple):
    """What joins the hosts.

    Attributes:
        nic: bytes/s of one network card, in each direction at once.
        hop: α, the seconds that a hop of a collective takes a host's processor.
        nics: the network cards of each host.
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
        """Load a network of ``configs/networks`` by name, or from a YAML file whose keys are the fields.

        Raises:
            ClusterError: neither a preset nor a file, an unknown or missing key, a value that is not a positive number,
                or a name that is not text.
        """
        path, values = presets.load("networks", name_or_path, _FIELDS, ClusterError)
        return cls(**{"name": path.stem, **values})

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str) -> Network:
        """Make a network from its fields.

        Raises:
            ClusterError: a value that is not a positive number, or a name that is not text; names ``source``.
        """
        return cls(**presets.check(values, _FIELDS, source, ClusterError))

    @property
    def wire(self) -> float:
        """The bytes/s that all cards of a host carry in each direction."""
        return self.nics * self.nic

    @property
    def bytes_per_second(self) -> float:
        """B: what the cards carry or what the runtime moves, whichever is less."""
        return min(self.wire, self.engine)

    def ring_seconds(self, hosts: int, size: float, collectives: int) -> float:
        """Return what ``collectives`` rings of ``size`` bytes together take; 0 for one host."""
        hops = 2 * (hosts - 1)
        return collectives * hops * self.hop + hops / hosts * size / self.bytes_per_second

    def wire_seconds(self, hosts: int, size: float) -> float:
        """Return the least that any all-reduce takes: 2(H-1)/H · N bytes over all cards; 0 for one host."""
        return self._replace(engine=self.wire).ring_seconds(hosts, size, 0)

    def processor_seconds(self, hosts: int, size: float, collectives: int) -> float:
        """Return what a host's processor needs for the hops and the bytes, on any cards; 0 for one host."""
        return self._replace(nic=math.inf).ring_seconds(hosts, size, collectives)

    def nics_used(self, devices: int) -> int:
        """Return how many of a host's cards its devices use: at most one each."""
        return min(self.nics, devices)

    def nic_of(self, device: int, devices: int) -> int:
        """Return the card that a device uses: devices in order share the cards evenly."""
        return device * self.nics_used(devices) // devices
