"""A report as text, as Markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from ..errors import BenchError
from ..figures import BLUE, GREEN, GREY, INK, VERMILLION, pyplot, save_picture
from ..formatting import table
from .contenders import is_ours
from .floor import Floor
from .results import Measured, Report, quartiles
from .sizes import bandwidth_text

_HEAD = (
    ("", "step", "quartiles", "times", "nodes", "nodes", "build", "first", "peak", "copies", "MiB", "largest"),
    ("", "ms", "", "ours", "built", "run", "s", "run s", "memory", "", "", "error"),
)
_BANDWIDTHS = (("algbw", "busbw"), ("GB/s", "GB/s"))
_COLORS = {Floor.name: GREY, "wrong": VERMILLION, "ours": GREEN, "peer": BLUE}
_LOWEST = 4  # a quartile below a fourth of the median, or below 0, is cut off: the axis is logarithmic
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def title(name: str, report: Report) -> str:
    """Return ``resnet50, sum over 8 devices``; of a path only the file's name."""
    return f"{_case_name(name, report)} over {len(report.case.devices)} devices"


def _case_name(name: str, report: Report) -> str:
    return f"{Path(name).stem}, {'mean' if report.case.average else 'sum'}"


def report_text(name: str, report: Report) -> str:
    """Return a table of at most 120 columns, and a line for each contender that failed.

    It has nccl-tests' bandwidths too, which follow from the other columns.
    """
    rows = [[*line[:4], *added, *line[4:]] for line, added in zip(_HEAD, _BANDWIDTHS)]
    for measured in report.contenders:
        if measured.step_seconds:
            row = contender_row(report, measured)
            speeds = [bandwidth_text(speed) for speed in (report.algbw(measured), report.busbw(measured))]
            rows.append([*row[:4], *speeds, *row[4:]])
    lines = [title(name, report), *case_lines(report), "", table(rows, all_right=True)]
    failed = failures(report)
    if failed:
        lines += ["", *failed]
    return "\n".join(lines)


def report_markdown(name: str, report: Report) -> str:
    """Return a report as a section of a Markdown page."""
    head = [" ".join(lines).strip() for lines in zip(*_HEAD)]
    rows = [contender_row(report, measured) for measured in report.contenders if measured.step_seconds]
    padded = [row + [""] * (len(head) - len(row)) for row in rows]
    lines = [f"## {title(name, report)}", "", *case_lines(report), "", *_markdown_table(head, padded)]
    failed = failures(report)
    if failed:
        lines += ["", *(f"- {line}" for line in failed)]
    return "\n".join([*lines, ""])


def report_records(name: str, report: Report) -> List[Dict[str, str]]:
    """Return a report as a record for each contender that was timed: the cells of its row, its case and a note."""
    head = ["contender", *(" ".join(lines).strip() for lines in list(zip(*_HEAD))[1:])]
    note = " ".join([*case_lines(report), *failures(report)])
    timed = [measured for measured in report.contenders if measured.step_seconds]
    rows = [contender_row(report, measured) for measured in timed]
    return [{"case": title(name, report), "note": note, **dict(zip(head, row))} for row in rows]


def report_summary(cases: Sequence[Tuple[str, Report]]) -> str:
    """Return a Markdown table of the ratios to ours: a row for each contender, a column for each case.

    A dash marks a contender that did not run.

    Args:
        cases: a report for each model's name.
    """
    head = ["times ours", *(_case_name(name, report) for name, report in cases)]
    names = dict.fromkeys(measured.name for _, report in cases for measured in report.contenders)
    rows = [[name, *(_ratio_text(name, report) for _, report in cases)] for name in names]
    return "\n".join(_markdown_table(head, rows))


def _ratio_text(contender: str, report: Report) -> str:
    measured = next((m for m in report.contenders if m.name == contender), None)
    ratio = report.ratio(measured) if measured else None
    return f"{ratio:.2f}" if ratio else "–"


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> List[str]:
    """Return the lines of a Markdown table whose first column is aligned left, the others right."""
    alignment = [":--"] + ["--:"] * (len(head) - 1)
    return [f"| {' | '.join(cells)} |" for cells in (head, alignment, *rows)]


