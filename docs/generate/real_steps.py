"""The table of steps on a real GPU, as Markdown, from ``benchmarks/results/real``.

::

    python docs/generate/real_steps.py     # writes the table into the pages again

A page says ``<!-- real: steps -->`` before it and ``<!-- end -->`` after it.
"""

import json
from statistics import median

from page_tables import TOP, PageTables, markdown

RUNS = TOP / "benchmarks" / "results" / "real"
PAGES = ("README.md", "docs/measured.md")

NAMES = {  # all-reduces by the name in the JSON
    "flat/4": "**ours** (`flat`)",
    "flat/4 without edges": "**ours** (`flat` without edges)",
    "flat_hierarchical/4": "**ours** (`flat_hierarchical`)",
    "tensorpack packed": "tensorpack, packed",
    "tensorpack": "tensorpack",
    "tensorpack gpu": "tensorpack, gpu",
    "HierarchicalCopyAllReduce": "`HierarchicalCopyAllReduce`",
    "ReductionToOneDevice": "`ReductionToOneDevice`",
}
KINDS = {  # cells of a column by machine, milliseconds of the pass
    ("h100-8-logical", 60): "8 GPUs",
    ("h100-2-logical", 60): "2 GPUs",
    ("h100-8-logical", 0): "8 GPUs, no pass",
}


def cells_of(machine, pass_ms):
    """Return the cells of a column, whose host does nothing but launch.

    Without a pass, all runs count. With one, those count that have no reason against them.
    """
    cells = []
    for path in sorted(RUNS.glob("*.json")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            place = (cell["machine"], cell.get("pass_ms"), cell.get("host"))
            if place == (machine, pass_ms, 0) and (pass_ms == 0 or "no_anchor" not in cell):
                cells.append(cell)
    return cells


def numbers(cells, name):
    """Return the step and the exposed time, in ms; the range of the runs if there are several."""
    of_name = [cell for cell in cells if name in cell["contenders"]]
    if not of_name:
        return "–", "–"
    exposed = [cell["contenders"][name]["median_ms"] for cell in of_name]
    steps = [cell["base_ms"] + ms for cell, ms in zip(of_name, exposed)]
    spread = f" ({min(exposed):.1f}–{max(exposed):.1f})" if len(exposed) > 1 else ""
    return f"{median(steps):.1f}", f"{median(exposed):.1f}{spread}"


def table():
    """Return the table: a row for each all-reduce, the step and the exposed time by column.

    A sentence follows.
    """
    rows = [["one H100 as"]]
    for title in KINDS.values():
        rows[0] += [f"{title}: step, ms", "exposed, ms"]
    for name, title in NAMES.items():
        cells = [numbers(cells_of(*kind), name) for kind in KINDS]
        rows.append([title, *(number for pair in cells for number in pair)])
    return f"{markdown(rows)}\n\n{about()}"


def about():
    """Return when the runs were made, and of what, as a sentence."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json"))]
    made = sorted({(run["date"], run["commit"], run["tensorflow"]) for run in runs})
    return (
        "; ".join(
            f"Measured on {day} at commit {commit}, with TensorFlow {version}"
            for day, commit, version in made
        )
        + "."
    )


TABLES = {"steps": table}
ON_PAGES = PageTables("real", PAGES, lambda name: TABLES[name]())
with_table = ON_PAGES.in_text

if __name__ == "__main__":
    ON_PAGES.write()
