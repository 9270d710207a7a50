"""How to reduce gradients: a user's choices in one frozen object, from Python or a YAML file."""

from __future__ import annotations

import copy
import dataclasses
import os
import runpy
from dataclasses import dataclass
from typing import Any, ClassVar, Dict, Iterator, Optional, Tuple, Union

from .. import presets
from ..errors import HierAllreduceError
from ..formatting import amount, count, duration
from ..topology import Topology, load
from .algorithms import BY_NAME, Algorithm, checked, in_groups, name_of
from .buckets import Bucketing
from .plan import Plan
from .plan_file import load_plan

NAMES = ("auto", *BY_NAME)
_CHOICES = {
    "wire_dtype": (None, "float16", "bfloat16"),
    "sparse": ("auto", "gather", "dense"),
    "missing": ("error", "zeros"),
}
_SIZES = ("pack_below", "splits")
_PLANNED_WITH_A_TOPOLOGY = ("groups", "mains", "splits")
_PLANNED = ("algorithm", "topology", *_PLANNED_WITH_A_TOPOLOGY, "backward")

THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Strategy:
    """How gradients are grouped, reduced and sent. ``print(strategy)`` shows it; sizes are in bytes.

    Attributes:
        algorithm: ``"hierarchical"``, ``"tree"``, ``"flat"``, ``"ring"`` or ``"auto"``. With a topology, ``"auto"`` is
            what leaves least exposed after the backward pass, and a name is the best variant of that algorithm for the
            links. Without one, ``"auto"`` is flat if all devices are CPUs (they share one memory, where a second level
            only adds work), else hierarchical. A function is an algorithm of your own: called with the number of
            devices and a chunk's number, and with the machine as ``topology`` if it has such an argument, it returns
            or yields the chunk's :class:`Reduce` and :class:`Copy` steps. They are checked before the first op.
        topology: the machine's links: a preset's name (``"dgx-1v"``), a YAML or nvidia-smi file, a ``Topology``, or
            ``"this machine"`` to detect them. All gradients of a dtype are joined, and cut into buckets and chunks as
            planned for the links; a tower on ``/gpu:i`` is device i. On CPU devices, whose copies cost nothing, a plan
            for another machine's links costs several times the default strategy.
        groups: for ``"hierarchical"`` without a topology: tuples that hold each tower number once; None makes two
            halves.
        mains: ``"balance"`` (by bytes, the largest first), ``"rotate"`` (by index, as tensorpack does), or one tower's
            number for all chunks. None is ``"balance"``, or tower 0 for ``"tree"``, as in caffe2's muji.
        pack_below: gradients smaller than this share buckets of 10 MiB, or of this size if it is larger; so do the
            values and the indices of sparse ones that are smaller than this on each tower. 0 packs nothing.
        splits: instead of buckets, concatenate all gradients of a dtype and cut them into this many chunks (tensorpack:
            8); 0 is off.
        wire_dtype: ``"float16"`` or ``"bfloat16"``: float32 gradients travel in this dtype and are added in float32.
            Sparse ones that are gathered are not narrowed. A value above the dtype's range (65504 for float16) becomes
            infinite. The error bound is in docs/cost-model.md.
        sparse: for ``tf.IndexedSlices``: ``"gather"`` collects every tower's rows, ``"dense"`` makes them dense and
            adds them. ``"auto"`` takes what moves fewer bytes, and gathers if that is unknown or all devices are CPUs.
            Where an optimizer gets the result (``TowerOptimizer``, the trainers, ``MirroredStrategy``), ``"auto"``
            always gathers.
        missing: None on some towers only is an ``"error"``, or counts as ``"zeros"``.
        backward: with a topology: seconds of the backward pass; 0 plans for an idle machine. None assumes one second
            for each 1.7 GB of gradients.
        plan: instead of an algorithm and a topology: a file that ``hier-allreduce plan MACHINE --json`` wrote, or a
            :class:`Plan`. Device i is tower i. The gradients of each dtype are joined and cut by the plan's shares,
            however many bytes they have; with less than 64 bytes for a chunk, they take the way of one chunk.

    Raises:
        HierAllreduceError: an invalid value, or a topology that does not exist or cannot be understood; or the file of
            a plan cannot be read, or the plan is wrong.
    """

    algorithm: Union[str, Algorithm] = "auto"
    topology: Union[str, Topology, None] = None
    groups: Optional[Tuple[Tuple[int, ...], ...]] = None
    mains: Union[int, str, None] = None
    pack_below: int = Bucketing.pack_below
    splits: int = 0
    wire_dtype: Optional[str] = None
    sparse: str = "auto"
    missing: str = "error"
    backward: Optional[float] = None
    plan: Union[str, Plan, None] = None
    _plan: ClassVar[Optional[Plan]] = None  # set for each object: the plan that it names
    _machine: ClassVar[Optional[Topology]] = None  # set for each object: the topology that it names

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_sizes()
        self._check_mains_and_groups()
        self._check_topology()
        self._check_plan()
        # Read at once, so that a file that cannot be read is an error here and not at its first use.
        object.__setattr__(self, "_machine", self._named_machine())
        object.__setattr__(self, "_plan", None if self.plan is None else load_plan(self.plan))

    def _check_choices(self) -> None:
        for field, allowed in {"algorithm": NAMES, **_CHOICES}.items():
            value = getattr(self, field)
            if field == "algorithm" and callable(value):
                continue
            if not isinstance(value, (str, type(None))):  # tf.float16 == "float16"
                raise HierAllreduceError(f"{field}={value!r}: expected {' or '.join(map(repr, allowed))}")
            if value not in allowed:
                hint = presets.nearest(str(value), [choice for choice in allowed if choice])
                raise HierAllreduceError(f"{field}={value!r} is unknown{hint}")

    def _check_sizes(self) -> None:
        for field in _SIZES:
            if not _is_count(getattr(self, field)):
                raise HierAllreduceError(f"{field}={getattr(self, field)!r}: expected a whole number of 0 or more")

    def _check_mains_and_groups(self) -> None:
        if not _is_count(self.mains) and self.mains not in (None, "balance", "rotate"):
            raise HierAllreduceError(f"mains={self.mains!r}: expected 'balance', 'rotate', or a tower's number")
        if self.groups is not None and self.algorithm not in ("hierarchical", "auto"):
            raise HierAllreduceError(
                f"groups={self.groups!r} go with algorithm='hierarchical', not {name_of(self.algorithm)!r}"
            )

    def _check_topology(self) -> None:
        if self.topology is None:
            if self.backward is not None:
                raise HierAllreduceError(f"backward={self.backward!r} is for planning: give topology= too")
            return
        if not isinstance(self.topology, (str, Topology)):
            raise HierAllreduceError(f"topology={self.topology!r}: expected a Topology, or a machine's name or file")
        for field in _PLANNED_WITH_A_TOPOLOGY:
            if getattr(self, field) != getattr(Strategy, field):
                raise HierAllreduceError(
                    f"{field}={getattr(self, field)!r}: with a topology this is planned; leave it out"
                )
        is_number = isinstance(self.backward, (int, float)) and not isinstance(self.backward, bool)
        if self.backward is not None and not (is_number and 0 <= self.backward <= 60):
            raise HierAllreduceError(f"backward={self.backward!r}: expected seconds from 0 to 60 (60 ms are 0.06)")

    def _check_plan(self) -> None:
        if self.plan is None:
            return
        if not isinstance(self.plan, (str, os.PathLike, Plan)):
            raise HierAllreduceError(f"plan={self.plan!r}: expected a Plan, or the path of a file with one")
        for field in _PLANNED:
            if getattr(self, field) != getattr(Strategy, field):
                raise HierAllreduceError(f"{field}={getattr(self, field)!r}: the plan decides this; leave it out")

    def _named_machine(self) -> Optional[Topology]:
        if not isinstance(self.topology, str):
            return self.topology
        try:
            return None if self.topology == THIS_MACHINE else load(self.topology)
        except HierAllreduceError as error:
            raise HierAllreduceError(f"topology={self.topology!r}: {error}") from None

    @property
    def bucketing(self) -> Bucketing:
        """The choices that group gradients."""
        return Bucketing(self.pack_below, max(Bucketing.bucket_bytes, self.pack_below), self.splits)

    def machine(self) -> Optional[Topology]:
        """Return the topology that is named; None also for ``"this machine"``, which the caller detects."""
        return self._machine

    def given_plan(self) -> Optional[Plan]:
        """Return the plan that is named."""
        return self._plan

    def facts(self) -> Dict[str, str]:
        """Return the choices as text that is the same on all hosts; what a plan holds is compared with its chunks."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "plan"}
        return {name: name_of(value) if name == "algorithm" else str(value) for name, value in values.items()}

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

    def function(self, algorithm: Union[str, Algorithm]) -> Algorithm:
        """Return the function of a name, or a user's with its check, where nothing is planned."""
        if not isinstance(algorithm, str):
            return checked(algorithm)
        return BY_NAME[algorithm] if self.groups is None else in_groups(self.groups)

    def mains_for(self, algorithm: Union[str, Algorithm]) -> Union[int, str]:
        """Return ``mains``, or what None means for an algorithm."""
        if self.mains is not None:
            return self.mains
        return 0 if algorithm == "tree" else "balance"

    @classmethod
    def load(cls, name_or_path: str) -> Strategy:
        """Load ``configs/strategies/NAME.yaml``, or the YAML file at a path.

        Raises:
            HierAllreduceError: no such file or name, an unknown key (with the nearest one), or an invalid value.
        """
        path = presets.find("strategies", name_or_path)
        return cls.from_values(presets.read_yaml(path), str(path))

    @classmethod
    def from_values(cls, values: Dict[str, Any], source: str) -> Strategy:
        """Return a strategy of a file's keys and values.

        Raises:
            HierAllreduceError: an unknown key (with the nearest one), or an invalid value; the message names
                ``source``.
        """
        fields = dict.fromkeys((field.name for field in dataclasses.fields(cls)), presets.Field())
        presets.check(values, fields, source)
        try:
            return cls(**_with_tuples(values))
        except HierAllreduceError as error:
            raise HierAllreduceError(f"{source}: {error}") from None

    def __str__(self) -> str:
        name = self._plan.algorithm if self._plan else name_of(self.algorithm)
        return "\n".join([f"{name} all-reduce", *(f"  {sentence}" for sentence in _sentences(self))])


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
    plan = strategy.given_plan()
    if plan:
        size = f"{count(plan.towers, 'device')}, {count(plan.lanes, 'lane')} each, {count(plan.chunks, 'chunk')}"
        yield f"as planned in {'a Plan' if isinstance(strategy.plan, Plan) else strategy.plan}: {size}"
    else:
        yield from _chosen(strategy) if strategy.topology is None else _planned(strategy)
    if strategy.wire_dtype:
        yield f"dense float32 travels as {strategy.wire_dtype}, added in float32"
    yield _SPARSE[strategy.sparse]
    yield _MISSING[strategy.missing]


