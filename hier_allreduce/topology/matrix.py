"""The output of ``nvidia-smi topo -m``, read as a matrix of link kinds. ``detect`` runs the command.

::

            GPU0  GPU1  NIC0  CPU Affinity          kinds    X    NV2       NV4   four NVLinks, bonded
    GPU0     X    NV2   PIX   0-23           ──►            NV2    X        PIX   one PCIe switch
    GPU1    NV2    X    SYS   24-47                 cpus    0-23  24-47     SYS   PCIe, and the bus between sockets

Other text may stand around the table: a prompt, ``nvidia-smi -L``, plain ``nvidia-smi``, the legend; and the table of
``nvidia-smi topo -p2p r``, which says which pairs have peer access. Missing or contradictory cells are errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations, dropwhile, takewhile
from typing import Dict, List, Optional, Sequence, Tuple

from ..errors import HierAllreduceError

Kinds = Tuple[Tuple[str, ...], ...]

SELF = "X"
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from near to far
_OLD_NAMES = {"SOC": "SYS", "PSB": "PXB"}  # of drivers before 2018

# nvidia-smi underlines its header, even in a file. In a copied text the escape character may be lost.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\ufffd?\[[0-9;]+m")
_LABEL = re.compile(r"[GC]PU\d+")
_CARD = re.compile(r"[A-Za-z]\w*\d$")  # a network card: NIC0, mlx5_1
_KIND = re.compile("|".join([SELF, r"NV[1-9]\d{0,3}", *PCIE, *_OLD_NAMES]))
_HEADER = re.compile(rf"\s*((?:{_LABEL.pattern}\s*)*)(.*)")  # the tabs between labels may be lost
_ACCESS = r"X|OK|NS|CNS|GNS|TNS|DR|U"  # `nvidia-smi topo -p2p r`: supported, or why not
_ACCESS_TABLE = re.compile(
    rf"^[ \t]*(?:GPU\d+[ \t]*){{2,}}\n(?:[ \t]*GPU\d+(?:[ \t]+(?:{_ACCESS})\b)+[ \t]*\n)+", re.M
)
_CPUS = re.compile(r"[\d,-]+|.*")  # of an affinity, without the NUMA nodes after them
_ROW = re.compile(rf"\s*{_LABEL.pattern}\s+(?:{_KIND.pattern})\b")
_LISTED = re.compile(r"\s*GPU \d+: (.+?) \(UUID")  # of nvidia-smi -L
# a GPU's first line in the box of plain nvidia-smi: |   0  NVIDIA GeForce RTX 4090    Off |   00000000:01:00.0 Off |
_BOXED = re.compile(
    r"\s*\|\s+\d+\s+(\S.{0,60}?)\s+(?:On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*[0-9A-Fa-f]+:[0-9A-Fa-f]+:"
)


@dataclass(frozen=True)
class LinkMatrix:
    """A K×K matrix of link kinds.

    Attributes:
        labels: K device labels.
        kinds: K×K kinds, ``X`` on the diagonal.
        cpus: K CPU affinities; empty texts where none are known.
        models: the models of the GPUs that the text around the table lists.
        warnings: contradictions in the text.
        staged: pairs such as ``GPU0-GPU3`` without peer access; None without the table of ``nvidia-smi topo -p2p r``.
    """

    labels: Tuple[str, ...]
    kinds: Kinds
    cpus: Tuple[str, ...]
    models: Tuple[str, ...] = ()
    warnings: Tuple[str, ...] = ()
    staged: Optional[Tuple[str, ...]] = None


def distance(kind: str) -> int:
    """Return a number that orders link kinds from near (many NVLinks) to far (SYS)."""
    return PCIE.index(kind) if kind in PCIE else -nvlinks(kind)


def nvlinks(kind: str) -> int:
    """Return the number of NVLinks that are bonded in a link of this kind: 0 for PCIe."""
    return int(kind[2:]) if kind.startswith("NV") else 0


def read_matrix(text: str) -> LinkMatrix:
    """Return the matrix in ``text``.

    Raises:
        HierAllreduceError: no table, or one that is cut or contradicts itself; the message names row and column.
    """
    plain = "".join(f"{line}\n" for line in without_escapes(text).splitlines() if line.strip())
    access = _ACCESS_TABLE.search(plain)
    lines = _ACCESS_TABLE.sub("", plain).splitlines()
    if access and not any(map(_ROW.match, lines)):
        raise HierAllreduceError(
            "this is the table of `nvidia-smi topo -p2p r` alone: put the output of `nvidia-smi topo -m` above it"
        )
    start, labels, cards = _find_header(lines)
    rows = _read_rows(lines[start:], labels)
    kinds, warnings = _symmetric(
        labels, [_row_kinds(label, rows[label], labels, cards) for label in labels]
    )
    if sum(bool(_ROW.match(line)) for line in lines) > len(rows):
        warnings += ("the text has rows of another table too; only one table was read",)
    cpus = tuple(
        _CPUS.findall(" ".join(dropwhile(_KIND.fullmatch, rows[label])))[0] for label in labels
    )
    models = {
        match.group(1)
        for line in lines
        for match in [_LISTED.match(line) or _BOXED.match(line)]
        if match
    }
    staged = None if access is None else _without_access(access.group(), labels)
    return LinkMatrix(labels, kinds, cpus, tuple(sorted(models)), warnings, staged)


def without_escapes(text: str) -> str:
    """Remove a terminal's escape sequences."""
    return _ESCAPES.sub("", text)


