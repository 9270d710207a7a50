"""What checks of a training cost: the flag of equal towers, and the comparison of copies.

    python benchmarks/checks.py cpu resnet50,bert_base --rounds 30 --json checks.json
    python benchmarks/checks.py dgx-1v,pcie-pairs resnet50 --passes 60,0

Steps of ``TowerOptimizer`` on emulated machines, or on 8 CPU devices without a pass. A round runs a
step of each kind, in random order. A price is the median of the rounds' differences.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import Any, Dict, List

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from emulated import HOSTS, about, run, scale_of
from emulated_cell import UPDATE, Cell
from rounds import COMPARED, STEP, UNFLAGGED, Step, timed_rounds
from tables import check_files, list_of, price_rows, write
from training_step import load_pass, tf1, updating_step

from hier_allreduce.formatting import table

CPU, TOWERS = "cpu", 8
KINDS = [STEP, STEP + UNFLAGGED, STEP + COMPARED]
Results = List[Dict[str, Any]]


def on_cpu_devices(model: str, rounds: int) -> Results:
    """Return the milliseconds of each kind of step, the ops of its graph, and its building."""
    devices = [f"/cpu:{number}" for number in range(TOWERS)]
    config = tf1.ConfigProto(device_count={"CPU": TOWERS})
    steps: Dict[str, Step] = {}
    ops: Dict[str, int] = {}
    build_s: Dict[str, float] = {}
    for kind in KINDS:
        started = time.perf_counter()
        built = updating_step(load_pass(model, 0), devices, kind[len(UPDATE) :])
        build_s[kind] = round(time.perf_counter() - started, 2)
        ops[kind] = len(built.graph.get_operations())
        session = tf1.Session(graph=built.graph, config=config)
        session.run(built.fill)
        session.run(built.start)
        steps[kind] = session.make_callable(built.step)
    timed_rounds(steps, 2)  # Grappler's work, and memory that is touched first
    step_ms = timed_rounds(steps, rounds)
    about_graphs = {"ops": ops, "build_s": build_s}
    return [{"machine": CPU, "model": model, "pass_ms": 0, **about_graphs, "step_ms": step_ms}]


def on_machine(machine: str, model: str, pass_ms: float, rounds: int) -> Results:
    """Return the milliseconds of each kind of step on an emulated machine."""
    scale = scale_of(machine)
    cells = run(Cell(machine, model, pass_ms, HOSTS, scale, True, rounds, KINDS))
    for cell in cells:
        base = cell["base_ms"]
        exposed = {kind: cell["contenders"][kind]["exposed_ms"] for kind in KINDS}
        cell["step_ms"] = {kind: [base + ms for ms in exposed[kind]] for kind in KINDS}
    return cells


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("machines", type=list_of(str), help="cpu, or of benchmarks/machines")
    parser.add_argument("models", type=list_of(str), help="of benchmarks/models, with commas")
    parser.add_argument("--passes", type=list_of(float), default=[60.0], help="on machines; ms")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="a file for all rounds")
    options = parser.parse_args()
    check_files(options.json)
    results: Dict[str, Any] = {**about(), "cells": []}
    for machine, model in itertools.product(options.machines, options.models):
        if machine == CPU:
            results["cells"] += on_cpu_devices(model, options.rounds)
        else:
            for pass_ms in options.passes:
                results["cells"] += on_machine(machine, model, pass_ms, options.rounds)
        write(results, options.json)
    print(table(price_rows(results["cells"])))


if __name__ == "__main__":
    main()
