"""The output of ``nvidia-smi topo -m``, read as a matrix of link kinds. ``detect`` runs the command.

::

            GPU0  GPU1  NIC0  CPU Affinity          kinds    X    NV2
    GPU0     X    NV2   PIX   0-23           ──►            NV2    X
    GPU1    NV2    X    SYS   24-47                 cpus    0-23  24-47

People paste this table from terminals, bug trackers and wikis: tabs get lost, lines are wrapped, and prompts or legends
surround it. :mod:`.pasted_text` cleans the text first. Missing or contradictory cells are errors, never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations, takewhile
from typing import Dict, List, NamedTuple, Sequence, Tuple

from ..errors import TopologyError
from .anomalies import odd_links
from .gpu_names import gpu_name
from .matrix import KIND_PATTERN, PCIE, SELF, Kinds, LinkMatrix, distance, nvlinks
from .pasted_text import clean_lines

_OLD_NAMES = {"SOC": "SYS", "PSB": "PXB"}  # of drivers before 2018

_LABELS = re.compile(r"(?:[GC]PU\d+\s*)+")
_CELL = re.compile(rf"\s*({KIND_PATTERN})(?![a-z])")
_LEGEND = re.compile(rf"legend|(?:^|\s)(?:{KIND_PATTERN}|NV#)\s+=", re.I)
_PEER_STATUS = re.compile(r"\b(?:OK|[CGT]?NS|DR|U)\b")  # what `topo -p2p` prints
_AMD = re.compile(r"0\s|.*\bXGMI\b")  # what rocm-smi prints, with 0 on its diagonal
_LABEL_ALONE = re.compile(r"\W*GPU\d+\s*[A-Z]{0,3}\W*$")  # a row cut off after its label
_KIND_THEN_NUMBER = re.compile(r"(NV\d+)\n(?=\d)(?!\d?\s)")  # NV1|0-23, but neither NV1|2 nor NO|DE
_CUT_CELL = re.compile(r"[NPS][A-Z]{0,2}\d")
_AFFINITIES = re.compile(r"\s*(?:[\d,-]+|N/?A?|/?A)(?:\s+(?:[\d,-]+|N/A))*\s*$")
_WHOLE_AFFINITY = re.compile(r"[\d,-]*\d(?![\d,-])|N/A")
_BREAK_BETWEEN_AFFINITIES = re.compile(r"(?<=[\d,A])\n(?=[\dN])")
_AFFINITY_HEADING = re.compile(r"Affinity|NUMA\s*ID")
_NO_CPUS = re.compile(r" *\t *\t *\d+\s*(?:N/A|\d*)\s*$")  # an empty column of CPUs, then NUMA nodes


def parse_nvidia_smi(text: str) -> LinkMatrix:
    """Return the matrix in ``text``, which may hold anything else around it.

    Raises:
        TopologyError: ``text`` is not text, or it has no table, or the table is cut or contradicts itself; the message
            names row and column.
    """
    if not isinstance(text, str):
        raise TopologyError(f"expected the text that `nvidia-smi topo -m` prints, not {type(text).__name__}: .decode()")
    lines = clean_lines(text)
    start, header = _find_header(lines)
    labels = header.labels
    rows, end = _read_rows(lines, start, header)
    kinds = tuple(_row_kinds(label, rows, labels, header.columns) for label in labels)
    kinds, asymmetric = _symmetric(labels, kinds)
    gpu, several_models = gpu_name(lines)
    warnings = asymmetric + odd_links(labels, kinds) + several_models
    if any(map(_is_row_of_links, map(_split_line, lines[:start]))):
        warnings += ("there are rows of another table, without a header, above the one that was read",)
    if _has_table(lines[end:]):
        warnings += ("there is a second table in the text; only the first one was read",)
    cpus = tuple(" ".join(rows[label].rest.split()) for label in labels)
    return LinkMatrix(labels, kinds, cpus, gpu, warnings)


# ---- lines ------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A line, split into its first run of GPU labels (tabs between them may be lost) and the rest."""

    labels: Tuple[str, ...]
    rest: str

    @property
    def is_row(self) -> bool:
        """Whether there is one label and then anything: in a table, a GPU's row."""
        return len(self.labels) == 1

    @property
    def is_header(self) -> bool:
        """Whether there are only column labels. With one GPU, header and row differ in what follows the label."""
        return bool(self.labels) and not re.search(r"GPU\d", self.rest) and not self.has_cells

    @property
    def has_cells(self) -> bool:
        """Whether a link kind follows the label."""
        return bool(_CELL.match(self.rest))

    @property
    def is_row_with_cells(self) -> bool:
        """Whether this is certainly a row, whatever a remark at its end says."""
        return self.is_row and self.has_cells


