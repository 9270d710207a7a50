"""The gradients of shipped models."""

import numpy as np

from helpers.project import TOP
from hier_allreduce.planning.chunks import GradientSize

MODELS = TOP / "benchmarks" / "models"


def gradients(model):
    """Return the dense gradients of a model's table; all are float32."""
    grads = []
    for line in (MODELS / f"{model}.tsv").read_text().splitlines()[1:]:
        _, shape, dtype, *sparse = line.split("\t")
        sizes = [int(size) for size in shape.split(",")]
        if sparse != ["yes"]:
            grads.append(GradientSize(int(np.prod(sizes)), 4, dtype))
    return tuple(grads)
