"""A training step with each update of ``TowerOptimizer``, on emulated machines.

    python benchmarks/updates.py dgx-1v,pcie-pairs --json updates.json

Exposed milliseconds, as in ``emulated.py``: how much longer a step is than one without an
all-reduce, whose towers update their variables with their own gradients.
"""

from __future__ import annotations

import argparse
import statistics

from emulated import about, fault_of, run, scale_of, words, write
from emulated_cell import UPDATE, Cell

from hier_allreduce.formatting import table

UPDATES = ("replicated", "once", "sharded")
SHARES = [0.2, 0.8]  # of the kernels' time for which the host is busy launching them


def main() -> None:
    """Measure the cells, print their medians, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machines", type=words, help="such as dgx-1v,pcie-pairs")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pass-ms", type=float, default=60.0, help="ResNet-50's backward pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file for all rounds")
    options = parser.parse_args()
    names = [UPDATE + update for update in UPDATES]
    rows = [["exposed, ms", "host", *UPDATES, ""]]
    cells = []
    for machine in options.machines:
        what = (machine, options.model, options.pass_ms, SHARES, scale_of(machine), True)
        cell = Cell(*what, options.rounds, names)
        for result in run(cell):
            cells.append(result)
            medians = [
                statistics.median(result["contenders"][name]["exposed_ms"]) for name in names
            ]
            fault = fault_of(result)
            shown = [f"{median:.1f}" for median in medians]
            rows.append(
                [machine, str(result["host"]), *shown, f"refused: {fault}" if fault else ""]
            )
            print(table([rows[0], rows[-1]]), flush=True)
    print(table(rows))
    write({**about(), "cells": cells}, options.json)


if __name__ == "__main__":
    main()
