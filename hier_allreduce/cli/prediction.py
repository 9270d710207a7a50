"""Predicted steps of a model on a machine: ours, and those of other all-reduces."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..commands.options import naming
from ..errors import HierAllreduceError
from ..formatting import amount, count, duration, rounded
from ..models import DTYPE_BYTES, GradientShape, load_model
from ..planning.choose import MIB, RATE, STEP, cases_of, rule
from ..planning.chunks import Chunk, Gradient, chunks_of
from ..planning.contenders import USABLE, exposed_by_others
from ..planning.plan import Plan
from ..planning.simulator import Work, exposed
from ..planning.strategy import Strategy, choices_for
from ..topology import Topology, links_of

OURS = "ours"
MODEL = "resnet50"
EQUAL = 50  # gradients that stand for a number of bytes


class Training(NamedTuple):
    """A model's gradients and the seconds of its step."""

    model: str
    gradients: Tuple[Gradient, ...]  # the last one is ready first
    step: float  # seconds on one device, without an all-reduce
    backward: float  # seconds of its backward pass
    is_timed: bool  # whether the user has said one of these times
    notes: str  # for people: bytes, gradients that are left out, assumptions


def training_of(
    model: Optional[str], size: Optional[int], step: Optional[float], backward: Optional[float]
) -> Training:
    """Return the training of a command's options."""
    if size is not None and model is not None:
        raise HierAllreduceError("--model and --bytes both say the gradients; name one of them")
    if step is not None and backward is not None and backward > step:
        raise HierAllreduceError(
            f"--backward {duration(backward, 4)} is longer than --step {duration(step, 4)}"
        )
    if size is not None:
        name, sparse = f"{EQUAL} equal gradients", 0
        ends = [size * number // EQUAL for number in range(EQUAL + 1)]
        gradients = [
            Gradient(end - start, 1, "bytes", is_flat=True) for start, end in zip(ends, ends[1:])
        ]
    else:
        name = MODEL if model is None else model
        with naming("--model"):
            shapes = load_model(name)
        gradients = dense_gradients(shapes)
        sparse = len(shapes) - len(gradients)
    total = sum(gradient.bytes for gradient in gradients)
    if not total:
        raise HierAllreduceError(
            f"--model: all gradients of {name} are sparse or empty, and these are not predicted"
        )
    length = backward or (step / STEP if step else total / RATE)
    said = {"model": model or size, "step": step, "backward pass": backward}
    assumed = [option for option, value in said.items() if value is None]
    notes = [amount(total)]
    notes += [f"{count(sparse, 'sparse gradient')} left out"] if sparse else []
    notes += [f"assumed: {', '.join(assumed)}"] if assumed else []
    is_timed = step is not None or backward is not None
    return Training(
        name, tuple(gradients), step or length * STEP, length, is_timed, "; ".join(notes)
    )


def dense_gradients(shapes: Sequence[GradientShape]) -> List[Gradient]:
    """Return the gradients of a model's table that are not sparse."""
    dense = [shape for shape in shapes if not shape.sparse]
    return [
        Gradient(g.elements, DTYPE_BYTES[g.dtype], g.dtype, is_flat=len(g.shape) == 1)
        for g in dense
    ]


class Row(NamedTuple):
    """An all-reduce: its name, details for people, and exposed seconds: mean, least and most over the cases."""

    name: str
    details: str
    exposed: float
    low: float
    high: float


class Prediction(NamedTuple):
    """A training on a machine: the rows of all-reduces, ours first, then our plan, its chunks and executed nodes."""

    machine: Topology
    training: Training
    rows: Tuple[Row, ...]
    plan: Plan
    chunks: Tuple[Chunk, ...]
    ops: int


def predict(machine: Topology, training: Training, everything: bool) -> Prediction:
    """Return the rows for K ≥ 2 devices; with ``everything``, those of our other algorithms and tensorpack too."""
    gradients, links = training.gradients, links_of(machine)
    backward = training.backward if training.is_timed else None
    cases = cases_of(sum(gradient.bytes for gradient in gradients), links, backward)
    best, *others = choices_for(Strategy(backward=backward), gradients, machine)
    by_rule = rule(gradients, len(machine), links)
    rows = [_row(OURS, _details(best.plan), best.by_case)]
    rows.append(
        _row(f"{OURS}, by rule", _details(by_rule), exposed(by_rule, links, gradients, cases))
    )
    if everything:
        rows += [_row(f"{OURS} too", _details(choice.plan), choice.by_case) for choice in others]
    for name, by_case in exposed_by_others(
        machine, gradients, cases, with_tensorpack=everything
    ).items():
        is_wrong = (
            name == USABLE[1] and len(machine) % 2
        )  # it leaves out a device's gradients, in silence
        rows.append(_row(name, f"wrong sums on {len(machine)} GPUs" if is_wrong else "", by_case))
    chunks = tuple(chunks_of(gradients, best.plan.chunk_bytes))
    return Prediction(
        machine, training, tuple(rows), best.plan, chunks, Work(best.plan, chunks, gradients).ops
    )


def _row(name: str, details: str, by_case: Sequence[float]) -> Row:
    return Row(name, details, sum(by_case) / len(by_case), min(by_case), max(by_case))


def _details(plan: Plan) -> str:
    return f"{plan.algorithm}, {rounded(plan.chunk_bytes / MIB)} MiB"
