"""What tuning found: the strategy, how sure that is, and the file that the trainers read.

A round takes one step of each candidate, so that other load on the machine affects all of them alike. A candidate is
compared with the default in the same rounds, by the ratio of their steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Sequence, Tuple

import yaml
from scipy.stats import binom

from ..formatting import duration, percent, table
from ..planning import Strategy
from ..presets import write_text
from .candidates import DEFAULT, changed

_DOUBT = 0.05  # the interval of a ratio holds the true median with 95 %
_WORTH = 0.99  # a ratio above this is not worth another strategy


class Row(NamedTuple):
    """A candidate: its median step, and that step divided by the default's in the same rounds; in seconds."""

    name: str
    rounds: int
    seconds: float
    ratio: float


class Duel(NamedTuple):
    """The last comparison: rounds that chose nothing before.

    Attributes:
        name: the candidate.
        ratios: its step divided by the default's, one for each round.
    """

    name: str
    ratios: Tuple[float, ...]

    @property
    def median(self) -> float:
        """The median ratio."""
        return median_interval(self.ratios)[1]

    @property
    def won(self) -> bool:
        """Whether the candidate is faster, beyond noise, and by more than 1 %."""
        _, median, high = median_interval(self.ratios)
        return high < 1 and median < _WORTH

    def __str__(self) -> str:
        low, median, high = median_interval(self.ratios)
        faster = sum(ratio < 1 for ratio in self.ratios)
        return (
            f"{self.name}: {median:.3f} times the default's step, between {low:.3f} and {high:.3f} with"
            f" {percent(1 - _DOUBT)} confidence; faster in {faster} of {len(self.ratios)} rounds"
        )


@dataclass(frozen=True)
class Tuned:
    """The best strategy for some gradients on some devices. ``print`` shows the table and how sure it is.

    Attributes:
        strategy: the best one; the default unless another was faster beyond noise.
        name: what the candidate is called in the table.
        rows: all candidates, the fastest first.
        duels: the last comparisons with the default.
        setting: what was measured, a line each.
        baseline: the seconds of a step without reduction, which has the stand-in for the backward pass.
        lanes_per_gpu: how many lanes of each tower it goes over. The file cannot hold them: give them to the function
            or trainer.
    """

    strategy: Strategy
    name: str
    rows: Tuple[Row, ...]
    duels: Tuple[Duel, ...]
    setting: Tuple[str, ...]
    baseline: float
    lanes_per_gpu: int = 0

    def __str__(self) -> str:
        cells = [
            [
                row.name,
                row.rounds,
                duration(row.seconds),
                duration(max(0.0, row.seconds - self.baseline)),
                f"{row.ratio:.3f}",
            ]
            for row in self.rows
        ]
        head = ["candidate", "rounds", "step", "exposed", "times the default"]
        return "\n".join([*self.setting, "", table([head, *cells], all_right=True), "", *self._verdict()])

    def _verdict(self) -> List[str]:
        lines = [str(duel) for duel in self.duels]
        if self.name == DEFAULT:
            return [*lines, "keep the default strategy: no other is faster beyond noise"]
        lanes = f"; the file has no lanes: also give lanes_per_gpu={self.lanes_per_gpu}" if self.lanes_per_gpu else ""
        return [*lines, f"use {self.name}{lanes}"]

    def yaml(self) -> str:
        """Return the strategy as YAML, with the table as comments."""
        comments = "\n".join(f"# {line}".rstrip() for line in str(self).splitlines())
        values = {name: _plain(value) for name, value in changed(self.strategy).items()} or {"algorithm": "auto"}
        return f"# Written by hier-allreduce tune.\n{comments}\n{yaml.safe_dump(values, sort_keys=False)}"

    def write(self, path: str) -> None:
        """Write the strategy as a YAML file for every ``strategy=``.

        Raises:
            HierAllreduceError: the file cannot be written.
        """
        write_text(path, self.yaml())


def median_interval(ratios: Sequence[float]) -> Tuple[float, float, float]:
    """Return the median, between the ends of an interval that holds the true median with 95 % confidence.

    It needs no assumption about the noise: the number of ratios below the true median has a binomial distribution. With
    fewer than six ratios there is no such interval, and the ends are 0 and infinity.
    """
    ordered, count = sorted(ratios), len(ratios)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    outside = max((k for k in range(count // 2) if 2 * binom.cdf(k, count, 0.5) <= _DOUBT), default=None)
    if outside is None:
        return 0.0, middle, float("inf")
    return ordered[outside], middle, ordered[count - 1 - outside]


def _plain(value: Any) -> Any:
    """Return a value as YAML can hold it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