def _planned(strategy: Strategy) -> Iterator[str]:
    yield f"planned for the links of {getattr(strategy.topology, 'name', strategy.topology)}"
    on_cpus = " (on CPU devices: nothing is planned)" if strategy.topology == THIS_MACHINE else ""
    yield f"gradients of a dtype in a few buckets, cut as planned{on_cpus}"
    if strategy.backward is not None:
        yield f"for a backward pass of {duration(strategy.backward)}" if strategy.backward else "for an idle machine"


def _chosen(strategy: Strategy) -> Iterator[str]:
    mains = strategy.mains_for(strategy.algorithm)
    yield _MAINS.get(str(mains), f"main is tower {mains}")
    if strategy.groups:
        yield f"groups {strategy.groups}"
    if strategy.splits:
        yield f"all gradients of a dtype in {strategy.splits} equal chunks"
        return
    yield _packing(strategy)


def _packing(strategy: Strategy) -> str:
    if not strategy.pack_below:
        return "every gradient travels alone"
    bucketing = strategy.bucketing
    small, bucket = (amount(size, binary=True) for size in (bucketing.pack_below, bucketing.bucket_bytes))
    return f"gradients under {small} share buckets of up to {bucket}"


# ---- from a user's argument -------------------------------------------------------------------------


def strategy_from(value: Union[str, Strategy, None]) -> Strategy:
    """Return the strategy of an argument ``strategy=``.

    Args:
        value: a :class:`Strategy`, the name of an algorithm, or the name or path of a YAML file; None is the default
            strategy.

    Raises:
        HierAllreduceError: the argument is invalid.
    """
    if value is None:
        return Strategy()
    if isinstance(value, str) and value in NAMES:
        return Strategy(algorithm=value)
    if isinstance(value, (str, os.PathLike)):
        return Strategy.load(str(presets.find("strategies", os.fspath(value), NAMES)))
    if isinstance(value, Strategy):
        return value
    raise HierAllreduceError(
        f"strategy={value!r}: expected a Strategy, an algorithm's name, or the name or path of a YAML file"
    )


def named(algorithm: str) -> Union[str, Algorithm]:
    """Return the algorithm of a command's argument: a name as it is, or the function of ``FILE.py:NAME``.

    The file is executed.

    Raises:
        HierAllreduceError: there is no such name, file or function, or the file raises an error.
    """
    if algorithm in NAMES:
        return algorithm
    path, _, name = algorithm.rpartition(":")
    if not path:
        hint = presets.nearest(algorithm, NAMES)
        raise HierAllreduceError(f"algorithm {algorithm!r} is unknown{hint}, and FILE.py:NAME for a function of yours")
    try:
        function = runpy.run_path(path).get(name)
    except Exception as cause:  # whatever the file does
        raise HierAllreduceError(f"algorithm {algorithm!r}: {path!r} raises {type(cause).__name__}: {cause}") from cause
    if not callable(function):
        raise HierAllreduceError(f"algorithm {algorithm!r}: {path!r} has no function {name!r}")
    return function


def _with_tuples(values: Dict[str, Any]) -> Dict[str, Any]:
    """Return the values with YAML's lists as tuples; invalid ones stay, for the checks to name."""
    groups = values.get("groups")
    if isinstance(groups, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in groups):
        return {**values, "groups": tuple(tuple(g) for g in groups)}
    return values
