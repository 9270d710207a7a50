r"""Our all-reduce beside those of tensorpack and tf.distribute and a plain sum, on CPU devices.

    .venv/bin/python benchmarks/cpu_devices.py --models resnet50,mobilenet_v2 \
        --json cpu-devices.json --picture cpu-devices.png

All contenders reduce the same gradients in one session. A round runs one step of each, in random
order, so that other load on the machine affects all alike. A step ends when each device has each
of its results. Steps without an all-reduce are timed too, and their median is subtracted. Before
the first round, every result is compared with the sum in float64.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import zlib
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

# before TensorFlow: without the lines of its start
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from baselines import BASELINES, Matrix, prepare, why_not
from candidates import all_reduce, check_names
from ratios import OURS
from rounds import NOTHING, timed_rounds
from shapes import GradientShape, load_model
from tables import check_files, write
from tqdm import tqdm

from hier_allreduce.compat import tf1
from hier_allreduce.formatting import table

WARM_UP = 2  # rounds that are not counted
SAMPLES = 64  # elements of each result that are compared
TOLERANCE = 1e-5  # relative; the gradients are positive, so no digits cancel
CONTENDERS = (OURS, *BASELINES)


# ---- the graph -----------------------------------------------------------------------------------


class Case(NamedTuple):
    """Gradients of a model on K devices; ``average`` asks for means instead of sums."""

    model: str
    shapes: Sequence[GradientShape]
    devices: Sequence[str]
    average: bool


def _variable(name: str, shape: Sequence[int], fills: List[Any]) -> Any:
    """Return the value of a new variable.

    ``fills`` gets the op that fills the variable with numbers from 0 to 1.
    Each step adds the same numbers, since TensorFlow neither folds a variable into a sum nor
    overwrites it.
    """
    raw = tf.raw_ops  # tf.get_variable would add many more ops
    handle = raw.VarHandleOp(dtype=tf.float32, shape=shape, shared_name=name, name=name)
    seed = zlib.crc32(name.encode())
    numbers = raw.RandomUniform(
        shape=tf.constant(shape, tf.int32), dtype=tf.float32, seed=seed, seed2=1
    )
    fills.append(raw.AssignVariableOp(resource=handle, value=numbers))
    value = raw.ReadVariableOp(resource=handle, dtype=tf.float32)
    value.set_shape(shape)
    return value


def _gradients(case: Case, fills: List[Any]) -> Matrix:
    rows = []
    for tower, device in enumerate(case.devices):
        with tf.device(device):
            names = [f"tower{tower}_grad{n}" for n in range(len(case.shapes))]
            rows.append(
                [_variable(name, shape.shape, fills) for name, shape in zip(names, case.shapes)]
            )
    return rows


def _consumed(rows: Matrix, case: Case) -> Any:
    """Return an op that waits for each result on its device."""
    # A placeholder passes its default on without a look at the elements. A control dependency
    # would not do, because Grappler replaces a sum that nothing reads.
    readers = []
    for device, row in zip(case.devices, rows):
        with tf.device(device):
            readers += [tf1.placeholder_with_default(tensor, tensor.shape).op for tensor in row]
    return tf.group(*readers)


def _samples(matrix: Matrix) -> List[np.ndarray]:
    """Return K×S elements of K×N arrays, for each variable, in float64."""
    samples = []
    for column in zip(*matrix):
        distance = 1 + column[0].size // SAMPLES
        some = [np.ravel(array)[::distance] for array in column]
        samples.append(np.array(some, np.float64))
    return samples


def _largest_error(reduced: Matrix, exact: Sequence[np.ndarray]) -> float:
    """Return the largest relative error of K×N results over their samples."""
    errors = [np.max(np.abs(got / wanted - 1)) for got, wanted in zip(_samples(reduced), exact)]
    return float(np.max(errors))


# ---- the measurement -----------------------------------------------------------------------------


class Result(NamedTuple):
    """One contender's seconds, or the error that it raised.

    ``steps`` has the seconds of each step less the median of those without an all-reduce, and
    ``build`` those that the graph took to build.
    """

    name: str
    steps: List[float]
    build: float
    error: Optional[str]

    @property
    def step(self) -> float:
        """The median of the steps, in seconds."""
        return statistics.median(self.steps)


def measure(case: Case, rounds: int, names: Sequence[str]) -> List[Result]:
    """Run the contenders one after another, and return a result for each."""
    gc.collect()  # the variables of an earlier case live as long as its graph
    steps: Dict[str, Any] = {}
    builds, failures = {}, {}
    config = tf1.ConfigProto(device_count={"CPU": len(case.devices)})
    with tf.Graph().as_default() as graph, tf1.Session(graph=graph, config=config) as session:
        fills: List[Any] = []
        grads = _gradients(case, fills)
        rows: Dict[str, Matrix] = {NOTHING: grads}
        for name in tqdm(names, desc="building", leave=False):
            start = time.perf_counter()
            try:
                rows[name] = all_reduce(name)(grads, case.devices, case.average)
            except Exception as error:  # a baseline may raise anything
                failures[name] = f"{type(error).__name__}: {error}"
            builds[name] = time.perf_counter() - start
        ops = {name: _consumed(rows[name], case) for name in rows}
        session.run(tf.group(*fills))
        divisor = len(case.devices) if case.average else 1
        exact = [column.sum(0) / divisor for column in _samples(session.run(grads))]
        for name in tqdm(builds, desc="comparing with float64", leave=False):
            off = _largest_error(session.run(rows[name]), exact) if name in rows else 0.0
            if not off <= TOLERANCE:  # also when it is NaN
                failures[name] = f"wrong: off by up to {off:.1%}"
        steps = {name: session.make_callable(op) for name, op in ops.items()}
        times = timed_rounds(steps, WARM_UP + rounds)
    seconds = {name: [step / 1e3 for step in times[name][WARM_UP:]] for name in times}
    nothing = statistics.median(seconds[NOTHING])
    results = []
    for name in names:
        steps_alone = [second - nothing for second in seconds.get(name, [])]
        results.append(Result(name, steps_alone, builds[name], failures.get(name)))
    return results


def best_baseline(results: Sequence[Result]) -> Optional[Result]:
    """Return the fastest baseline whose results are right."""
    return min(
        (r for r in results if r.name != OURS and r.error is None),
        key=lambda r: r.step,
        default=None,
    )


def ours_of(results: Sequence[Result]) -> Optional[float]:
    """Return our step divided by that of the best baseline."""
    ours, baseline = (
        next((r for r in results if r.name == OURS and r.error is None), None),
        best_baseline(results),
    )
    return None if ours is None or baseline is None else ours.step / baseline.step


# ---- tables and JSON -----------------------------------------------------------------------------


def title(case: Case, rounds: int) -> str:
    """Return the heading of a case's table."""
    total = sum(shape.bytes for shape in case.shapes)
    kind = "mean" if case.average else "sum"
    return (
        f"{case.model}, {kind} of {len(case.shapes)} gradients ({total / 1e6:.0f} MB) on "
        f"{len(case.devices)} CPU devices: medians of {rounds} steps"
    )


