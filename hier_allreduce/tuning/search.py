"""Tuning: the fastest strategy for some gradients, measured on the devices that will run it.

::

    candidates ─► rounds of all ─► rounds of the better half ─► … ─► their choices together ─► duel with the default
                  one step each, in a new order every round

All are built in one graph and run in one session, so that each is built once: building takes longer than most rounds.
The last duel has rounds of its own, so that a candidate that was only lucky does not win: see :mod:`.tuned`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import tensorflow as tf

from ..bench import (
    BASELINE,
    ROWS,
    WARM_UP,
    Case,
    Contender,
    Rows,
    consumed,
    cores,
    devices_here,
    load_model,
    ours,
    session,
    variables,
)
from ..errors import HierAllreduceError
from ..formatting import amount, count, duration
from ..logical import gpu_lanes
from ..presets import why_unwritable
from ..sampling import Tick, in_turn, timed
from .backward import Backward
from .candidates import DEFAULT, MINUTES, Candidate, combined, first_candidates
from .shapes import shapes_of
from .tuned import Duel, Row, Tuned

_FEWEST = 3  # rounds of a heat
_DUEL_FEWEST = 11
_HEATS, _HEATS_TOGETHER = 0.4, 0.33  # of the time that is left; the duel has the rest
_TOGETHER = 3  # candidates whose choices are combined
_LANE_MEMORY = 4  # bytes of each lane for a byte of gradients: one lane may carry everything

Steps = Dict[str, Callable[[], float]]  # a timed step of each candidate


def tune(
    shapes: Union[str, Sequence[Sequence[Any]]],
    devices: Optional[Sequence[str]] = None,
    average: bool = True,
    backward_ms: Optional[float] = None,
    topologies: Sequence[str] = (),
    wire_dtypes: Sequence[str] = (),
    minutes: float = MINUTES,
    file: Optional[str] = None,
    rows: int = ROWS,
    lanes_per_gpu: int = 0,
    tick: Optional[Tick] = None,
) -> Tuned:
    """Measure strategies on these devices and return the fastest; the default unless another is faster beyond noise.

    Each candidate reduces gradients of the real shapes, which a stand-in for the backward pass makes ready one after
    another.

    Args:
        shapes: K×N gradients or (gradient, variable) pairs, or the name or path of a table of shapes.
        devices: K devices (default: all GPUs if there are two or more, else 8 logical CPU devices).
        average: whether the mean is wanted.
        backward_ms: milliseconds of the backward pass (default: as long as the default strategy takes); 0 makes all
            gradients ready at once.
        topologies: machines for whose links strategies are planned too: names or files. On GPUs, ``"this machine"`` is
            always one of them.
        wire_dtypes: 16-bit dtypes in which gradients may travel, at the cost of accuracy: ``"float16"`` or
            ``"bfloat16"``.
        minutes: how long it takes in all; longer if building the candidates and a few steps of each take longer.
        file: a YAML file for the strategy.
        rows: in each sparse gradient.
        lanes_per_gpu: how many lanes each tower gets, as with :func:`hier_allreduce.gpu_lanes`; strategies are then
            tried over them too. On GPUs TensorFlow must not have started.
        tick: called with a short text at each stage.

    Raises:
        HierAllreduceError: no such table, a gradient of unknown shape, or an invalid number; or no such machine or
            dtype; or the lanes do not fit on these devices; or the file cannot be written; told before anything is
            measured.
    """
    unwritable = "" if file is None else why_unwritable(file)
    if unwritable:
        raise HierAllreduceError(f"file={unwritable}")
    for name, number in (("minutes", minutes), ("backward_ms", backward_ms)):
        if number is not None and not 0 <= number < math.inf:
            raise HierAllreduceError(f"{name}={number!r}: expected a number of 0 or more")
    table = load_model(shapes) if isinstance(shapes, str) else shapes_of(shapes)
    places = tuple(devices) if devices else devices_here()
    if len(places) < 2:
        raise HierAllreduceError(f"devices={list(places)}: one device has nothing to reduce; give two or more")
    case = Case(tuple(table), places, average, rows)
    if lanes_per_gpu:
        logical = gpu_lanes(places, lanes_per_gpu, _LANE_MEMORY * case.tower_bytes)
        case = dataclasses.replace(case, devices=logical.devices, logical=logical)
    on_gpus = any("gpu" in place.lower() for place in places)
    machines = list(dict.fromkeys([*topologies, *(["this machine"] if on_gpus else [])]))
    candidates = first_candidates(machines, wire_dtypes, lanes_per_gpu)
    tuned = _Search(case, candidates, backward_ms, minutes * 60, tick or (lambda stage: None)).run()
    if file is not None:
        tuned.write(file)
    return tuned


class _Bench:
    """One session, in which all steps use the same gradients, and each contender is built once."""

    def __init__(self, case: Case, gate: Callable[[Rows], Rows], until_done: contextlib.ExitStack):
        self._case, self._graph = case, tf.Graph()
        self._ops: Dict[str, Any] = {}
        with self._graph.as_default():
            grads, fill = variables(case)
            self._ready = gate(grads)
        self._session = until_done.enter_context(session(self._graph, case))
        self._session.run(fill)

    def build(self, contender: Contender) -> None:
        """Build a contender, if that was not done before."""
        if contender.name in self._ops:
            return
        with self._graph.as_default():
            reduced = contender.build(self._ready, self._case.devices, self._case.average)
            self._ops[contender.name] = consumed(reduced, self._case)

    def steps(self, names: Sequence[str]) -> Steps:
        """Return the timed steps of contenders that are built."""
        return {name: timed(self._session.make_callable(self._ops[name])) for name in names}


class _Search:
    """Successive halving over candidates of one case, which ends ``seconds`` from now."""

    def __init__(
        self, case: Case, candidates: Dict[str, Candidate], backward_ms: Optional[float], seconds: float, tick: Tick
    ):
        self._case, self._candidates, self._tick = case, dict(candidates), tick
        self._end = time.monotonic() + seconds
        self._ratios: Dict[str, List[float]] = {}
        self._seconds: Dict[str, List[float]] = {}
        self._failed: List[str] = []
        tick("backward pass")
        length = self._default_seconds() if backward_ms is None else backward_ms / 1e3
        self._backward = Backward(case, length)

    def run(self) -> Tuned:
        """Return the best strategy."""
        with contextlib.ExitStack() as until_done:
            bench = _Bench(self._case, self._backward.gate, until_done)
            best = self._heats(bench, list(self._candidates), _HEATS)
            together = combined({name: self._candidates[name] for name in best[:_TOGETHER] if name != DEFAULT})
            self._candidates.update(together)
            if together:
                best = self._heats(bench, [*best[:_TOGETHER], *together], _HEATS_TOGETHER)
            finalists = [name for name in best if name != DEFAULT][:1]
            duels = [self._duel(bench, name) for name in finalists]
        winner = next((duel.name for duel in duels if duel.won), DEFAULT)
        return Tuned(
            self._candidates[winner].strategy,
            winner,
            tuple(sorted(map(self._row, self._ratios), key=lambda row: row.ratio)),
            tuple(duels),
            tuple(self._setting()),
            self._baseline(),
            self._candidates[winner].lanes,
        )

    def _default_seconds(self) -> float:
        """Return the seconds that the default strategy takes for gradients that are all there."""
        with contextlib.ExitStack() as until_done:
            steps = self._steps(_Bench(self._case, lambda grads: grads, until_done), [DEFAULT])
            seconds = in_turn(steps, _FEWEST, WARM_UP, lambda stage: None)
        difference = statistics.median(seconds[DEFAULT]) - statistics.median(seconds[BASELINE.name])
        return max(1e-4, difference)

    def _steps(self, bench: _Bench, names: Sequence[str]) -> Steps:
        """Return a step of each candidate that can be built, and one without reduction."""
        built = []
        for contender in (BASELINE, *(self._contender(name) for name in names)):
            self._tick(f"building {contender.name}")
            try:
                bench.build(contender)
            except HierAllreduceError as error:  # what one machine or number of devices allows, another does not
                self._failed.append(f"{contender.name} does not fit: {error}")
            else:
                built.append(contender.name)
        return bench.steps(built)

    def _contender(self, name: str) -> Contender:
        candidate = self._candidates[name]
        logical = self._case.logical if candidate.lanes else None
        return ours(candidate.strategy, name, logical.lanes if logical else ())

    def _heats(self, bench: _Bench, names: Sequence[str], share: float) -> List[str]:
        """Return the names of the best, the fastest first: half of them leave after each heat.

        Args:
            bench: what builds them.
            names: of the candidates; the default takes part too.
            share: of the time that is left when all are built and have run.
        """
        steps = self._steps(bench, list(dict.fromkeys([DEFAULT, *names])))
        self._measure(steps, 1, 1)
        heats = max(1, math.ceil(math.log2(max(2, len(steps) - 2))))
        budget = share * self._left() / heats
        for _ in range(heats):
            self._measure(steps, self._rounds(steps, budget, _FEWEST))
            ranked = sorted((name for name in steps if name not in (BASELINE.name, DEFAULT)), key=self._median)
            kept = {BASELINE.name, DEFAULT, *ranked[: max(_TOGETHER, math.ceil(len(ranked) / 2))]}
            steps = {name: step for name, step in steps.items() if name in kept}
        return sorted((name for name in steps if name != BASELINE.name), key=self._median)

    def _left(self) -> float:
        """Return the seconds until the end."""
        return max(0.0, self._end - time.monotonic())

    def _rounds(self, steps: Steps, budget: float, fewest: int) -> int:
        """Return how many rounds of these steps take ``budget`` seconds."""
        each = sum(statistics.median(self._seconds[name]) for name in steps)
        return max(fewest, int(budget / each))

    def _measure(self, steps: Steps, rounds: int, warm_up: int = 0) -> Dict[str, List[float]]:
        """Take rounds of all steps and keep their seconds, and their ratios to the default's."""
        seconds = in_turn(
            steps, rounds, warm_up, lambda stage: self._tick(f"{count(len(steps) - 1, 'candidate')}, {stage}")
        )
        for name, taken in seconds.items():
            self._seconds.setdefault(name, []).extend(taken)
            if name != BASELINE.name:
                ratios = [step / default for step, default in zip(taken, seconds[DEFAULT])]
                self._ratios.setdefault(name, []).extend(ratios)
        return seconds

    def _duel(self, bench: _Bench, name: str) -> Duel:
        """Compare one candidate with the default in rounds that had no part in choosing it."""
        steps = self._steps(bench, [DEFAULT, name])
        seconds = self._measure(steps, self._rounds(steps, self._left(), _DUEL_FEWEST))
        return Duel(name, tuple(step / default for step, default in zip(seconds[name], seconds[DEFAULT])))

    def _median(self, name: str) -> float:
        return statistics.median(self._ratios[name])

    def _baseline(self) -> float:
        """Return the seconds of a step without reduction, measured in the same rounds as the candidates."""
        return statistics.median(self._seconds[BASELINE.name])

    def _row(self, name: str) -> Row:
        seconds = self._seconds[name]
        return Row(name, len(seconds), statistics.median(seconds), self._median(name))

    def _setting(self) -> List[str]:
        case = self._case
        baseline = duration(self._baseline())
        return [
            f"{count(len(case.shapes), 'gradient')}, {amount(case.tower_bytes)} on each of {case.devices[0]} to"
            f" {case.devices[-1]}, {'mean' if case.average else 'sum'}, {count(cores(), 'core')},"
            f" TensorFlow {tf.__version__}",
            f"after a stand-in for the backward pass; a step without all-reduce takes {baseline}"
            if self._backward.rows
            else "all gradients ready at once",
            *self._failed,
        ]
