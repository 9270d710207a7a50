"""Step times on several hosts, which are processes of this machine: ours, beside one flat collective over all devices.

    python -m hier_allreduce.bench_cluster [--hosts 2] [--devices 4] [--rounds 20]

All contenders take one step each in turn, in the same order on every host, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Dict, List, Sequence

import tensorflow as tf

from .bench import devices_here, interleaved, quartiles
from .case import Case, Rows, consumed, variables
from .cluster import Cluster
from .contenders import ours, ring
from .launcher import launch
from .shapes import GradientShape

_MARK = "measured "
_COLUMNS = ("inside", "ours", "flat")


def cases(devices: Sequence[str]) -> Dict[str, Case]:
    """Few large gradients and many small ones."""
    kinds = {"4 × 6.4 MB": (4, 1_600_000), "160 × 16 kB": (160, 4_000)}
    return {
        name: Case(tuple(GradientShape(f"v{n}", (size,), "float32") for n in range(count)), tuple(devices))
        for name, (count, size) in kinds.items()
    }


def host(devices: int, rounds: int) -> None:
    """Measure as one host; say what was found."""
    from .allreduce import allreduce_grads

    cluster = Cluster.from_environment(devices)
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
        print(_MARK + json.dumps({"task": cluster.task, "case": name, "seconds": seconds}), flush=True)


def table(found: Sequence[Dict[str, Any]], hosts: int, devices: int) -> str:
    """Medians and quartiles in milliseconds, and the ratio to the flat collective: the median over the rounds."""
    lines = [f"{hosts} hosts × {devices} devices, ms a step: median (quartiles)"]
    lines.append(f"{'':14}{'inside one host':>22}{'all hosts':>22}{'flat collective':>22}{'ours / flat':>14}")
    for case in found:
        seconds: Dict[str, List[float]] = case["seconds"]
        ratio = quartiles([a / b for a, b in zip(seconds["ours"], seconds["flat"])])[1]
        cells = [_cell(seconds[column]) for column in _COLUMNS]
        lines.append(f"{case['case']:14}" + "".join(f"{cell:>22}" for cell in cells) + f"{ratio:>14.2f}")
    return "\n".join(lines)


def _cell(seconds: Sequence[float]) -> str:
    low, median, high = (1e3 * value for value in quartiles(seconds))
    return f"{median:.1f} ({low:.1f}–{high:.1f})"


def main() -> int:
    """Start the hosts; print what host 0 measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--devices", type=int, default=4, help="of each host")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--host", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host:
        host(args.devices, args.rounds)
        return 0
    found: List[Dict[str, Any]] = []

    def take(line: str) -> None:
        words = line.split("] ", 1)[-1]
        if words.startswith(_MARK):
            measured = json.loads(words[len(_MARK) :])
            found.extend([measured] if measured["task"] == 0 else [])
        else:
            sys.stderr.write(line)

    command = [sys.executable, "-m", "hier_allreduce.bench_cluster", "--host"]
    command += ["--devices", str(args.devices), "--rounds", str(args.rounds)]
    status = launch(args.hosts, command, take)
    print(table(found, args.hosts, args.devices))
    return status


if __name__ == "__main__":
    sys.exit(main())
