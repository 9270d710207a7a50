"""Why a run has failed: in the program's own words, without TensorFlow's start-up lines."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import HierAllreduceError

_LONGEST = 160  # characters of a line
# lines that TensorFlow, its libraries and Python's warnings write into a program that is all right
_NOISE = re.compile(
    r"\d{4}-\d\d-\d\d [\d:.]+: [IWE] "  # 2026-11-25 17:00:00.123456: I tensorflow/…
    r"|[IWE]\d{4} [\d:.]+ "  # I0000 00:00:1795629992.339589    2106 port.cc:153]
    r"|WARNING: All log messages before absl"
    r"|WARNING:(tensorflow|absl):"
    r"|To enable the following instructions"
    r"|Skipping registering GPU devices"
    r"|.*\b\w*Warning: "
    r"|\s*warnings\.warn\("
)
_CAUSES = {
    "EOFError": "the program reads its standard input, which is closed here",
    "OOM when|ResourceExhausted|out.of.memory": "out of memory",
}


class NothingMeasured(HierAllreduceError):
    """No run can be measured: the program is to be changed or repaired first."""


def explained(fault: str, output: Path) -> str:
    """Return a fault with its cause, if the output shows one, and the program's last own line."""
    text = output.read_text(encoding="utf-8", errors="replace")
    causes = [cause for pattern, cause in _CAUSES.items() if re.search(pattern, text, re.I)]
    return "; ".join([fault, *causes, f"last line: {own_last_line(text) or 'none'}"])


def own_last_line(text: str) -> str:
    """Return the last line that the program itself has written; an empty text if there is none."""
    lines = re.split(r"[\r\n]+", text)  # a bar ends its lines with \r
    own = [line.strip() for line in lines if line.strip() and not _NOISE.match(line)]
    return own[-1][:_LONGEST] if own else ""
