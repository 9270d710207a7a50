"""What ``bench --table`` writes: a Markdown page, or the data of docs/data, which docs/measurements.md shows."""

from __future__ import annotations

import csv
import io
from typing import Sequence, Tuple

import tensorflow as tf

from .report import report_markdown, report_records, report_summary
from .results import Report, cores

_SWEEP = "\n`ours` is the default strategy. Each other contender differs from it in one choice."
NOTES = """
All contenders reduce the same gradients, which are the values of variables on each tower's device. The results have the
same consumers: an op for each result on its tower's device, which waits for the result and reads no element. The
baseline has nothing in between, and its step time is subtracted. All contenders take one step each in turn, in a new
order every round.

- **step ms, quartiles**: the median and the quartiles over the rounds. They say little about other machines.
- **times ours**: the median of a contender's time divided by ours in the same round.
- **nodes built, build s**: the ops that a contender adds to the graph, and the seconds that this takes.
- **nodes run**: the nodes executed on all devices, including sends and receives, minus the baseline's.
- **first run s**: the seconds of placement, Grappler and the first step.
- **peak memory**: the most memory allocated at one time during a step, in units of all towers' gradients.
- **copies, MiB**: the tensors copied between devices, and their size. CPU devices share one memory, so a copy costs
  only its dispatch there, and these times say nothing about links.
- **largest error**: relative to the result in float64.
- **floor**: Eigen's plain sum of the same bytes on one device, in pieces that fit into the cache.
"""


def page_markdown(cases: Sequence[Tuple[str, Report]], command: str, sweep: bool) -> str:
    """Return a page: how to read it, all ratios, and a section for each case.

    Args:
        cases: a report for each model's name, at least one.
        command: the command that writes the page.
        sweep: the contenders are strategies of ours, not peers.
    """
    devices = cases[0][1].case.devices
    intro = [
        f"# {'Strategies' if sweep else 'Contenders'} compared",
        "",
        f"Written by `{command}` with TensorFlow {tf.__version__} on {len(devices)} devices"
        f" ({devices[0]} to {devices[-1]}), {cores()} cores.{_SWEEP if sweep else ''}",
    ]
    sections = [report_markdown(name, report) for name, report in cases]
    return "\n".join([*intro, NOTES, report_summary(cases), "", *sections])


def page_csv(cases: Sequence[Tuple[str, Report]]) -> str:
    """Return all cases as one CSV table: a row for each contender, with the case and what was reduced.

    Args:
        cases: a report for each model's name, at least one.
    """
    records = [record for name, report in cases for record in report_records(name, report)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
