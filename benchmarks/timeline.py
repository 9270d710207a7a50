"""What is left of a step after the backward pass: each GPU's copies and kernels, from a trace.

::

    python benchmarks/timeline.py dgx-1v bert_base --host 0.8 --picture FILE

The step has the all-reduce of this package, or another one of ``emulated.py`` (``--only``). A GPU
that neither sends nor computes waits for other GPUs' copies, for a shared bus, or for the host.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from emulated import run, scale_of
from emulated_cell import Cell
from emulated_gpu import trace  # the tests are no installed package: emulation.py knows their place
from ratios import OURS
from tables import check_files

from hier_allreduce_tools.cost import picture
from hier_allreduce_tools.cost.step import COPY, PACK, PASS, SUM, UNPACK, UPDATE
from hier_allreduce_tools.text import table

FIRST, LAST = "forward0_burn", "backward0_burn"  # in the names of a pass's kernels
KINDS = {
    "ConcatV2": PACK,
    "Split": UNPACK,
    "SplitV": UNPACK,
    "ResourceApplyGradientDescent": UPDATE,
}


class Span(NamedTuple):
    """A kernel of a GPU or a copy that it sends. Times are the emulated machine's, in ms."""

    gpu: int
    what: str
    begin: float
    end: float

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy to another GPU."""
        return self.what.startswith("copy")

    @property
    def kind(self) -> str:
        """What it is for; all kernels without another name are sums."""
        if self.is_copy:
            return COPY
        op, name = self.what.split(" ", 1)
        is_pass = "_burn_" in name.rpartition("/")[2]  # chunks are named after gradients
        return PASS if is_pass else KINDS.get(op, SUM)


def spans_in(path: Path, scale: float) -> List[Span]:
    """Return the kernels and copies of a trace that was stretched by ``scale``."""
    spans = []
    for span in trace.spans_in(path):
        times = (1e3 * span.begin / scale, 1e3 * span.end / scale)
        spans.append(Span(span.gpu, span.what, *times))
    return spans


def after_pass(spans: List[Span]) -> List[Span]:
    """Return what ends after the last backward pass of the trace's last all-reduce.

    Times are from the end of that pass.
    """
    begins = [span.begin for span in spans if FIRST in span.what and span.gpu == 0]
    steps = Counter(_step_of(span, begins) for span in spans if span.is_copy)
    step = max(number for number, copies in steps.items() if copies > max(steps.values()) / 2)
    own = [span for span in spans if _step_of(span, begins) == step]
    pass_end = max(span.end for span in own if LAST in span.what)
    late = []
    for span in own:
        if span.end > pass_end:
            begin = max(0.0, span.begin - pass_end)
            late.append(span._replace(begin=begin, end=span.end - pass_end))
    return late


def _step_of(span: Span, begins: List[float]) -> int:
    """Return the number of a span's step; all GPUs begin a step within a millisecond."""
    return sum(begin - 1 < span.begin for begin in begins)


def _work_of(spans: List[Span], gpu: int, is_copy: bool) -> List[Span]:
    """Return the copies of a GPU, or its kernels."""
    return [span for span in spans if span.gpu == gpu and span.is_copy == is_copy]


def report(late: List[Span]) -> str:
    """Return a table of each GPU's work after the pass."""
    rows = [["GPU", "copies", "sends, ms", "last copy", "kernels", "computes, ms", "last kernel"]]
    for gpu in sorted({span.gpu for span in late}):
        row = [str(gpu)]
        for is_copy in (True, False):
            own = _work_of(late, gpu, is_copy)
            busy = sum(span.end - span.begin for span in own)
            end = max((span.end for span in own), default=0.0)
            row += [str(len(own)), f"{busy:.1f}", f"{end:.1f}"]
        rows.append(row)
    return table(rows)


def draw(late: List[Span], title: str, path: str) -> None:
    """Draw what each GPU computes and sends after the pass into a .png, .svg or .pdf."""
    gpus = sorted({span.gpu for span in late})
    bars: picture.Bars = defaultdict(list)
    for span in late:
        bars[span.kind].append((gpus.index(span.gpu), span.begin, span.end))
    rows = [f"GPU {gpu}" for gpu in gpus]
    # All times are from the end of the pass.
    picture.draw(bars, rows, title, path, pass_ends=[0.0] * len(rows))


def main() -> None:
    """Run a cell with a trace, and print and draw the end of its last step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("machine", help="of benchmarks/machines")
    parser.add_argument("model", help="of benchmarks/models")
    passes = "ms of ResNet-50's backward pass; others' are as their bytes (60)"
    parser.add_argument("--pass-ms", type=float, default=60.0, metavar="MS", help=passes)
    parser.add_argument("--host", type=float, default=0.8, help="share of the kernels' time (0.8)")
    parser.add_argument("--only", default=OURS, metavar="NAME", help="another all-reduce")
    parser.add_argument("--picture", metavar="FILE", help="draw it into a .png, .svg or .pdf")
    options = parser.parse_args()
    check_files(None, options.picture)
    scale = scale_of(options.machine)
    asked = (options.machine, options.model, options.pass_ms, [options.host], scale, True, 2)
    cell = Cell(*asked, [options.only])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        (result,) = run(cell, str(path))
        late = after_pass(spans_in(path, scale))
    contender: Dict[str, Any] = result["contenders"][options.only]
    exposed = ", ".join(f"{step:.1f}" for step in contender["exposed_ms"])
    title = f"{options.only} on {options.machine}, {options.model}, host {options.host:g}"
    print(f"{title}: {exposed} ms exposed. After the backward pass of the last step:")
    print(report(late))
    if options.picture:
        draw(late, title, options.picture)


if __name__ == "__main__":
    main()
