"""``hier-allreduce bench``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, List, Sequence

if TYPE_CHECKING:
    from ..bench import Case, Measured, Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="resnet50", help="a shipped table of gradient shapes (default: resnet50)")
    model.add_argument("--shapes", metavar="FILE", help="your own table: name, shape, dtype, between tabs")
    parser.add_argument(
        "--devices", type=int, metavar="K", help="how many (default: all GPUs, or 8 logical CPU devices)"
    )
    parser.add_argument("--average", action="store_true", help="the mean instead of the sum")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="timed steps of each (default: 15)")
    parser.add_argument(
        "--contenders", metavar="A,B,…", help="only these; `ours:NAME` is a strategy (default: everybody)"
    )
    parser.add_argument(
        "--strategy", nargs="+", default=[], metavar="NAME", help="measure these strategies of ours too"
    )
    parser.add_argument("--rows", type=int, default=2048, metavar="N", help="rows in a sparse gradient (default: 2048)")
    parser.add_argument(
        "--memory",
        type=float,
        default=8,
        metavar="GIB",
        help="do not run who needs more than this for dense copies of sparse gradients (default: 8)",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--picture", metavar="FILE", help="draw the ratios")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from .. import bench, shapes
    from ..contenders import all_of_them, find, ours

    name = args.shapes or args.model
    case = bench.Case(
        shapes.load(name), bench.devices_here(args.devices), args.average, args.rows, int(args.memory * 2**30)
    )
    names = [word for word in (args.contenders or "").split(",") if word]
    contenders = [find(word) for word in names if word != "floor"] if names else list(all_of_them())
    contenders += [ours(strategy) for strategy in args.strategy]
    report = _with_progress(case, contenders, args.rounds, not names or "floor" in names)
    print(text(name, report))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"model": name, "rounds": args.rounds, **report.as_dict()}, file, indent=1, ensure_ascii=False)
    if args.picture:
        draw(name, report, args.picture)
    return 0


def _with_progress(case: Case, contenders: Sequence[Any], rounds: int, floor: bool) -> Report:
    from tqdm import tqdm

    from .. import bench

    total = 1 + len(contenders) + bench.WARM_UP + rounds
    with tqdm(total=total, file=sys.stderr, leave=False, bar_format="{l_bar}{bar:30}| {n_fmt}/{total_fmt}") as bar:

        def tick(words: str) -> None:
            bar.set_description(f"{words:20}")
            bar.update()

        return bench.measure(case, contenders, rounds, floor, tick)


# ---- the table -------------------------------------------------------------------------------------

_HEAD = (
    ("", "ms over", "", "times", "nodes", "nodes", "build", "first", "peak", "copies", "copied", "largest"),
    ("", "baseline", "quartiles", "ours", "built", "run", "s", "run s", "memory", "", "MiB", "error"),
)


def text(name: str, report: Report) -> str:
    """The report as a table of 100 columns, and a line for each contender that failed."""
    case = report.case
    what = "mean" if case.average else "sum"
    lines = [
        f"{name}: {len(case.shapes)} gradients, {case.tower_bytes / 2**20:.1f} MiB a tower, {what} over"
        f" {len(case.devices)} devices ({case.devices[0]} …)",
        f"peak memory in units of all towers' gradients ({len(case.devices) * case.tower_bytes / 2**20:.0f} MiB);"
        f" the baseline's step takes {_ms(report.baseline.step_seconds)} ms",
        "",
        *_aligned([*_HEAD, *(_row(report, measured) for measured in report.contenders if measured.step_seconds)]),
    ]
    failed = [f"{m.name} {m.status}: {' '.join(m.error.split())}" for m in report.contenders if m.status != "ok"]
    return "\n".join(lines + [""] * bool(failed) + [line[:400] for line in failed])


def _row(report: Report, measured: Measured) -> List[str]:
    from ..bench import quartiles

    low, median, high = (seconds * 1e3 for seconds in quartiles(report.net_seconds(measured)))
    ratio = report.ratio(measured)
    cells = [measured.name, f"{median:.1f}", f"{low:.1f}–{high:.1f}", f"{ratio:.2f}" if ratio else ""]
    if not measured.nodes_built:  # the floor has no graph
        return cells
    return [
        *cells,
        f"{measured.nodes_built}",
        f"{measured.nodes_executed}",
        f"{measured.build_seconds:.2f}",
        f"{measured.first_run_seconds:.2f}",
        f"{measured.peak_bytes / (len(report.case.devices) * report.case.tower_bytes):.2f}",
        f"{measured.copied_tensors}",
        f"{measured.copied_bytes / 2**20:.0f}",
        f"{measured.max_error:.1g}" + " WRONG" * (measured.status == "wrong"),
    ]


def _ms(seconds: Sequence[float]) -> str:
    from ..bench import quartiles

    return f"{quartiles(seconds)[1] * 1e3:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    """Columns as wide as their widest cell: the first to the left, the others to the right."""
    count = max(len(row) for row in rows)
    full = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*full)]
    sides: List[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (count - 1)]
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip() for row in full]


# ---- the picture -----------------------------------------------------------------------------------


def draw(name: str, report: Report, path: str) -> None:
    """A bar for each contender: how many times ours it takes, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [(measured, report.ratio(measured) or 0.0) for measured in report.contenders if measured.step_seconds]
    colors = {"floor": "#999999", "wrong": "#c44e52", "ours": "#2a7f62"}
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.34 * len(timed)), constrained_layout=True)
    for place, (measured, ratio) in enumerate(timed):
        kind = measured.status if measured.status == "wrong" else measured.name.split(":")[0]
        axes.barh(place, ratio, color=colors.get(kind, "#4c72b0"))
        axes.annotate(f"{ratio:.2f}", (ratio, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xscale("log")
    axes.set_yticks(range(len(timed)))
    axes.set_yticklabels([measured.name + " (wrong)" * (measured.status == "wrong") for measured, _ in timed])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xlabel("step time over a graph without reduction, times ours")
    what = "mean" if report.case.average else "sum"
    axes.set_title(f"{name}, {what} over {len(report.case.devices)} devices")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
