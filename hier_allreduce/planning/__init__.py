"""From a machine and the sizes of gradients to a plan: integers and seconds only. No TensorFlow.

::

    Spec × N ──buckets──► Chunk × C ──────────────────────┐
                                                          ├─ assignment ─► Plan: Reduce and Copy steps     plan
    Topology ─► Candidate ─► least seconds ─► Prediction ─┘
       candidates (algorithms,    needs        planner: simulated, the one that leaves least exposed
       rings, spanning_trees)                  (simulator, flows, host; lanes: over extra devices; bounds)

``Strategy`` holds every choice of a user; ``verify`` checks a plan by counting; ``plan_text`` writes one.
"""

from __future__ import annotations

from .algorithms import check_groups
from .assignment import PlanningTarget, plan_cut, plan_unplanned, plan_whole
from .bounds import idle_bound
from .buckets import Bucketing, Chunk, Piece, Spec
from .host import IDLE, BackwardPass, backward_pass
from .lanes import MEMORY, Lanes, lane_bytes, on_lanes
from .plan import Copy, Counting, Ops, Plan, Reduce, Step, issued_before, run, verify
from .plan_file import plan_text, plan_values
from .planner import Prediction, alternatives, best_plan
from .rings import ring
from .simulator import Timing, predicted_seconds, ready_times, simulate
from .spanning_trees import pack
from .strategy import NAMES, THIS_MACHINE, Strategy, named, strategy_from

__all__ = [
    "IDLE",
    "MEMORY",
    "NAMES",
    "THIS_MACHINE",
    "BackwardPass",
    "Bucketing",
    "Chunk",
    "Copy",
    "Counting",
    "Lanes",
    "Ops",
    "Piece",
    "Plan",
    "PlanningTarget",
    "Prediction",
    "Reduce",
    "Spec",
    "Step",
    "Strategy",
    "Timing",
    "alternatives",
    "backward_pass",
    "best_plan",
    "check_groups",
    "idle_bound",
    "issued_before",
    "lane_bytes",
    "named",
    "on_lanes",
    "pack",
    "plan_cut",
    "plan_text",
    "plan_unplanned",
    "plan_values",
    "plan_whole",
    "predicted_seconds",
    "ready_times",
    "ring",
    "run",
    "simulate",
    "strategy_from",
    "verify",
]
