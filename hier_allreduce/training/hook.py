"""Towers that are compared while a training runs: a hook, which both front ends have."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Dict, List, Sequence, Tuple

from ..cluster.session import fetched_ops
from ..compat import outside_control_flow, tf1
from ..configs import is_step_to_compare
from ..errors import HierAllreduceError
from ..graph.copy_check import CopyCheck
from ..graphs import needed_by
from .options import Options


class TowersHook(tf1.train.SessionRunHook):
    """Makes towers equal, and compares them in some steps: what they got, and then their variables.

    A difference is an error. The runs of each train op are counted for its copies, because several
    may take turns, as in a GAN.

    Args:
        options: of the training.
        build: adds ops, because a session finalizes its graph; returns the function that compares
            the towers' variables, and the ops that make them equal, one after the other.
        begins_epoch: whether the next step is the first of an epoch, before which these run, too.
    """

    def __init__(
        self,
        options: Options,
        build: Callable[[], Tuple[Callable[[Any], str], Sequence[Any]]],
        begins_epoch: Callable[[], bool] = lambda: False,
    ):
        self._options = options
        self._build = build
        self._begins_epoch = begins_epoch

    def begin(self) -> None:
        # A hook may serve several sessions, one after the other, also of several graphs.
        self._check_by_op: Dict[Any, CopyCheck] = {}  # by train op
        self._train_ops: Dict[Tuple[Any, ...], List[Any]] = {}  # that a step needs, by its fetches
        if self._options.check_replicas_every != 0:
            with outside_control_flow():
                for op in tf1.get_collection(tf1.GraphKeys.TRAIN_OP):
                    self._check_by_op[op] = CopyCheck(op)
        self._compare, self._starts = self._build()

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._options.cluster:
            self._options.cluster.check_session(session)
        self._steps = 0
        self._equal_after = 0  # the last step after which all towers were equal
        self._runs: Counter = Counter()  # by train op

    def before_run(self, run_context: Any) -> Any:
        # Before a step, so that also what other hooks and the program set after the last one, or
        # restored in a new session, is copied.
        period = self._options.broadcast_every
        is_due = self._steps % period == 0 if period else self._steps == 0
        if is_due or self._begins_epoch():
            for op in self._starts:
                run_context.session.run(op)
        fetched = fetched_ops(run_context.session.graph, run_context.original_args.fetches)
        # A walk through the graph; a training runs the same fetches again and again.
        if fetched not in self._train_ops:
            needed = needed_by(fetched)
            self._train_ops[fetched] = [op for op in self._check_by_op if op in needed]
        train_ops = self._train_ops[fetched]
        self._runs.update(train_ops)
        every = self._options.check_replicas_every
        # the train ops whose copies are compared in this run
        self._compared = [op for op in train_ops if is_step_to_compare(self._runs[op], every)]
        fingerprints = [self._check_by_op[op].fingerprints for op in self._compared]
        return tf1.train.SessionRunArgs(fingerprints)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        session = run_context.session
        for op, bits in zip(self._compared, run_values.results):
            self._check_by_op[op].compare(bits, self._runs[op], session)
        self._steps += 1
        if is_step_to_compare(self._steps, self._options.check_replicas_every):
            difference = self._compare(session)
            if difference:
                raise HierAllreduceError(
                    f"after step {self._steps} {difference}; they were equal after step"
                    f" {self._equal_after}. Either the program assigns to a variable on one tower"
                    " only, or the transform does not do the same on each tower"
                )
            self._equal_after = self._steps
