"""A user's choices about the all-reduce, as plain data from Python or a YAML file; and the plan that they select."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple, Union

from .. import presets
from ..errors import HierAllreduceError
from ..topology import Topology, links_of
from .algorithms import BY_NAME, Algorithm, check_groups, in_groups, name_of, schedules_of, with_root
from .choose import ALONG_LINKS, SIZES, Choice, candidates, cases_of, choose, rule
from .chunks import Gradient
from .plan import Plan

AUTO = "auto"
THIS_MACHINE = "this machine"
NAMES = (AUTO, *BY_NAME)
# the fastest on CPU devices (`make bench`), which share one memory: small gradients packed, larger ones whole
_CPU_CHUNK, _CPU_PACKED = 10 << 20, 64 << 10
_WORDS = {"sparse": ("gather", "dense"), "missing": ("error", "zeros"), "wire_dtype": (None, "float16", "bfloat16")}


@dataclass(frozen=True)
class Strategy:
    """Choices about the all-reduce. Sizes are in bytes, times in seconds.

    ::

        Strategy(algorithm="tree", chunk_bytes=8 << 20)
        Strategy(topology="dgx-1v", wire_dtype="float16")
        Strategy.load("tensorpack")

    Attributes:
        algorithm: ``"flat"``, ``"tree"``, ``"hierarchical"``, ``"ring"``; or a function ``(devices, chunk) -> steps``,
            or ``(devices, chunk, topology) -> steps``, that returns the :class:`.Reduce` and :class:`.Copy` steps of a
            chunk. ``"auto"``: on GPUs, the plan that is predicted to leave least exposed after the backward pass on
            the machine that nvidia-smi shows; on CPU devices, which have no links, flat.
        topology: the machine to plan for: a preset's name (``"dgx-1v"``), a YAML or nvidia-smi file, a
            :class:`.Topology`, or ``"this machine"``. The tower on ``/gpu:i`` is its device i.
        chunk_bytes: the size of chunks: smaller gradients are packed up to it, larger ones are cut. None: by the plan
            or rule. 0: each gradient travels alone and whole.
        groups: for ``"hierarchical"``: tuples that hold each tower's number once; by default two halves.
        main: the tower on which all sums are formed; by default chunks rotate over the towers.
        sparse: ``"gather"`` keeps ``tf.IndexedSlices`` sparse: each tower gets the rows of all. ``"dense"`` makes them
            dense.
        missing: None on some towers only is an ``"error"``, or counts as ``"zeros"``.
        wire_dtype: ``"float16"`` or ``"bfloat16"``: float32 gradients travel in 16 bits and are added in float32. A
            value above 65504 becomes infinite in float16.
        backward: seconds of the backward pass, for planning. None: assumed from the bytes of the gradients.

    Raises:
        HierAllreduceError: an invalid value, or two that exclude each other.
    """

    algorithm: Union[str, Algorithm] = AUTO
    topology: Union[str, Topology, None] = None
    chunk_bytes: Optional[int] = None
    groups: Optional[Tuple[Tuple[int, ...], ...]] = None
    main: Optional[int] = None
    sparse: str = "gather"
    missing: str = "error"
    wire_dtype: Optional[str] = None
    backward: Optional[float] = None

    def __post_init__(self) -> None:
        if not callable(self.algorithm) and self.algorithm not in NAMES:
            hint = _machine_hint(self.algorithm) or presets.nearest(str(self.algorithm), NAMES)
            raise HierAllreduceError(f"algorithm={self.algorithm!r} is unknown{hint}")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value not in words:
                raise HierAllreduceError(
                    f"{name}={value!r} is unknown{presets.nearest(str(value), filter(None, words))}"
                )
        for name in ("chunk_bytes", "main"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise HierAllreduceError(f"{name}={value!r}: expected a whole number of 0 or more")
        if not isinstance(self.topology, (str, os.PathLike, Topology, type(None))):
            raise HierAllreduceError(f"topology={self.topology!r}: expected a Topology, or a machine's name or file")
        if self.groups is not None and self.algorithm != "hierarchical":
            raise HierAllreduceError(f"groups={self.groups!r} go with algorithm='hierarchical'; give that too")
        try:
            hash(self.algorithm)
        except TypeError:
            raise HierAllreduceError(
                f"algorithm={self.algorithm!r} has no hash, by which plans are kept; a frozen dataclass has one"
            ) from None
        try:
            object.__setattr__(self, "groups", self.groups and tuple(map(tuple, self.groups)))
            hash(self.groups)
        except TypeError:
            raise HierAllreduceError(
                f"groups={self.groups!r}: expected tuples of towers, as ((0, 1), (2, 3))"
            ) from None
        seconds = self.backward
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds <= 60):
            raise HierAllreduceError(f"backward={seconds!r}: expected seconds above 0, up to 60 (60 ms are 0.06)")

    @classmethod
    def load(cls, name_or_path: Union[str, os.PathLike]) -> Strategy:
        """Return the strategy in ``configs/strategies/NAME.yaml``, or in a YAML file. Its keys are the attributes.

        A relative path in ``topology`` is beside the file.

        Raises:
            HierAllreduceError: no such file or name, an unknown key (with the nearest one), or an invalid value.
        """
        path = presets.find("strategies", name_or_path, NAMES)
        return cls.from_values(presets.read_yaml(path), path)

    @classmethod
    def from_values(cls, values: Dict[str, Any], source: Path) -> Strategy:
        """Return the strategy of a file's keys and values; raises the errors of :meth:`load`."""
        presets.check(values, dict.fromkeys((field.name for field in fields(cls)), presets.anything), str(source))
        machine = values.get("topology")
        if isinstance(machine, str) and (source.parent / machine).is_file():
            values = {**values, "topology": str(source.parent / machine)}
        try:
            return cls(**values)
        except HierAllreduceError as error:
            raise HierAllreduceError(f"{source}: {error}") from None


