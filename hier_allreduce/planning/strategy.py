"""A user's choices about the all-reduce, and the plan that they select."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from operator import index
from typing import Any, Optional, Tuple, Union

import yaml

from .. import configs
from ..errors import HierAllreduceError
from .algorithms import BY_NAME, Algorithm, name_of, schedules_of
from .plan import Plan, root_of
from .schedules import rule

AUTO = "auto"
ALGORITHMS = (AUTO, *BY_NAME)
LEAST_CHUNK = 4096


@dataclass(frozen=True)
class Strategy:
    """Choices about the all-reduce. Sizes are in bytes.

    ::

        Strategy(algorithm="tree", chunk_bytes=8 << 20)
        Strategy(wire_dtype="float16")
        Strategy.load("tensorpack")

    Attributes:
        algorithm: ``"flat"``, ``"tree"``, ``"hierarchical"``, ``"flat_hierarchical"``; or a
            function ``(towers, chunk) -> moves`` that returns the :class:`.Reduce` and
            :class:`.Copy` moves of a chunk. ``"auto"``: by the rule, from the number of towers and
            whether they are CPU devices.
        chunk_bytes: the size of chunks, 4096 or more: smaller gradients are packed up to it, larger
            ones are cut. None: by the rule. 0: each gradient travels alone and whole.
        groups: for ``"hierarchical"`` and ``"flat_hierarchical"``: tuples that hold each tower's
            number once, by default two groups of neighbours.
        main: the tower on which all sums are formed; by default chunks rotate over the towers.
        sparse: ``"rows"`` keeps ``tf.IndexedSlices`` sparse, unless another tower's gradient is
            dense, or there are several hosts: each tower gets the sum with one slice for each
            index. ``"dense"`` makes them dense on their tower. ``"auto"``: dense if the slices of
            all towers, as far as their number is known, could be more bytes than that; where an
            optimizer is called that would then train unread slices, too, as ``"rows"``.
        missing: None on some towers only is an ``"error"``, or counts as ``"zeros"``.
        wire_dtype: ``"float16"``, ``"bfloat16"``: float32 gradients travel in 16 bits and are added
            in float32. A value above 65504 becomes infinite in float16.
        chunks: in place of ``chunk_bytes``: the number of equal chunks that hold all dense
            gradients of a dtype, one after another. With ``update="sharded"`` gradients are not
            cut, and each root has about as many bytes.
        edges: whether control edges let a GPU's backward pass wait, before it is launched, for
            earlier sums on this GPU, where a graph takes them. False, or 0: none.

    Raises:
        HierAllreduceError: an invalid value, or two that exclude each other.
    """

    algorithm: Union[str, Algorithm] = AUTO
    chunk_bytes: Optional[int] = None
    groups: Optional[Tuple[Tuple[int, ...], ...]] = None
    main: Optional[int] = None
    sparse: str = AUTO
    missing: str = "error"
    wire_dtype: Optional[str] = None
    edges: bool = True
    chunks: Optional[int] = None

    def __post_init__(self) -> None:
        if not callable(self.algorithm):
            configs.one_of(self.algorithm, "algorithm", ALGORITHMS)
        configs.one_of(self.sparse, "sparse", (AUTO, "rows", "dense"))
        configs.one_of(self.missing, "missing", ("error", "zeros"))
        configs.one_of(self.wire_dtype, "wire_dtype", (None, "float16", "bfloat16"))
        # NumPy's numbers become plain ones, because hosts compare their plans as texts.
        for field, least in (("chunk_bytes", 0), ("main", 0), ("chunks", 1)):
            integer = getattr(self, field)
            if integer is not None:
                object.__setattr__(self, field, configs.whole_number(integer, field, least))
        # Chunks below a page cost more than they carry, and a model would have millions of them.
        if self.chunk_bytes and self.chunk_bytes < LEAST_CHUNK:
            raise configs.refusal(self.chunk_bytes, "chunk_bytes", f"0, or {LEAST_CHUNK} or more")
        if None not in (self.chunks, self.chunk_bytes):
            raise configs.refusal(self.chunks, "chunks", "no chunk_bytes beside it")
        edges = configs.one_of(self.edges, "edges", (True, False))
        object.__setattr__(self, "edges", bool(edges))
        if self.groups is not None:
            try:
                groups = tuple(tuple(map(index, group)) for group in self.groups)
            except TypeError:
                expected = "tuples of towers: ((0, 1), (2, 3))"
                raise configs.refusal(self.groups, "groups", expected) from None
            object.__setattr__(self, "groups", groups)

    @classmethod
    def load(cls, name_or_path: Union[str, os.PathLike]) -> Strategy:
        """Return the strategy in ``configs/strategies/NAME.yaml``, or in a YAML file.

        The keys of the file are the attributes.

        Raises:
            HierAllreduceError: no such file or name, or it cannot be read, is no YAML, or has an
                unknown key or an invalid value. The message is one line.
        """
        path = configs.find(name_or_path, ALGORITHMS)
        try:
            return cls(**yaml.safe_load(path.read_bytes()))  # no tag runs any code
        # PyYAML raises errors of many classes, and Python one of an unknown key.
        except Exception as error:
            words = " ".join(str(error).split())
            raise HierAllreduceError(f"{path}: {words}") from None


def strategy_from(strategy: Union[str, os.PathLike, Strategy, None]) -> Strategy:
    """Return a strategy, also that of an algorithm's name, or of a YAML file's name or path.

    None is the default.

    Raises:
        HierAllreduceError: it is something else.
    """
    if isinstance(strategy, Strategy):
        return strategy
    # An algorithm's name comes before a file's, so that no file of that name changes a program.
    if isinstance(strategy, (str, os.PathLike)) and strategy not in ALGORITHMS:
        return Strategy.load(strategy)
    algorithm: Any = AUTO if strategy is None else strategy
    return Strategy(algorithm)


def plan_for(strategy: Strategy, towers: int, on_cpu: bool = False) -> Plan:
    """Return the plan that a strategy selects for K towers, of GPUs or of CPU devices.

    Raises:
        HierAllreduceError: the groups, the main or the algorithm's moves do not fit K towers.
    """
    # The rule decides what the strategy leaves open, so each choice replaces a field of its plan.
    plan = rule(towers, on_cpu)
    algorithm = plan.algorithm if strategy.algorithm == AUTO else strategy.algorithm
    function = BY_NAME[algorithm] if isinstance(algorithm, str) else algorithm
    options = {} if strategy.groups is None else {"groups": strategy.groups}
    schedules = schedules_of(function, towers, **options)
    name = name_of(function)
    if strategy.main is not None:
        roots = list(map(root_of, schedules))
        if strategy.main not in roots:
            raise configs.refusal(strategy.main, "main", f"one of the roots of {name}: {roots}")
        schedules = (schedules[roots.index(strategy.main)],)
    plan = plan._replace(algorithm=name, schedules=schedules)
    size = sys.maxsize if strategy.chunks else strategy.chunk_bytes
    if size is not None:
        chunks = strategy.chunks or 1
        return plan._replace(
            chunk_bytes=size, pack_below=size, whole=False, tapers=False, chunks=chunks
        )
    return plan
