"""Why a run has failed: in the program's own words, without TensorFlow's start-up lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List

from hier_allreduce.errors import HierAllreduceError

_LONGEST = 160  # characters of a line
# TensorFlow, its libraries and Python's warnings write such lines into programs that are all right.
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
# Such errors name their cause in many lines or in none, and a table has room for one.
_CAUSE_BY_PATTERN = {
    "EOFError": "the program reads its standard input, which is closed here",
    "OOM when|ResourceExhausted|out.of.memory": "out of memory",
}
_ERROR = re.compile(r"[\w.]*(Error|Exception)(:|$)")  # the line below a traceback
_MODULE = re.compile(r"([A-Za-z_]\w*\.)+(?=\w*(Error|Exception))")


class NothingMeasured(HierAllreduceError):
    """No run can be measured: the program is to be changed or repaired first."""


def explained(fault: str, output: Path) -> str:
    """Return a fault with its cause: the first error in the output, or the program's last line."""
    lines = own_lines(output.read_text(encoding="utf-8", errors="replace"))
    written = "\n".join(lines)
    words = [fault]
    for pattern, cause in _CAUSE_BY_PATTERN.items():
        if re.search(pattern, written, re.I):
            words.append(cause)
    error = next((line for line in lines if _ERROR.match(line)), "")
    if error:
        words.append(_MODULE.sub("", error, 1)[:_LONGEST])
    # What a program did last tells why it hangs; "Graph execution error:" has the cause below it.
    if not error or error.endswith(":") or not fault.startswith("failed"):
        words.append(f"last line: {lines[-1][:_LONGEST] if lines else 'none'}")
    return "; ".join(words)


def own_lines(output: str) -> List[str]:
    """Return the lines that the program itself has written."""
    # A bar ends its lines with \r only, so that all of them would be one line without this.
    lines = re.split(r"[\r\n]+", output)
    return [line.strip() for line in lines if line.strip() and not _NOISE.match(line)]
