"""From gradients and a machine to a plan: integers and seconds only. No TensorFlow.

::

    rule │ name │ function │ choose(links) ──► Plan: schedules and a chunk size          algorithms, groups, choose
                                                 │ chunk c takes schedule c mod S        (simulator, cases)
    Gradient × N ──chunks_of──► Chunk × C ───────┴──► run(schedule, values, ops)         chunks, plan

``Strategy`` holds a user's choices; ``check`` counts what a schedule adds up.
"""

from __future__ import annotations

from .algorithms import BY_NAME, name_of
from .choose import DISPATCH, LEAD, LEAST_GAIN, RATE, STEP, Choice, cases_of, rule
from .chunks import Chunk, Gradient, Range, chunks_of, ready, spread
from .plan import Copy, Ops, Plan, Reduce, Schedule, Step, check, complete_on, copies_in, root_of, run, sums_in
from .simulator import Case, Work, exposed
from .strategy import AUTO, NAMES, THIS_MACHINE, Strategy, choices_for, plan_for, strategy_from

__all__ = [
    *("AUTO", "BY_NAME", "DISPATCH", "LEAD", "LEAST_GAIN", "NAMES", "RATE", "STEP", "THIS_MACHINE"),
    *("Case", "Choice", "Chunk", "Copy", "Gradient", "Ops", "Plan", "Range", "Reduce", "Schedule", "Step", "Strategy", "Work"),
    *("cases_of", "check", "choices_for", "chunks_of", "complete_on", "copies_in", "exposed", "name_of", "plan_for"),
    *("ready", "root_of", "rule", "run", "spread", "strategy_from", "sums_in"),
]
