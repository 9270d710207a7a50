"""``nvidia-smi topo -m``: its text read into a table of link kinds. Running the command is apart (``detect``).

::

            GPU0  GPU1  NIC0  CPU Affinity          kinds    X    NV2
    GPU0     X    NV2   PIX   0-23           ──►            NV2    X
    GPU1    NV2    X    SYS   24-47                 cpus    0-23  24-47

People paste this table from terminals, bug trackers and wikis: tabs get lost, escape sequences are broken, prompts,
quotes and legends stand around it. All of that is read; what is missing or contradicts itself is not guessed.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from itertools import combinations, takewhile
from typing import Dict, List, NamedTuple, Sequence, Tuple

from ..errors import TopologyError
from .anomalies import odd_links
from .gpus import GPUS, known_gpu
from .matrix import PCIE, SELF, Kinds, LinkMatrix, distance

# SOC is what drivers before 2018 call SYS
_SYNONYMS = {"SOC": "SYS", "PSB": "PXB"}

_ESCAPES = re.compile(
    r"(?:\x1b|\x9b|\ufffd|\\x1b|\\u001b|\\e|\\033|\^\[)?\[[0-9;]*m|\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z]"
)
_LABELS = re.compile(r"(?:[GC]PU\d+\s*)+")
_KIND = r"(?i:NV\d+|PIX|PXB|PSB|PHB|NODE(?!\s+Affinity)|SYS|SOC|HOST|X)"
_CELL = re.compile(rf"\s*({_KIND})(?![a-z])")
_VENDOR = r"(?:NVIDIA|Tesla|Quadro|GeForce|TITAN)\b"
_KNOWN = "|".join(gpu.pattern for gpu in GPUS)
_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        # nvidia-smi -L, also with a worker's name or a time before it; reports
        r".*\bGPU [\d,]+:\s+([A-Z].*?)\s+\(UUID",
        r"\W*GPU [\d,]+:\s+(?!GPU-|PCI)([A-Z].*?)(?:\s{2,}.*|\s+[\d.]+ [MG]iB\b.*)?\s*$",
        rf"\W*\d+, (?!P(?:[0-35789]|1\d)\b)((?:{_VENDOR}|[ABHLPTV]\d+)[^,]*?)\s*(?:,|$)",  # --query-gpu=index,name
        rf"\W*({_VENDOR}[^,]*\d[^,]*), (?:GPU-|[\d.]+(?: MiB)?\s*(?:,|$))",  # --query-gpu=name and anything
        r"\W*\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s+[0-9A-F]{4,8}:",  # nvidia-smi alone
        r"\s*Product Name\s*:\s*(\S.*?)\s*$",  # nvidia-smi -q
        rf"\W*(?=.*(?i:{_KNOWN}))({_VENDOR}[\w -]+)\W*$",  # --query-gpu=name; with a remark for a name it would warn
        r"\W*Device: \d+, ([^,]+),",  # p2pBandwidthLatencyTest
        r".*\bdevice\s+\d+ \[[\w:.]+\] (\S.*?)\s*$",  # nccl-tests
    )
)
_END = re.compile(rf"legend|(?:^|\s)(?:{_KIND}|NV#)\s+=", re.I)
_NEXT_ROW = re.compile(rf"(?=GPU\d+\W+{_KIND}\b|Legend:)")
_TAGS = re.compile(r"(<(?:br|/p|/tr|/div)\b[^<>\n]*>)|</?\w[^<>\n]*>", re.I)
_PEER_STATUS = re.compile(r"\b(?:OK|[CGT]?NS|DR|U)\b")  # what `topo -p2p` prints
_AMD = re.compile(r"0\s|.*\bXGMI\b")  # what rocm-smi prints, 0 on its diagonal
_BARE_ROW = re.compile(r"\W*GPU\d+\s*[A-Z]{0,3}\W*$")  # cut off after its label
_APART = re.compile(r"(NV\d+)\n(?=\d)(?!\d?\s)")  # NV1|0-23, but neither NV1|2 nor NO|DE
_CUT_CELL = re.compile(r"[NPS][A-Z]{0,2}\d")
_AFFINITY = re.compile(r"\s*(?:[\d,-]+|N/?A?|/?A)(?:\s+(?:[\d,-]+|N/A))*\s*$")
_WHOLE = re.compile(r"[\d,-]*\d(?![\d,-])|N/A")  # one of the affinities, not cut
_WORDS = re.compile(r"(?<=[\d,A])\n(?=[\dN])")
_HEADINGS = re.compile(r"Affinity|NUMA\s*ID")
_NO_CPUS = re.compile(r" *\t *\t *\d+\s*(?:N/A|\d*)\s*$")  # only NUMA nodes, and an empty column before them


class _Header(NamedTuple):
    """The GPUs' columns, the network cards' after them, and how many columns of affinities are behind these."""

    labels: Tuple[str, ...]
    cards: Tuple[str, ...]
    affinities: int

    @property
    def columns(self) -> Tuple[str, ...]:
        return self.labels + self.cards


class _Row(NamedTuple):
    cells: List[str]
    rest: str


def parse_nvidia_smi(text: str) -> LinkMatrix:
    """The table in ``text``, which may hold anything else around it.

    Raises:
        TopologyError: there is no table, it is cut, or it contradicts itself; the message names row and column.
            Or ``text`` is none.
    """
    if not isinstance(text, str):
        raise TopologyError(f"expected the text that `nvidia-smi topo -m` prints, not {type(text).__name__}: .decode()")
    lines = _clean(text)
    start, header = _find_header(lines)
    labels = header.labels
    rows, end = _rows(lines, start, header)
    kinds = tuple(_row_kinds(label, rows, labels, header.columns) for label in labels)
    kinds, asymmetric = _symmetric(labels, kinds)
    gpu, several = _gpu_name(lines)
    warnings = asymmetric + odd_links(labels, kinds) + several
    if any(map(_is_row_of_links, map(_read, lines[:start]))):
        warnings += ("there are rows of another table, without a header, above the one that was read",)
    if _has_table(lines[end:]):
        warnings += ("there is a second table in the text; only the first one was read",)
    return LinkMatrix(labels, kinds, _affinities(labels, rows), gpu, warnings)


# ---- the text ---------------------------------------------------------------------------------------


def _clean(text: str) -> List[str]:
    """Lines without escape sequences, tags, quote marks, table rules and odd blanks; at most one row in each."""
    text = without_escapes(text.replace("\r\n", "\n").replace("\r", "\n"))
    text = text.replace("\\t", "\t").replace("\\n", "\n")  # as a string in JSON or in a program
    text = html.unescape(_TAGS.sub(lambda tag: "\n" if tag.group(1) else " ", text))
    text = re.sub(r"[|│┃`*\ufeff]|[^\S\t\n]", " ", text.replace("\u200b", ""))
    text = re.sub(r"^[^\S\n]*(?:>[^\S\n]*)+", "", text, flags=re.M)
    return re.sub(r"GPU\d.*", lambda line: line.group()[:4] + _NEXT_ROW.sub("\n", line.group()[4:]), text).split("\n")


def without_escapes(text: str) -> str:
    """A terminal's escape sequences left out: nvidia-smi underlines its header with them, into a file too."""
    return _ESCAPES.sub("", text)


