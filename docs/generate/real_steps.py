"""Tables of steps on a real GPU, as Markdown, from ``benchmarks/results/real``.

::

    python docs/generate/real_steps.py     # writes the tables into the pages again

A page says ``<!-- real: NAME -->`` before a table and ``<!-- end -->`` after it.
"""

import json
import re
from statistics import median

from page_tables import TOP, PageTables, markdown

RUNS = TOP / "benchmarks" / "results" / "real"
PAGES = ("README.md", "docs/measured.md")
COLUMNS_OF_SHORT = ("8 GPUs", "2 GPUs")

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
    """Return the exposed time, in ms; the range of the runs if there are several."""
    exposed = exposed_in(cells, name)
    if not exposed:
        return "–"
    spread = f" ({min(exposed):.1f}–{max(exposed):.1f})" if len(exposed) > 1 else ""
    return f"{median(exposed):.1f}{spread}"


def exposed_in(cells, name):
    """Return the exposed time of an all-reduce, in ms, in each cell that has it."""
    ran = [cell["contenders"][name] for cell in cells if name in cell["contenders"]]
    return [contender["median_ms"] for contender in ran]


def exposed_by_name(machine, pass_ms):
    """Return the exposed times of a column, in ms, by the plain title of each all-reduce."""
    cells = cells_of(machine, pass_ms)
    times = {re.sub("[*`]", "", title): exposed_in(cells, name) for name, title in NAMES.items()}
    return {title: of_title for title, of_title in times.items() if of_title}


def table():
    """Return the table of the exposed times in all columns, and two sentences."""
    bases = [median(cell["base_ms"] for cell in cells_of(*place)) for place in KINDS]
    without = ", ".join(f"{ms:.1f}" for ms in bases)
    return f"{exposed_table(KINDS)}\n\nA step without all-reduce: {without} ms. {about()}"


def short_table():
    """Return README's table: the exposed time where 8 and 2 logical GPUs have a pass."""
    return exposed_table([place for place, title in KINDS.items() if title in COLUMNS_OF_SHORT])


def exposed_table(places):
    """Return a table with a row for each all-reduce that ran in one of the columns."""
    rows = [["exposed on one H100, ms", *(f"as {KINDS[place]}" for place in places)]]
    for name, title in NAMES.items():
        cells = [numbers(cells_of(*place), name) for place in places]
        if set(cells) != {"–"}:
            rows.append([title, *cells])
    return markdown(rows)


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


TABLES = {"steps": table, "short": short_table}
ON_PAGES = PageTables("real", PAGES, lambda name: TABLES[name]())
with_table = ON_PAGES.in_text

if __name__ == "__main__":
    ON_PAGES.write()
