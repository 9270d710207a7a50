"""Tables of gradient shapes, which stand for a model in predictions.

A table is a TSV file with a header and one line for each variable, in the order of the layers::

    name                    shape         dtype     sparse
    embedding               30522,768     float32   yes
    dense/kernel            768,768       float32
    scale                                 float32

An empty shape is a scalar. The column ``sparse`` is optional; ``yes`` marks an embedding whose gradient contains
only the rows that a batch touched (``tf.IndexedSlices``). Lines that begin with ``#`` are comments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Tuple

from . import configs
from .errors import HierAllreduceError

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
_COLUMNS = ("name", "shape", "dtype")


@dataclass(frozen=True)
class GradientShape:
    """One gradient of a model: its variable's name, shape and dtype, and whether it is sparse."""

    name: str
    shape: Tuple[int, ...]
    dtype: str
    sparse: bool = False

    @property
    def elements(self) -> int:
        """The number of elements of the dense gradient."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def load_model(name_or_path: str) -> Tuple[GradientShape, ...]:
    """Read the table of a shipped model (``configs/models``) or of a file.

    Raises:
        HierAllreduceError: no such model or file (suggests the nearest name), or an invalid line (with its number).
    """
    path = configs.find("models", name_or_path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as cause:
        raise HierAllreduceError(f"{path}: not readable as text: {cause}") from None
    numbered = [
        (number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    if not numbered:
        raise HierAllreduceError(
            f"{path}: empty; expected a header `name<TAB>shape<TAB>dtype` and one line per variable"
        )
    header = numbered[0][1].split("\t")
    if tuple(header[:3]) != _COLUMNS or header[3:] not in ([], ["sparse"]):
        raise HierAllreduceError(
            f"{path}, line {numbered[0][0]}: the header is {header}; expected name, shape, dtype and optionally sparse,"
            " separated by tabs"
        )
    shapes = tuple(
        _read_line(path, number, dict(zip(header, line.split("\t"))))
        for number, line in numbered[1:]
    )
    if not shapes:
        raise HierAllreduceError(f"{path}: a header, but no variables")
    return shapes


def _read_line(path: Path, number: int, cells: Dict[str, str]) -> GradientShape:
    where = f"{path}, line {number}"
    missing = [column for column in _COLUMNS if column not in cells]
    if missing or not cells["name"]:
        raise HierAllreduceError(
            f"{where}: no {', '.join(missing) or 'name'}; expected name, shape, dtype, separated by tabs"
        )
    dtype = cells["dtype"].strip()
    if dtype not in DTYPE_BYTES:
        raise HierAllreduceError(
            f"{where}: dtype {dtype!r}{configs.nearest(dtype, sorted(DTYPE_BYTES))}"
        )
    sparse = cells.get("sparse", "").strip()
    if sparse not in ("", "no", "yes"):
        raise HierAllreduceError(f"{where}: sparse is {sparse!r}; expected yes, no or nothing")
    is_scalar = cells["shape"].strip() in ("", "scalar")
    sizes = [] if is_scalar else [size.strip() for size in cells["shape"].split(",")]
    # 18 digits fit into int64, as TensorFlow's sizes do
    if not all(size.isdecimal() and len(size) <= 18 for size in sizes):
        raise HierAllreduceError(
            f"{where}: shape {cells['shape']!r}; expected whole numbers separated by commas, such as 3,3,64,64"
        )
    if sparse == "yes" and is_scalar:
        raise HierAllreduceError(f"{where}: a scalar has no rows, so it cannot be sparse")
    return GradientShape(cells["name"], tuple(map(int, sizes)), dtype, sparse == "yes")