def text(case: Case, results: Sequence[Result], rounds: int) -> str:
    """Return the table of a case."""
    ours = next((r.step for r in results if r.name == OURS and r.steps), None)
    rows: List[Sequence[str]] = [("", "step, ms", "quartiles", "of ours", "graph, s")]
    for result in results:
        if result.error is not None:
            rows.append((result.name, "–", result.error))
            continue
        low, high = np.percentile(result.steps, [25, 75]) * 1e3
        ratio = f"{result.step / ours:.2f}" if ours else "–"
        cells = (f"{result.step * 1e3:.1f}", f"{low:.1f}–{high:.1f}", ratio, f"{result.build:.2f}")
        rows.append((result.name, *cells))
    lines = [title(case, rounds), table(rows)]
    ratio_to_best, baseline = ours_of(results), best_baseline(results)
    if ratio_to_best is not None and baseline is not None:
        lines.append(f"ours ÷ the best baseline ({baseline.name}): {ratio_to_best:.2f}")
    return "\n".join(lines)


def as_dict(case: Case, results: Sequence[Result]) -> Dict[str, Any]:
    """Return a case for JSON; times in seconds."""
    contenders = [
        {**result._asdict(), "step": result.step if result.steps else None} for result in results
    ]
    about = {"model": case.model, "devices": len(case.devices), "average": case.average}
    machine = {"tensorflow": tf.__version__, "cores": len(os.sched_getaffinity(0))}
    return {**about, **machine, "ours_of_best_baseline": ours_of(results), "contenders": contenders}


def draw(cases: Sequence[Case], found: Sequence[Sequence[Result]], path: str) -> None:
    """Draw a bar for each contender and case into a picture file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.6 + 2.2 * len(cases)), dpi=120)
    for number, (case, results) in enumerate(zip(cases, found), 1):
        axes = figure.add_subplot(len(cases), 1, number)
        right = [result for result in reversed(results) if result.error is None]
        colors = ["tab:orange" if result.name == OURS else "tab:gray" for result in right]
        bars = axes.barh([r.name for r in right], [r.step * 1e3 for r in right], color=colors)
        for bar, result in zip(bars, right):
            axes.text(
                bar.get_width(),
                bar.get_y() + bar.get_height() / 2,
                f" {result.step * 1e3:.0f}",
                va="center",
            )
        axes.set_title(
            f"{case.model}, {'mean' if case.average else 'sum'}: step, ms", loc="left", fontsize=10
        )
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_figure(path)


def main() -> None:
    """Measure the models, sum and mean, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--models",
        default="resnet50,mobilenet_v2",
        metavar="LIST",
        help="names in benchmarks/models",
    )
    parser.add_argument(
        "--devices", type=int, default=8, metavar="N", help="logical CPU devices (default 8)"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="counted steps of each (default 15)"
    )
    parser.add_argument("--only", metavar="NAMES", help="these all-reduces: ours,flat/64")
    parser.add_argument("--json", metavar="FILE", help="write every step's seconds")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw the steps, into a .png, .svg or .pdf"
    )
    args = parser.parse_args()
    tf1.disable_eager_execution()
    devices = [f"/cpu:{number}" for number in range(args.devices)]
    names = args.only.split(",") if args.only else CONTENDERS
    shapes_by_model = {model: load_model(model) for model in args.models.split(",")}
    check_names(names)
    check_files(args.json, args.picture)
    prepare(name for name in names if not why_not(name, args.devices))
    cases, found = [], []
    for model, shapes in shapes_by_model.items():
        for average in (False, True):
            cases.append(Case(model, shapes, devices, average))
            found.append(measure(cases[-1], args.rounds, names))
            print(text(cases[-1], found[-1], args.rounds), end="\n\n", flush=True)
            write([as_dict(*pair) for pair in zip(cases, found)], args.json)
    if args.picture:
        draw(cases, found, args.picture)


if __name__ == "__main__":
    main()
