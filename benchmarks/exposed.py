"""What is left of an all-reduce after the backward pass, with and without lanes: the table of docs/lanes.md.

::

    python benchmarks/exposed.py                        ResNet-50's gradients, five machines
    python benchmarks/exposed.py --page docs/lanes.md   between the <!-- exposed --> marks of a page

All times are modelled. For each machine: the plan that is fastest on an idle machine and two-group, both in 1, 4 or 8
buckets, whichever leaves least; the plan chosen for the backlog; and that over lanes.
"""

import argparse
from pathlib import Path

from hier_allreduce.formatting import marked
from hier_allreduce.planning import Backward, Schedule, choose, choose_for_training, exposed_seconds, operands
from hier_allreduce.topology import load

MACHINES = ("dgx-1v", "dgx-1p", "nvlink-bridges", "pcie-sockets", "dgx-a100")
BYTES = 102_000_000  # ResNet-50
HEAD = (
    "machine",
    "queued, ms",
    "idle: without, with lanes, ms",
    "exposed: fastest idle plan",
    "two-group",
    "chosen, without lanes",
    "chosen, with lanes",
    "with lanes / better of the first two",
    "copies, sums in a step",
)


def row(name, backlog, lanes):
    """A row of the table."""
    topology, backward = load(name), Backward(backlog)

    def best(algorithm):
        schedules = (Schedule(count, choose(topology, BYTES // count, algorithm).recipe, 0.0) for count in (1, 4, 8))
        return min(exposed_seconds(schedule, topology, BYTES, backward) for schedule in schedules)

    fastest, two_group = best(None), best("two-group")
    without = choose_for_training(topology, BYTES, backward=backward)
    over_lanes = choose_for_training(topology, BYTES, lanes=lanes, backward=backward)
    idle = [choose(topology, BYTES, lanes=used).seconds for used in (0, lanes)]
    plan = over_lanes.plan()
    copies = sum(plan.transfers().values())
    cells = [
        name,
        f"{backlog * 1e3:.0f}",
        ", ".join(f"{seconds * 1e3:.2f}" for seconds in idle),
        *(f"{seconds * 1e3:.2f}" for seconds in (fastest, two_group, without.exposed, over_lanes.exposed)),
        f"{over_lanes.exposed / min(fastest, two_group):.2f}",
        f"{copies}, {sum(added > 1 for added in operands(plan))}",
    ]
    return f"| {' | '.join(cells)} |"


def main():
    """Print the table, and write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lanes", type=int, default=4, metavar="L")
    parser.add_argument("--page", metavar="FILE")
    args = parser.parse_args()
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for name in MACHINES:
        lines += [row(name, backlog, args.lanes) for backlog in (0.005, 0.010)]
    text = "\n".join(lines)
    print(text)
    if args.page:
        page = Path(args.page)
        page.write_text(marked(page.read_text(encoding="utf-8"), "exposed", text), encoding="utf-8")


if __name__ == "__main__":
    main()
