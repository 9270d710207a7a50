"""Reports as text.

Source of the columns algbw and busbw: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Optional

from ..formatting import amount, count, duration, table
from ..sampling import quartiles
from .floor import Floor
from .results import Measured, Report

HEAD = (
    ("", "step", "quartiles", "times", "nodes", "nodes", "build", "first", "peak", "copies", "MiB", "largest"),
    ("", "ms", "", "ours", "built", "run", "s", "run s", "memory", "", "", "error"),
)
_SIZES_HEAD = ("size", "contender", "time", "algbw GB/s", "busbw GB/s", "times ours", "largest error")
_BANDWIDTHS = (("algbw", "busbw"), ("GB/s", "GB/s"))


def title(name: str, report: Report) -> str:
    """Return ``resnet50, sum over 8 devices``; of a path only the file's name."""
    operation = "mean" if report.case.average else "sum"
    return f"{Path(name).stem}, {operation} over {len(report.case.devices)} devices"


def report_text(name: str, report: Report) -> str:
    """Return a table of at most 120 columns, and a line for each contender that failed.

    It has nccl-tests' bandwidths too, which follow from the other columns.
    """
    rows = [[*line[:4], *added, *line[4:]] for line, added in zip(HEAD, _BANDWIDTHS)]
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


def case_lines(report: Report) -> List[str]:
    """Return what was reduced, and the units of the table."""
    case = report.case
    return [
        f"{len(case.shapes)} gradients, {case.tower_bytes / 2**20:.1f} MiB on each of {case.devices[0]} to"
        f" {case.devices[-1]}, {report.cores} cores, {count(len(report.baseline.step_seconds), 'round')}.",
        f"Step times exclude the baseline's {1e3 * quartiles(report.baseline.step_seconds).median:.1f} ms;",
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


# ---- `bench sizes` ----------------------------------------------------------------------------------


def sizes_text(reports: Dict[int, Report]) -> str:
    """Return a table: a row for each size and contender.

    Args:
        reports: by bytes.
    """
    first = next(iter(reports.values()))
    operation = "mean" if first.case.average else "sum"
    devices = first.case.devices
    rows = [_size_row(size, report, measured) for size, report in reports.items() for measured in report.contenders]
    return "\n".join(
        [
            f"{first.case.shapes[0].dtype}, {operation} over {len(devices)} devices ({devices[0]} to {devices[-1]}),"
            f" {count(len(first.baseline.step_seconds), 'round')}. Times exclude the step without a reduction.",
            "algbw is the size over the time; busbw is algbw · 2(K−1)/K, as in nccl-tests.",
            "",
            table([_SIZES_HEAD, *rows], all_right=True),
        ]
    )


def _size_row(size: int, report: Report, measured: Measured) -> List[str]:
    if not measured.step_seconds:
        return [amount(size, binary=True), measured.name, f"{measured.status}: {measured.error}"[:60]]
    ratio = report.ratio(measured)
    return [
        amount(size, binary=True),
        measured.name,
        duration(max(0.0, quartiles(report.net_seconds(measured)).median)),
        bandwidth_text(report.algbw(measured)),
        bandwidth_text(report.busbw(measured)),
        f"{ratio:.2f}" if ratio else "",
        f"{measured.max_error:.0e}" if measured.status == "ok" else "WRONG",
    ]


def bandwidth_text(bytes_per_second: Optional[float]) -> str:
    """Return GB/s with three digits; empty if the time was not longer than the baseline's."""
    return "" if bytes_per_second is None else f"{bytes_per_second / 1e9:#.3g}".rstrip(".")
