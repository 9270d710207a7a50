"""The journal: one file of JSON lines, which ``tune`` and the programs that it measures write.

::

    {"settings": {"program": ["python", "train.py"], "folder": "/home/me", "only": []}}
    {"sum": "71 4096 w:0", "built": {…}}       the program's own lines, as ``inside`` says
    {"sum": "71 4096 w:0", "time": 1795629992.33}
    {"ended": {"round": 0, "candidate": "tree", "step": 0.01, …}}          a run has ended

``--continue`` needs the first line, and those of runs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from hier_allreduce import HierAllreduceError


class Run(NamedTuple):
    """One start of the program, and the all-reduce that it built: of several, the training's."""

    round: int  # in which each candidate runs once; 0 is the first run
    candidate: str
    step: float  # seconds; 0 if the run failed
    took: float  # seconds of the whole run
    fault: str = ""  # how it failed or hung
    bytes: int = 0  # of one tower's gradients
    front_end: str = "towers"
    update: str = ""
    towers: int = 0  # 0: no all-reduce was built
    strategy: Dict[str, Any] = {}  # noqa: RUF012


def append(journal: Path, line: Dict[str, Any]) -> None:
    """Add a line, after the half of one that a program may have left when it was killed."""
    with journal.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(line)}\n")


def lines_in(journal: Path, begin: int = 0) -> List[Dict[str, Any]]:
    """Return the lines after so many bytes, without one that is still being written."""
    with journal.open("rb") as file:
        file.seek(begin)
        text = file.read().rpartition(b"\n")[0]
    lines = []
    for line in text.splitlines():
        with suppress(ValueError):  # an empty line, or half a one
            lines.append(json.loads(line))
    return lines


def read(journal: Path) -> Tuple[Dict[str, Any], List[Run]]:
    """Return the settings in a journal, and the runs that have ended.

    Raises:
        HierAllreduceError: ``tune`` has not written the file.
    """
    lines = lines_in(journal)
    try:
        settings: Dict[str, Any] = lines[0]["settings"]
        return settings, [Run(**line["ended"]) for line in lines if "ended" in line]
    except (IndexError, KeyError, TypeError) as error:
        raise HierAllreduceError(f"{journal} is no journal of tune: {error!r}") from None
