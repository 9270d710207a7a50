"""``bench sizes``: one gradient of each of several sizes, with the columns of nccl-tests.

Source of the columns: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

from ..formatting import amount, duration, table
from ..sampling import quartiles
from .case import Case
from .models import DTYPE_BYTES, GradientShape
from .results import Measured, Report

_HEAD = ("size", "contender", "time", "algbw GB/s", "busbw GB/s", "times ours", "largest error")


def sweep_sizes(least: int, most: int, factor: int) -> List[int]:
    """Return ``least``, ``least × factor``, … up to ``most`` bytes."""
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes


def size_case(size: int, devices: Sequence[str], average: bool = False, dtype: str = "float32") -> Case:
    """Return the case of one dense gradient of ``size`` bytes, rounded up to a whole element."""
    elements = -(-size // DTYPE_BYTES[dtype])
    return Case((GradientShape("gradient", (elements,), dtype),), tuple(devices), average)


def sizes_text(reports: Dict[int, Report]) -> str:
    """Return a table: a row for each size and contender.

    Args:
        reports: by bytes.
    """
    first = next(iter(reports.values()))
    operation = "mean" if first.case.average else "sum"
    devices = first.case.devices
    rows = [_row(size, report, measured) for size, report in reports.items() for measured in report.contenders]
    return "\n".join(
        [
            f"{first.case.shapes[0].dtype}, {operation} over {len(devices)} devices ({devices[0]} to {devices[-1]}),"
            f" {len(first.baseline.step_seconds)} rounds. Times exclude the step without a reduction.",
            "algbw is the size over the time; busbw is algbw · 2(K−1)/K, as in nccl-tests.",
            "",
            table([_HEAD, *rows], all_right=True),
        ]
    )


def _row(size: int, report: Report, measured: Measured) -> List[str]:
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
