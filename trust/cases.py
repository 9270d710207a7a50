"""Random all-reduces, and what each must return, computed with NumPy in float64.

::

    seed ─► Case: K towers, N columns, Strategy ─┬─► tensors ─► allreduce_grads ─► values ─┐
                                                 └─► exact sums, sums of magnitudes ───────┴─► check

Most numbers are small and whole: their sums are exact in every dtype and order, so that one wrong contribution is a
difference. The other results may differ by the error bound of docs/cost-model.md.
"""

import random
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from helpers.strategies import groups

import hier_allreduce
from hier_allreduce.planning import NAMES
from hier_allreduce.topology import load

IS_TF2 = tf.__version__ >= "2"
tf1 = tf.compat.v1
CPUS = 16
MODES = ("eager", "graph", "function") if IS_TF2 else ("graph",)
_MODE_WEIGHTS = (60, 28, 12) if IS_TF2 else (1,)
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8") + (("uint16", "uint32", "uint64") if IS_TF2 else ())
_REALS = ("float32", "float32", "float32", "float16", "bfloat16", "float64", "complex64", "complex128")
_MACHINES = {name: len(load(name)) for name in ("dgx-1v", "dgx-a100", "pcie-sockets", "nvlink-bridges", "dgx-1p")}
_BITS = {"float16": 11, "bfloat16": 7, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}


class Rows(NamedTuple):
    """A sparse gradient of one tower: its values, indices, and the number of rows of the variable or None."""

    values: np.ndarray
    indices: np.ndarray
    rows: Optional[int]


class Column(NamedTuple):
    """One variable: its dtype and shape, and K gradients, each an array, Rows or None."""

    dtype: str
    shape: Tuple[int, ...]
    is_static: bool
    is_whole: bool
    grads: List[Any]


class Case(NamedTuple):
    """One all-reduce: everything that is passed to it, as NumPy arrays and plain values."""

    seed: int
    mode: str
    devices: List[str]
    columns: List[Column]
    average: bool
    choices: Dict[str, Any]
    spoilt: str = ""
    lanes: Sequence[Tuple[str, int]] = ()

    def strategy(self):
        """Return the strategy; an invalid one raises its error here."""
        return hier_allreduce.Strategy(**self.choices)

    def __str__(self):
        dtypes = sorted({column.dtype for column in self.columns})
        return (
            f"seed {self.seed}, {self.mode}, {len(self.devices)} towers on {self.devices},"
            f" {len(self.columns)} variables of {dtypes}, average={self.average}, {self.choices},"
            f" lanes {self.lanes} {self.spoilt}"
        )


def draw(seed, mode=None):
    """Return the case of a seed."""
    rng = random.Random(seed)
    return drawn(rng, mode or rng.choices(MODES, _MODE_WEIGHTS)[0], seed)


def drawn(rng, mode, seed=0):
    """Return a case of a ``random.Random``, or of Hypothesis's, which then makes a case that fails smaller."""
    numbers = np.random.RandomState(rng.randrange(2**32))
    towers = rng.randint(1, rng.choice((6, CPUS)))
    average = rng.random() < 0.5
    choices = draw_choices(rng, towers)
    if choices.get("topology"):
        towers = min(towers, _MACHINES[choices["topology"]])
    columns = [_column(rng, numbers, towers, average, choices) for _ in range(_variables(rng))]
    spoilt = rng.choice(sorted(SPOIL)) if rng.random() < 0.05 else ""
    devices = _devices(rng, towers, choices)
    return Case(seed, mode, devices, columns, average, choices, spoilt, _lanes(rng, devices))


def _variables(rng):
    """Mostly a few variables, at times hundreds."""
    most = rng.choices((3, 12, 60, 300), (840, 120, 35, 5))[0]
    return rng.randint(0, most)


def _devices(rng, towers, choices):
    most = _MACHINES[choices["topology"]] if choices.get("topology") else CPUS
    in_order = bool(choices.get("topology")) and rng.random() < 0.7  # machines that were planned for before
    numbers = list(range(towers)) if in_order else rng.sample(range(most), towers)
    if rng.random() < 0.05 and not choices.get("topology"):  # towers that share devices
        numbers = [rng.choice(numbers) for _ in numbers]
    form = rng.choice(("/cpu:{}", "/CPU:{}", "/device:CPU:{}"))
    return [form.format(number) for number in numbers]


