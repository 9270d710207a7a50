"""The journal: one file of JSON lines, which ``tune`` and the programs that it measures write.

::

    {"program": ["python", "train.py"], "folder": "/home/me", "only": []}
    {"run": 1, "sum": "71-1", "built": {…}}              the program's own lines, as ``inside`` says
    {"run": 1, "sum": "71-1", "time": 1795629992.33}
    {"run": 1, "round": 0, "candidate": "tree", "step": 0.01, …}     the run has ended

``--continue`` needs the first line, and those of runs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from hier_allreduce import HierAllreduceError


class Built(NamedTuple):
    """The all-reduce that a program has built; of several, the one with most bytes."""

    bytes: int = 0  # of one tower's gradients
    front_end: str = "towers"
    update: str = ""
    towers: int = 0  # 0: none is built
    gpus: bool = False  # whether some towers are on GPUs
    strategy: Dict[str, Any] = {}  # noqa: RUF012  its fields that are no defaults


class Run(NamedTuple):
    """One start of the program."""

    round: int  # in which each candidate runs once; 0 is the first run
    candidate: str
    step: float  # seconds; 0 if the run failed
    took: float  # seconds of the whole run
    fault: str = ""  # how it failed or hung
    built: Built = Built()


class Journal:
    """The lines of a file, to which this process and others append."""

    def __init__(self, path: Path):
        self.path = path
        self.runs = 0  # the number of the newest one
        self._read = 0  # bytes

    def write(self, line: Dict[str, Any]) -> None:
        """Append a line, after the half of one that a program may have left when it was killed."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(line)}\n")

    def new_lines(self) -> List[Dict[str, Any]]:
        """Return the lines since the last call; one that is still being written comes later."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            text, end, _ = file.read().rpartition(b"\n")
        self._read += len(text + end)
        lines = []
        for line in text.splitlines():
            with suppress(ValueError):  # an empty line, or half a one
                lines.append(json.loads(line))
        return lines

    def read(self) -> Tuple[Dict[str, Any], List[Run]]:
        """Return the first line of a journal, and the runs in all lines so far.

        Raises:
            HierAllreduceError: ``tune`` has not written the file.
        """
        runs = []
        lines = self.new_lines()
        try:
            settings = {key: lines[0][key] for key in ("program", "folder", "only")}
            for line in lines[1:]:
                self.runs = max(self.runs, line.pop("run"))
                if "round" in line:
                    runs.append(Run(built=Built(**line.pop("built")), **line))
        except (IndexError, KeyError, TypeError) as error:
            raise HierAllreduceError(f"{self.path} is no journal of tune: {error!r}") from None
        return settings, runs
