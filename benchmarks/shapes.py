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
    """The float32 gradient of one variable.

    Attributes:
        name: of the variable.
        shape: of the variable.
        ids: the rows of the variable that a tower reads in a step; 0 if its gradient is dense.
    """

    name: str
    shape: Tuple[int, ...]
    ids: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of a tower's gradient; rows have int64 indices."""
        elements = 1
        for size in (self.ids, *self.shape[1:]) if self.ids else self.shape:
            elements *= size
        return 4 * elements + 8 * self.ids


def load_model(name: str, ids: int = 0) -> List[GradientShape]:
    """Return the gradients of a model.

    Args:
        name: of a file in ``benchmarks/models``.
        ids: the rows of each embedding that a tower reads in a step; with 0 embeddings are left
            out.

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
        is_sparse = row.get("sparse") == "yes"
        if not is_sparse or ids:
            sizes = [int(size) for size in row["shape"].split(",") if size]
            shapes.append(GradientShape(row["name"], tuple(sizes), ids if is_sparse else 0))
    return shapes