def _split_line(text: str) -> _Line:
    labels = _LABELS.search(text)
    if not labels:
        return _Line((), text)
    return _Line(tuple(re.findall(r"[GC]PU\d+", labels.group())), text[labels.end() :])


class _Row(NamedTuple):
    """The cells of a row, and the text after them."""

    cells: List[str]
    rest: str


def _cells(text: str) -> _Row:
    cells: List[str] = []
    position = 0
    while True:
        cell = _CELL.match(text, position)
        if not cell:
            break
        cells.append(cell.group(1).upper())
        position = cell.end()
    rest = text[position:]
    return _Row(cells, f"N/A {rest.strip()}" if _NO_CPUS.match(rest) else rest.strip())


def _is_row_of_links(line: _Line) -> bool:
    """Return whether a line is a row of a matrix for two GPUs or more, and not of what peers can do."""
    return line.is_row and len(_cells(line.rest).cells) > 1 and not _PEER_STATUS.search(line.rest)


# ---- the header -------------------------------------------------------------------------------------


class _Header(NamedTuple):
    """The GPUs' columns, the network cards' columns, and the number of affinity columns, in this order."""

    labels: Tuple[str, ...]
    cards: Tuple[str, ...]
    affinities: int

    @property
    def columns(self) -> Tuple[str, ...]:
        return self.labels + self.cards


def _find_header(lines: Sequence[str]) -> Tuple[int, _Header]:
    """Return the line where the rows begin, and the header: the first one that a row follows."""
    for number, text in enumerate(lines):
        if not _split_line(text).is_header:
            continue
        text, first_row = _joined_header(lines, number)
        labels, rest = _split_line(text)
        row = _split_line(lines[first_row] if first_row < len(lines) else "")
        if any(map(_PEER_STATUS.match, row.rest.split()[: len(labels)])) or _AMD.match(row.rest):
            continue
        if row.is_row and (len(labels) > 1 or (row.has_cells and row.labels == labels)):
            repeated = [label for label, count in Counter(labels).items() if count > 1]
            if repeated:
                raise TopologyError(f"header: column {repeated[0]} appears twice; paste all of `nvidia-smi topo -m`")
            return first_row, _Header(labels, _cards(rest), len(_AFFINITY_HEADING.findall(rest)))
    raise TopologyError(_why_no_table([line for line in map(_split_line, lines) if line.is_row]))


def _joined_header(lines: Sequence[str], number: int) -> Tuple[str, int]:
    """Return a header, unwrapped into one line, and the number of the next line with text."""
    text = lines[number]
    following = number + 1
    while following < min(len(lines), number + 9) and _continues_header(lines[following], _split_line(text)):
        between_words = re.search(r"\d$", text) and re.match("[A-Za-z]", lines[following])  # NIC0|CPU Affinity
        text += f" {lines[following]}" if between_words else lines[following]
        following += 1
    while following < len(lines) and not lines[following].strip():
        following += 1
    return text, following


def _continues_header(text: str, header: _Line) -> bool:
    """Return whether a line continues a header that was wrapped, with columns not named before."""
    line = _split_line(text)
    if line.labels:
        return line.is_header and not set(line.labels) & set(header.labels)
    may_be_wide = len(header.labels) > 1 or bool(_cards(header.rest))
    return may_be_wide and bool(text.strip()) and not re.match(rf"\s*{KIND_PATTERN}\b", text)


