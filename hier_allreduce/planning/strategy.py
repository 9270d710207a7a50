"""How to reduce gradients: a user's choices in one frozen object, from Python or a YAML file."""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Dict, Iterator, Optional, Tuple, Union

from .. import presets
from ..errors import StrategyError, TopologyError
from ..formatting import amount
from ..topology import Topology, load
from .algorithms import ALGORITHMS
from .buckets import Bucketing
from .planner import PLANNER_ALGORITHMS as PLANNED
from .simulator import Backward

_CHOICES = {
    "algorithm": ("auto", *ALGORITHMS, *(name for name in PLANNED if name not in ALGORITHMS)),
    "wire_dtype": (None, "float16", "bfloat16"),
    "sparse": ("auto", "gather", "dense"),
    "missing": ("error", "zeros"),
}
_SIZES = ("pack_below", "bucket_bytes", "splits", "split_above")
_PLANNED_WITH_A_TOPOLOGY = ("groups", "mains", "splits", "split_above")

THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Strategy:
    """How gradients are grouped, reduced and sent. ``print(strategy)`` shows it; sizes are in bytes.

    Attributes:
        algorithm: ``"hierarchical"``, ``"tree"``, ``"flat"`` or ``"auto"``. With a topology, ``"auto"`` is the fastest
            for its links, and there are also the planner's algorithms: ``"ring"``, ``"exchange"``, ``"soonest"``,
            ``"packed_trees"``, ``"packed_paths"``, ``"two-group"``. Without one, ``"auto"`` is flat if all devices are
            CPUs (they share one memory, where a second level only adds work), else hierarchical.
        topology: the machine's links: a preset's name (``"dgx-1v"``), a YAML or nvidia-smi file, a ``Topology``, or
            ``"this machine"`` to detect them. Groups and mains are planned from the links; a tower on ``/gpu:i`` is
            device i.
        groups: for ``"hierarchical"``: tuples that hold each tower number once; None makes two halves.
        mains: ``"balance"`` (by bytes, the largest first), ``"rotate"`` (by index, as tensorpack does), or one tower's
            number for all chunks. None is ``"balance"``, or tower 0 for ``"tree"``, as in caffe2's muji.
        pack_below: gradients smaller than this share buckets, as do the values and the indices of sparse ones that are
            smaller than this on each tower; 0 packs nothing.
        bucket_bytes: the most bytes that one bucket holds.
        splits: instead of buckets, concatenate all gradients of a dtype and cut them into this many chunks (tensorpack:
            8); 0 is off.
        split_above: cut larger buckets into equal chunks, spread over the mains; 0 is off.
        wire_dtype: ``"float16"`` or ``"bfloat16"``: dense float32 gradients travel in this dtype and are added in
            float32. Gathered sparse gradients travel as they are. A value above the dtype's range (65504 for float16)
            becomes infinite. The error bound is in docs/cost-model.md. ``HierarchicalAllReduce`` refuses it, because
            ``MirroredStrategy`` reduces more than gradients.
        sparse: for ``tf.IndexedSlices``: ``"gather"`` collects every tower's rows, ``"dense"`` makes them dense and
            adds them. ``"auto"`` takes what moves fewer bytes, and gathers if that is unknown or all devices are CPUs.
            Where an optimizer gets the result (``TowerOptimizer``, the trainers, ``MirroredStrategy``), ``"auto"``
            always gathers.
        missing: None on some towers only is an ``"error"``, or counts as ``"zeros"``.
        whole: with a topology: False makes one bucket of all gradients of a dtype and cuts it as planned. True leaves
            gradients whole, packs small ones as without a topology, and spreads them over the planned paths. None is
            False, and True with ``update="main"``, which needs whole gradients. On CPU devices, whose copies cost
            nothing, a plan for another machine's links costs several times the default strategy.

        backlog: seconds of kernels that the host has queued on a tower during the backward pass. With a topology, the
            plan leaves least exposed after a backward pass with such a backlog; 0 plans for an idle machine.

    Raises:
        StrategyError: an invalid value, or a topology that does not exist or cannot be understood.
    """

    algorithm: str = "auto"
    topology: Union[str, Topology, None] = None
    groups: Optional[Tuple[Tuple[int, ...], ...]] = None
    mains: Union[int, str, None] = None
    pack_below: int = Bucketing.pack_below
    bucket_bytes: int = Bucketing.bucket_bytes
    splits: int = 0
    split_above: int = 0
    wire_dtype: Optional[str] = None
    sparse: str = "auto"
    missing: str = "error"
    whole: Optional[bool] = None
    backlog: float = Backward().backlog
    _machine: ClassVar[Optional[Topology]] = None  # set for each object: the topology that it names

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_sizes()
        self._check_backlog()
        self._check_mains_and_groups()
        self._check_topology()
        # Read at once, so that a file that cannot be read is an error here and not at its first use.
        object.__setattr__(self, "_machine", self._named_machine())

    def _check_choices(self) -> None:
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if not isinstance(value, (str, type(None))):  # tf.float16 == "float16"
                raise StrategyError(f"{field}={value!r}: expected {' or '.join(map(repr, allowed))}")
            if value not in allowed:
                hint = presets.nearest(str(value), [choice for choice in allowed if choice])
                raise StrategyError(f"{field}={value!r} is unknown{hint}")
        if not isinstance(self.whole, (bool, type(None))):
            raise StrategyError(f"whole={self.whole!r}: expected True, False or None")

    def _check_sizes(self) -> None:
        for field in _SIZES:
            if not _is_count(getattr(self, field)):
                raise StrategyError(f"{field}={getattr(self, field)!r}: expected a whole number of 0 or more")
        if not self.bucket_bytes:
            raise StrategyError("bucket_bytes=0: no gradient fits in; expected 1 or more (pack_below=0 packs nothing)")

    def _check_backlog(self) -> None:
        if isinstance(self.backlog, bool) or not isinstance(self.backlog, (int, float)) or not 0 <= self.backlog <= 1:
            raise StrategyError(f"backlog={self.backlog!r}: expected seconds from 0 to 1 (10 ms are 0.01)")
        if self.topology is None and self.backlog != Strategy.backlog:
            raise StrategyError(f"backlog={self.backlog!r} is for planning: give topology= too")

    def _check_mains_and_groups(self) -> None:
        if not _is_count(self.mains) and self.mains not in (None, "balance", "rotate"):
            raise StrategyError(f"mains={self.mains!r}: expected 'balance', 'rotate', or a tower's number")
        if self.groups is not None and self.algorithm not in ("hierarchical", "auto"):
            raise StrategyError(f"groups={self.groups!r} go with algorithm='hierarchical', not {self.algorithm!r}")

    def _check_topology(self) -> None:
        if self.topology is None:
            if self.whole is not None:
                raise StrategyError(f"whole={self.whole!r} says how a planned strategy packs: give topology= too")
            if self.algorithm not in ("auto", *ALGORITHMS):
                raise StrategyError(
                    f"algorithm={self.algorithm!r} is planned from a machine's links: give topology= too"
                )
            return
        if not isinstance(self.topology, (str, Topology)):
            raise StrategyError(f"topology={self.topology!r}: expected a Topology, or a machine's name or file")
        for field in _PLANNED_WITH_A_TOPOLOGY:
            if getattr(self, field) != getattr(Strategy, field):
                raise StrategyError(f"{field}={getattr(self, field)!r}: with a topology this is planned; leave it out")

    def _named_machine(self) -> Optional[Topology]:
        if not isinstance(self.topology, str):
            return self.topology
        try:
            return None if self.topology == THIS_MACHINE else load(self.topology)
        except TopologyError as error:
            raise StrategyError(f"topology={self.topology!r}: {error}") from None

    @property
    def bucketing(self) -> Bucketing:
        """The choices that group gradients."""
        return Bucketing(self.pack_below, self.bucket_bytes, self.splits, self.split_above)

    def machine(self) -> Optional[Topology]:
        """Return the topology that is named; None also for ``"this machine"``, which the caller detects."""
        return self._machine

    def for_optimizers(self, hosts: int = 1) -> Strategy:
        """Return the strategy for an optimizer's gradients: on one host ``sparse="auto"`` becomes gather.

        Momentum moves other rows for a dense gradient than for a sparse one, and the training result must not depend on
        which moves fewer bytes. Several hosts can add sparse gradients only as dense ones.
        """
        return self.with_sparse("gather") if self.sparse == "auto" and hosts == 1 else self

    def with_sparse(self, sparse: str) -> Strategy:
        """Return a copy with another ``sparse``."""
        changed = copy.copy(self)  # dataclasses.replace would read the topology again, which may have been a pipe
        object.__setattr__(changed, "sparse", sparse)
        return changed

    def mains_for(self, algorithm: str) -> Union[int, str]:
        """Return ``mains``, or what None means for an algorithm."""
        if self.mains is not None:
            return self.mains
        return 0 if algorithm == "tree" else "balance"

    @classmethod
    def load(cls, name_or_path: str) -> Strategy:
        """Load ``configs/strategies/NAME.yaml``, or the YAML file at a path.

        Raises:
            StrategyError: no such file or name, an unknown key (with the nearest one), or an invalid value.
        """
        path = presets.find("strategies", name_or_path, StrategyError)
        return cls.from_values(presets.read_yaml(path, StrategyError), str(path))

    @classmethod
    def from_values(cls, values: Dict[str, Any], source: str) -> Strategy:
        """Return a strategy of a file's keys and values.

        Raises:
            StrategyError: an unknown key (with the nearest one), or an invalid value; the message names ``source``.
        """
        fields = dict.fromkeys((field.name for field in dataclasses.fields(cls)), presets.Field())
        presets.check(values, fields, source, StrategyError)
        try:
            return cls(**_with_tuples(values))
        except StrategyError as error:
            raise StrategyError(f"{source}: {error}") from None

    def __str__(self) -> str:
        return "\n".join([f"{self.algorithm} all-reduce", *(f"  {sentence}" for sentence in _sentences(self))])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ---- a strategy in words ----------------------------------------------------------------------------

