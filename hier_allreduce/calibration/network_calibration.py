"""The function behind ``hier-allreduce calibrate`` over several hosts, and what it returns: text and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Mapping, NamedTuple, Optional, Tuple

import yaml

from ..formatting import count, duration, percent, table
from ..topology import GB, Network
from .files import write_whole
from .measurement import Tick
from .network import NETWORK_SIZES, NetworkMeasurement, NetworkRuns, measure_network, measured_network
from .samples import Quartiles


class NetworkCalibration(NamedTuple):
    """What a calibration over several hosts found. ``print(calibration)`` shows it next to what is assumed without one.

    Attributes:
        network: the measured network, for ``Cluster(network=…)``.
        assumed: the network whose cards the hosts have; None if that is not known.
        measurement: each single speed, with its spread.
        versions: ``date``, ``tensorflow`` and ``hier_allreduce``.
    """

    network: Network
    assumed: Optional[Network]
    measurement: NetworkMeasurement
    versions: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self._head()}\n\n{_report(self.measurement, self.network, self.assumed)}"

    def _head(self) -> str:
        hosts = self.measurement.hosts
        when = f"{self.versions['date']}, TensorFlow {self.versions['tensorflow']}"
        return f"{count(len(hosts), 'host')} ({', '.join(hosts)}), {when}"

    def save(self, file: str) -> str:
        """Write the network as YAML, which ``plan --network`` and ``Cluster(network=…)`` read; return the path.

        Raises:
            CalibrationError: the file cannot be written.
        """
        return write_whole(Path(file), self._yaml())

    def _yaml(self) -> str:
        fields: Mapping[str, Any] = self.network._asdict()
        values = yaml.safe_dump({key: fields[key] for key in ("name", *fields)}, sort_keys=False, allow_unicode=True)
        written_by = f"written by hier_allreduce {self.versions['hier_allreduce']}, `hier-allreduce calibrate`"
        cards = "nic and nics are as assumed; no program can see a card"
        if not self.assumed or self.network.nic > self.assumed.nic:
            cards = "nic is the most that was seen: a card may carry more. nics is not measured"
        return "".join(f"# {line}\n" for line in (self._head(), written_by, cards)) + values


def calibrate_network(
    runs: NetworkRuns, noise: float, versions: Mapping[str, str], assumed: Optional[Network], tick: Tick
) -> NetworkCalibration:
    """Measure the network between hosts; every host calls this at the same time.

    Args:
        runs: what to run, over two hosts or more.
        noise: the widest distance of the quartiles of a measurement, as a share of its median.
        versions: ``date``, ``tensorflow`` and ``hier_allreduce``.
        assumed: the network whose cards the hosts have; None if that is not known.
        tick: called with one of :data:`.network.STAGES` after each run.

    Raises:
        CalibrationError: measurements are too noisy; names the hosts.
        ClusterError: a host is gone, or what was measured cannot be a network.
    """
    measurement = measure_network(runs, NETWORK_SIZES, noise, tick)
    network = measured_network(measurement, assumed, f"a network measured on {versions['date']}")
    return NetworkCalibration(network, assumed, measurement, versions)


def _report(measured: NetworkMeasurement, network: Network, assumed: Optional[Network]) -> str:
    without = assumed or Network(network.nic)  # with the defaults of what TensorFlow reaches
    rates = sorted(measured.copies.values(), key=lambda line: line.rate)
    slowest, fastest = _gb(rates[0].rate), _gb(rates[-1].rate)
    spread = max(line.spread for line in rates)
    alone, together = measured.alone, measured.together
    rows: List[Tuple[str, ...]] = [("", "measured", "quartiles", "assumed")]
    rows += [
        ("collectives, GB/s of a host, one sum", _gb(alone.rate), _apart(alone.spread), _gb(without.engine)),
        ("collectives, GB/s of a host, several", _gb(together.speed), _apart(together.spread), _gb(without.engine)),
        ("hop of a collective", duration(measured.hop.median), _range(measured.hop), duration(without.hop)),
        ("start of one sum", duration(alone.start), "", duration(2 * (len(measured.hosts) - 1) * without.hop)),
        ("gRPC copy, GB/s", slowest if slowest == fastest else f"{slowest} to {fastest}", _apart(spread), "–"),
        ("all hosts' copies at once, GB/s of a host", _gb(measured.ring.speed), _apart(measured.ring.spread), "–"),
        ("start of a gRPC copy", duration(measured.copy_start), "", "–"),
        ("card, GB/s", "–", "", _gb(assumed.nic) if assumed else "–"),
    ]
    check = (
        f"Four sums that had no part in these numbers took {measured.check:.2f} times as long as the network's formula "
        "predicts from them."
    )
    return "\n\n".join([table(rows), *_slow_pairs(measured), check])


def _slow_pairs(measured: NetworkMeasurement) -> List[str]:
    """Return a table of the copies between each two neighbours; nothing for two hosts, whose copies are shown above."""
    if len(measured.hosts) < 3:
        return []
    rows: List[Tuple[str, ...]] = [("gRPC copies, GB/s", "from", "to", "quartiles")]
    for (src, dst), line in sorted(measured.copies.items()):
        ends = (f"host {task} ({measured.hosts[task]})" for task in (src, dst))
        rows.append((_gb(line.rate), *ends, _apart(line.spread)))
    return [table(rows)]


def _gb(speed: float) -> str:
    return f"{speed / GB:.3g}"


def _apart(spread: float) -> str:
    return f"{percent(spread)} apart"


def _range(quartiles: Quartiles) -> str:
    return f"{duration(quartiles.low)} to {duration(quartiles.high)}"