def _without_access(table: str, labels: Sequence[str]) -> Tuple[str, ...]:
    """Return the pairs, such as ``GPU0-GPU3``, for which ``nvidia-smi topo -p2p r`` prints anything but OK."""
    header, *rows = (line.split() for line in table.splitlines())
    columns_match = tuple(header) == tuple(labels) and [row[0] for row in rows] == header
    if not columns_match or {len(row) for row in rows} != {len(rows) + 1}:
        raise HierAllreduceError(
            f"the table of `nvidia-smi topo -p2p r` is cut, or of other GPUs: expected a row and a column for each of "
            f"{', '.join(labels)}"
        )
    cells = {(row[0], column): cell for row in rows for column, cell in zip(header, row[1:])}
    return tuple(
        f"{a}-{b}" for a, b in combinations(labels, 2) if {cells[a, b], cells[b, a]} != {"OK"}
    )


def _find_header(lines: Sequence[str]) -> Tuple[int, Tuple[str, ...], Tuple[str, ...]]:
    """Return the number of the first row, and the header's labels of GPUs and of network cards. Affinities follow.

    The header is the first line of labels that has a row below.
    """
    for number, (line, below) in enumerate(zip(lines, lines[1:]), 1):
        found = _HEADER.match(line)
        labels = _LABEL.findall(found.group(1)) if found else []
        rest = found.group(2) if found else ""
        if below.split()[0] in labels and not _LABEL.search(rest) and not _ROW.match(line):
            return number, tuple(labels), tuple(takewhile(_CARD.match, rest.split()))
    raise HierAllreduceError(
        "no table of GPUs, with a header row (GPU0 GPU1 …) and a row for each GPU; expected the output of "
        "`nvidia-smi topo -m`, with its line ends and without quote marks or markup"
    )


def _read_rows(lines: Sequence[str], labels: Sequence[str]) -> Dict[str, List[str]]:
    """Return the words after the label of each GPU's row."""
    rows: Dict[str, List[str]] = {}
    for label, *words in takewhile(lambda words: _LABEL.fullmatch(words[0]), map(str.split, lines)):
        if label in rows or labels.count(label) > 1:
            raise HierAllreduceError(
                f"{label} appears twice in the table; expected one row and one column for each GPU"
            )
        if label not in labels:
            raise HierAllreduceError(
                f"row {label}: the header has no column {label}, only {', '.join(labels)}"
            )
        rows[label] = words
    missing = [label for label in labels if label not in rows]
    if missing:
        raise HierAllreduceError(
            f"the table is cut: row {missing[0]} is missing (columns {labels[0]} to {labels[-1]}, "
            f"rows {', '.join(rows)}); expected the whole output of `nvidia-smi topo -m`"
        )
    return rows


def _row_kinds(
    label: str, words: Sequence[str], labels: Sequence[str], cards: Sequence[str]
) -> Tuple[str, ...]:
    """Return the link kinds of one GPU's row, in the order of the columns."""
    columns = [
        *labels,
        *cards,
    ]  # without the cards, a cell that was lost before them would go unnoticed
    cells = [*words, *[""] * len(columns)][: len(columns)]
    for column, cell in zip(columns, cells):
        if not _KIND.fullmatch(cell):
            raise HierAllreduceError(
                f"row {label}, column {column}: expected X, NV#, {', '.join(PCIE)} or SOC, found "
                f"{repr(cell) if cell else 'the end of the line'}; the table is cut, wrapped or damaged there, or not "
                "the output of `nvidia-smi topo -m`"
            )
        if (cell == SELF) != (column == label):
            raise HierAllreduceError(
                f"row {label}, column {column}: {cell!r} contradicts the diagonal; "
                f"X stands where a GPU meets itself, and nowhere else"
            )
    return tuple(_OLD_NAMES.get(cell, cell) for cell in cells[: len(labels)])


def _symmetric(
    labels: Sequence[str], kinds: Sequence[Sequence[str]]
) -> Tuple[Kinds, Tuple[str, ...]]:
    """Return a symmetric matrix: where two sides differ, the slower kind, with a warning."""
    warnings = []
    symmetric = [list(row) for row in kinds]
    for i, j in combinations(range(len(labels)), 2):
        upper, lower = kinds[i][j], kinds[j][i]
        if upper != lower:
            slower = max(upper, lower, key=distance)
            symmetric[i][j] = symmetric[j][i] = slower
            warnings.append(
                f"{labels[i]}–{labels[j]}: row {labels[i]} says {upper}, row {labels[j]} says {lower}; using {slower}"
            )
    return tuple(tuple(row) for row in symmetric), tuple(warnings)