class _Line(NamedTuple):
    """A line from its first GPU label on: the labels in one run (a header's tabs may be lost), and what follows."""

    labels: Tuple[str, ...]
    rest: str

    @property
    def is_row(self) -> bool:
        """One label and then anything: in a table, a GPU's row."""
        return len(self.labels) == 1

    @property
    def is_header(self) -> bool:
        """Column labels. With one GPU, header and row differ in what follows the label."""
        return bool(self.labels) and not re.search(r"GPU\d", self.rest) and not self.has_cells

    @property
    def has_cells(self) -> bool:
        """A link kind follows the label."""
        return bool(_CELL.match(self.rest))


def _is_row_of_links(line: _Line) -> bool:
    """A row of a matrix for two GPUs or more, and not of what peers can do."""
    return line.is_row and len(_cells(line.rest).cells) > 1 and not _PEER_STATUS.search(line.rest)


def _read(line: str) -> _Line:
    run = _LABELS.search(line)
    return _Line(tuple(re.findall(r"[GC]PU\d+", run.group())), line[run.end() :]) if run else _Line((), line)


def _find_header(lines: Sequence[str]) -> Tuple[int, _Header]:
    """Where the rows begin, and the columns.

    A header is followed by a row, perhaps after its own second half.
    """
    for number, text in enumerate(lines):
        if not _read(text).is_header:
            continue
        after = number + 1
        while after < min(len(lines), number + 9) and _continues_header(lines[after], _read(text)):
            apart = re.search(r"\d$", text) and re.match("[A-Za-z]", lines[after])  # NIC0|CPU Affinity
            text += " " * bool(apart) + lines[after]
            after += 1
        labels, rest = _read(text)
        while after < len(lines) and not lines[after].strip():
            after += 1
        row = _read(lines[after] if after < len(lines) else "")
        if any(map(_PEER_STATUS.match, row.rest.split()[: len(labels)])) or _AMD.match(row.rest):
            continue
        if row.is_row and (len(labels) > 1 or (row.has_cells and row.labels == labels)):
            twice = [label for label, count in Counter(labels).items() if count > 1]
            if twice:
                raise TopologyError(f"header: column {twice[0]} appears twice; paste all of `nvidia-smi topo -m`")
            return after, _Header(labels, _cards(rest), len(_HEADINGS.findall(rest)))
    raise TopologyError(_without_table([line for line in map(_read, lines) if line.is_row]))


