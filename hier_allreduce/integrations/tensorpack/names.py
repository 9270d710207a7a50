"""Names of towers' variables as tensorpack gives them."""

from __future__ import annotations

from typing import List, Sequence

from ...compat import tf1
from ...training.update import Pairs


def with_missing_pairs(rows: Sequence[Pairs]) -> List[Pairs]:
    """Add (None, variable) for each variable of a tower that has a gradient only on other towers.

    tensorpack leaves out variables without a gradient, tower by tower, so that the K rows would not match.
    """
    prefixes = [f"tower{tower}/" if tower else "" for tower in range(len(rows))]
    towers = [
        {
            var.op.name[len(prefix) if var.op.name.startswith(prefix) else 0 :]: (grad, var)
            for grad, var in row
        }
        for prefix, row in zip(prefixes, rows)
    ]
    trainable = {var.op.name: (None, var) for var in tf1.trainable_variables()}
    names = list(dict.fromkeys(name for tower in towers for name in tower))
    completed = [
        [tower.get(name, trainable.get(prefix + name)) for name in names]
        for prefix, tower in zip(prefixes, towers)
    ]
    return [[pair for pair in row if pair] for row in completed]
