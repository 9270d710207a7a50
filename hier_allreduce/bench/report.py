"""What the bench found, as text, Markdown and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import List, Sequence, Tuple

from ..errors import BenchError
from ..figures import pyplot, save_picture
from ..formatting import table
from .contenders import is_ours
from .floor import Floor
from .measuring import Measured, Report, cores, quartiles

_HEAD = (
    ("", "step", "quartiles", "times", "nodes", "nodes", "build", "first", "peak", "copies", "MiB", "largest"),
    ("", "ms", "", "ours", "built", "run", "s", "run s", "memory", "", "", "error"),
)
_COLORS = {Floor.name: "#999999", "wrong": "#c44e52", "ours": "#2a7f62", "peer": "#4c72b0"}


def title(name: str, report: Report) -> str:
    """``resnet50, sum over 8 devices``; of a path only the file's name."""
    return f"{Path(name).stem}, {'mean' if report.case.average else 'sum'} over {len(report.case.devices)} devices"


def report_text(name: str, report: Report) -> str:
    """A table of at most 100 columns, and a line for each contender that failed."""
    failed = failures(report)
    rows = [*_HEAD, *(row(report, measured) for measured in report.contenders if measured.step_seconds)]
    parts = [title(name, report), *about(report), "", table(rows, all_right=True), *[""] * bool(failed), *failed]
    return "\n".join(parts)


def report_markdown(name: str, report: Report) -> str:
    """The same as a section of a Markdown page."""
    head = [" ".join(words).strip() for words in zip(*_HEAD)]
    rows = [head, [":--", *["--:"] * (len(head) - 1)]]
    rows += [row(report, measured) for measured in report.contenders if measured.step_seconds]
    lines = [f"## {title(name, report)}", "", *about(report), ""]
    lines += [f"| {' | '.join(cells + [''] * (len(head) - len(cells)))} |" for cells in rows]
    failed = failures(report)
    return "\n".join([*lines, *[""] * bool(failed), *(f"- {line}" for line in failed), ""])


def report_summary(cases: Sequence[Tuple[str, Report]]) -> str:
    """A Markdown table of ratios: a contender's seconds over ours in each row, a case in each column.

    Where one did not run there is a dash.

    Args:
        cases: names of models with what was measured on them.
    """
    heads = [f"{Path(name).stem}, {'mean' if report.case.average else 'sum'}" for name, report in cases]
    rows = [["times ours", *heads], [":--", *["--:"] * len(cases)]]
    for contender in dict.fromkeys(found.name for _, report in cases for found in report.contenders):
        by_case = [next((m for m in report.contenders if m.name == contender), None) for _, report in cases]
        ratios = [found and report.ratio(found) for (_, report), found in zip(cases, by_case)]
        rows.append([contender, *(f"{ratio:.2f}" if ratio else "–" for ratio in ratios)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def about(report: Report) -> List[str]:
    """What was reduced, and in which units the table speaks."""
    case = report.case
    towers = len(case.devices)
    return [
        f"{len(case.shapes)} gradients, {case.tower_bytes / 2**20:.1f} MiB on each of {case.devices[0]} to"
        f" {case.devices[-1]}, {cores()} cores, {len(report.baseline.step_seconds)} rounds.",
        f"Steps are over the baseline's, which takes {quartiles(report.baseline.step_seconds)[1] * 1e3:.1f} ms;",
        f"peak memory is in units of all towers' gradients, {towers * case.tower_bytes / 2**20:.0f} MiB.",
    ]


def failures(report: Report) -> List[str]:
    """A line for each contender that could not run or was wrong, with its error."""
    failed = [measured for measured in report.contenders if measured.status != "ok"]
    return [f"{measured.name} {measured.status}: {' '.join(measured.error.split())}"[:300] for measured in failed]


def row(report: Report, measured: Measured) -> List[str]:
    """One contender's cells; the floor has no graph and fewer of them."""
    low, median, high = (_ms(seconds) for seconds in quartiles(report.net_seconds(measured)))
    ratio = report.ratio(measured)
    cells = [measured.name, median, f"{low}–{high}", f"{ratio:.2f}" if ratio else ""]
    if measured.name == Floor.name:
        return cells
    return [
        *cells,
        f"{measured.nodes_built}",
        f"{measured.nodes_executed}",
        f"{measured.build_seconds:.2f}",
        f"{measured.first_run_seconds:.2f}",
        f"{measured.peak_bytes / max(1, len(report.case.devices) * report.case.tower_bytes):.2f}",
        f"{measured.copied_tensors}",
        f"{measured.copied_bytes / 2**20:.0f}",
        f"{measured.max_error:.0e}" if measured.status == "ok" else "WRONG",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f}"


def draw_report(name: str, report: Report, path: str) -> None:
    """A bar from ours to each contender: how many times ours it takes, on a logarithmic axis.

    Raises:
        BenchError: there are no ratios to draw.
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    timed = [(measured, ratio) for measured in report.contenders for ratio in [report.ratio(measured)] if ratio]
    if not timed:
        raise BenchError(f"{path}: nothing to draw, since ours was not measured, or took no longer than the baseline")
    figure, axes = pyplot().subplots(figsize=(8, 1.2 + 0.34 * len(timed)), constrained_layout=True)
    for place, (measured, ratio) in enumerate(timed):
        slower = ratio >= 1
        axes.barh(place, ratio - 1, left=1, color=_COLORS[_kind(measured)])
        axes.annotate(
            f"{ratio:.2f}",
            (ratio, place),
            xytext=(4 if slower else -4, 0),
            textcoords="offset points",
            va="center",
            ha="left" if slower else "right",
        )
    axes.set_xscale("log")
    axes.set_yticks(range(len(timed)))
    axes.set_yticklabels([measured.name + " (wrong)" * (measured.status == "wrong") for measured, _ in timed])
    axes.invert_yaxis()
    ratios = [ratio for _, ratio in timed]
    axes.set_xlim(min(ratios) / 1.5, max(ratios) * 1.5)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if min(ratios) / 1.5 < tick < max(ratios) * 1.5]
    axes.set_xticks(ticks)
    axes.set_xticklabels([f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("step time over a graph without reduction, times ours")
    axes.set_title(title(name, report))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_picture(figure, path)


def _kind(measured: Measured) -> str:
    if measured.name == Floor.name or measured.status == "wrong":
        return Floor.name if measured.name == Floor.name else "wrong"
    return "ours" if is_ours(measured.name) else "peer"