def _without_table(rows: Sequence[_Line]) -> str:
    """What is wrong with a text in which no header is followed by a row."""
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


def _has_table(lines: Sequence[str]) -> bool:
    try:
        return bool(_find_header(lines))
    except TopologyError:
        return False


def _continues_header(text: str, header: _Line) -> bool:
    """A header too wide for the terminal goes on in the next line, with columns not named before."""
    line = _read(text)
    if not line.labels:
        wide = len(header.labels) > 1 or _cards(header.rest)
        return bool(text.strip()) and bool(wide) and not re.match(rf"\s*{_KIND}\b", text)
    return line.is_header and not set(line.labels) & set(header.labels)


def _cards(rest: str) -> Tuple[str, ...]:
    """The labels after the GPUs' in a header: ``NIC0``, ``mlx5_1``; the affinities' headings end them."""
    names = takewhile(lambda word: re.match(r"[A-Za-z]\w*\d$", word), rest.split())
    return tuple(names)


def _rows(lines: Sequence[str], start: int, header: _Header) -> Tuple[Dict[str, _Row], int]:
    """The GPUs' rows by label, and the line after them. A row too wide for the terminal goes on in the next line."""
    labels = header.labels
    found: Dict[str, List[str]] = {}
    label = ""
    end = len(lines)
    for number, text in enumerate(lines[start:], start):
        line = _read(text)
        complete = len(found) == len(labels)
        of_a_row = line.is_row and line.has_cells  # whatever a remark behind it says
        if complete and label and of_a_row and line.labels[0] in labels:
            raise _twice(line.labels[0])
        another = complete and line.labels and not (line.is_row and line.labels[0] not in labels)
        if another or (_END.search(text) and not of_a_row):
            end = number
            break
        remark = line.is_row and not line.has_cells and line.labels[0] in found  # "GPU0 is the one with …"
        if line.is_row and not remark and (of_a_row or not complete or _BARE_ROW.match(text)):
            label = line.labels[0]
            if label in found:
                raise _twice(label)
            if label not in labels:
                raise TopologyError(f"row {label}: the header has no column {label}, only {', '.join(labels)}")
            found[label] = [line.rest]
        elif label and _continues_row(text, _row(found[label], header), header):
            found[label].append(text)
        elif complete or text.strip():
            label = ""  # a NIC's row, a remark, or the table's end
    missing = [name for name in labels if name not in found]
    if missing:
        raise TopologyError(
            f"the table is cut: row {missing[0]} is missing (columns {labels[0]} to {labels[-1]}, "
            f"rows {', '.join(found)}); paste all of `nvidia-smi topo -m`"
        )
    return {name: _row(parts, header) for name, parts in found.items()}, end


def _twice(label: str) -> TopologyError:
    return TopologyError(f"row {label} appears twice in the table; expected one row for each column")


def _continues_row(text: str, row: _Row, header: _Header) -> bool:
    """The rest of a row: links and a cut cell while columns are missing, affinities while these are. No card's row."""
    if not text.strip() or re.match(r"\s*(NIC|mlx|[a-z]+\w*\d)", text):
        return False
    if len(row.cells) < len(header.columns):
        return True
    return len(_WHOLE.findall(row.rest)) < header.affinities and bool(_AFFINITY.match(text))


