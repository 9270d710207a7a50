"""Cleaning of pasted text: escape sequences, HTML, quote marks and table rules are removed."""

from __future__ import annotations

import html
import re
from typing import List

from .matrix import KIND_PATTERN

_ESCAPES = re.compile(
    r"(?:\x1b|\x9b|\ufffd|\\x1b|\\u001b|\\e|\\033|\^\[)?\[[0-9;]*m|\x1b\[[0-9;?]*[A-Za-z]|\x1b\([A-Z]"
)
_TAGS = re.compile(r"(<(?:br|/p|/tr|/div)\b[^<>\n]*>)|</?\w[^<>\n]*>", re.I)  # group 1: those that end a line
_RULES_AND_BLANKS = re.compile(r"[|│┃`*\ufeff]|[^\S\t\n]")
_QUOTE_MARKS = re.compile(r"^[^\S\n]*(?:>[^\S\n]*)+", re.M)
_ROW = rf"GPU\d+\W+{KIND_PATTERN}\b"
_NEXT_ROW = re.compile(rf"(?={_ROW}|Legend:)")


def clean_lines(text: str) -> List[str]:
    """Return the lines of a pasted text, with at most one row of a table in each."""
    text = without_escapes(text.replace("\r\n", "\n").replace("\r", "\n"))
    text = text.replace("\\t", "\t").replace("\\n", "\n")  # as a string in JSON or in a program
    text = html.unescape(_TAGS.sub(lambda tag: "\n" if tag.group(1) else " ", text))
    text = _RULES_AND_BLANKS.sub(" ", text.replace("\u200b", ""))
    text = _QUOTE_MARKS.sub("", text)
    return re.sub(r"GPU\d.*", _one_row_a_line, text).split("\n")


def has_row(text: str) -> bool:
    """Return whether a pasted text has a row of nvidia-smi's table."""
    return bool(re.search(_ROW, "\n".join(clean_lines(text)), re.I))


def _one_row_a_line(line: re.Match[str]) -> str:
    """Break a line before each row that follows its first label: the line ends may be lost."""
    first_label, rest = line.group()[:4], line.group()[4:]
    return first_label + _NEXT_ROW.sub("\n", rest)


def without_escapes(text: str) -> str:
    """Remove a terminal's escape sequences: nvidia-smi underlines its header with them, even in a file."""
    return _ESCAPES.sub("", text)
