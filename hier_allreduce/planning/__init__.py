"""From gradients to a plan: whole numbers only. No TensorFlow.

::

    rule │ name │ function ──► Plan: schedules and a chunk size                 strategy, rule, algorithms
                                   │ chunk c takes schedule c mod S
    Gradient × N ──chunks_of──► Chunk × C ──► run(schedule, values, ops)        chunks, plan

``Strategy`` holds a user's choices; ``check`` counts the towers in each sum.
"""

from __future__ import annotations

from .chunks import Chunk, Gradient, Range, chunks_of
from .plan import Copy, Ops, Plan, Reduce, Schedule, check, root_of, run
from .strategy import Strategy, plan_for, strategy_from

__all__ = ["Chunk", "Copy", "Gradient", "Ops", "Plan", "Range", "Reduce", "Schedule", "Strategy"]
__all__ += ["check", "chunks_of", "plan_for", "root_of", "run", "strategy_from"]
