"""Tables of what was measured, as Markdown, from the committed JSON of ``benchmarks/emulated.py``.

::

    python docs/generate/measured.py     # writes the tables into the pages again

A page says ``<!-- measured: NAME -->`` before such a table and ``<!-- end -->`` after it.
"""

import functools
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

TOP = Path(__file__).parents[2]
sys.path.insert(0, str(TOP / "benchmarks"))

from sweep import score_of_rule  # noqa: E402  the line above shows where it is

RESULTS = TOP / "benchmarks" / "results"  # of the sweep: sweep-*.json
RUNS = RESULTS / "emulated"  # a file for each run
PAGES = ("README.md", "docs/index.md", "docs/measured.md")
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

OURS = "ours"
PEERS = {
    "tensorpack packed": "tensorpack, hierarchical",
    "tensorpack gpu": "tensorpack, gpu",
    "HierarchicalCopyAllReduce": "HierarchicalCopyAllReduce",
    "ReductionToOneDevice": "ReductionToOneDevice",
}
MACHINES = {
    "dgx-1v": "8 × V100, NVLink",
    "dgx-1p": "8 × P100, NVLink",
    "dgx-a100": "8 × A100, NVSwitch",
    "pcie-pairs": "8 × L40S, PCIe in pairs",
    "pcie-switch": "8 GPUs, two PCIe switches",
    "4x-rtx-4090": "4 × RTX 4090, no peer access",
    "2x-rtx-5090": "2 × RTX 5090, no peer access",
}
MODELS = {"resnet50": "ResNet-50", "bert_base": "BERT-base", "vgg16": "VGG-16"}


@functools.lru_cache(maxsize=None)
def runs():
    """Return the committed runs of the benchmark, the first one first."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json"))]


def all_cells():
    """Return the cells of all runs."""
    return [cell for run in runs() for cell in run["cells"]]


def cells_of(machine, model, average):
    """Return the cells of a machine and a model, the least share of the host first."""
    wanted = (machine, model, average)
    cells = [
        cell for cell in all_cells() if (cell["machine"], cell["model"], cell["average"]) == wanted
    ]
    return sorted(cells, key=lambda cell: cell["host"])


def exposed(cells, name):
    """Return one all-reduce's medians, in ms, as a cell of a table: a dash if it did not run."""
    medians = [
        cell["contenders"][name]["median_ms"] for cell in cells if name in cell["contenders"]
    ]
    return ", ".join(f"{median:.1f}" for median in medians) or "–"


def short_table():
    """Return the table of README: ResNet-50's mean on each machine, ours beside the peers."""
    rows = [["exposed, ms", OURS, *PEERS.values()]]
    for machine, words in MACHINES.items():
        cells = cells_of(machine, "resnet50", True)
        numbers = [exposed(cells, name) for name in (OURS, *PEERS)]
        rows.append([f"{words} (`{machine}`)", *numbers])
    return markdown(rows)


def best_peer(cell):
    """Return the name and the median of the peer that leaves the least time exposed."""
    medians = {name: one["median_ms"] for name, one in cell["contenders"].items() if name != OURS}
    name = min(medians, key=medians.__getitem__)
    return name, medians[name]


def long_table():
    """Return the table of the means: ours beside the best peer, and the ratio.

    A row has two numbers where the shares of the host differ.
    """
    head = ["machine", "model", "ours, ms", "range", "limit, ms", "best peer, ms", "ours ÷ peer"]
    rows = [head]
    for model, model_words in MODELS.items():
        for machine in MACHINES:
            cells = cells_of(machine, model, True)
            ours = [cell["contenders"][OURS] for cell in cells]
            peers = [best_peer(cell) for cell in cells]
            names = ", ".join(dict.fromkeys(name for name, _ in peers))
            ranges = [f"{min(one['exposed_ms']):.1f}–{max(one['exposed_ms']):.1f}" for one in ours]
            rows.append(
                [
                    f"`{machine}`",
                    model_words,
                    exposed(cells, OURS),
                    ", ".join(ranges),
                    f"{ours[0]['limit_ms']:.1f}",
                    f"{', '.join(f'{median:.1f}' for _, median in peers)} ({names})",
                    ratios_of(cells),
                ]
            )
    return markdown(rows)


def sums_table():
    """Return the table of the sums: ours, and the ratio to the best peer."""
    rows = [["ours, ms (÷ best peer)", *MODELS.values()]]
    for machine in MACHINES:
        row = [f"`{machine}`"]
        for model in MODELS:
            cells = cells_of(machine, model, False)
            row.append(f"{exposed(cells, OURS)} ({ratios_of(cells)})")
        rows.append(row)
    return markdown(rows)


def ratios_of(cells):
    """Return ours divided by the best peer, of cells, as a cell of a table."""
    return ", ".join(f"{ratio(cell):.2f}" for cell in cells)


def ratio(cell):
    """Return ours divided by the best peer."""
    return cell["contenders"][OURS]["median_ms"] / best_peer(cell)[1]


def ratios():
    """Return ours divided by the best peer, of all cells, in ascending order."""
    return sorted(map(ratio, all_cells()))


def ratio_sentence():
    """Return a sentence about all cells."""
    values = ratios()
    return (
        f"In {len(values)} cells, ours leaves {values[0]:.2f} to {values[-1]:.2f} of the"
        f" exposed time of the best peer, {statistics.median(values):.2f} in the median."
    )


def sweep_sentence():
    """Return a sentence about the rule's score in the cells that were swept."""
    found = defaultdict(list)
    for path in sorted(RESULTS.glob("sweep-*.json")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            score = score_of_rule(cell)
            if score is not None:
                found[cell["machine"], cell["model"], cell["host"]].append(score)
    worse = {kind: max(cell_scores) for kind, cell_scores in found.items()}
    machine, model, host = max(worse, key=worse.__getitem__)
    return (
        f"In {len(worse)} cells, the rule scores {statistics.median(worse.values()):.2f} in the"
        f" median, of two runs the worse one, and {max(worse.values()):.2f} at most, for"
        f" {MODELS[model]} on `{machine}` at host {host}."
    )


def about():
    """Return where and when the cells were measured, as a sentence."""
    rounds = {len(cell["contenders"][OURS]["exposed_ms"]) for cell in all_cells()}
    found = runs()
    first = found[0]
    cells = Counter()
    for run in found:
        cells[run["date"], run["commit"]] += len(run["cells"])
    made = [f"{count} on {day} at commit {commit}" for (day, commit), count in cells.items()]
    return (
        f"Cells: {', '.join(made)}. TensorFlow {first['tensorflow']}, {first['cores']} cores,"
        f" {'/'.join(map(str, sorted(rounds)))} rounds."
    )


def markdown(rows):
    """Return a Markdown table of a header and rows."""
    head, *others = rows
    cells = [head, ["---"] * len(head), *others]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


TABLES = {
    "short": short_table,
    "long": long_table,
    "sums": sums_table,
    "ratios": ratio_sentence,
    "sweep": sweep_sentence,
    "about": about,
}


def with_tables(text):
    """Return a page's text with each table as it is today."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def main():
    """Write the tables into the pages."""
    for page in PAGES:
        path = TOP / page
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
