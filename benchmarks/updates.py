"""A training step with each update of ``TowerOptimizer``, on emulated machines.

    python benchmarks/updates.py dgx-1v,pcie-pairs --json updates.json

Exposed milliseconds, as in ``emulated.py``: how much longer a step is than one without an
all-reduce, whose towers update their variables with their own gradients.
"""

from __future__ import annotations

import argparse
from typing import Any, Dict

from emulated import HOSTS, SOME_REFUSED, about, measured, scale_of
from emulated_cell import UPDATE, Cell
from tables import check_files, faulty, list_of, write

from hier_allreduce.training.options import UPDATES


def main() -> None:
    """Measure the cells, print their tables, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machines", type=list_of(str), help="such as dgx-1v,pcie-pairs")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pass-ms", type=float, default=60.0, help="ResNet-50's backward pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file for all rounds")
    options = parser.parse_args()
    check_files(options.json)
    names = [UPDATE + update for update in UPDATES]
    results: Dict[str, Any] = {**about(), "cells": []}
    for machine in options.machines:
        what = (machine, options.model, options.pass_ms, HOSTS, scale_of(machine), True)
        results["cells"] += measured(Cell(*what, options.rounds, names))
        write(results, options.json)  # after each machine: an interrupted run keeps what it has
    if faulty(results["cells"]):
        raise SystemExit(SOME_REFUSED)


if __name__ == "__main__":
    main()
