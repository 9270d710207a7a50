"""A user's choices about the all-reduce, as plain data from Python or a YAML file; and the plan that they select."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple, Union

from .. import configs
from ..errors import HierAllreduceError
from ..topology import Topology, links_of
from .algorithms import BY_NAME, Algorithm, in_groups, name_of, schedules_of, with_root
from .choose import ALONG_LINKS, Choice, candidates, cases_of, choose, rule
from .chunks import Gradient
from .plan import Plan, Schedule

AUTO = "auto"
THIS_MACHINE = "this machine"
NAMES = (AUTO, *BY_NAME)
# the fastest on CPU devices (`make bench`), which share one memory: small gradients packed, larger ones whole
_CPU_CHUNK, _CPU_PACKED = 10 << 20, 64 << 10
_WORDS = {
    "sparse": ("gather", "dense"),
    "missing": ("error", "zeros"),
    "wire_dtype": (None, "float16", "bfloat16"),
}
_COUNT = (lambda value: type(value) is int and value >= 0), "a whole number of 0 or more"
_MACHINE = (
    (lambda value: isinstance(value, (str, os.PathLike, Topology))),
    "a Topology, or a machine's name or file",
)
_PASS = (
    (lambda value: type(value) in (int, float) and 0 < value <= 60),
    "seconds above 0, up to 60 (60 ms are 0.06)",
)
_OPTIONAL = {"chunk_bytes": _COUNT, "main": _COUNT, "topology": _MACHINE, "backward": _PASS}


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
            hint = _machine_hint(self.algorithm) or configs.nearest(str(self.algorithm), NAMES)
            raise HierAllreduceError(f"algorithm={self.algorithm!r} is unknown{hint}")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value not in words:
                hint = configs.nearest(str(value), filter(None, words))
                raise HierAllreduceError(f"{name}={value!r} is unknown{hint}")
        for name, (fits, expected) in _OPTIONAL.items():
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise HierAllreduceError(f"{name}={value!r}: expected {expected}")
        if self.groups is not None and self.algorithm != "hierarchical":
            raise HierAllreduceError(
                f"groups={self.groups!r} go with algorithm='hierarchical'; give that too"
            )
        try:
            hash(self.algorithm)
        except TypeError:
            hint = "has no hash, by which plans are kept; a frozen dataclass has one"
            raise HierAllreduceError(f"algorithm={self.algorithm!r} {hint}") from None
        try:
            object.__setattr__(self, "groups", self.groups and tuple(map(tuple, self.groups)))
            hash(self.groups)
        except TypeError:
            raise HierAllreduceError(
                f"groups={self.groups!r}: expected tuples of towers: ((0, 1), (2, 3))"
            ) from None

    @classmethod
    def load(cls, name_or_path: Union[str, os.PathLike]) -> Strategy:
        """Return the strategy in ``configs/strategies/NAME.yaml``, or in a YAML file. Its keys are the attributes.

        A relative path in ``topology`` is beside the file.

        Raises:
            HierAllreduceError: no such file or name, an unknown key (with the nearest one), or an invalid value.
        """
        path = configs.find("strategies", name_or_path, NAMES)
        return cls.from_values(configs.read_yaml(path), path)

    @classmethod
    def from_values(cls, values: Dict[str, Any], source: Path) -> Strategy:
        """Return the strategy of a file's keys and values; raises the errors of :meth:`load`."""
        configs.check(
            values,
            dict.fromkeys((field.name for field in fields(cls)), configs.anything),
            str(source),
        )
        machine = values.get("topology")
        if isinstance(machine, str) and (source.parent / machine).is_file():
            values = {**values, "topology": str(source.parent / machine)}
        try:
            return cls(**values)
        except HierAllreduceError as error:
            raise HierAllreduceError(f"{source}: {error}") from None


def strategy_from(value: Union[str, os.PathLike, Strategy, None]) -> Strategy:
    """Return a strategy, or that of an algorithm's name, or of the name or path of a YAML file; None is the default.

    Raises:
        HierAllreduceError: the argument ``strategy=`` is invalid.
    """
    if value is None or isinstance(value, Strategy):
        return value or Strategy()
    if isinstance(value, str) and value in NAMES:
        return Strategy(algorithm=value)
    hint = (
        "; a function goes into Strategy(algorithm=…)" if callable(value) else _machine_hint(value)
    )
    if hint or not isinstance(value, (str, os.PathLike)):
        expected = "a Strategy, an algorithm's name, or the name or path of a YAML file"
        raise HierAllreduceError(f"strategy={value!r}: expected {expected}{hint}")
    return Strategy.load(value)


def _machine_hint(name: Any) -> str:
    return (
        f"; a machine goes into Strategy(topology={name!r})"
        if name in configs.names("machines")
        else ""
    )


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
        plan = Plan(
            towers,
            schedules_of(BY_NAME["flat"], towers),
            _CPU_CHUNK,
            "flat",
            _CPU_PACKED,
            whole=True,
        )
    ((name, schedules),) = _selected(strategy, {plan.algorithm: plan.schedules}, towers).items()
    plan = plan._replace(algorithm=name, schedules=schedules)
    if strategy.chunk_bytes is not None:
        plan = plan._replace(chunk_bytes=strategy.chunk_bytes, pack_below=None, whole=False)
    return plan


@lru_cache(maxsize=64)  # an eager program asks at every step
def choices_for(
    strategy: Strategy, gradients: Tuple[Gradient, ...], machine: Topology
) -> Tuple[Choice, ...]:
    """Return the plan that a strategy selects for the K ≥ 2 devices of a machine, then the best plans of others."""
    towers, links = len(machine), links_of(machine)
    cases = cases_of(sum(gradient.bytes for gradient in gradients), links, strategy.backward)
    algorithms = _selected(strategy, candidates(links, towers), towers, machine)
    is_free = strategy.algorithm == AUTO and strategy.main is None and strategy.chunk_bytes is None
    usual = rule(gradients, towers, links) if is_free else None
    return tuple(choose(gradients, links, cases, algorithms, strategy.chunk_bytes, usual))


def _selected(
    strategy: Strategy,
    usual: Dict[str, Tuple[Schedule, ...]],
    towers: int,
    machine: Optional[Topology] = None,
) -> Dict[str, Tuple[Schedule, ...]]:
    """Return the schedules of the algorithms among which a strategy leaves the choice; ``"auto"``: the usual ones."""
    algorithm, name = strategy.algorithm, name_of(strategy.algorithm)
    if algorithm == "hierarchical" and strategy.groups is None and ALONG_LINKS in usual:
        usual = {key: schedules for key, schedules in usual.items() if key in (name, ALONG_LINKS)}
    elif algorithm != AUTO:
        function = algorithm if callable(algorithm) else BY_NAME[algorithm]
        function = in_groups(strategy.groups) if strategy.groups is not None else function
        usual = {name: schedules_of(function, towers, machine)}
    if strategy.main is None:
        return usual
    return {key: with_root(schedules, strategy.main, key) for key, schedules in usual.items()}