def case_lines(report: Report) -> List[str]:
    """Return what was reduced, and the units of the table."""
    case = report.case
    return [
        f"{len(case.shapes)} gradients, {case.tower_bytes / 2**20:.1f} MiB on each of {case.devices[0]} to"
        f" {case.devices[-1]}, {report.cores} cores, {len(report.baseline.step_seconds)} rounds.",
        f"Step times exclude the baseline's {quartiles(report.baseline.step_seconds)[1] * 1e3:.1f} ms;",
        f"peak memory is in units of all towers' gradients, {report.gradient_bytes / 2**20:.0f} MiB.",
    ]


def failures(report: Report) -> List[str]:
    """Return a line for each contender that could not run or was wrong, with its error."""
    failed = [measured for measured in report.contenders if measured.status != "ok"]
    return [f"{measured.name} {measured.status}: {' '.join(measured.error.split())}"[:300] for measured in failed]


def contender_row(report: Report, measured: Measured) -> List[str]:
    """Return one contender's cells. The floor has no graph, and so only the first four."""
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
        f"{report.peak_ratio(measured):.2f}",
        f"{measured.copied_tensors}",
        f"{measured.copied_bytes / 2**20:.0f}",
        f"{measured.max_error:.0e}" if measured.status == "ok" else "WRONG",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f}"


def draw_report(name: str, report: Report, path: str) -> None:
    """Draw a bar from ours to each contender: the ratio of their step times, with quartiles, on a logarithmic axis.

    Raises:
        BenchError: there are no ratios to draw.
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    ratios = [report.ratio(measured) for measured in report.contenders]
    timed = [(measured, ratio) for measured, ratio in zip(report.contenders, ratios) if ratio]
    if not timed:
        raise BenchError(f"{path}: nothing to draw: ours was not measured, or took no longer than the baseline")
    figure, axes = pyplot().subplots(figsize=(8, 1.2 + 0.34 * len(timed)), constrained_layout=True)
    drawn = []
    for place, (measured, ratio) in enumerate(timed):
        low, _, high = quartiles(report.ratios(measured))
        drawn.append((max(low, ratio / _LOWEST), ratio, high))
        _draw_bar(axes, place, drawn[-1], _COLORS[_kind(measured)])
    axes.set_yticks(range(len(timed)))
    axes.set_yticklabels([f"{m.name} (wrong)" if m.status == "wrong" else m.name for m, _ in timed])
    axes.invert_yaxis()
    _scale_ratios(axes, [ratio for ratios in drawn for ratio in ratios])
    axes.set_title(f"{title(name, report)}\n{_conditions(report)}", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    save_picture(figure, path)


def _conditions(report: Report) -> str:
    """Return ``TensorFlow 2.21.0, /cpu:0 to /cpu:7, 2 cores, 9 rounds``."""
    devices = report.case.devices
    rounds = len(report.baseline.step_seconds)
    return f"TensorFlow {report.tensorflow}, {devices[0]} to {devices[-1]}, {report.cores} cores, {rounds} rounds"


def _draw_bar(axes: Any, place: int, ratios: Tuple[float, float, float], color: str) -> None:
    """Draw a bar from 1 to the median ratio with its value, and a line from the first to the third quartile."""
    low, ratio, high = ratios
    slower = ratio >= 1
    axes.barh(place, ratio - 1, left=1, color=color)
    axes.plot((low, high), (place, place), color=INK, linewidth=1.6, solid_capstyle="butt")
    axes.annotate(
        f"{ratio:.2f}",
        (max(ratio, high) if slower else min(ratio, low), place),
        xytext=(4 if slower else -4, 0),
        textcoords="offset points",
        va="center",
        ha="left" if slower else "right",
    )


def _scale_ratios(axes: Any, ratios: Sequence[float]) -> None:
    """Set up the logarithmic axis of ratios, with a line at 1 and room for the numbers at both ends."""
    low, high = min(ratios) / 1.5, max(ratios) * 1.5
    ticks = [tick for tick in _TICKS if low < tick < high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(ticks)
    axes.set_xticklabels([f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time that the reduction adds to a step, times ours (dark line: first to third quartile)")


def _kind(measured: Measured) -> str:
    """Return the key of a contender's colour."""
    if measured.name == Floor.name:
        return Floor.name
    if measured.status == "wrong":
        return "wrong"
    return "ours" if is_ours(measured.name) else "peer"
