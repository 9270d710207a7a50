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
from typing import Optional, Sequence, Tuple

from hier_allreduce import HierAllreduceError

Kinds = Tuple[Tuple[str, ...], ...]  # K×K kinds of links, X where a GPU meets itself
Groups = Tuple[Tuple[int, ...], ...]

_MOST_GPUS = 16  # all groups of so many are tried in a second; larger machines have an NVSwitch
_UNDERLINE = re.compile(r"\x1b\[\d*m")  # nvidia-smi underlines its header, even in a file
_KIND = r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)"  # SOC is the name of SYS before 2018
_ROW = re.compile(rf"\s*GPU\d+\s+{_KIND}\b")


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
    gpus = range(len(kinds))
    are_kinds = all(re.fullmatch(_KIND, kind) for row in kinds for kind in row)
    if not are_kinds or kinds != tuple(zip(*kinds)):
        return False
    return all((kinds[a][b] == "X") == (a == b) for a in gpus for b in gpus)


def linked_groups(kinds: Kinds) -> Optional[Groups]:
    """Return the two groups along the links of K GPUs, as ``Strategy(groups=…)`` takes them.

    As many pairs as possible are linked inside the groups; then as many partners as possible, which
    stand at the same index of both groups. Where K is odd, the first group has one GPU more.
    Without NVLinks, GPUs of one socket count as linked.

    Returns:
        None where these groups are the halves, which are the default. So it is with an NVSwitch.
    """
    gpus = tuple(range(len(kinds)))
    if not 4 <= len(gpus) <= _MOST_GPUS:
        return None
    has_nvlinks = any(kind.startswith("NV") for row in kinds for kind in row)

    def linked(pairs: Sequence[Tuple[int, int]]) -> Tuple[int, int]:
        between = [kinds[a][b] for a, b in pairs]
        if not has_nvlinks:
            return sum(kind not in ("SYS", "SOC") for kind in between), 0
        counts = [int(kind[2:]) for kind in between if kind.startswith("NV")]
        return len(counts), sum(counts)

    def linked_inside(group: Sequence[int]) -> Tuple[int, int]:
        outside = [gpu for gpu in gpus if gpu not in group]
        return linked([*combinations(group, 2), *combinations(outside, 2)])

    # Of equal groups the first ones are taken: these are the halves, which need no setting.
    half = (len(gpus) + 1) // 2
    group = max(combinations(gpus, half), key=linked_inside)
    orders = permutations(gpu for gpu in gpus if gpu not in group)
    partners = max(orders, key=lambda order: linked(list(zip(group, order))))
    return None if group + partners == gpus else (group, partners)
