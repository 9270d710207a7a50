"""Does it pay? Predicted step times of a model, with our plan, without one, and with other all-reduces."""

from __future__ import annotations

from typing import Dict, Optional, Sequence, Tuple

from ..bench import DTYPE_BYTES, GradientShape
from ..errors import HierAllreduceError
from ..formatting import count, duration, percent, table
from ..planning import Spec, Strategy, backward_pass, best_plan, plan_unplanned, predicted_seconds
from ..topology import Topology
from .describe import paragraphs, remarks

# bytes/s on the bus, as nccl-tests count, of NCCL's all-reduce on all GPUs: docs/calibration.md has the sources
NCCL_BUS = {
    "DGX-1 (8x P100)": 62.24e9,
    "DGX-1V (8x V100)": 135.5e9,
    "DGX A100 (8x A100)": 230.1e9,
    "DGX H100 (8x H100)": 466.35e9,
    "4x RTX 5090": 35e9,
}

_PLANNED, _DEFAULT = "ours, planned for the machine", "ours, without a topology"


def describe_steps(
    machine: Topology, shapes: Sequence[GradientShape], step: float, backward: Optional[float], lanes: int = 0
) -> str:
    """Return a table of step times, and a sentence.

    Args:
        machine: the GPUs.
        shapes: the model's gradients; sparse ones are left out.
        step: seconds of a step on one GPU, without an all-reduce.
        backward: seconds of the backward pass; by default what is assumed for the gradients' bytes.
        lanes: L, for the planned one.

    Raises:
        HierAllreduceError: there are no dense gradients, or the backward pass is longer than the step.
    """
    dense = [shape for shape in shapes if not shape.sparse]
    size = sum(shape.dense_bytes for shape in dense)
    if not size:
        raise HierAllreduceError("--model: all gradients are sparse or empty, and these are not predicted")
    if backward is not None and backward > step:
        raise HierAllreduceError(f"--backward {duration(backward)} is longer than --step {duration(step)}")
    during = backward_pass(size, min(step, backward_pass(size).seconds) if backward is None else backward)
    specs = [Spec(shape.elements, DTYPE_BYTES[shape.dtype], shape.dtype) for shape in dense]
    exposed = {_PLANNED: best_plan(machine, size, during, lanes=lanes).seconds}
    for name, strategy in _others(len(machine)).items():
        chunks, plan = plan_unplanned(specs, strategy, len(machine))
        exposed[name] = predicted_seconds(plan, machine, [chunk.bytes for chunk in chunks], during)
    sentence = _sentence(exposed, step)
    if machine.name in NCCL_BUS:
        nccl = size * 2 * (len(machine) - 1) / len(machine) / NCCL_BUS[machine.name]
        exposed["NCCL as published, if nothing overlaps"] = nccl
        sentence += f" NCCL, if it works, leaves at most {duration(nccl)} exposed."
    rows = [
        (name, duration(seconds), duration(step + seconds), percent(step / (step + seconds)))
        for name, seconds in exposed.items()
    ]
    left_out = len(shapes) - len(dense)
    return paragraphs(
        [
            table([("all-reduce, predicted", "exposed", "step", "scaling efficiency"), *rows]),
            sentence,
            f"{count(left_out, 'sparse gradient')} left out" if left_out else "",
            f"a step of {duration(step)} on one GPU, of which the backward pass takes {duration(during.seconds)}",
            *remarks(machine),
        ]
    )


def _others(towers: int) -> Dict[str, Strategy]:
    """Return what others do with the gradients, as strategies of ours."""
    others = {
        _DEFAULT: Strategy(),
        "TensorFlow, HierarchicalCopyAllReduce": Strategy("hierarchical", mains=0, splits=1),
        "TensorFlow, ReductionToOneDevice": Strategy("flat", mains=0, pack_below=0),
        "tensorpack, mode gpu": Strategy("flat", mains="rotate", pack_below=0),
    }
    if towers == 8:  # on any other number of GPUs tensorpack falls back
        others["tensorpack, mode hierarchical"] = Strategy("hierarchical", mains="rotate", splits=8)
    return others


def _sentence(exposed: Dict[str, float], step: float) -> str:
    name, seconds = min(_without_ours(exposed), key=lambda each: each[1])
    default = exposed[_DEFAULT]
    saved = [
        f"{duration(max(0.0, other - exposed[_PLANNED]))} of the {duration(step + other)} of {what}"
        for what, other in (("our default", default), (name, seconds))
    ]
    return f"The plan saves {saved[0]}, and {saved[1]}."


def _without_ours(exposed: Dict[str, float]) -> Sequence[Tuple[str, float]]:
    return [(name, seconds) for name, seconds in exposed.items() if name not in (_PLANNED, _DEFAULT)]
