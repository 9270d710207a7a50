"""Inside the user's program: the measurement that obeys ``tune``.

``observer`` calls :func:`begin` when the program imports the all-reduce of this package. The clock
is an op that appends the time to the clock file. The first all-reduce of a graph has it, so that it
runs once a step.
"""

from __future__ import annotations

import weakref
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Optional

import tensorflow as tf

from hier_allreduce.errors import ClusterError, HierAllreduceError
from hier_allreduce.graph.devices import all_on_cpu
from hier_allreduce.graph.layout import Layout, lay_out
from hier_allreduce.graph.measuring import Measurement, Rows, use
from hier_allreduce.planning.chunks import OwnedBytes
from hier_allreduce.planning.strategy import Strategy
from .protocol import ProgramFacts, Request
from .step_cost import trace_step


def begin(setting: str) -> None:
    """Measure this process, as the value of the environment variable asks.

    Raises:
        HierAllreduceError: ``tune`` has not written the value.
    """
    use(MeasuredProgram(Request.read(setting)))


class MeasuredProgram(Measurement):
    """A program with a candidate's all-reduce, a clock, and facts about what it builds."""

    def __init__(self, request: Request):
        self._request = request
        self._facts = ProgramFacts()
        self._timed: Any = weakref.WeakSet()  # the graphs that have a clock
        if request.traced:
            trace_step(
                request.traced,
                Path(request.clock),
                tell=lambda line: self._note(self._facts._replace(cost=line)),
            )

    def baseline(self, front_end: str, update: str = "replicated") -> str:
        """Return the baseline of the request, and note the front end."""
        self._note(self._facts._replace(front_end=front_end, update=update))
        return self._request.baseline

    def strategy(self, strategy: Strategy, hosts: int) -> Strategy:
        """Return the program's strategy with the changes of the request.

        Raises:
            ClusterError: there are several hosts.
        """
        if hosts > 1:
            raise ClusterError(
                f"tune measures one host, and this program has {hosts}: run it without a cluster"
            )
        return replace(strategy, **self._request.changes)

    def planned(self, layout: Layout, strategy: Strategy, load: Optional[OwnedBytes]) -> None:
        """Note the plan of the largest all-reduce: statistics and losses are reduced too."""
        size = sum(chunk.bytes for chunk in layout.chunks)
        if size <= self._facts.bytes:
            return
        # The other candidates are laid out here, because only the program knows its gradients.
        plan_by_name = {}
        for name, changes in self._request.strategies.items():
            try:
                candidate = lay_out(
                    layout.columns, layout.devices, replace(strategy, **changes), owned=load
                )
            except HierAllreduceError:  # such as groups of other towers
                continue
            plan_by_name[name] = _digest(candidate)
        # Defaults are left out, because they would only make a strategy's file longer.
        kept = {
            field.name: getattr(strategy, field.name)
            for field in fields(Strategy)
            if getattr(strategy, field.name) != field.default
        }
        # JSON has no word for a function, and None is no algorithm's name.
        if callable(strategy.algorithm):
            kept["algorithm"] = None
        self._note(
            self._facts._replace(
                towers=len(layout.devices),
                gpus=not all_on_cpu(layout.devices),
                bytes=size,
                plan=_digest(layout),
                plans=plan_by_name,
                kept=kept,
            )
        )

    def reduced(self, rows: Rows) -> Rows:
        """Return K rows of N reduced gradients, one of which waits for the clock op."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph in self._timed:
            return rows
        # Any gradient does, because a step needs all of them; but a missing one has no op.
        places = product(range(len(rows)), range(len(rows[0])))
        present = [(tower, column) for tower, column in places if rows[tower][column] is not None]
        if not present:
            return rows
        # A second clock in the graph would write two lines a step.
        if graph is not None:
            self._timed.add(graph)
        tower, column = present[0]
        grad = rows[tower][column]
        if isinstance(grad, tf.IndexedSlices):
            timed: Any = tf.IndexedSlices(
                self._after_clock(grad.values), grad.indices, grad.dense_shape
            )
        else:
            timed = self._after_clock(grad)
        changed = [list(row) for row in rows]
        changed[tower][column] = timed
        return [tuple(row) for row in changed]

    def _after_clock(self, tensor: Any) -> Any:
        """Return a copy of a tensor, after a line with the time is in the clock file."""
        with tf.device("/cpu:0"), tf.control_dependencies([tensor]):
            # It is the wall clock, because a Python function would wait for the program's threads.
            moment = tf.strings.as_string(tf.timestamp(), precision=6)
            with tf.control_dependencies([moment]):
                printed = tf.print(moment, output_stream=f"file://{self._request.clock}")
        # Eagerly there is no op to wait for, because the line is written by now.
        waited = [] if printed is None else [printed]
        with tf.device(tensor.device), tf.control_dependencies(waited):
            return tf.identity(tensor)

    def _note(self, facts: ProgramFacts) -> None:
        self._facts = facts
        facts.write(self._request.clock)


def _digest(layout: Layout) -> str:
    """Return the part of a fingerprint without names: two algorithms may have the same steps."""
    return layout.fingerprint.rpartition(", ")[2]
