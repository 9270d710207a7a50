"""The journal: one file of JSON lines, which ``tune`` and the programs that it measures write.

::

    {"program": ["python", "train.py"], "folder": "/home/me", "only": [], "patience": 60.0}
    {"run": 1, "sum": "71-1", "built": {…}}              the program's own lines, as ``inside`` says
    {"run": 1, "sum": "71-1", "time": 1795629992.33}
    {"run": 1, "round": 0, "candidate": {…}, "step": 0.01, …}     the run has ended

``--continue`` needs the first line, and those of runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from hier_allreduce import HierAllreduceError

CURRENT = "the program as it is"


class Candidate(NamedTuple):
    """An all-reduce to measure: the program's as it is, another strategy of ours, or a baseline."""

    name: str = CURRENT  # in the table, and for --only
    baseline: str = ""  # the name of an all-reduce that is not ours
    changes: Dict[str, Any] = {}  # noqa: RUF012  fields of Strategy, instead of the program's
    is_original: bool = False  # whether the program used it before hier_allreduce

    @property
    def is_current(self) -> bool:
        """Whether this is the program as it is."""
        return self.name == CURRENT

    @property
    def title(self) -> str:
        """The name in the table and in sentences."""
        return f"{self.name} (as it was)" if self.is_original else self.name


class Built(NamedTuple):
    """The all-reduce that a program has built; of several, the one with most bytes."""

    bytes: int = 0  # of one tower's gradients
    front_end: str = "towers"
    update: str = ""
    towers: int = 0  # 0: none is built
    gpus: bool = False  # whether some towers are on GPUs
    strategy: Dict[str, Any] = {}  # noqa: RUF012  its fields that are no defaults
    plan: str = ""  # a digest that equal plans share; empty for a baseline


class Run(NamedTuple):
    """One start of the program."""

    round: int  # in which each candidate runs once; 0 is the first run
    candidate: Candidate
    step: float  # seconds; 0 if the run failed
    took: float  # seconds of the whole run
    start: float  # seconds until its first step
    stage: int  # of inside.STAGES: how far it has come
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

    def end_run(self, run: Run) -> None:
        """Append the line of a run that has ended."""
        facts = {"candidate": run.candidate._asdict(), "built": run.built._asdict()}
        self.write({"run": self.runs, **run._asdict(), **facts})

    def new_lines(self) -> List[Dict[str, Any]]:
        """Return the lines since the last call; one that is still being written comes later."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")
        self._read += len(whole[0]) + len(whole[1])
        lines = []
        for text in whole[0].decode("utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # an empty line, or half a one
                continue
            if isinstance(line, dict):
                lines.append(line)
        return lines

    def read(self) -> Tuple[Dict[str, Any], List[Run]]:
        """Return the first line of a journal, and the runs in all lines so far.

        Raises:
            HierAllreduceError: ``tune`` has not written the file.
        """
        runs = []
        lines = self.new_lines()
        try:
            settings = {key: lines[0][key] for key in ("program", "folder", "only", "patience")}
            for line in lines[1:]:
                self.runs = max(self.runs, line.pop("run"))
                if "round" in line:
                    candidate = Candidate(**line.pop("candidate"))
                    built = Built(**line.pop("built"))
                    runs.append(Run(candidate=candidate, built=built, **line))
        except (IndexError, KeyError, TypeError) as error:
            raise HierAllreduceError(f"{self.path} is no journal of tune: {error!r}") from None
        return settings, runs
