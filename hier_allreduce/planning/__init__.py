"""From a machine and the sizes of gradients to a plan: integers and seconds only. No TensorFlow.

::

    Spec × N ──buckets──► Chunk × C ─────────────────────┐
                                                         ├─ assignment ─► Plan: Reduce and Copy steps    plan
    Topology ─► Recipe ─► seconds ─► Choice ─► Schedule ─┘
        recipes   simulator    planner  schedule: the buckets that leave least after a backward pass
        (algorithms, rings, spanning_trees; lanes: over extra devices)

``Strategy`` holds every choice of a user; ``verify`` checks a plan by counting. ``cache`` keeps searches for the next
process. ``trace`` has predicted and executed runs, bar by bar.
"""

from __future__ import annotations

from .algorithms import ALGORITHMS, BY_ROOT, hierarchical
from .assignment import PlanningTarget, plan_cut, plan_whole
from .bars import COPY, EXECUTED, SUM, Bar, Interval, Run, union
from .buckets import Bucketing, Chunk, Piece, Spec, balanced, make_buckets
from .cache import cache_folder
from .lanes import Lanes, lane_bytes, on_lanes
from .plan import Copy, Counting, Ops, Plan, Reduce, Step, issued_before, operands, run, verify
from .planner import (
    PLANNER_ALGORITHMS,
    Choice,
    algorithms_for,
    baseline_seconds,
    choose,
    seconds_by_algorithm,
    timeline,
)
from .rings import ring
from .schedule import (
    Schedule,
    TrainingChoice,
    choose_for_training,
    choose_schedule,
    exposed_by_algorithm,
    exposed_seconds,
    one_bucket,
)
from .simulator import Backward, Timing, simulate
from .spanning_trees import pack
from .strategy import THIS_MACHINE, Strategy, strategy_from
from .trace import Trace, chunk_name, predicted_run, predicted_trace

__all__ = [
    "ALGORITHMS",
    "BY_ROOT",
    "COPY",
    "EXECUTED",
    "PLANNER_ALGORITHMS",
    "SUM",
    "THIS_MACHINE",
    "Backward",
    "Bar",
    "Bucketing",
    "Choice",
    "Chunk",
    "Copy",
    "Counting",
    "Interval",
    "Lanes",
    "Ops",
    "Piece",
    "Plan",
    "PlanningTarget",
    "Reduce",
    "Run",
    "Schedule",
    "Spec",
    "Step",
    "Strategy",
    "Timing",
    "Trace",
    "TrainingChoice",
    "algorithms_for",
    "balanced",
    "baseline_seconds",
    "cache_folder",
    "choose",
    "choose_for_training",
    "choose_schedule",
    "chunk_name",
    "exposed_by_algorithm",
    "exposed_seconds",
    "hierarchical",
    "issued_before",
    "lane_bytes",
    "make_buckets",
    "on_lanes",
    "one_bucket",
    "operands",
    "pack",
    "plan_cut",
    "plan_whole",
    "predicted_run",
    "predicted_trace",
    "ring",
    "run",
    "seconds_by_algorithm",
    "simulate",
    "strategy_from",
    "timeline",
    "union",
    "verify",
]
