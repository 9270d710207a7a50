"""Names of towers, variables and ops, in messages and in the graph."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain, count, product, takewhile
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import is_eager
from ..errors import HierAllreduceError


def where(
    tower: int, devices: Sequence[Any], variable: Optional[int] = None, names: Sequence[str] = ()
) -> str:
    """Return ``tower 3 (/gpu:3), variable 5 ('conv1/W')``, which begins an error message."""
    text = f"tower {tower} ({devices[tower]})"
    if variable is None:
        return text
    return f"{text}, variable {variable}" + (f" ({names[variable]!r})" if names else "")


def names_of_gradients(rows: Sequence[Sequence[Any]]) -> List[str]:
    """Return names for N variables of which only gradients are known: of the first op in each column."""
    names = []
    for variable, column in enumerate(zip(*rows)):
        tensors = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in column]
        ops = (
            str(tensor.op.name)
            for tensor in tensors
            if isinstance(tensor, tf.Tensor) and not is_eager(tensor)
        )
        names.append(next(ops, f"gradient{variable}"))
    return names


def check_scope(name: str) -> None:
    """Raise a HierAllreduceError if ``name`` is not a name scope in both TensorFlows."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_./-]*", name):
        raise HierAllreduceError(
            f"name={name!r} is not a name scope: expected letters, digits and any of ./_-, a letter or digit first"
        )


def variable_names(
    tower_grads_and_vars: Sequence[Sequence[Tuple[Any, Any]]], devices: Sequence[Any]
) -> List[str]:
    """Return the N names of K×N (gradient, variable) pairs, without the towers' scopes.

    Raises:
        HierAllreduceError: the towers list the same variables in different orders.
    """
    rows = names_within_towers([[var for _, var in row] for row in tower_grads_and_vars])
    # without scopes TensorFlow numbers the copies: w/kernel and w_1/kernel
    plain = [[re.sub(r"_?\d+", "", name) for name in row] for row in rows]
    for compared, tower in product((rows, plain), range(len(rows))):
        row = compared[tower]
        if row != compared[0] and sorted(row) == sorted(compared[0]):
            variable = next(
                number
                for number, (name, first) in enumerate(zip(row, compared[0]))
                if name != first
            )
            raise HierAllreduceError(
                f"{where(tower, devices, variable, rows[tower])}: tower 0 has {rows[0][variable]!r} there; list the"
                " variables in one order on every tower"
            )
    return rows[0]


def names_within_towers(rows: Sequence[Sequence[Any]]) -> List[List[str]]:
    """Return the names of K rows of variables, without the towers' scopes.

    A tower's scope begins all names of its row, and ends with the last level that no other row has::

        tower 0                tower 1
        w, layer/b             tower1/w, tower1/layer/b        "" and "tower1/", as tensorpack calls them
        m_0/w, m_0/layer/b     m_1/w, m_1/layer/b              "m_0/" and "m_1/"

    A name in several rows is a variable that towers share, and does not count.
    """
    names = [[str(var.name).split(":")[0] for var in row] for row in rows]
    rows_with_name = Counter(name for row in names for name in set(row))
    rows_with_level = Counter(
        level for row in names for level in {lvl for name in row for lvl in name.split("/")[:-1]}
    )
    within = []
    for row in names:
        levels = zip(*(name.split("/")[:-1] for name in row if rows_with_name[name] == 1))
        shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
        depth = max(
            (depth for depth, level in enumerate(shared, 1) if rows_with_level[level] == 1),
            default=0,
        )
        scope = "".join(f"{level}/" for level in shared[:depth])
        within.append([name[len(scope) :] if name.startswith(scope) else name for name in row])
    return within


def op_names(names: Sequence[str]) -> List[str]:
    """Return ``names`` made safe and unique in op names: ``conv1/W`` → ``conv1.W``."""
    safe: Dict[str, None] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.-]", ".", name).lstrip("._-") or "chunk"
        numbered = chain([plain], (f"{plain}.{number}" for number in count(2)))
        safe[next(free for free in numbered if free not in safe)] = None
    return list(safe)
