"""Tables of what was measured, as Markdown, from the committed JSON of ``benchmarks/``.

::

    python docs/generate/measured.py     # writes the tables into the pages again

A page says ``<!-- measured: NAME -->`` before such a table and ``<!-- end -->`` after it. A table
has what was measured so far. Each ratio is defined in ``benchmarks/ratios.py``.
"""

import functools
import json
import sys
from collections import Counter, defaultdict
from statistics import median

from page_tables import TOP, PageTables, markdown

# benchmarks/ is no package, so its modules are found by this path.
sys.path.insert(0, str(TOP / "benchmarks"))

import anchors as anchoring
import ratios
from rounds import FUNCTION, PRIVATE
from sweep import SIZES, scores
from tables import price_rows

RESULTS = TOP / "benchmarks" / "results"
PUBLISHED = RESULTS / "published"  # calibrated: a file for each machine, model and pass
PAGES = ("docs/measured.md", "docs/emulator-limits.md", "benchmarks/results/published/README.md")

OURS = ratios.OURS
CHOICE_OF_8 = "flat_hierarchical/4"  # of the rule, for 8 GPUs
SHORT = {  # short names, of the picture
    OURS: "ours",
    "tensorpack packed": "tensorpack, packed",
    "tensorpack": "tensorpack",
    "tensorpack gpu": "tensorpack, gpu",
    "HierarchicalCopyAllReduce": "HierarchicalCopy",
    "HierarchicalCopyAllReduce in 8 packs": "in 8 packs",
    "ReductionToOneDevice": "ReductionToOne",
}
BASELINES = {  # shorter names, of the long table
    "tensorpack packed": "packed",
    "tensorpack": "alone",
    "tensorpack gpu": "gpu",
    "HierarchicalCopyAllReduce in 8 packs": "8 packs",
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
PASSES_MS = (60, 20)
UPDATES = ("replicated", "once", "sharded")
# The all-reduces of anchors that stand for those without: the default, with its control edges.
STANDS_FOR = {
    OURS: "flat/4",
    "HierarchicalCopyAllReduce in 8 packs": "HierarchicalCopyAllReduce",
}
# For ResNet-50 these were one plan when chunk sizes were swept: no pack was above a quarter of the
# bytes that were left.
ONE_PLAN = (("flat_hierarchical/32", "flat_hierarchical/64"), (OURS, CHOICE_OF_8))
SWEPT_SIZES = SIZES[:-1]  # the last one was the plan of the one before
NOTHING_YET = "No calibrated cell is published yet."


# ---- the cells -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def runs():
    """Return the published runs, by the name of their file."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(PUBLISHED.glob("*.json"))]


def all_cells():
    """Return the published cells of emulated machines, without those of the anchors."""
    return [cell for run in runs() for cell in run["cells"] if cell["machine"] in MACHINES]


def cells_of(machine, model, pass_ms):
    """Return the cells that differ in the share of the host, the least one first."""
    wanted = (machine, model, pass_ms, True)
    keys = ("machine", "model", "pass_ms", "average")
    cells = [cell for cell in all_cells() if tuple(cell[key] for key in keys) == wanted]
    return sorted(cells, key=lambda cell: cell["host"])


def places(models):
    """Yield the machine, the model, the pass and the cells of each row of a table."""
    for model in models:
        for pass_ms in PASSES_MS:
            for machine in MACHINES:
                cells = cells_of(machine, model, pass_ms)
                if cells:
                    yield machine, model, pass_ms, cells


# ---- tables --------------------------------------------------------------------------------------


def exposed(cells, name):
    """Return one all-reduce's medians, in ms, as a cell of a table: a dash if it did not run."""
    medians = [ratios.exposed_ms(cell, name) for cell in cells if name in cell["contenders"]]
    return ", ".join(f"{ms:.1f}" for ms in medians) or "–"


def long_table():
    """Return the table of all means, as emulated."""
    rows = means_rows("emulated", places(MODELS))
    limits = [f"{cells[0]['contenders'][OURS]['limit_ms']:.1f}" for *_, cells in places(MODELS)]
    return table([[*row, limit] for row, limit in zip(rows, ["limit, ms", *limits])])


def corrected_table():
    """Return the table of all means, with the emulator's known errors corrected."""
    of_place = [(*place, list(map(corrected, cells))) for *place, cells in places(MODELS)]
    return table(means_rows("emulated, corrected", of_place))


def means_rows(kind, cells_by_place):
    """Return the rows of a table of means: ours beside the best baseline, and both ratios.

    A row has two numbers where the shares of the host differ.
    """
    rows = [[kind, "model, pass in ms", "ours, ms", "best baseline, ms", "÷ exposed", "÷ step"]]
    for machine, model, pass_ms, cells in cells_by_place:
        baselines = [ratios.best_baseline(cell) for cell in cells]
        medians = [ratios.exposed_ms(cell, baseline) for cell, baseline in zip(cells, baselines)]
        numbers = ", ".join(f"{ms:.1f}" for ms in medians)
        words = dict.fromkeys(BASELINES.get(baseline, baseline) for baseline in baselines)
        rows.append(
            [
                f"`{machine}`",
                f"{MODELS[model]}, {pass_ms}",
                exposed(cells, OURS),
                f"{numbers} ({', '.join(words)})",
                ratio_words(ratios.exposed_ratio, cells, 2),
                ratio_words(ratios.step_ratio, cells, 3),
            ]
        )
    return rows


def ratio_words(ratio, cells, digits):
    """Return ours compared with the best baseline, of cells, as a cell of a table."""
    values = [ratio(cell, OURS, ratios.best_baseline(cell)) for cell in cells]
    return ", ".join(f"{value:.{digits}f}" for value in values)


def published_anchors():
    """Return the published emulated steps that a real chip has timed, too."""
    return anchoring.anchors([cell for run in runs() for cell in run["cells"]])


def anchors_table():
    """Return the table of all steps that a real chip timed, beside the emulated ones."""
    return beside_real(published_anchors())


def passes_table():
    """Return the same table of the steps with a pass."""
    return beside_real([anchor for anchor in published_anchors() if anchor.place.pass_ms])


def beside_real(found):
    """Return a table of anchors.

    A row has a number for each share of the host, and by how much the emulated steps are too short.
    """
    rows = [["exposed, ms", "machine, pass in ms", "host", "real", "emulated", "real - emulated"]]
    by_row = defaultdict(list)
    for anchor in found:
        by_row[anchor.place.machine, anchor.place.pass_ms, anchor.name].append(anchor)
    for (machine, pass_ms, name), of_row in by_row.items():
        of_row.sort(key=lambda anchor: anchor.place.host)
        hosts = ", ".join(f"{anchor.place.host:g}" for anchor in of_row)
        real = ", ".join(f"{median(anchor.real_ms):.1f}" for anchor in of_row)
        emulated = ", ".join(f"{anchor.emulated_ms:.1f}" for anchor in of_row)
        lacking = f"{lacking_ms(found, machine, pass_ms, name):+.1f}"
        rows.append([name, f"`{machine}`, {pass_ms:g}", hosts, real, emulated, lacking])
    return table(rows)


def lacking_ms(found, machine, pass_ms, name):
    """Return by how much emulated steps of an all-reduce are too short: the median of the hosts.

    ``found`` are the anchors; without one of this place and name it is None.
    """
    lacking = [
        median(anchor.real_ms) - anchor.emulated_ms
        for anchor in found
        if (anchor.place.machine, anchor.place.pass_ms, anchor.name) == (machine, pass_ms, name)
    ]
    return median(lacking) if lacking else None


def errors_sentence():
    """Return how many anchors' errors are small, as a sentence."""
    found = published_anchors()
    near = sum(abs(anchor.error) <= 0.25 for anchor in found)
    return (
        f"{near} of all {len(found)} errors are at most 25 % of the real time. The last column is"
        f" the median of the hosts."
    )


# ---- sentences -----------------------------------------------------------------------------------


def error_ms(gpus, name):
    """Return by how much an emulated all-reduce is too short, by the anchor that is nearest.

    That is one with a pass, if there is one, and of as many GPUs; 0 if it is in no anchor.
    """
    wanted = STANDS_FOR.get(name, name)
    of_two, of_eight = ("h100-2-logical", 60), ("h100-8-logical", 60)
    near = [of_two, of_eight] if gpus == 2 else [of_eight, of_two]
    for machine, pass_ms in (*near, ("h100-8-logical", 0)):
        error = lacking_ms(published_anchors(), machine, pass_ms, wanted)
        if error is not None:
            return error
    return 0.0


def corrected(cell):
    """Return a cell with the emulator's known error added to each exposed time."""
    by_name = {}
    for name in (OURS, *ratios.baselines_in(cell)):
        median = ratios.exposed_ms(cell, name) + error_ms(cell["gpus"], name)
        by_name[name] = {**cell["contenders"][name], "median_ms": median}
    return {**cell, "contenders": by_name}


def ratios_table():
    """Return the table of both ratios in all cells, as emulated and corrected, and a sentence."""
    if not all_cells():
        return NOTHING_YET
    corrected_cells = list(map(corrected, all_cells()))
    rows = [["ours ÷ best baseline", "as emulated", "corrected"]]
    for what, ratio, digits in (
        ("exposed", ratios.exposed_ratio, 2),
        ("step", ratios.step_ratio, 3),
    ):
        rows.append([what, *(spread(ratio, of, digits) for of in (all_cells(), corrected_cells))])
    errors = [error_ms(8, name) for name in ratios.COMPARED]
    return (
        f"{table(rows)}\n\nOn 8 GPUs the emulator lacks {error_ms(8, OURS):.1f} ms of ours, and"
        f" {min(errors):.1f} to {max(errors):.1f} of the others. **Corrected, ours is ahead in"
        f" {ahead_of(corrected_cells)}"
    )


def spread(ratio, cells, digits):
    """Return the range, and the median, of a ratio of ours and the best baseline in cells."""
    values = sorted(ratio(cell, OURS, ratios.best_baseline(cell)) for cell in cells)
    least, most, middle = (f"{n:.{digits}f}" for n in (values[0], values[-1], median(values)))
    return f"{least} to {most} ({middle} in the median)"


def ahead_of(cells):
    """Return in how many cells ours is ahead, and the machines of the others: an end in bold."""
    behind = Counter()
    for cell in cells:
        best_ms = ratios.exposed_ms(cell, ratios.best_baseline(cell))
        behind[cell["machine"]] += ratios.exposed_ms(cell, OURS) > best_ms
    cells_by_machine = Counter(cell["machine"] for cell in cells)
    where = [
        f"{count} of {cells_by_machine[machine]} on `{machine}`"
        for machine, count in behind.items()
        if count
    ]
    ahead = len(cells) - sum(behind.values())
    return f"{ahead} of {len(cells)} cells**, and behind in {', '.join(where) or 'none'}."


def noise_sentence():
    """Return a sentence about pairs of columns that were one plan, each in one run."""
    apart = []
    for cell in swept_cells():
        for names in ONE_PLAN:
            medians = [ratios.exposed_ms(cell, name) for name in names]
            apart.append((max(medians) / min(medians) - 1, cell))
    if not apart:
        return NOTHING_YET
    most, cell = max(apart, key=lambda one: one[0])
    middle = median(difference for difference, _ in apart)
    return (
        f"By chance two columns may differ as two of one plan did: in {len(apart)} pairs, each in"
        f" one run, by {middle:.0%} in the median, and {most:.0%} at most (`{cell['machine']}`,"
        f" pass {cell['pass_ms']:g} ms, host {cell['host']})."
    )


def cells_in(pattern):
    """Return the cells of the published files with such a name."""
    cells = []
    for path in sorted(PUBLISHED.glob(pattern)):
        cells += json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def swept_cells():
    """Return the cells in which all algorithms ran with chunks of several sizes."""
    return cells_in("sweep/sizes-*.json")


def sizes_table():
    """Return the table of the rule's algorithm, by the size of chunks."""
    cells = []
    for cell in swept_cells():
        algorithm = "flat_hierarchical" if cell["gpus"] == 8 else "flat"
        by_size = {size: cell["contenders"][f"{algorithm}/{size}"] for size in SWEPT_SIZES}
        cells.append({**cell, "contenders": by_size})
    return side_by_side(cells, SWEPT_SIZES, [f"{size} MiB" for size in SWEPT_SIZES])


def sweep_sentence():
    """Return a sentence about the rule's score in the cells that were swept."""
    cells = swept_cells()
    if not cells:
        return "No calibrated sweep is published yet."
    score_by_place = {}
    for cell in cells:
        place = (cell["machine"], cell["model"], cell["pass_ms"], cell["host"])
        score_by_place[place] = scores(cell)[OURS]
    machine, model, pass_ms, host = max(score_by_place, key=score_by_place.__getitem__)
    values = score_by_place.values()
    candidates = max(len(cell["contenders"]) for cell in cells) - 1
    return (
        f"In {len(values)} emulated cells with up to {candidates} candidates, the rule adds"
        f" {median(values):.2f} of what the best candidate of the cell adds, in the"
        f" median, and {max(values):.2f} at most, for {MODELS[model]} on `{machine}`, pass"
        f" {pass_ms:g} ms, host {host}."
    )


def groups_table():
    """Return the table of one group, two for the copies back, and two; with edges and without."""
    with_edges = ("flat/4", CHOICE_OF_8, "hierarchical/4")
    names = (*with_edges, *(name + ratios.WITHOUT_EDGES for name in with_edges))
    # Several runs have other all-reduces of the same cell.
    cell_by_place = {}
    for cell in cells_in("sweep/groups*.json"):
        place = tuple(cell[key] for key in ("machine", "pass_ms", "host"))
        before = cell_by_place.get(place, {"contenders": {}})["contenders"]
        cell_by_place[place] = {**cell, "contenders": {**before, **cell["contenders"]}}
    return side_by_side(cell_by_place.values(), names)


def updates_table():
    """Return the table of a TowerOptimizer's updates: the all-reduce and all copies of a step."""
    names = [f"update={update}" for update in UPDATES]
    return side_by_side(cells_in("updates/*.json"), names, UPDATES)


def functions_table():
    """Return the table of ours in a graph and in a ``tf.function``, with edges and without."""
    others = (OURS + ratios.WITHOUT_EDGES + FUNCTION, "HierarchicalCopyAllReduce in 8 packs")
    titles = (
        "in a graph",
        "in a function",
        "there without edges",
        "`HierarchicalCopy…` in 8 packs",
    )
    return side_by_side(cells_in("functions/*.json"), (OURS, OURS + FUNCTION, *others), titles)


def default_table():
    """Return the table of what might be another default: updates, and chunks of 4 to 32 MiB."""
    large = [f"{name}/{mib}" for name in ("flat_hierarchical", "hierarchical") for mib in (16, 32)]
    names = ("ours", "hierarchical/4", *large, "tensorpack packed")
    updates = ("update=replicated", "update=sharded")
    titles = (
        "ours",
        "two/4",
        "one/16",
        "one/32",
        "two/16",
        "two/32",
        "packed",
        "replicated",
        "sharded",
    )
    return side_by_side(cells_in("default/*.json"), (*names, *updates), titles)


def checks_table():
    """Return the table of steps, and of what the flag and compared copies add to them."""
    return table(price_rows(cells_in("checks/*.json")))


def embeddings_table():
    """Return the table of an embedding whose rows are more bytes than the table itself."""
    names = ("ours rows", "ours dense", "tensorpack", "tensorpack gpu")
    return side_by_side(cells_in("embeddings/word_embeddings.json"), names)


def dlrm_table():
    """Return the table of DLRM's rows."""
    return side_by_side(cells_in("embeddings/dlrm.json"), (OURS,))


def threads_sentence():
    """Return a sentence about all-reduces with tensorpack's threads, and with the default."""
    more_ms = defaultdict(list)
    for cell in cells_in("threads/*.json"):
        for name in cell["contenders"]:
            if name + PRIVATE in cell["contenders"]:
                default, private = (ratios.exposed_ms(cell, n) for n in (name, name + PRIVATE))
                more_ms[name == OURS].append(private - default)
    ours, others = more_ms[True], more_ms[False]
    return (
        "The baselines ran with the threads that the import of tensorpack chooses, ours with"
        " TensorFlow's. In an emulated cell with both, tensorpack's threads add"
        f" {min(others):.1f} to {max(others):.1f} ms to the baselines, and {min(ours):.1f} to"
        f" {max(ours):.1f} to ours."
    )


def side_by_side(cells, names, titles=None):
    """Return a table with a row for each machine and pass, and a number for each host's share.

    All-reduces have columns of their names, or of other titles.
    """
    rows = [["emulated: exposed, ms", "pass, ms", *(titles or names)]]
    cells_by_place = {}
    for cell in cells:
        cells_by_place.setdefault((cell["machine"], cell["pass_ms"]), []).append(cell)
    for (machine, pass_ms), of_place in cells_by_place.items():
        exposures = [exposed(of_place, name) for name in names]
        rows.append([f"`{machine}`", f"{pass_ms:g}", *exposures])
    return table(rows)


def about():
    """Return where and when the cells were measured, as a sentence."""
    if not runs():
        return NOTHING_YET
    cells = Counter()
    for run in runs():
        cells[run["date"], run["commit"]] += len(run["cells"])
    made = [f"{count} on {day} at commit {commit}" for (day, commit), count in cells.items()]
    rounds = sorted({cell["rounds"] for run in runs() for cell in run["cells"]})
    first = runs()[0]
    return (
        f"Cells: {', '.join(made)}. TensorFlow {first['tensorflow']}, {first['cores']} cores,"
        f" {'/'.join(map(str, rounds))} rounds."
    )


def table(rows):
    """Return a Markdown table of a header and rows; without rows, a sentence."""
    return markdown(rows) if len(rows) > 1 else NOTHING_YET


TABLES = {
    "long": long_table,
    "corrected": corrected_table,
    "anchors": anchors_table,
    "passes": passes_table,
    "errors": errors_sentence,
    "ratios": ratios_table,
    "noise": noise_sentence,
    "sizes": sizes_table,
    "sweep": sweep_sentence,
    "groups": groups_table,
    "updates": updates_table,
    "functions": functions_table,
    "checks": checks_table,
    "default": default_table,
    "embeddings": embeddings_table,
    "dlrm": dlrm_table,
    "threads": threads_sentence,
    "about": about,
}


ON_PAGES = PageTables("measured", PAGES, lambda name: TABLES[name]())
with_tables = ON_PAGES.in_text

if __name__ == "__main__":
    ON_PAGES.write()