_MAINS = {"balance": "mains chosen by bytes", "rotate": "mains rotate with the chunk"}
_SPARSE = {
    "auto": "sparse gradients gathered, or densified where that moves fewer bytes between GPUs",
    "gather": "sparse gradients gathered",
    "dense": "sparse gradients densified",
}
_MISSING = {"error": "None on some towers is an error", "zeros": "None on some towers counts as zeros"}


def _sentences(strategy: Strategy) -> Iterator[str]:
    yield from _chosen(strategy) if strategy.topology is None else _planned(strategy)
    if strategy.wire_dtype:
        yield f"dense float32 travels as {strategy.wire_dtype}, added in float32"
    yield _SPARSE[strategy.sparse]
    yield _MISSING[strategy.missing]


def _planned(strategy: Strategy) -> Iterator[str]:
    yield f"planned for the links of {getattr(strategy.topology, 'name', strategy.topology)}"
    if strategy.whole:
        yield "gradients stay whole, spread over the planned paths by bytes"
        yield _packing(strategy)
    else:
        on_cpus = " (on CPU devices: nothing is planned)" if strategy.topology == THIS_MACHINE else ""
        yield f"gradients of a dtype in a few buckets, cut as planned{on_cpus}"


def _chosen(strategy: Strategy) -> Iterator[str]:
    mains = strategy.mains_for(strategy.algorithm)
    yield _MAINS.get(str(mains), f"main is tower {mains}")
    if strategy.groups:
        yield f"groups {strategy.groups}"
    if strategy.splits:
        yield f"all gradients of a dtype in {strategy.splits} equal chunks"
        return
    yield _packing(strategy)
    if strategy.split_above:
        yield f"chunks above {amount(strategy.split_above, binary=True)} are cut"