def _cards(rest: str) -> Tuple[str, ...]:
    """Return the network cards' labels after the GPUs' in a header: ``NIC0``, ``mlx5_1``."""
    return tuple(takewhile(lambda word: re.match(r"[A-Za-z]\w*\d$", word), rest.split()))


def _has_table(lines: Sequence[str]) -> bool:
    try:
        return bool(_find_header(lines))
    except TopologyError:
        return False


def _why_no_table(rows: Sequence[_Line]) -> str:
    """Return what is wrong with a text in which no header is followed by a row."""
    if any(_AMD.match(row.rest) for row in rows):
        return (
            f"row {rows[0].labels[0]} is of rocm-smi's table, which has other kinds of links; "
            "only NVIDIA's `nvidia-smi topo -m` is read"
        )
    linked = [row for row in rows if row.has_cells]
    if any(_PEER_STATUS.search(row.rest) for row in linked):
        return f"row {linked[0].labels[0]} tells what peers can do (`topo -p2p`); expected `nvidia-smi topo -m`"
    if linked:
        return (
            f"row {linked[0].labels[0]} has no header row with its columns' names (GPU0 GPU1 …) above it; "
            "paste all of `nvidia-smi topo -m`"
        )
    return "no table of GPUs, with a header row and a row for each GPU; expected the output of `nvidia-smi topo -m`"


# ---- the rows ---------------------------------------------------------------------------------------


def _read_rows(lines: Sequence[str], start: int, header: _Header) -> Tuple[Dict[str, _Row], int]:
    """Return the GPUs' rows by label, and the number of the line after them."""
    reader = _RowReader(header)
    end = next((number for number in range(start, len(lines)) if not reader.take(lines[number])), len(lines))
    return reader.rows(), end


class _RowReader:
    """Collects the GPUs' rows, line by line. A row too wide for the terminal continues on the next line.

    ::

                       ┌─ a row's first line ─►  IN A ROW: `open_label`  ◄─┐ the row continues
        BETWEEN ROWS  ─┘                                │        └─────────┘
              ▲                                         │
              └── a card's row, a remark, a blank line ─┘     (both states: with `all_found`, another table ──► THE END)
    """

    def __init__(self, header: _Header):
        self.header = header
        self.parts: Dict[str, List[str]] = {}
        self.open_label = ""

    @property
    def all_found(self) -> bool:
        return len(self.parts) == len(self.header.labels)

    def take(self, text: str) -> bool:
        """Take a line; return False, and take nothing, where the table has ended.

        Raises:
            TopologyError: a row that appears twice, or that has no column.
        """
        line = _split_line(text)
        if self._ends_table(text, line):
            return False
        if self._starts_row(text, line):
            self._open_row(line)
        elif self.open_label and self._continues_row(text):
            self.parts[self.open_label].append(text)
        elif self.all_found or text.strip():
            self.open_label = ""
        return True

    def _ends_table(self, text: str, line: _Line) -> bool:
        known_row = line.is_row and line.labels[0] in self.header.labels
        if self.all_found and self.open_label and known_row and line.has_cells:
            raise _appears_twice(line.labels[0])
        labels_of_another = bool(line.labels) and (known_row or not line.is_row)
        return (self.all_found and labels_of_another) or (bool(_LEGEND.search(text)) and not line.is_row_with_cells)

    def _starts_row(self, text: str, line: _Line) -> bool:
        if not line.is_row or line.has_cells:
            return line.is_row
        is_remark = line.labels[0] in self.parts  # "GPU0 is the one with …"
        return not is_remark and (not self.all_found or bool(_LABEL_ALONE.match(text)))

    def _open_row(self, line: _Line) -> None:
        label, columns = line.labels[0], self.header.labels
        if label in self.parts:
            raise _appears_twice(label)
        if label not in columns:
            raise TopologyError(f"row {label}: the header has no column {label}, only {', '.join(columns)}")
        self.parts[label] = [line.rest]
        self.open_label = label

    def _continues_row(self, text: str) -> bool:
        """Return whether a line holds missing links, the rest of a cut cell, or affinities of the open row."""
        if not text.strip() or re.match(r"\s*(NIC|mlx|[a-z]+\w*\d)", text):  # a network card's row
            return False
        row = self._row(self.open_label)
        if len(row.cells) < len(self.header.columns):
            return True
        return len(_WHOLE_AFFINITY.findall(row.rest)) < self.header.affinities and bool(_AFFINITIES.match(text))

    def _row(self, label: str) -> _Row:
        """Return a row put together. A terminal breaks lines between cells or within one.

        A number that may be broken is put together, unless an affinity would then be missing.
        """
        text = _KIND_THEN_NUMBER.sub(r"\1 ", "\n".join(self.parts[label]))
        joined = _cells(text.replace("\n", ""))
        spaced = _cells(_BREAK_BETWEEN_AFFINITIES.sub(" ", text).replace("\n", ""))
        one_is_missing = len(joined.rest.split()) < self.header.affinities == len(spaced.rest.split())
        return spaced if one_is_missing and spaced.cells == joined.cells else joined

    def rows(self) -> Dict[str, _Row]:
        """Return the rows by label.

        Raises:
            TopologyError: a row is missing.
        """
        labels = self.header.labels
        missing = [label for label in labels if label not in self.parts]
        if missing:
            raise TopologyError(
                f"the table is cut: row {missing[0]} is missing (columns {labels[0]} to {labels[-1]}, "
                f"rows {', '.join(self.parts)}); paste all of `nvidia-smi topo -m`"
            )
        return {label: self._row(label) for label in self.parts}


