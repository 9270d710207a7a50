"""Two groups of GPUs along their NVLinks, from the output of ``nvidia-smi topo -m``.

::

            GPU0  GPU1  GPU2  GPU3  NIC0        0 2 0 1
    GPU0     X    NV2   SYS   NV1   PIX    ──►  2 0 1 0    ──►  groups=((0, 1), (3, 2))
    GPU1    NV2    X    NV1   SYS   SYS         0 1 0 2         GPU0 ═ GPU1
    GPU2    SYS   NV1    X    NV2   SYS         1 0 2 0           │      │
    GPU3    NV1   SYS   NV2    X    SYS       NVLinks           GPU3 ═ GPU2

Other text may stand around the table: a prompt, plain ``nvidia-smi``, the legend. Only NVLinks
count: whether two GPUs without one are ``PIX`` or ``SYS`` to each other changes nothing here.
"""

from __future__ import annotations

import re
from itertools import combinations, permutations, takewhile
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from hier_allreduce.errors import HierAllreduceError

Links = Tuple[Tuple[int, ...], ...]  # K×K numbers of NVLinks: 0 on the diagonal, and over PCIe
Groups = Tuple[Tuple[int, ...], ...]

_MOST_GPUS = 16  # all groups of so many are tried in a second; larger machines have an NVSwitch
# nvidia-smi underlines its header, even in a file. A copied text may lack the escape character.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\ufffd?\[[0-9;]+m")
_LABEL = re.compile(r"GPU\d+")
_KIND = re.compile(r"X|NV[1-9]\d{0,3}|PIX|PXB|PHB|NODE|SYS|PSB|SOC")  # the last two before 2018
_CARD_KIND = re.compile(rf"{_KIND.pattern}|N/A")
_CARD_KINDS = re.compile(f"(?:{_CARD_KIND.pattern})+")  # the tabs between cells may be lost
_CARD = re.compile(r"[A-Za-z]\w*\d$")  # a network card: NIC0, mlx5_1
_HEADER = re.compile(r"\s*((?:GPU\d+\s*)*)(.*)")  # the tabs between labels may be lost
_ROW = re.compile(rf"\s*GPU\d+\s+(?:{_KIND.pattern})\b")


class Table(NamedTuple):
    """The NVLinks of K GPUs, and the warnings about contradictions and damage in the text."""

    links: Links
    warnings: Tuple[str, ...]


def read_table(output: str) -> Table:
    """Return the NVLinks in the output of ``nvidia-smi topo -m``.

    Raises:
        HierAllreduceError: no table, or one that is cut or contradicts itself; the message names
            row and column.
    """
    lines = [line for line in _ESCAPES.sub("", output).splitlines() if line.strip()]
    start, labels, cards = _header(lines)
    words_by_label = _words_by_label(lines[start:], labels)
    warnings: List[str] = []
    kinds: List[List[str]] = []
    links: List[List[int]] = []
    for label in labels:
        cells = _cells(label, words_by_label[label], labels, cards, warnings)
        kinds.append(cells)
        links.append([int(cell[2:]) if cell.startswith("NV") else 0 for cell in cells])
    # Two rows may name different kinds of one link; the slower kind promises no link that is none.
    for a, b in combinations(range(len(labels)), 2):
        if kinds[a][b] != kinds[b][a]:
            links[a][b] = links[b][a] = min(links[a][b], links[b][a])
            says = f"row {labels[a]} says {kinds[a][b]}, row {labels[b]} says {kinds[b][a]}"
            warnings.append(f"{labels[a]}–{labels[b]}: {says}; the slower one counts")
    if sum(bool(_ROW.match(line)) for line in lines) > len(labels):
        warnings.append("the text has rows of another table too; only one table was read")
    return Table(tuple(map(tuple, links)), tuple(warnings))


