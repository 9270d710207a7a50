"""The shapes of a model's gradients, from ``benchmarks/models/NAME.tsv``.

::

    name                 shape       dtype     sparse
    embedding            30522,768   float32   yes
    dense/kernel         768,768     float32
    scale                            float32

One line for each variable, in the order of the layers, with a tab between columns. An empty shape
is a scalar. The column ``sparse`` is optional.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import List, NamedTuple, Tuple

MODELS = Path(__file__).parent / "models"


class GradientShape(NamedTuple):
    """The gradient of one variable: its name, and its shape if it is dense float32."""

    name: str
    shape: Tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of a float32 gradient."""
        elements = 1
        for size in self.shape:
            elements *= size
        return 4 * elements


def load_model(name: str) -> List[GradientShape]:
    """Return the dense gradients of a model; sparse ones are left out.

    Raises:
        SystemExit: there is no such model, or it has other dtypes than float32.
    """
    path = MODELS / f"{name}.tsv"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in MODELS.glob("*.tsv")))
        raise SystemExit(f"{name}: no such model; there are {known}")
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    shapes = []
    for row in csv.DictReader(lines, delimiter="\t"):
        if row["dtype"] != "float32":
            raise SystemExit(f"{path}: {row['name']} is {row['dtype']}; expected float32")
        if row.get("sparse") != "yes":
            sizes = [int(size) for size in row["shape"].split(",") if size]
            shapes.append(GradientShape(row["name"], tuple(sizes)))
    return shapes
