"""What the bench measured: one ``Measured`` for each contender, one ``Report`` for each case."""

from __future__ import annotations

import dataclasses
import os
import statistics
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import tensorflow as tf

from ..sampling import quartiles
from .case import Case
from .contenders import is_ours
from .floor import Floor

_SHORTEST = 1e-6  # seconds: the divisor of a round in which ours was faster than the baseline's median


@dataclass
class Measured:
    """The measurements of one contender. The baseline's executed nodes are already subtracted.

    Attributes:
        status: "ok", "wrong" (it ran, but its results are not the sum) or "cannot run".
        error: the contender's own message.
        nodes_built: ops added by its build function.
        nodes_executed: nodes on all devices after pruning, Grappler and partitioning, including sends and receives.
        build_seconds: the median of three builds, each in a fresh graph.
        first_run_seconds: the first ``session.run``: placement, Grappler, executors and one step.
        peak_bytes: the most memory that ops held at one time during a step, from the allocation records of a
            traced step (on GPUs without the buffers that receive copies).
        copies: executed copies, ``{(source, destination): (tensors, bytes)}``.
        max_error: the largest relative difference from the float64 result, over 4096 elements of every result.
        step_seconds: one entry for each round; the baseline is not subtracted.
    """

    name: str
    status: str = "ok"
    error: str = ""
    nodes_built: int = 0
    nodes_executed: int = 0
    build_seconds: float = 0.0
    first_run_seconds: float = 0.0
    peak_bytes: int = 0
    copies: Dict[Tuple[str, str], Tuple[int, int]] = field(default_factory=dict)
    max_error: float = 0.0
    step_seconds: List[float] = field(default_factory=list)

    @property
    def copied_bytes(self) -> int:
        """The bytes copied between all pairs of devices."""
        return sum(size for _, size in self.copies.values())

    @property
    def copied_tensors(self) -> int:
        """The number of tensors copied between all pairs of devices."""
        return sum(count for count, _ in self.copies.values())


@dataclass
class Report:
    """The measurements of one case: the baseline, and the contenders in the order requested.

    ``tensorflow`` and ``cores`` are the version and the number of cores that they were measured with.
    """

    case: Case
    baseline: Measured
    contenders: List[Measured]
    tensorflow: str = tf.__version__
    cores: int = field(default_factory=lambda: cores())

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all towers' gradients."""
        return len(self.case.devices) * self.case.tower_bytes

    @property
    def ours(self) -> Optional[Measured]:
        """The first timed contender of this package; the others are compared with it."""
        return next((m for m in self.contenders if is_ours(m.name) and m.step_seconds), None)

    def net_seconds(self, measured: Measured) -> List[float]:
        """Return each step's seconds minus the baseline's median step. The floor has no baseline."""
        idle = 0.0 if measured.name == Floor.name else statistics.median(self.baseline.step_seconds)
        return [seconds - idle for seconds in measured.step_seconds]

    def ratio(self, measured: Measured) -> Optional[float]:
        """Return the median, over the rounds, of this contender's net seconds divided by ours in the same round.

        None if either was not timed, or if ours took no longer than the baseline.
        """
        if self.ours is None or not measured.step_seconds:
            return None
        ours = self.net_seconds(self.ours)
        if statistics.median(ours) <= 0:
            return None
        return statistics.median(a / max(b, _SHORTEST) for a, b in zip(self.net_seconds(measured), ours))

    def algbw(self, measured: Measured) -> Optional[float]:
        """Return one tower's bytes divided by a contender's median net seconds; None if it took none."""
        seconds = statistics.median(self.net_seconds(measured)) if measured.step_seconds else 0.0
        return self.case.tower_bytes / seconds if seconds > 0 else None

    def busbw(self, measured: Measured) -> Optional[float]:
        """Return ``algbw · 2(K-1)/K``: the bytes/s of each link, if all were used evenly, as nccl-tests define it."""
        algbw, count = self.algbw(measured), len(self.case.devices)
        return None if algbw is None else algbw * 2 * (count - 1) / count

    def peak_ratio(self, measured: Measured) -> float:
        """Return a contender's peak memory divided by the bytes of all towers' gradients."""
        return measured.peak_bytes / max(1, self.gradient_bytes)

    def as_dict(self) -> Dict[str, Any]:
        """Return everything for JSON: seconds, bytes, and ``copies`` as ``{"cpu:0→cpu:1": [tensors, bytes]}``."""
        return {
            "devices": list(self.case.devices),
            "average": self.case.average,
            "gradients": len(self.case.shapes),
            "tower_bytes": self.case.tower_bytes,
            "tensorflow": self.tensorflow,
            "cores": self.cores,
            "baseline": self._fields(self.baseline),
            "contenders": [self._fields(measured) for measured in self.contenders],
        }

    def _fields(self, measured: Measured) -> Dict[str, Any]:
        fields = dataclasses.asdict(measured)
        fields["copies"] = {f"{i}→{j}": [count, size] for (i, j), (count, size) in measured.copies.items()}
        if measured.step_seconds:
            fields["net_seconds"] = dict(zip(("q1", "median", "q3"), quartiles(self.net_seconds(measured))))
            fields["ratio_to_ours"] = self.ratio(measured)
            fields["algbw"], fields["busbw"] = self.algbw(measured), self.busbw(measured)
            fields["peak_to_gradients"] = self.peak_ratio(measured)
        return fields


def cores() -> int:
    """Return the number of cores that this process may use, or of all cores where the system does not tell."""
    # Windows and macOS have no affinity
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
