"""The output of ``nvidia-smi topo -m``, read as a matrix of link kinds. ``detect`` runs the command.

::

            GPU0  GPU1  NIC0  CPU Affinity          kinds    X    NV2
    GPU0     X    NV2   PIX   0-23           ──►            NV2    X
    GPU1    NV2    X    SYS   24-47                 cpus    0-23  24-47

Above and below the table there may be other text: a prompt, ``nvidia-smi -L``, the legend; and the table of
``nvidia-smi topo -p2p r``, which says which pairs have peer access. Missing or contradictory cells are errors, never
guessed.
"""

from __future__ import annotations

import re
from itertools import combinations, dropwhile, takewhile
from typing import Dict, List, NamedTuple, Sequence, Tuple

from ..errors import HierAllreduceError
from .gpus import listed_gpu
from .matrix import HOST, PCIE, SELF, Kinds, LinkMatrix, distance

_OLD_NAMES = {"SOC": "SYS", "PSB": "PXB"}  # of drivers before 2018

# nvidia-smi underlines its header, even in a file. In a copied text the escape character may be lost.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\ufffd?\[[0-9;]+m")
_LABEL = re.compile(r"[GC]PU\d+")
_CARD = re.compile(r"[A-Za-z]\w*\d$")  # a network card: NIC0, mlx5_1
_KIND = re.compile("|".join([SELF, r"NV[1-9]\d{0,3}", *PCIE, *_OLD_NAMES, HOST]))
_HEADER = re.compile(rf"\s*((?:{_LABEL.pattern}\s*)*)(.*)")  # the tabs between labels may be lost
_ACCESS = r"X|OK|NS|CNS|GNS|TNS|DR|U"  # `nvidia-smi topo -p2p r`: supported, or why not
_ACCESS_TABLE = re.compile(rf"^[ \t]*(?:GPU\d+[ \t]*){{2,}}\n(?:[ \t]*GPU\d+(?:[ \t]+(?:{_ACCESS})\b)+[ \t]*\n)+", re.M)
_CPUS = re.compile(r"[\d,-]+")
_ROW = re.compile(rf"\s*{_LABEL.pattern}\s+(?:{_KIND.pattern})\b")


def parse_nvidia_smi(text: str) -> LinkMatrix:
    """Return the matrix in ``text``.

    Raises:
        HierAllreduceError: there is no table, or the table is cut or contradicts itself; the message names row and
            column.
    """
    plain = "".join(f"{line}\n" for line in without_escapes(text).splitlines() if line.strip())
    access = _ACCESS_TABLE.search(plain)
    lines = _ACCESS_TABLE.sub("", plain).splitlines()
    if access and not any(map(_ROW.match, lines)):
        raise HierAllreduceError(
            "this is the table of `nvidia-smi topo -p2p r` alone: put what `nvidia-smi topo -m` prints above it"
        )
    start, header = _find_header(lines)
    rows = _read_rows(lines[start:], header.labels)
    kinds, warnings = _symmetric(header.labels, [_row_kinds(label, rows[label], header) for label in header.labels])
    gpu, several_models = listed_gpu(lines)
    warnings += several_models
    if sum(bool(_ROW.match(line)) for line in lines) > len(rows):
        warnings += ("the text has rows of another table too; only one table was read",)
    cpus = tuple(_cpus(" ".join(dropwhile(_KIND.fullmatch, rows[label]))) for label in header.labels)
    staged = None if access is None else _without_access(access.group(), header.labels)
    return LinkMatrix(header.labels, kinds, cpus, gpu, warnings, staged)


def _cpus(affinity: str) -> str:
    """Return the CPUs in an affinity, without the NUMA nodes after them."""
    cpus = _CPUS.match(affinity)
    return cpus.group() if cpus else affinity


