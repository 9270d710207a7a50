"""A report as text and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from ..formatting import table
from .floor import Floor
from .results import Measured, Report, quartiles
from .sizes import bandwidth_text

_HEAD = (
    ("", "step", "quartiles", "times", "nodes", "nodes", "build", "first", "peak", "copies", "MiB", "largest"),
    ("", "ms", "", "ours", "built", "run", "s", "run s", "memory", "", "", "error"),
)
_BANDWIDTHS = (("algbw", "busbw"), ("GB/s", "GB/s"))


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