def strategy_from(value: Union[str, os.PathLike, Strategy, None]) -> Strategy:
    """Return the strategy of an argument ``strategy=``.

    Args:
        value: a :class:`Strategy`, the name of an algorithm, or the name or path of a YAML file; None is the default.

    Raises:
        HierAllreduceError: the argument is invalid.
    """
    if value is None or isinstance(value, Strategy):
        return value or Strategy()
    if isinstance(value, str) and value in NAMES:
        return Strategy(algorithm=value)
    hint = "; a function goes into Strategy(algorithm=…)" if callable(value) else _machine_hint(value)
    if hint or not isinstance(value, (str, os.PathLike)):
        raise HierAllreduceError(
            f"strategy={value!r}: expected a Strategy, an algorithm's name, or the name or path of a YAML file{hint}"
        )
    return Strategy.load(value)


def _machine_hint(name: Any) -> str:
    return f"; a machine goes into Strategy(topology={name!r})" if name in presets.names("machines") else ""


# ---- the plan that a strategy selects ----------------------------------------------------------------


def plan_for(
    strategy: Strategy,
    gradients: Sequence[Gradient],
    towers: int,
    machine: Optional[Topology] = None,
    on_cpu: bool = False,
) -> Plan:
    """Return the plan that a strategy selects for K towers, on a ``machine`` of K devices where that is known.

    Raises:
        HierAllreduceError: the groups, the main or the algorithm's steps do not fit K towers.
    """
    if machine is not None and towers > 1:
        return choices_for(strategy, tuple(gradients), machine)[0].plan
    plan = rule(gradients, towers)
    if on_cpu:
        plan = Plan(towers, schedules_of(BY_NAME["flat"], towers), _CPU_CHUNK, "flat", _CPU_PACKED, whole=True)
    if strategy.algorithm != AUTO:
        schedules = schedules_of(_function(strategy, towers), towers)
        plan = plan._replace(schedules=schedules, algorithm=name_of(strategy.algorithm))
    if strategy.main is not None:
        plan = plan._replace(schedules=with_root(plan.schedules, strategy.main, plan.algorithm))
    if strategy.chunk_bytes is not None:
        plan = plan._replace(chunk_bytes=strategy.chunk_bytes, pack_below=None, whole=False)
    return plan


@lru_cache(maxsize=64)  # an eager program asks at every step
def choices_for(strategy: Strategy, gradients: Tuple[Gradient, ...], machine: Topology) -> Tuple[Choice, ...]:
    """Return the plan that a strategy selects for the K ≥ 2 devices of a machine, then the best plans of others."""
    towers, links = len(machine), links_of(machine)
    algorithms, sizes = candidates(links, towers), SIZES
    if strategy.algorithm == "hierarchical" and strategy.groups is None:
        algorithms = {name: found for name, found in algorithms.items() if name in ("hierarchical", ALONG_LINKS)}
    elif strategy.algorithm != AUTO:
        function = _function(strategy, towers)
        algorithms = {name_of(strategy.algorithm): schedules_of(function, towers, topology=machine)}
    if strategy.main is not None:
        algorithms = {name: with_root(found, strategy.main, name) for name, found in algorithms.items()}
    if strategy.chunk_bytes is not None:
        sizes = (strategy.chunk_bytes,)
    total = sum(gradient.bytes for gradient in gradients)
    is_free = strategy.algorithm == AUTO and strategy.main is None and strategy.chunk_bytes is None
    usual = rule(gradients, towers, links) if is_free else None
    return tuple(choose(gradients, links, cases_of(total, links, strategy.backward), algorithms, sizes, usual))


def _function(strategy: Strategy, towers: int) -> Algorithm:
    """Return the function of a strategy's algorithm, which is not ``"auto"``."""
    if strategy.groups is not None:
        return in_groups(check_groups(strategy.groups, towers))
    return strategy.algorithm if callable(strategy.algorithm) else BY_NAME[strategy.algorithm]
