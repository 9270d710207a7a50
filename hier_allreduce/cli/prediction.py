"""Predicted steps of a model on a machine: ours, and those of other all-reduces."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..errors import HierAllreduceError
from ..formatting import amount, count, duration
from ..models import DTYPE_BYTES, GradientShape, load_model
from ..planning.choose import RATE, STEP, cases_of, rule
from ..planning.chunks import Chunk, Gradient, chunks_of
from ..planning.contenders import USABLE, exposed_by_others
from ..planning.plan import Plan
from ..planning.simulator import Work, exposed
from ..planning.strategy import Strategy, choices_for
from ..topology import Topology, links_of
from .options import naming

OURS = "ours"
MODEL = "resnet50"
EQUAL = 50  # gradients that stand for a number of bytes


class Training(NamedTuple):
    """A model's gradients and the seconds of its step.

    Attributes:
        model: its name.
        gradients: N gradients; the last one is ready first.
        step: seconds of a step on one device, without an all-reduce.
        backward: seconds of its backward pass.
        notes: for people: bytes, gradients that are left out, assumptions.
        is_timed: whether the user has said the step or its backward pass.
    """

    model: str
    gradients: Tuple[Gradient, ...]
    step: float
    backward: float
    notes: str
    is_timed: bool


def training_of(
    model: Optional[str], size: Optional[int], step: Optional[float], backward: Optional[float]
) -> Training:
    """Return the training of a command's options.

    Raises:
        HierAllreduceError: a model and bytes, an unknown model, no dense gradients, or a step that is too short.
    """
    if size is not None and model is not None:
        raise HierAllreduceError("--model and --bytes both say the gradients; give one of them")
    if step is not None and backward is not None and backward > step:
        raise HierAllreduceError(f"--backward {duration(backward)} is longer than --step {duration(step)}")
    if size is not None:
        name, sparse = f"{EQUAL} equal gradients", 0
        ends = [size * number // EQUAL for number in range(EQUAL + 1)]
        gradients = [Gradient(end - start, 1, "bytes", is_flat=True) for start, end in zip(ends, ends[1:])]
    else:
        name = MODEL if model is None else model
        with naming("--model"):
            shapes = load_model(name)
        gradients = dense_gradients(shapes)
        sparse = len(shapes) - len(gradients)
    total = sum(gradient.bytes for gradient in gradients)
    if not total:
        raise HierAllreduceError(f"--model: all gradients of {name} are sparse or empty, and these are not predicted")
    length = backward or (step / STEP if step else total / RATE)
    said = {"model": model or size, "step": step, "backward pass": backward}
    assumed = ", ".join(option for option, value in said.items() if value is None)
    notes = [
        amount(total),
        f"{count(sparse, 'sparse gradient')} left out" * bool(sparse),
        f"assumed: {assumed}" * bool(assumed),
    ]
    is_timed = step is not None or backward is not None
    return Training(name, tuple(gradients), step or length * STEP, length, "; ".join(filter(None, notes)), is_timed)


def dense_gradients(shapes: Sequence[GradientShape]) -> List[Gradient]:
    """Return the gradients of a model's table that are not sparse."""
    dense = [shape for shape in shapes if not shape.sparse]
    return [Gradient(g.elements, DTYPE_BYTES[g.dtype], g.dtype, is_flat=len(g.shape) == 1) for g in dense]


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


def predict(machine: Topology, training: Training, strategy: Strategy, everything: bool) -> Prediction:
    """Return the rows of a training on K ≥ 2 devices: ours, and those of others.

    Args:
        machine: K devices.
        training: its gradients and times.
        strategy: the algorithm of ours.
        everything: whether our other algorithms and tensorpack's modes have rows too.
    """
    gradients, links = training.gradients, links_of(machine)
    backward = training.backward if training.is_timed else None
    cases = cases_of(sum(gradient.bytes for gradient in gradients), links, backward)
    choices = choices_for(strategy, gradients, machine)
    ours, by_rule = choices[0].plan, rule(gradients, len(machine), links)
    seconds = exposed(by_rule, links, gradients, cases)
    rows = [_row(OURS, _details(ours), choices[0].by_case), _row(f"{OURS}, by rule", _details(by_rule), seconds)]
    if everything:
        rows += [_row(f"{OURS} too", _details(choice.plan), choice.by_case) for choice in choices[1:]]
    for name, by_case in exposed_by_others(machine, gradients, cases, with_tensorpack=everything).items():
        is_wrong = name == USABLE[1] and len(machine) % 2  # it leaves out a device's gradients, in silence
        rows.append(_row(name, f"wrong sums on {len(machine)} GPUs" if is_wrong else "", by_case))
    chunks = tuple(chunks_of(gradients, ours.chunk_bytes))
    return Prediction(machine, training, tuple(rows), ours, chunks, Work(ours, chunks, gradients).ops)


def _row(name: str, details: str, by_case: Sequence[float]) -> Row:
    return Row(name, details, sum(by_case) / len(by_case), min(by_case), max(by_case))


def _details(plan: Plan) -> str:
    return f"{plan.algorithm}, {amount(plan.chunk_bytes, binary=True)}"
