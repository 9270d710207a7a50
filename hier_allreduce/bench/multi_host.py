"""Step times on several hosts, which are processes of this machine: ours, beside TensorFlow's own ways.

An all-reduce is held against one flat collective over all devices, and a training step against
MultiWorkerMirroredStrategy's. All contenders take one step each in turn, in the same order on every host, so that a
busy machine disturbs all alike.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import tensorflow as tf

from ..cluster import Cluster, free_addresses, launch
from ..formatting import table
from ..graph import allreduce_grads
from . import multi_host_training as workers
from .case import Case, Rows, consumed, variables
from .contenders import ours, ring
from .measuring import devices_here, interleaved, quartiles
from .models import GradientShape

_MARK = "measured "
_COLUMNS = ("inside", "ours", "flat")


def cases(devices: Sequence[str]) -> Dict[str, Case]:
    """Few large gradients and many small ones."""
    kinds = {"4 × 6.4 MB": (4, 1_600_000), "160 × 16 kB": (160, 4_000)}  # how many, and elements of each
    return {
        name: Case(tuple(GradientShape(f"v{n}", (size,), "float32") for n in range(number)), tuple(devices))
        for name, (number, size) in kinds.items()
    }


def measure_hosts(hosts: int, devices: int, rounds: int, write: Callable[[str], Any]) -> Tuple[int, str]:
    """Start the hosts; their exit status as :func:`.launcher.launch` gives it, and what host 0 found, as text.

    Args:
        hosts: how many.
        devices: of each host.
        rounds: how many steps of each contender are timed.
        write: takes each line of the hosts that is no measurement.
    """
    found: List[Dict[str, Any]] = []

    def take(line: str) -> None:
        words = line.split("] ", 1)[-1]
        if words.startswith(_MARK):
            measured = json.loads(words[len(_MARK) :])
            found.extend([measured] if measured["task"] == 0 else [])
        else:
            write(line)

    addresses = free_addresses(2 * hosts)  # drawn at once, so that all differ
    command = [sys.executable, "-m", "hier_allreduce.cli", "bench", "--hosts", f"{hosts}"]
    command += ["--devices", f"{devices}", "--rounds", f"{rounds}", "--peers", *addresses[hosts:]]
    status = launch(hosts, command, take, addresses[:hosts])
    if status:
        return status, ""
    training, *reducing = found
    return 0, f"{reducing_table(reducing, hosts, devices)}\n\n{training_table(training)}"


def run_host(devices: int, rounds: int, peers: Sequence[str], say: Callable[[str], Any]) -> None:
    """Measure as one of the hosts.

    Args:
        devices: of each host.
        rounds: how many steps of each contender are timed.
        peers: addresses for the servers of TensorFlow's strategy, one for each host.
        say: takes a line for each measurement, which :func:`measure` reads.
    """

    def tell(**found: Any) -> None:
        say(_MARK + json.dumps({"task": cluster.task, **found}))

    cluster = Cluster.from_environment(devices)
    found = workers.train(cluster, devices_here(devices), peers, rounds)
    tell(case="training", **found)
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
                seconds = interleaved(callables, rounds, lambda words: None)
        tell(case=name, seconds=seconds)


def reducing_table(found: Sequence[Dict[str, Any]], hosts: int, devices: int) -> str:
    """Medians and quartiles in milliseconds, and the ratio to the flat collective: the median over the rounds."""
    rows = [["", "inside one host", "all hosts", "flat collective", "ours / flat"]]
    for case in found:
        seconds: Dict[str, List[float]] = case["seconds"]
        ratio = quartiles([a / b for a, b in zip(seconds["ours"], seconds["flat"])])[1]
        rows.append([case["case"], *(_cell(seconds[column]) for column in _COLUMNS), f"{ratio:.2f}"])
    return f"{hosts} hosts × {devices} devices, ms a step: median (quartiles)\n{table(rows, all_right=True)}"


def training_table(found: Dict[str, Any]) -> str:
    """A line for each contender, and how far their weights are from ours at the end."""
    words = f"a training step, {workers.WEIGHTS / 1e6:.1f} million weights, {workers.BATCH} examples"
    rows = [[f"{words}, ms: median (quartiles)", "towers a host", "ms", "ours / it"]]
    ours = found["seconds"][workers.OURS]
    for name, seconds in found["seconds"].items():
        ratio = quartiles([a / b for a, b in zip(ours, seconds)])[1]
        rows.append([name, str(found["towers"][name]), _cell(seconds), f"{ratio:.2f}"])
    lines = [table(rows, all_right=True)]
    lines += [f"{name}: cannot run: {error}" for name, error in found["errors"].items()]
    return "\n".join([*lines, f"largest difference of a weight to ours at the end: {found['difference']:.0e}"])


def _cell(seconds: Sequence[float]) -> str:
    low, median, high = (1e3 * value for value in quartiles(seconds))
    return f"{median:.1f} ({low:.1f}–{high:.1f})"
