"""Step times on several hosts, which are processes on this machine: ours, compared with TensorFlow's own.

An all-reduce is compared with one flat collective over all devices, and a training step with
MultiWorkerMirroredStrategy's. All contenders take one step each in turn, in the same order on every host, so that
other load on the machine affects all of them alike.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import tensorflow as tf

from ..cluster import Cluster, free_addresses, launch, publish, read_event
from ..formatting import table
from ..graph import allreduce_grads
from . import multi_host_training as training
from .case import Case, Rows, consumed, devices_here, variables
from .contenders import ours, ring
from .horovod_peer import horovod_text
from .measuring import interleaved
from .models import GradientShape
from .results import quartiles

COMMAND = (sys.executable, "-m", "hier_allreduce.cli")
_COLUMNS = ("inside", "ours", "flat")


def cases(devices: Sequence[str]) -> Dict[str, Case]:
    """Return a few large gradients and many small ones."""
    counts_and_elements = {"4 × 6.4 MB": (4, 1_600_000), "160 × 16 kB": (160, 4_000)}
    return {
        name: Case(tuple(GradientShape(f"v{n}", (elements,), "float32") for n in range(count)), tuple(devices))
        for name, (count, elements) in counts_and_elements.items()
    }


def measure_hosts(
    hosts: int, devices: int, rounds: int, write: Callable[[str], Any], command: Sequence[str] = COMMAND
) -> Tuple[int, str]:
    """Start the hosts and wait for them.

    Args:
        hosts: the number of hosts.
        devices: the number of devices of each host.
        rounds: the number of timed steps of each contender.
        write: called with each line of the hosts' output that is not a measurement.
        command: the program that each host runs with ``bench hosts …``.

    Returns:
        The exit status, as :func:`.launcher.launch` returns it, and host 0's measurements as text.
    """
    measurements: List[Dict[str, Any]] = []

    def take(line: str) -> None:
        measurement = read_event(line)
        if measurement is None:
            write(line)
        elif measurement["task"] == 0:
            measurements.append(measurement)

    addresses = free_addresses(2 * hosts)  # in one call, so that all differ
    arguments = ["bench", "hosts", f"{hosts}", "--devices", f"{devices}", "--rounds", f"{rounds}"]
    status = launch(hosts, [*command, *arguments, "--peers", *addresses[hosts:]], take, addresses[:hosts])
    if status:
        return status, ""
    trained, *reduced = measurements
    gradients = {name: case.shapes for name, case in cases(()).items()}
    ours_seconds = {measurement["case"]: measurement["seconds"]["ours"] for measurement in reduced}
    peer = horovod_text(gradients, ours_seconds, hosts * devices, rounds)
    return 0, f"{reducing_table(reduced, hosts, devices)}\n\n{peer}\n\n{training_table(trained)}"


def run_host(devices: int, rounds: int, peers: Sequence[str]) -> None:
    """Measure as one of the hosts, and publish the measurements to :func:`measure_hosts`.

    Args:
        devices: the number of devices of each host.
        rounds: the number of timed steps of each contender.
        peers: addresses for the servers of TensorFlow's strategy, one for each host.
    """
    cluster = Cluster.from_environment(devices)
    publish(task=cluster.task, case="training", **training.train(cluster, devices_here(devices), peers, rounds))
    for number, (name, case) in enumerate(cases(devices_here(devices)).items()):
        with tf.Graph().as_default():
            grads, fill = variables(case)
            built: Dict[str, Rows] = {
                "inside": ours().build(grads, case.devices, False),
                "ours": allreduce_grads(grads, case.devices, cluster=cluster),
                "flat": ring(grads, case.devices, False, cluster.size, 1000 * (1 + number)),
            }
            steps = {column: consumed(rows, case) for column, rows in built.items()}
            with cluster.session() as session:
                session.run(fill)
                callables = {column: session.make_callable(op) for column, op in steps.items()}
                seconds = interleaved(callables, rounds, lambda stage: None)
        publish(task=cluster.task, case=name, seconds=seconds)


def reducing_table(measurements: Sequence[Dict[str, Any]], hosts: int, devices: int) -> str:
    """Return a line for each case: milliseconds, and the median over the rounds of ours divided by the flat one's."""
    rows = [["", "inside one host", "all hosts", "flat collective", "ours / flat"]]
    for measurement in measurements:
        seconds: Dict[str, List[float]] = measurement["seconds"]
        cells = [_milliseconds(seconds[column]) for column in _COLUMNS]
        rows.append([measurement["case"], *cells, _ratio(seconds["ours"], seconds["flat"])])
    return f"{hosts} hosts × {devices} devices, ms a step: median (quartiles)\n{table(rows, all_right=True)}"


def training_table(measurement: Dict[str, Any]) -> str:
    """Return a line for each contender, and the largest difference of a final weight from ours."""
    model = f"a training step, {training.WEIGHTS / 1e6:.1f} million weights, {training.BATCH} examples"
    rows = [[f"{model}, ms: median (quartiles)", "towers a host", "ms", "ours / it"]]
    ours_seconds = measurement["seconds"][training.OURS]
    for name, seconds in measurement["seconds"].items():
        towers = str(measurement["towers"][name])
        rows.append([name, towers, _milliseconds(seconds), _ratio(ours_seconds, seconds)])
    lines = [table(rows, all_right=True)]
    lines += [f"{name}: cannot run: {error}" for name, error in measurement["errors"].items()]
    lines.append(f"largest difference of a final weight from ours: {measurement['difference']:.0e}")
    return "\n".join(lines)


def _milliseconds(seconds: Sequence[float]) -> str:
    low, median, high = (1e3 * value for value in quartiles(seconds))
    return f"{median:.1f} ({low:.1f}–{high:.1f})"


def _ratio(seconds: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratio within each round."""
    return f"{quartiles([a / b for a, b in zip(seconds, others)])[1]:.2f}"