def _without_access(table: str, labels: Sequence[str]) -> Tuple[str, ...]:
    """Return the pairs, such as ``GPU0-GPU3``, for which ``nvidia-smi topo -p2p r`` prints anything but OK."""
    header, *rows = (line.split() for line in table.splitlines())
    if (
        tuple(header) != tuple(labels)
        or [row[0] for row in rows] != header
        or {len(row) for row in rows} != {len(rows) + 1}
    ):
        raise HierAllreduceError(
            f"the table of `nvidia-smi topo -p2p r` is cut, or of other GPUs: expected a row and a column for each of "
            f"{', '.join(labels)}"
        )
    cells = {(row[0], column): cell for row in rows for column, cell in zip(header, row[1:])}
    return tuple(f"{a}-{b}" for a, b in combinations(labels, 2) if {cells[a, b], cells[b, a]} != {"OK"})


def without_escapes(text: str) -> str:
    """Remove a terminal's escape sequences."""
    return _ESCAPES.sub("", text)


class _Header(NamedTuple):
    """The labels of the GPUs' columns, and of the network cards' columns after them. Affinities follow."""

    labels: Tuple[str, ...]
    cards: Tuple[str, ...]

    @property
    def columns(self) -> Tuple[str, ...]:
        return self.labels + self.cards


def _find_header(lines: Sequence[str]) -> Tuple[int, _Header]:
    """Return the number of the first row, and the header above it: the first line of labels that has a row below."""
    for number, (line, below) in enumerate(zip(lines, lines[1:]), 1):
        found = _HEADER.match(line)
        labels = _LABEL.findall(found.group(1)) if found else []
        rest = found.group(2) if found else ""
        if below.split()[0] in labels and not _LABEL.search(rest) and not _ROW.match(line):
            return number, _Header(tuple(labels), tuple(takewhile(_CARD.match, rest.split())))
    raise HierAllreduceError(
        "no table of GPUs, with a header row (GPU0 GPU1 …) and a row for each GPU; expected what "
        "`nvidia-smi topo -m` prints, with its line ends and without quote marks or markup"
    )


def _read_rows(lines: Sequence[str], labels: Sequence[str]) -> Dict[str, List[str]]:
    """Return the words after the label of each GPU's row.

    Raises:
        HierAllreduceError: a row is missing, appears twice, or has no column.
    """
    rows: Dict[str, List[str]] = {}
    for label, *words in takewhile(lambda words: _LABEL.fullmatch(words[0]), map(str.split, lines)):
        if label in rows or labels.count(label) > 1:
            raise HierAllreduceError(
                f"{label} appears twice in the table; expected one row and one column for each GPU"
            )
        if label not in labels:
            raise HierAllreduceError(f"row {label}: the header has no column {label}, only {', '.join(labels)}")
        rows[label] = words
    missing = [label for label in labels if label not in rows]
    if missing:
        raise HierAllreduceError(
            f"the table is cut: row {missing[0]} is missing (columns {labels[0]} to {labels[-1]}, "
            f"rows {', '.join(rows)}); expected all that `nvidia-smi topo -m` prints"
        )
    return rows


def _row_kinds(label: str, words: Sequence[str], header: _Header) -> Tuple[str, ...]:
    """Return the link kinds of one GPU's row, in the order of the columns.

    Raises:
        HierAllreduceError: a cell is missing, unknown, or contradicts the diagonal.
    """
    # Network cards' cells count too: without them a cell that was lost before would go unnoticed.
    cells = [*words, *[""] * len(header.columns)][: len(header.columns)]
    for column, cell in zip(header.columns, cells):
        if not _KIND.fullmatch(cell):
            raise HierAllreduceError(
                f"row {label}, column {column}: expected X, NV#, {', '.join(PCIE)} or SOC, found "
                f"{repr(cell) if cell else 'the end of the line'}; the table is cut, wrapped or damaged there, or not "
                "what `nvidia-smi topo -m` prints"
            )
        if (cell == SELF) != (column == label):
            raise HierAllreduceError(
                f"row {label}, column {column}: {cell!r} contradicts the diagonal; "
                f"X stands where a GPU meets itself, and nowhere else"
            )
    return tuple(_OLD_NAMES.get(cell, cell) for cell in cells[: len(header.labels)])


def _symmetric(labels: Sequence[str], kinds: Sequence[Sequence[str]]) -> Tuple[Kinds, Tuple[str, ...]]:
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