def _row(parts: Sequence[str], header: _Header) -> _Row:
    """The cells of a row, and what follows them. A terminal breaks lines between cells or within one.

    A broken number of affinities is put together, unless one is missing then.
    """
    text = _APART.sub(r"\1 ", "\n".join(parts))
    together, apart = _cells(text.replace("\n", "")), _cells(_WORDS.sub(" ", text).replace("\n", ""))
    missing = len(together.rest.split()) < header.affinities == len(apart.rest.split())
    return apart if missing and apart.cells == together.cells else together


def _cells(text: str) -> _Row:
    cells: List[str] = []
    position = 0
    while True:
        cell = _CELL.match(text, position)
        if not cell:
            rest = text[position:]
            return _Row(cells, "N/A " * bool(_NO_CPUS.match(rest)) + rest.strip())
        cells.append(cell.group(1).upper())
        position = cell.end()


# ---- what the cells say -----------------------------------------------------------------------------


def _row_kinds(label: str, rows: Dict[str, _Row], labels: Sequence[str], columns: Sequence[str]) -> Tuple[str, ...]:
    """One GPU's row: its link kinds in the order of the columns.

    A cell lost before a card's would shift the others. Some drivers cut the last card's cell (``PH0-115``): that shifts
    nothing.
    """
    cells, rest = rows[label]
    if len(cells) < len(columns) and SELF in cells[: labels.index(label)]:
        column = labels[cells.index(SELF)]
        raise TopologyError(
            f"row {label}, column {column}: X, which belongs under {label}; a cell before it is missing "
            f"({len(cells)} of {len(columns)} are there)"
        )
    if len(cells) + bool(_CUT_CELL.match(rest) and len(cells) >= len(labels)) < len(columns):
        column = columns[len(cells)]
        instead = repr(rest.split()[0]) if rest else "the end of the line"
        raise TopologyError(
            f"row {label}, column {column}: expected X, NV#, {', '.join(PCIE)} or SOC, found {instead}; "
            "the table is cut or damaged there, or not of NVIDIA's GPUs"
        )
    kinds = [_SYNONYMS.get(cell, cell) for cell in cells[: len(labels)]]
    for column, kind in zip(labels, kinds):
        if (kind == SELF) != (column == label):
            raise TopologyError(
                f"row {label}, column {column}: {kind!r} contradicts the diagonal; "
                f"X stands where a GPU meets itself, and nowhere else"
            )
        if kind == "NV0":
            raise TopologyError(f"row {label}, column {column}: 'NV0' is a bond of no links; expected NV1 or more")
    return tuple(kinds)


def _symmetric(labels: Sequence[str], kinds: Kinds) -> Tuple[Kinds, Tuple[str, ...]]:
    """The matrix with the slower reading on both sides of the diagonal where they differ, and a warning for each."""
    warnings = []
    table = [list(row) for row in kinds]
    for i, j in combinations(range(len(labels)), 2):
        here, there = kinds[i][j], kinds[j][i]
        if here != there:
            slower = max(here, there, key=distance)
            table[i][j] = table[j][i] = slower
            warnings.append(
                f"{labels[i]}–{labels[j]}: row {labels[i]} says {here}, row {labels[j]} says {there}; using {slower}"
            )
    return tuple(tuple(row) for row in table), tuple(warnings)


def _affinities(labels: Sequence[str], rows: Dict[str, _Row]) -> Tuple[str, ...]:
    """Each GPU's CPU affinity, as it is written; empty where there is none."""
    return tuple(" ".join(rows[label].rest.split()) for label in labels)


def _gpu_name(lines: Sequence[str]) -> Tuple[str, Tuple[str, ...]]:
    """The model, where the same text lists the GPUs; none, and a warning, where they are not alike."""
    for pattern in _NAMES:
        names = sorted({found.group(1) for found in map(pattern.match, lines) if found})
        alike = len({known_gpu(name) or name for name in names}) == 1  # as an L40 and an L40S are
        if names and not alike:
            return "", (f"the GPUs are of several models ({', '.join(names)}); speeds are guessed from the links",)
        if names:
            return names[0], ()
    return "", ()
