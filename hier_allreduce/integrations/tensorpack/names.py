"""Names of towers' variables as tensorpack gives them."""

from __future__ import annotations

from itertools import chain
from typing import List, Sequence

from ...compat import tf1
from ...graph.names import name_within
from ...training.towers import Pairs


def with_missing_pairs(rows: Sequence[Pairs]) -> List[Pairs]:
    """Add (None, variable) for each variable of a tower that has a gradient only on other towers.

    tensorpack leaves out variables without a gradient, tower by tower, so that the K rows would not
    match.
    """
    scopes = [f"tower{tower}/" if tower else "" for tower in range(len(rows))]
    towers = []
    for scope, pairs in zip(scopes, rows):
        towers.append({name_within(scope, var.op.name): (grad, var) for grad, var in pairs})
    names = list(dict.fromkeys(chain(*towers)))
    without_gradient = {var.op.name: (None, var) for var in tf1.trainable_variables()}
    completed: List[Pairs] = []
    # What no tower trains there stays out, and the check of the rows names it.
    for scope, pair_by_name in zip(scopes, towers):
        listed = [pair_by_name.get(name, without_gradient.get(scope + name)) for name in names]
        completed.append([pair for pair in listed if pair])
    return completed
