"""How to reduce: every choice in one frozen object, by hand or from a YAML file."""

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

_CHOICES = {
    "algorithm": ("auto", *ALGORITHMS, *(name for name in PLANNED if name not in ALGORITHMS)),
    "wire_dtype": (None, "float16", "bfloat16"),
    "sparse": ("auto", "gather", "dense"),
    "missing": ("error", "zeros"),
}


THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class Strategy:
    """How gradients are grouped, reduced and sent. Sizes in bytes; ``print(strategy)`` says what it will do.

    Attributes:
        algorithm: ``"hierarchical"``, ``"tree"``, ``"flat"``; ``"auto"``, with a topology, is what its links are
            fastest with; without one it is flat where all devices are CPUs (they share one memory, so that a second
            level only adds work) and hierarchical elsewhere. With a topology also the planner's others:
            ``"ring"``, ``"exchange"``, ``"soonest"``, ``"packed_trees"``, ``"packed_paths"``, ``"two-group"``.
        topology: the machine's links: a preset's name (``"dgx-1v"``), a YAML or nvidia-smi file, a ``Topology``,
            or ``"this machine"`` to look. Groups and mains are found from its links; a tower on ``/gpu:i`` is device i.
        groups: for ``"hierarchical"``: tuples that hold each tower number once; None is two halves.
        mains: ``"balance"`` (by bytes, the largest first), ``"rotate"`` (by index, as tensorpack does), or one tower's
            number for all; None is ``"balance"``, and tower 0 for ``"tree"``, as in caffe2's muji.
        pack_below: gradients smaller than this share buckets; 0 packs nothing.
        bucket_bytes: the most that one bucket holds.
        splits: instead of buckets, concatenate everything of a dtype and cut it into this many chunks (tensorpack: 8);
            0 is off.
        split_above: cut what is larger than this into equal chunks, spread over the mains; 0 is off.
        wire_dtype: ``"float16"`` or ``"bfloat16"``: float32 gradients travel in this dtype and are added in float32.
            A value above the dtype's range (65504 for float16) becomes infinite. The error bound is in
            docs/cost-model.md.
        sparse: ``tf.IndexedSlices``: ``"gather"`` every tower's rows, add them up ``"dense"``, or ``"auto"``: whichever
            moves fewer bytes, and gather where that is not known, or where all devices are CPUs. Where an optimizer
            gets the result (``TowerOptimizer``, the trainers, ``MirroredStrategy``), ``"auto"`` gathers.
        missing: None on some towers only: an ``"error"``, or ``"zeros"`` in its place.
        whole: with a topology: False makes one bucket of all gradients of a dtype and cuts it as planned; True leaves
            gradients whole, packs small ones as without a topology, and spreads them over the planned ways. None is
            False, and True with ``update="main"``, which needs whole gradients. On CPU devices, whose copies cost
            nothing, a plan for another machine's links costs several times the default strategy.

    Raises:
        StrategyError: a value that is none of these, or a topology that is not there or cannot be understood.
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
    _read: ClassVar[Optional[Topology]] = None  # of each object, the topology that was named

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if not isinstance(value, (str, type(None))):  # tf.float16 == "float16"
                raise StrategyError(f"{field}={value!r}: expected {' or '.join(map(repr, allowed))}")
            if value not in allowed:
                raise StrategyError(
                    f"{field}={value!r} is unknown{presets.nearest(str(value), [a for a in allowed if a])}"
                )
        for field in ("pack_below", "bucket_bytes", "splits", "split_above"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise StrategyError(f"{field}={value!r}: expected a whole number of 0 or more")
        if not self.bucket_bytes:
            raise StrategyError("bucket_bytes=0: no gradient fits in; expected 1 or more (pack_below=0 packs nothing)")
        number = isinstance(self.mains, int) and not isinstance(self.mains, bool) and self.mains >= 0
        if not number and self.mains not in (None, "balance", "rotate"):
            raise StrategyError(f"mains={self.mains!r}: expected 'balance', 'rotate', or a tower's number")
        if self.groups is not None and self.algorithm not in ("hierarchical", "auto"):
            raise StrategyError(f"groups={self.groups!r} go with algorithm='hierarchical', not {self.algorithm!r}")
        self._check_topology()

    def _check_topology(self) -> None:
        if not isinstance(self.whole, (bool, type(None))):
            raise StrategyError(f"whole={self.whole!r}: expected True, False or None")
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
        for field in ("groups", "mains", "splits", "split_above"):
            if getattr(self, field) != getattr(Strategy, field):
                raise StrategyError(f"{field}={getattr(self, field)!r}: with a topology this is planned; leave it out")
        # once, and where it is written: what cannot be read is not found out at its first use
        object.__setattr__(self, "_read", self._machine())

    @property
    def bucketing(self) -> Bucketing:
        """The part that groups gradients."""
        return Bucketing(self.pack_below, self.bucket_bytes, self.splits, self.split_above)

    def machine(self) -> Optional[Topology]:
        """The topology that was named; ``"this machine"`` is for the caller to look at, and None here too."""
        return self._read

    def _machine(self) -> Optional[Topology]:
        if not isinstance(self.topology, str):
            return self.topology
        try:
            return None if self.topology == THIS_MACHINE else load(self.topology)
        except TopologyError as error:
            raise StrategyError(f"topology={self.topology!r}: {error}") from None

    def for_optimizers(self, hosts: int = 1) -> Strategy:
        """The same for gradients that an optimizer gets: on one host ``sparse="auto"`` is to gather.

        Momentum moves other rows for a dense gradient than for a sparse one; what is trained must not depend on where
        bytes are fewer. Several hosts can only add up dense.
        """
        return self.with_sparse("gather") if self.sparse == "auto" and hosts == 1 else self

    def with_sparse(self, sparse: str) -> Strategy:
        """The same with another ``sparse``; the topology is not read again, for it may have been a pipe."""
        changed = copy.copy(self)
        object.__setattr__(changed, "sparse", sparse)
        return changed

    def mains_for(self, algorithm: str) -> Union[int, str]:
        """``mains``, or what None means for an algorithm."""
        if self.mains is not None:
            return self.mains
        return 0 if algorithm == "tree" else "balance"

    @classmethod
    def load(cls, name_or_path: str) -> Strategy:
        """A strategy from ``configs/strategies/NAME.yaml``, or from the YAML file at a path.

        Raises:
            StrategyError: no such file or name, a key that is no field (with the nearest), or a value that is none.
        """
        path = presets.find("strategies", name_or_path, StrategyError)
        return cls.from_values(presets.read_yaml(path, StrategyError), str(path))

    @classmethod
    def from_values(cls, values: Dict[str, Any], source: str) -> Strategy:
        """A strategy from a file's keys and values.

        Raises:
            StrategyError: a key that is no field (with the nearest), or a value that is none; names ``source``.
        """
        presets.check(values, {field.name: presets.Field() for field in dataclasses.fields(cls)}, source, StrategyError)
        try:
            return cls(**_with_tuples(values))
        except StrategyError as error:
            raise StrategyError(f"{source}: {error}") from None

    def __str__(self) -> str:
        return "\n".join([f"{self.algorithm} all-reduce", *(f"  {line}" for line in self._sentences())])

    def _sentences(self) -> Iterator[str]:
        yield from self._grouping()
        if self.wire_dtype:
            yield f"float32 travels as {self.wire_dtype}, added in float32"
        yield {
            "auto": "sparse gradients gathered, or densified where that moves fewer bytes between GPUs",
            "gather": "sparse gradients gathered",
            "dense": "sparse gradients densified",
        }[self.sparse]
        yield {"error": "None on some towers is an error", "zeros": "None on some towers counts as zeros"}[self.missing]

    def _grouping(self) -> Iterator[str]:
        if self.topology is not None:
            yield f"planned for the links of {getattr(self.topology, 'name', self.topology)}"
            if self.whole:
                yield "gradients stay whole, spread over the planned ways by bytes"
                yield self._packing()
            else:
                on_cpus = " (on CPU devices: nothing is planned)" if self.topology == THIS_MACHINE else ""
                yield f"all gradients of a dtype in one bucket, cut as planned{on_cpus}"
            return
        mains = self.mains_for(self.algorithm)
        words = {"balance": "mains chosen by bytes", "rotate": "mains rotate with the chunk"}
        yield words.get(str(mains), f"main is tower {mains}")
        if self.groups:
            yield f"groups {self.groups}"
        if self.splits:
            yield f"all gradients of a dtype in {self.splits} equal chunks"
        else:
            yield self._packing()
        if self.split_above and not self.splits:
            yield f"chunks above {amount(self.split_above, binary=True)} are cut"

    def _packing(self) -> str:
        if self.pack_below:
            small, bucket = amount(self.pack_below, binary=True), amount(self.bucket_bytes, binary=True)
            return f"gradients under {small} share buckets of up to {bucket}"
        return "every gradient travels alone"


def strategy_from(value: Union[str, Strategy, None], **overrides: Any) -> Strategy:
    """What people pass as ``strategy=``: a :class:`Strategy`, a name or path, or None for the default.

    Args:
        value: the strategy; ``"auto"`` is the default.
        overrides: fields given beside it; None is "not given".

    Raises:
        StrategyError: it is none of these, or an override is given together with a strategy.
    """
    given: Dict[str, Any] = {key: item for key, item in overrides.items() if item is not None}
    if value is None:
        return Strategy(**_with_tuples(given))
    if given:
        raise StrategyError(f"give either strategy= or {', '.join(f'{key}=' for key in given)}, not both")
    if value == "auto":
        return Strategy()
    if isinstance(value, (str, os.PathLike)):
        return Strategy.load(os.fspath(value))
    if isinstance(value, Strategy):
        return value
    raise StrategyError(f"strategy={value!r}: expected a Strategy, or the name or path of a YAML file")


def _with_tuples(values: Dict[str, Any]) -> Dict[str, Any]:
    """YAML's lists as the tuples that a frozen object holds; anything odd is left for the checks to name."""
    groups = values.get("groups")
    if isinstance(groups, (list, tuple)) and all(isinstance(g, (list, tuple)) for g in groups):
        return {**values, "groups": tuple(tuple(g) for g in groups)}
    return values