def _appears_twice(label: str) -> TopologyError:
    return TopologyError(f"row {label} appears twice in the table; expected one row for each column")


# ---- the cells --------------------------------------------------------------------------------------


def _row_kinds(label: str, rows: Dict[str, _Row], labels: Sequence[str], columns: Sequence[str]) -> Tuple[str, ...]:
    """Return the link kinds of one GPU's row, in the order of the columns.

    Raises:
        TopologyError: a cell is missing, unknown, or contradicts the diagonal.
    """
    cells, rest = rows[label]
    if len(cells) < len(columns) and SELF in cells[: labels.index(label)]:
        column = labels[cells.index(SELF)]
        raise TopologyError(
            f"row {label}, column {column}: X, which belongs under {label}; a cell before it is missing "
            f"({len(cells)} of {len(columns)} are there)"
        )
    # Some drivers cut the last card's cell (`PH0-115`). A cell lost earlier would shift the ones after it.
    last_is_cut = len(cells) >= len(labels) and bool(_CUT_CELL.match(rest))
    if len(cells) + last_is_cut < len(columns):
        column = columns[len(cells)]
        instead = repr(rest.split()[0]) if rest else "the end of the line"
        raise TopologyError(
            f"row {label}, column {column}: expected X, NV#, {', '.join(PCIE)} or SOC, found {instead}; "
            "the table is cut or damaged there, or not of NVIDIA's GPUs"
        )
    kinds = [_OLD_NAMES.get(cell, cell) for cell in cells[: len(labels)]]
    for column, kind in zip(labels, kinds):
        if (kind == SELF) != (column == label):
            raise TopologyError(
                f"row {label}, column {column}: {kind!r} contradicts the diagonal; "
                f"X stands where a GPU meets itself, and nowhere else"
            )
        if kind.startswith("NV") and not nvlinks(kind):
            raise TopologyError(f"row {label}, column {column}: {kind!r} is a bond of no links; expected NV1 or more")
    return tuple(kinds)


def _symmetric(labels: Sequence[str], kinds: Kinds) -> Tuple[Kinds, Tuple[str, ...]]:
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
