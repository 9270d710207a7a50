"""Predicted steps of a model on a machine: ours, and those of other all-reduces."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..errors import HierAllreduceError
from ..formatting import amount, duration
from ..models import DTYPE_BYTES, load_model
from ..planning.choose import RATE, STEP, cases_of, rule
from ..planning.chunks import Chunk, Gradient, chunks_of
from ..planning.contenders import NCCL, USABLE, exposed_by_others
from ..planning.plan import Plan
from ..planning.simulator import Case, Work, exposed
from ..planning.strategy import Strategy, choices_for, plan_for
from ..topology import Links, Topology, links_of
from .options import naming

OURS, RULE = "ours", "ours, by rule"
MODEL = "resnet50"
EQUAL = 50  # gradients that stand for a number of bytes


class Training(NamedTuple):
    """A model's gradients and the seconds of its step.

    Attributes:
        model: its name, for reports.
        gradients: N gradients; the last one is ready first.
        left_out: the number of sparse gradients, which are not predicted.
        step: seconds of a step on one device, without an all-reduce.
        backward: seconds of its backward pass.
        known_backward: the same, or None if neither it nor the step was given.
        assumed: names of the values that nobody has given.
    """

    model: str
    gradients: Tuple[Gradient, ...]
    left_out: int
    step: float
    backward: float
    known_backward: Optional[float]
    assumed: Tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    @staticmethod
    def of(model: Optional[str], size: Optional[int], step: Optional[float], backward: Optional[float]) -> Training:
        """Return the training of a command's options.

        Raises:
            HierAllreduceError: a model and bytes, an unknown model, no dense gradients, or a step that is too short.
        """
        if model is not None and size is not None:
            raise HierAllreduceError("--model and --bytes both say the gradients; give one of them")
        with naming("--model"):
            shapes = () if size is not None else load_model(MODEL if model is None else model)
        gradients = [
            Gradient(shape.elements, DTYPE_BYTES[shape.dtype], shape.dtype, is_flat=len(shape.shape) == 1)
            for shape in shapes
            if not shape.sparse
        ]
        if size is not None:
            ends = [size * number // EQUAL for number in range(EQUAL + 1)]
            gradients = [Gradient(end - start, 1, "int8", is_flat=True) for start, end in zip(ends, ends[1:])]
        total = sum(gradient.bytes for gradient in gradients)
        if not total:
            raise HierAllreduceError(f"--model {model}: all gradients are sparse or empty, and these are not predicted")
        if step is not None and backward is not None and backward > step:
            raise HierAllreduceError(f"--backward {duration(backward)} is longer than --step {duration(step)}")
        known = backward if step is None else backward or step / STEP
        length = known or total / RATE
        given = {"model": model or size, "step": step, "backward pass": backward}
        return Training(
            f"{EQUAL} equal gradients" if size is not None else model or MODEL,
            tuple(gradients),
            len(shapes) - len(gradients) if shapes else 0,
            step or length * STEP,
            length,
            known,
            tuple(name for name, value in given.items() if value is None),
        )


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
    cases: Tuple[Case, ...]
    rows: Tuple[Row, ...]
    plan: Plan
    chunks: Tuple[Chunk, ...]
    ops: int


def predict(machine: Topology, training: Training, strategy: Strategy, everything: bool) -> Prediction:
    """Return the rows of a training on K devices: ours, and those of others.

    Args:
        machine: K devices.
        training: its gradients and times.
        strategy: the algorithm of ours.
        everything: whether our other algorithms and tensorpack's modes have rows too.
    """
    gradients, links = training.gradients, links_of(machine)
    if len(machine) < 2:
        plan = plan_for(strategy, gradients, len(machine))
        return Prediction(
            machine,
            training,
            (),
            (Row(OURS, "", 0.0, 0.0, 0.0),),
            plan,
            tuple(chunks_of(gradients, plan.chunk_bytes)),
            0,
        )
    cases = tuple(cases_of(training.bytes, links, training.known_backward))
    choices = choices_for(strategy, gradients, machine)
    ours = choices[0].plan
    chunks = tuple(chunks_of(gradients, ours.chunk_bytes))
    by_rule = rule(gradients, len(machine), links)
    rows = [_row(OURS, _details(ours), choices[0].by_case)]
    rows.append(_row(RULE, _details(by_rule), _exposed(by_rule, links, gradients, cases)))
    for choice in choices[1:] if everything else ():
        rows.append(_row(f"{OURS}, {choice.plan.algorithm}", amount(choice.plan.chunk_bytes, True), choice.by_case))
    for name, by_case in exposed_by_others(machine, gradients, cases).items():
        if everything or name in (*USABLE, NCCL):
            wrong = name == USABLE[1] and len(machine) % 2
            rows.append(_row(name, f"wrong sums on {len(machine)} GPUs" if wrong else "", by_case))
    return Prediction(machine, training, cases, tuple(rows), ours, chunks, Work(ours, chunks, gradients).ops)


def _exposed(plan: Plan, links: Links, gradients: Sequence[Gradient], cases: Sequence[Case]) -> List[float]:
    chunks = chunks_of(gradients, plan.chunk_bytes, plan.pack_below, plan.whole)
    return exposed(plan, links, chunks, gradients, cases)


def _row(name: str, details: str, by_case: Sequence[float]) -> Row:
    return Row(name, details, sum(by_case) / len(by_case), min(by_case), max(by_case))


def _details(plan: Plan) -> str:
    size = amount(plan.chunk_bytes, True) if plan.chunk_bytes else "whole gradients"
    return f"{plan.algorithm}, {size}"