def _packing(strategy: Strategy) -> str:
    if not strategy.pack_below:
        return "every gradient travels alone"
    small, bucket = amount(strategy.pack_below, binary=True), amount(strategy.bucket_bytes, binary=True)
    return f"gradients under {small} share buckets of up to {bucket}"


# ---- from a user's argument -------------------------------------------------------------------------


def strategy_from(value: Union[str, Strategy, None], **overrides: Any) -> Strategy:
    """Return the strategy of an argument ``strategy=``.

    Args:
        value: a :class:`Strategy`, a name or path; ``"auto"`` or None is the default strategy.
        overrides: fields that are arguments of their own; None means "not given".

    Raises:
        StrategyError: the argument is invalid, or an override is given together with a strategy.
    """
    fields: Dict[str, Any] = {name: field for name, field in overrides.items() if field is not None}
    if value is None:
        return Strategy(**_with_tuples(fields))
    if fields:
        raise StrategyError(f"give either strategy= or {', '.join(f'{name}=' for name in fields)}, not both")
    if value == "auto":
        return Strategy()
    if isinstance(value, (str, os.PathLike)):
        return Strategy.load(os.fspath(value))
    if isinstance(value, Strategy):
        return value
    raise StrategyError(f"strategy={value!r}: expected a Strategy, or the name or path of a YAML file")


def _with_tuples(values: Dict[str, Any]) -> Dict[str, Any]:
    """Return the values with YAML's lists as tuples; invalid ones stay, for the checks to name."""
    groups = values.get("groups")
    if isinstance(groups, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in groups):
        return {**values, "groups": tuple(tuple(g) for g in groups)}
    return values
