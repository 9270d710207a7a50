"""Copies that are compared while a training runs: a hook."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, Tuple

from ..cluster.session import fetched_ops
from ..compat import outside_control_flow, tf1
from ..graph.copy_check import CopyCheck, sent_by
from ..graphs import needed_by
from .equality import is_step_to_compare
from .options import Options

TrainOps = Tuple[Any, ...]


class CopyCheckHook(tf1.train.SessionRunHook):
    """Compares what towers got with what was sent, in some steps; a difference is an error.

    A step is a run of the same train ops, because several may take turns, as in a GAN.
    """

    def __init__(self, options: Options):
        self._every = options.check_replicas_every
        self._steps: Counter = Counter()  # by train ops
        # Both walk through the graph, and a training runs the same fetches again and again.
        self._train_ops_of = lru_cache(maxsize=None)(_train_ops_of)
        self._check_of = lru_cache(maxsize=None)(_check_of)

    # Ops are added here, because a session finalizes its graph.
    def begin(self) -> None:
        if self._every != 0:
            with outside_control_flow():
                CopyCheck(sent_by(tf1.get_collection(tf1.GraphKeys.TRAIN_OP)))

    def before_run(self, run_context: Any) -> Any:
        if self._every == 0:
            return None
        train_ops = self._train_ops_in(run_context)
        self._steps[train_ops] += 1
        if train_ops and is_step_to_compare(self._steps[train_ops], self._every):
            return tf1.train.SessionRunArgs(self._check_of(train_ops).fingerprints)
        return None

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_values.results:
            train_ops = self._train_ops_in(run_context)
            step = self._steps[train_ops]
            self._check_of(train_ops).compare(run_values.results, step, run_context.session)

    def _train_ops_in(self, run_context: Any) -> TrainOps:
        graph = run_context.session.graph
        return self._train_ops_of(graph, fetched_ops(graph, run_context.original_args.fetches))


def _train_ops_of(graph: Any, ops: TrainOps) -> TrainOps:
    """Return the train ops that a step runs which is asked for some ops."""
    needed = needed_by(ops)
    return tuple(op for op in graph.get_collection(tf1.GraphKeys.TRAIN_OP) if op in needed)


def _check_of(train_ops: TrainOps) -> CopyCheck:
    with train_ops[0].graph.as_default():
        return CopyCheck(sent_by(train_ops))