def linked_groups(links: Links) -> Optional[Groups]:
    """Return the two groups along the NVLinks of K GPUs, as ``Strategy(groups=…)`` takes them.

    As many pairs as possible are linked inside the groups; then as many partners as possible, which
    stand at the same index of both groups. Where K is odd, the first group has one GPU more.

    ::

        linked_groups(((0, 2, 0, 1), (2, 0, 1, 0), (0, 1, 0, 2), (1, 0, 2, 0)))
        ((0, 1), (3, 2))

    Returns:
        None where these groups are the halves, which are the default. So it is without NVLinks, and
        with an NVSwitch.
    """
    gpus = tuple(range(len(links)))
    if not 4 <= len(gpus) <= _MOST_GPUS:
        return None

    def linked(pairs: Sequence[Tuple[int, int]]) -> Tuple[int, int]:
        counts = [links[a][b] for a, b in pairs]
        return sum(count > 0 for count in counts), sum(counts)

    def linked_inside(group: Sequence[int]) -> Tuple[int, int]:
        outside = [gpu for gpu in gpus if gpu not in group]
        return linked([*combinations(group, 2), *combinations(outside, 2)])

    # Of equal groups the first ones are taken: these are the halves, which need no setting.
    half = (len(gpus) + 1) // 2
    group = max(combinations(gpus, half), key=linked_inside)
    orders = permutations(gpu for gpu in gpus if gpu not in group)
    partners = max(orders, key=lambda order: linked(list(zip(group, order))))
    return None if group + partners == gpus else (group, partners)


def _header(lines: Sequence[str]) -> Tuple[int, Tuple[str, ...], Tuple[str, ...]]:
    """Return the index of the first row, and the header's labels of GPUs and of network cards."""
    for start, (line, below) in enumerate(zip(lines, lines[1:]), 1):
        header = _HEADER.match(line)
        begin, behind = header.groups() if header else ("", "")
        labels = _LABEL.findall(begin)
        # A sentence about GPUs looks like a header, but a header has a row of its labels below.
        if below.split()[0] in labels and not _LABEL.search(behind) and not _ROW.match(line):
            # Affinities stand behind the labels, and the cards end where they begin.
            return start, tuple(labels), tuple(takewhile(_CARD.match, behind.split()))
    raise HierAllreduceError(
        "no table of GPUs, with a header row (GPU0 GPU1 …) and a row for each GPU; expected the "
        "output of `nvidia-smi topo -m`, with its line ends and without quote marks or markup"
    )


def _words_by_label(lines: Sequence[str], labels: Sequence[str]) -> Dict[str, List[str]]:
    """Return the words after the label of each GPU's row."""
    words_by_label: Dict[str, List[str]] = {}
    of_gpus = takewhile(lambda words: _LABEL.fullmatch(words[0]), map(str.split, lines))
    for label, *words in of_gpus:
        if label in words_by_label or labels.count(label) > 1:
            raise HierAllreduceError(
                f"{label} appears twice in the table; expected one row and one column for each GPU"
            )
        if label not in labels:
            raise HierAllreduceError(
                f"row {label}: the header has no column {label}, only {', '.join(labels)}"
            )
        words_by_label[label] = words
    missing = [label for label in labels if label not in words_by_label]
    if missing:
        raise HierAllreduceError(
            f"the table is cut: row {missing[0]} is missing (columns {labels[0]} to {labels[-1]}, "
            f"rows {', '.join(words_by_label)}); expected the whole output of `nvidia-smi topo -m`"
        )
    return words_by_label


def _cells(
    label: str,
    words: Sequence[str],
    labels: Sequence[str],
    cards: Sequence[str],
    warnings: List[str],
) -> List[str]:
    """Return the kinds of links in one GPU's row, in the order of the columns."""
    # The tabs between the cards' cells may be lost: ``PIXNODE`` is two of them. They are counted,
    # because a cell that was lost before them would otherwise go unnoticed.
    columns = [*labels, *cards]
    cells = list(words[: len(labels)])
    for word in words[len(labels) :]:
        if len(cells) < len(columns):
            cells += _CARD_KIND.findall(word) if _CARD_KINDS.fullmatch(word) else [word]
    if list(words[: len(cells)]) != cells or "N/A" in cells:
        warnings.append(f"row {label}: cells of network cards are damaged; those of GPUs are whole")

    # A row that ends too early has empty cells, so that the message names the first of them.
    cells += [""] * len(columns)
    for column, cell in zip(columns, cells):
        if not _KIND.fullmatch(cell) and not (cell == "N/A" and column in cards):
            raise HierAllreduceError(
                f"row {label}, column {column}: expected X, NV#, PIX, PXB, PHB, NODE, SYS or SOC, "
                f"found {repr(cell) if cell else 'the end of the line'}; the table is cut, wrapped "
                "or damaged there, or not the output of `nvidia-smi topo -m`"
            )
        if (cell == "X") != (column == label):
            raise HierAllreduceError(
                f"row {label}, column {column}: {cell!r} contradicts the diagonal; "
                "X stands where a GPU meets itself, and nowhere else"
            )
    return cells[: len(labels)]
