"""Two groups of GPUs along their links, from the output of ``nvidia-smi topo -m``.

::

            GPU0  GPU1  GPU2  GPU3  NIC0
    GPU0     X    NV2   SYS   NV1   PIX      ──►  groups=((0, 1), (3, 2))
    GPU1    NV2    X    NV1   SYS   SYS           GPU0 ═ GPU1
    GPU2    SYS   NV1    X    NV2   SYS             │      │
    GPU3    NV1   SYS   NV2    X    SYS           GPU3 ═ GPU2

Other text may stand around the table: a prompt, plain ``nvidia-smi``, the legend.
"""

from __future__ import annotations

import re
from itertools import combinations, permutations
from typing import Iterable, Optional, Sequence, Tuple

from hier_allreduce import HierAllreduceError

Kinds = Tuple[Tuple[str, ...], ...]  # K×K kinds of links, X where a GPU meets itself
Groups = Tuple[Tuple[int, ...], ...]

_MOST_GPUS = 16  # all groups of so many are tried in a second; larger machines have an NVSwitch
_UNDERLINE = re.compile(r"\x1b\[\d*m")  # nvidia-smi underlines its header, even in a file
_KIND = r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)"  # SOC is the name of SYS before 2018
_ROW = re.compile(rf"\s*GPU\d+\s+{_KIND}\b")
_PAIR = 10_000  # outweighs all links of a machine


def read_table(output: str) -> Kinds:
    """Return the kinds of links between K GPUs in the output of ``nvidia-smi topo -m``.

    Raises:
        HierAllreduceError: there is no such table, or it is not whole.
    """
    lines = [line for line in _UNDERLINE.sub("", output).splitlines() if line.strip()]
    rows = [index for index, line in enumerate(lines) if _ROW.match(line)]
    if rows and rows[0] > 0:
        header = re.findall(r"GPU\d+", lines[rows[0] - 1])
        cells = [lines[row].split()[: len(header) + 1] for row in rows]
        kinds = tuple(tuple(row[1:]) for row in cells)
        labels = [row[0] for row in cells]
        if labels == header == [f"GPU{gpu}" for gpu in range(len(rows))] and _is_whole(kinds):
            return kinds
    begin = lines[0].strip()[:80] if lines else ""
    raise HierAllreduceError(
        "expected the whole output of `nvidia-smi topo -m`: a header with GPU0, GPU1, … and a row"
        f" for each of them; found a text that begins with {begin!r}, or a table that is cut"
    )


def _is_whole(kinds: Kinds) -> bool:
    """Return whether no cell is missing: then X is on the diagonal, and both triangles are equal.

    A cell that was lost moves those behind it, so that one of the two is no longer so.
    """
    for a, row in enumerate(kinds):
        for b, kind in enumerate(row):
            if (kind == "X") != (a == b) or not re.fullmatch(_KIND, kind):
                return False
    return kinds == tuple(zip(*kinds))


def linked_groups(kinds: Kinds) -> Optional[Groups]:
    """Return the two groups along the links of K GPUs, as ``Strategy(groups=…)`` takes them.

    As many pairs as possible have NVLinks inside the groups, or else are on one socket; then as
    many partners, which stand at the same index of both groups. Where K is odd, the first group has
    one GPU more.

    Returns:
        None where these groups are the halves, which are the default. So it is with an NVSwitch.
    """
    gpus = tuple(range(len(kinds)))
    if not 4 <= len(gpus) <= _MOST_GPUS:
        return None

    def linked(pairs: Iterable[Tuple[int, int]]) -> int:
        weight = 0
        for a, b in pairs:
            if kinds[a][b].startswith("NV"):
                weight += _PAIR + int(kinds[a][b][2:])
            else:
                weight += kinds[a][b] not in ("SYS", "SOC")
        return weight

    def linked_inside(group: Sequence[int]) -> int:
        outside = [gpu for gpu in gpus if gpu not in group]
        return linked([*combinations(group, 2), *combinations(outside, 2)])

    # Of equal groups the first ones are taken: these are the halves, which need no setting.
    group = max(combinations(gpus, (len(gpus) + 1) // 2), key=linked_inside)
    orders = permutations(gpu for gpu in gpus if gpu not in group)
    partners = max(orders, key=lambda order: linked(zip(group, order)))
    return None if group + partners == gpus else (group, partners)


def groups_in(output: str) -> str:
    """Return what a program writes for the groups in an output of ``nvidia-smi topo -m``.

    Raises:
        HierAllreduceError: as :func:`read_table`.
    """
    groups = linked_groups(read_table(output))
    if groups is None:
        return "keep the default, and write no groups=: no others follow the links better"
    return f'along the links: Strategy(algorithm="hierarchical", groups={groups})'
