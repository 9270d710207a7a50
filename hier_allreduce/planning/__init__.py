"""From gradients to a plan: whole numbers only. No TensorFlow.

::

    rule │ name │ function ──► Plan: schedules and a chunk size         strategy, rule, algorithms
                                   │ chunk c takes schedule c mod S
    GradientSize × N ──chunks_of──► Chunk × C ──scheduled──► Chunk × C       chunks, schedules
                                                with steps ──► run(steps, values, ops)    plan

``Strategy`` holds a user's choices; ``check`` counts the towers in each sum.
"""

from __future__ import annotations

from .chunks import Chunk, GradientSize, Range, chunks_of
from .plan import ChunkOps, Copy, Plan, Reduce, Schedule, check, root_of, run
from .strategy import Strategy, plan_for, strategy_from

__all__ = ["Chunk", "ChunkOps", "Copy", "GradientSize", "Plan", "Range", "Reduce", "Schedule"]
__all__ += ["Strategy", "check", "chunks_of", "plan_for", "root_of", "run", "strategy_from"]
