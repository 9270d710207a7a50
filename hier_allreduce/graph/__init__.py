"""A plan as TensorFlow ops: one K×N matrix of gradients in, one K×N matrix of reduced gradients out.

::

    all_grads ─► gradients ─► layout ─► units ─► packing ─► emit ─► packing ─► units ─► result
       K×N       Columns      what,     K×U      K×C        ops     K×U        K×N
                              chunks,
                              plan

``layout`` decides everything before the first op, so an error leaves the graph unchanged. Differences between
TensorFlow 1.15 and 2 are in ``compat``.
"""

from __future__ import annotations

from .allreduce import (
    allreduce_grads,
    allreduce_grads_and_vars,
    allreduce_grads_hierarchical,
    copy_from_mains,
    copy_from_tower_0,
    reduce_to_mains,
)
from .compat import (
    COLLECTIVE_DTYPES,
    IS_TF2,
    builds_for_session,
    collected_graphs,
    forget_colocation,
    gpu_count,
    in_current_graph,
    is_resource,
    make_logical_cpus,
    mirrored_factory,
    outside_control_flow,
    per_replica,
    process_gpu_options,
    replica_values,
    tf1,
    without_autograph,
)
from .copy_order import TURN
from .devices import Lane, all_on_cpu, device_fields, device_numbers, device_strings, devices_match, places_of
from .emit import Emitted, emitted_in, emitting_graphs, lane_memory_in
from .gradients import VAR_LIST_ADVICE, Matrix, check_average, check_matrix, check_pairs, is_sparse, static_shape
from .hosts import CrossHostReduce, HostGroup
from .names import op_names, tower_scopes, variable_names, where

__all__ = [
    "COLLECTIVE_DTYPES",
    "IS_TF2",
    "TURN",
    "VAR_LIST_ADVICE",
    "CrossHostReduce",
    "Emitted",
    "HostGroup",
    "Lane",
    "Matrix",
    "all_on_cpu",
    "allreduce_grads",
    "allreduce_grads_and_vars",
    "allreduce_grads_hierarchical",
    "builds_for_session",
    "check_average",
    "check_matrix",
    "check_pairs",
    "collected_graphs",
    "copy_from_mains",
    "copy_from_tower_0",
    "device_fields",
    "device_numbers",
    "device_strings",
    "devices_match",
    "emitted_in",
    "emitting_graphs",
    "forget_colocation",
    "gpu_count",
    "in_current_graph",
    "is_resource",
    "is_sparse",
    "lane_memory_in",
    "make_logical_cpus",
    "mirrored_factory",
    "op_names",
    "outside_control_flow",
    "per_replica",
    "places_of",
    "process_gpu_options",
    "reduce_to_mains",
    "replica_values",
    "static_shape",
    "tf1",
    "tower_scopes",
    "variable_names",
    "where",
    "without_autograph",
]
