"""The trace that emulated GPUs write (``plugin.environment(trace=…)``): kernels and copies."""

from pathlib import Path
from typing import List, NamedTuple


class Span(NamedTuple):
    """A kernel of a GPU, or a copy that it sends. Times are seconds of the system's clock."""

    gpu: int
    what: str  # "AddN hier_allreduce/v0/sum", or "copy 0>2 40000000"
    begin: float
    end: float


def spans_in(path: Path) -> List[Span]:
    """Return all kernels and copies in the file of a trace."""
    spans = []
    for line in path.read_text("utf-8").splitlines()[1:]:
        gpu, what, _, _, begin, end = line.split("\t")
        spans.append(Span(int(gpu), what, float(begin), float(end)))
    return spans
