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
    """A printed row, and the planner's time over that of brute force."""
    machine = load(name)
    least, algorithm, buckets = brute_force(machine, size)
    began = time.process_time()
    found = best_plan(machine, size)
    cells = [
        _title(name),
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
    print(f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD), sep="\n")
    ratios = {}
    for name in args.machines or presets.names("machines"):
        for size in args.bytes:
            line, ratios[name, size] = row(name, size)
            print(line, flush=True)
    table = summary(ratios)
    print(table)
    if args.page:
        page = Path(args.page)
        page.write_text(marked(page.read_text(encoding="utf-8"), "brute force", table), encoding="utf-8")


def _title(machine):
    return machine if machine in presets.names("machines") else Path(machine).stem


def summary(ratios):
    """The table of a page: planner over brute force, a row for each machine and a column for each size."""
    sizes = sorted({size for _, size in ratios})
    lines = ["| |" + "".join(f" {size / 1e6:g} MB |" for size in sizes), "|---|" + "---|" * len(sizes)]
    for machine in dict.fromkeys(machine for machine, _ in ratios):
        found = [ratios.get((machine, size)) for size in sizes]
        cells = "".join(f" {'' if ratio is None else format(ratio, '.2f')} |" for ratio in found)
        lines.append(f"| {_title(machine)} |{cells}")
    all_ratios = list(ratios.values())
    median, worst = statistics.median(all_ratios), max(all_ratios)
    return "\n".join([*lines, "", f"Planner over brute force: {median:.2f} (median), {worst:.2f} (worst)."])


if __name__ == "__main__":
    main()