def _lanes(rng, devices):
    """At times further devices for each tower, none of them a tower or another's lane."""
    free = [number for number in range(CPUS) if not any(device.endswith(f":{number}") for device in devices)]
    most = len(free) // len(devices)
    if not most or len(set(devices)) < len(devices) or rng.random() < 0.85:
        return []
    count = rng.randint(1, min(most, 4))
    return [(f"/cpu:{free[number]}", number // count) for number in range(len(devices) * count)]


def draw_choices(rng, towers):
    choices = {
        "missing": rng.choice(("error", "zeros")),
        "sparse": rng.choice(("auto", "auto", "gather", "dense")),
        "wire_dtype": rng.choice((None, None, None, "float16", "bfloat16")),
        "pack_below": rng.choice((0, 0, 16, 65536)),
    }
    if rng.random() < 0.03:
        fitting = [name for name, devices in _MACHINES.items() if devices >= min(towers, 8)]
        planned = {"topology": rng.choice(fitting), "backward": rng.choice((None, 0, 10e-3))}
        return {**choices, **planned, "algorithm": rng.choice(("auto", rng.choice(NAMES)))}
    algorithm = rng.choice(NAMES)
    choices.update(
        algorithm=algorithm,
        mains=rng.choice((None, "balance", "rotate", rng.randrange(towers))),
        splits=rng.choice((0, 0, 0, 1, 3, 8)),
    )
    if algorithm in ("auto", "hierarchical") and rng.random() < 0.5:
        choices["groups"] = groups(rng, towers)
    return choices


def _column(rng, numbers, towers, average, choices):
    dtype = rng.choice(_REALS if average or rng.random() < 0.7 else _INTEGERS)
    kind = rng.choices(("dense", "sparse", "mixed", "none"), (80, 10, 5, 5))[0]
    if kind in ("sparse", "mixed"):
        dtype = rng.choice(("float32", "float32", "float64", "float16"))
    shape = tuple(rng.randint(0, 4) for _ in range(rng.randint(0, 3)))
    if rng.random() < 0.05:
        shape = (rng.randint(100, 40000),)
    if kind != "dense":
        shape = (rng.randint(1, 9), *shape[1:])
    is_whole = kind != "dense" or dtype not in ("float32", "float64") or rng.random() < 0.7
    is_static = rng.random() < 0.8
    grads = [_gradient(rng, numbers, kind, dtype, shape, is_whole) for _ in range(towers)]
    if kind == "sparse" and choices["sparse"] != "dense" and rng.random() < 0.3:
        grads = [grad._replace(rows=None) for grad in grads]
    if kind == "mixed" and not any(isinstance(grad, np.ndarray) for grad in grads):
        grads[0] = _dense(numbers, dtype, shape, is_whole)
    if choices["missing"] == "zeros" and kind != "none" and rng.random() < 0.2:
        kept = rng.randrange(towers)  # at least one tower has a gradient
        grads = [grad if tower == kept or rng.random() < 0.5 else None for tower, grad in enumerate(grads)]
    return Column(dtype, shape, is_static, is_whole, grads)


def _gradient(rng, numbers, kind, dtype, shape, is_whole):
    if kind == "none":
        return None
    if kind == "dense" or (kind == "mixed" and rng.random() < 0.5):
        return _dense(numbers, dtype, shape, is_whole)
    count = rng.randint(0, 5)
    values = numbers.randint(-2, 3, (count, *shape[1:])).astype(dtype)
    indices = numbers.randint(0, shape[0], count)
    return Rows(values, indices.astype("int32" if shape[0] % 2 else "int64"), shape[0])


def _dense(numbers, dtype, shape, is_whole):
    if not is_whole:
        return np.asarray(numbers.randn(*shape), dtype)
    least = 0 if dtype.startswith("uint") else -7
    values = np.asarray(numbers.randint(least, 8, shape))
    if dtype.startswith("complex"):
        values = values + 1j * numbers.randint(-7, 8, shape)
    return np.asarray(values, _numpy(dtype))


def _numpy(dtype):
    return tf.as_dtype(dtype).as_numpy_dtype


def is_auditable(case):
    """Return whether TensorFlow adds up what was planned: it drops the zeros of missing gradients, and their sums."""
    return not case.spoilt and all(len({grad is None for grad in column.grads}) == 1 for column in case.columns)


# ---- a case as tensors -----------------------------------------------------------------------------


def tensors(case, held):
    """Return the case's K×N gradients; ``held(array, is_static)`` makes a tensor on the current device."""
    rows = []
    for tower, device in enumerate(case.devices):
        with tf1.device(device):
            rows.append([_tensor(column.grads[tower], column.is_static, held) for column in case.columns])
    return rows


def _tensor(grad, is_static, held):
    if grad is None:
        return None
    if isinstance(grad, np.ndarray):
        return held(grad, is_static)
    shape = None
    if grad.rows is not None:
        shape = tf.constant([grad.rows, *grad.values.shape[1:]], tf.int64)
    return tf.IndexedSlices(held(grad.values, True), held(grad.indices, True), shape)


def grown(case):
    """Return the case with twice the rows in each dense gradient whose shape is not known when the graph is built."""
    columns = []
    for column in case.columns:
        if not column.is_static and column.shape and not any(isinstance(grad, Rows) for grad in column.grads):
            grads = [None if grad is None else np.concatenate([grad, grad]) for grad in column.grads]
            column = column._replace(shape=(2 * column.shape[0], *column.shape[1:]), grads=grads)
        columns.append(column)
    return case._replace(columns=columns)


def fed(case, rows):
    """Return the values of placeholders whose shape is not known, as a session takes them."""
    entries = [(column, row[v], column.grads[k]) for k, row in enumerate(rows) for v, column in enumerate(case.columns)]
    return {tensor: grad for column, tensor, grad in entries if not column.is_static and isinstance(grad, np.ndarray)}


def placeholder(array, is_static):
    """Return a tensor that no graph optimizer can fold into a constant."""
    return tf1.placeholder_with_default(array, array.shape if is_static else None)


def reduce_case(case, rows, name=None):
    """Call ``allreduce_grads`` for a case."""
    return hier_allreduce.allreduce_grads(
        rows, case.devices, case.average, name=name, strategy=case.strategy(), lanes=case.lanes
    )


# ---- what must come out ----------------------------------------------------------------------------


def check(case, results):
    """Return what is wrong with a case's K×N results as arrays, "" if nothing is."""
    if len(results) != len(case.devices) or any(len(row) != len(case.columns) for row in results):
        return f"{len(results)} rows of {[len(row) for row in results]} results"
    for variable, column in enumerate(case.columns):
        got = [row[variable] for row in results]
        fault = _fault(case, column, got)
        if fault:
            return f"variable {variable} ({column.dtype} {column.shape}): {fault}"
    return ""


def _fault(case, column, got):
    if all(grad is None for grad in column.grads):
        return "" if all(value is None for value in got) else "None became something"
    if any(value is None for value in got):
        return "something became None"
    exact, magnitude = _total(column)
    if case.average:
        exact, magnitude = exact / len(case.devices), magnitude / len(case.devices)
    allowed = _allowed(case, column, magnitude)
    first = _bits(got[0])
    for tower, value in enumerate(got):
        if _bits(value) != first:
            return f"tower {tower} has other bits than tower 0"
        dense, dtype = _densified(value, column.shape[:1])
        if dtype != _numpy(column.dtype):
            return f"tower {tower} has {dtype}"
        if dense.shape != column.shape:
            return f"tower {tower} has shape {dense.shape}"
        if not (np.abs(dense - exact) <= allowed).all():
            worst = np.unravel_index(np.argmax(np.abs(dense - exact) - allowed), dense.shape)
            return f"tower {tower} has {dense[worst]} at {worst} instead of {exact[worst]}"
    return ""


def _total(column):
    """Return the sum over the towers, and the sum of magnitudes, in double precision."""
    wide = np.complex128 if column.dtype.startswith("complex") else np.float64
    exact, magnitude = np.zeros(column.shape, wide), np.zeros(column.shape)
    for grad in column.grads:
        if grad is not None:
            exact += _densified(grad, column.shape[:1])[0]
            magnitude += np.abs(_densified(grad, column.shape[:1], np.abs)[0])
    return exact, magnitude


def _densified(grad, rows, of=lambda values: values):
    """Return a gradient as a dense array in double precision, and its dtype."""
    if isinstance(grad, np.ndarray) or np.isscalar(grad):
        grad = np.asarray(grad)
        return _wide(of(_wide(grad))), grad.dtype
    values = np.asarray(grad.values)
    table = np.zeros((*rows, *values.shape[1:]), _wide(values).dtype)
    np.add.at(table, np.asarray(grad.indices), of(_wide(values)))
    return table, values.dtype


def _wide(array):
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _bits(value):
    if isinstance(value, np.ndarray) or np.isscalar(value):
        return np.asarray(value).tobytes()
    return np.asarray(value.values).tobytes(), np.asarray(value.indices).tobytes()


def _allowed(case, column, magnitude):
    """Return the largest difference from the exact result: none for sums of whole numbers."""
    if column.is_whole and not case.average:
        return 0.0
    wire = case.choices.get("wire_dtype") if column.dtype == "float32" else None
    hops = len(case.devices) + 4
    smallest = 2.0**-24 * hops if "float16" in (wire, column.dtype) else 0.0
    return 2 * hops * 2.0 ** -_BITS[wire or column.dtype] * magnitude + smallest


# ---- cases that must be refused --------------------------------------------------------------------


def _row(change):
    """Return a fault: the last tower's row is ``change(row)``."""
    return lambda rows, case: ([*rows[:-1], change(rows[-1])], case)


def _first(make):
    """Return a fault: the last tower's first gradient is ``make(column)``."""
    return lambda rows, case: ([*rows[:-1], [make(case.columns[0]), *rows[-1][1:]]], case)


def _choice(**choice):
    return lambda rows, case: (rows, case._replace(choices={**case.choices, **choice}))


def _zeros(column, *more, dtype=None):
    # tf.zeros would add three ops where there are many elements
    return tf.constant(np.zeros((*column.shape, *more)), dtype or column.dtype)


SPOIL = {  # functions from rows and case to both with a fault
    "a row is missing": lambda rows, case: (rows[:-1], case),
    "a gradient is missing": _row(lambda row: row[:-1]),
    "another dtype": _first(lambda column: _zeros(column, dtype="int64" if column.dtype == "int32" else "int32")),
    "another rank": _first(lambda column: _zeros(column, 2)),
    "None on one tower": lambda rows, case: _first(lambda _: None)(*_choice(missing="error")(rows, case)),
    "text instead of a gradient": _first(lambda _: "gradient"),
    "a tensor of text": _first(lambda _: tf.constant("gradient")),
    "average is text": lambda rows, case: (rows, case._replace(average="yes")),
    "no such device": lambda rows, case: (rows, case._replace(devices=[*case.devices[:-1], "/gpu:first"])),
    "an unknown algorithm": _choice(algorithm="hierarchic"),
    "an unknown choice": _choice(sparse="maybe"),
    "groups without towers": _choice(algorithm="hierarchical", groups=((0,), ())),
    "no such main": _choice(mains=CPUS),
}
_NEED_TOWERS = {"a gradient is missing", "another dtype", "another rank", "None on one tower"}
_NEED_A_DENSE_COLUMN = {*_NEED_TOWERS, "text instead of a gradient", "a tensor of text"}


def can_spoil(case):
    """Return whether the fault of a spoilt case is one in it."""
    first = case.columns[0].grads if case.columns else []
    is_dense = bool(first) and all(isinstance(grad, np.ndarray) for grad in first) and case.columns[0].is_static
    if case.spoilt in _NEED_TOWERS and len(case.devices) < 2:
        return False
    if case.spoilt == "no such main" and not case.columns:
        return False
    return is_dense or case.spoilt not in _NEED_A_DENSE_COLUMN


def refused(case, rows):
    """Call ``allreduce_grads`` with a spoilt case; return the error of this package, or what else happened as text."""
    rows, spoilt = SPOIL[case.spoilt](rows, case)
    try:
        reduce_case(spoilt, rows)
    except hier_allreduce.HierAllreduceError as error:
        return error
    return f"{case.spoilt}, and it was reduced"
