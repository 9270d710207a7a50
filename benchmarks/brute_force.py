"""The planner against brute force: every candidate in every division into buckets, simulated.

::

    python benchmarks/brute_force.py dgx-1v pcie-pairs --bytes 25e6 100e6     some machines, presets or files
    python benchmarks/brute_force.py --page docs/cost-model.md        the table there: an hour and more

All times are modelled: seconds exposed after the backward pass that is assumed for so many bytes. The brute force
leaves out schedules with two algorithms, which only the planner looks for.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

from hier_allreduce import presets
from hier_allreduce.formatting import marked
from hier_allreduce.planning import best_plan
from hier_allreduce.planning.candidates import bucketings, candidates
from hier_allreduce.planning.host import backward_pass
from hier_allreduce.planning.plan import Plan, operands
from hier_allreduce.planning.simulator import Simulation, joined, work_of
from hier_allreduce.topology import load

SIZES = (10**7, 25 * 10**6, 10**8, 4 * 10**8, 10**9)
HEAD = ("machine", "MB", "brute force, ms", "by", "planner, ms", "by", "planner / brute force", "planner, s of CPU")


def brute_force(machine, size):
    """The least seconds of one algorithm, its name and its number of buckets."""
    backward, towers = backward_pass(size), len(machine)
    best = math.inf, "", 0
    for candidate in candidates(machine):
        work = work_of(towers, towers, candidate.steps, operands(Plan(towers, candidate.chunks, candidate.steps)))
        for shares in bucketings():
            sizes = [share * size / candidate.chunks for share in shares for _ in range(candidate.chunks)]
            numbers = [number for number in range(len(shares)) for _ in range(candidate.chunks)]
            whole, patience = joined([work] * len(shares)), best[0] + backward.seconds
            run = Simulation(whole, machine, sizes, numbers, backward, patience=patience).run()
            best = min(best, (run.seconds - backward.seconds, candidate.algorithm, len(shares)))
    return best


def row(name, size):
    """A row of the table, and the planner's time over that of brute force."""
    machine = load(name)
    least, algorithm, buckets = brute_force(machine, size)
    began = time.process_time()
    found = best_plan(machine, size)
    cells = [
        name if name in presets.names("machines") else Path(name).stem,
        f"{size / 1e6:g}",
        f"{least * 1e3:.3f}",
        f"{algorithm}, {buckets}",
        f"{found.seconds * 1e3:.3f}",
        f"{found.plan.algorithm}, {found.buckets}",
        f"{found.seconds / least:.2f}",
        f"{time.process_time() - began:.1f}",
    ]
    return f"| {' | '.join(cells)} |", found.seconds / least


def main():
    """Print the table, and write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("machines", nargs="*", metavar="MACHINE")
    parser.add_argument("--bytes", nargs="+", type=lambda text: int(float(text)), default=SIZES, metavar="SIZE")
    parser.add_argument("--page", metavar="FILE")
    args = parser.parse_args()
    lines, ratios = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)], []
    print(*lines, sep="\n")
    for name in args.machines or presets.names("machines"):
        for size in args.bytes:
            line, ratio = row(name, size)
            print(line, flush=True)
            lines.append(line)
            ratios.append(ratio)
    lines += ["", f"Planner over brute force: {statistics.median(ratios):.2f} (median), {max(ratios):.2f} (worst)."]
    print(*lines[-2:], sep="\n")
    if args.page:
        page = Path(args.page)
        page.write_text(marked(page.read_text(encoding="utf-8"), "brute force", "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
