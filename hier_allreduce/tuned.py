"""The candidate that ``hier-allreduce tune`` measures in this process: the only reader of ``HIER_ALLREDUCE_TUNE``.

::

    HIER_ALLREDUCE_TUNE={"name": "rule", "peer": "", "changes": {"algorithm": "flat"}, "clock": "/tmp/…/3-rule.clock"}

Without the variable nothing differs. With it, the program's all-reduce is replaced, and one op appends TensorFlow's
time to the clock file at every step. Facts, from which the candidates follow, are written beside it. No TensorFlow.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

VARIABLE = "HIER_ALLREDUCE_TUNE"
_noted: Dict[str, Any] = {"front_end": "towers"}


class Candidate(NamedTuple):
    """An all-reduce to measure: the program's as it is, another strategy of ours, or a peer.

    Attributes:
        name: for ``--only`` and the table.
        peer: the name of an all-reduce that is not ours.
        changes: fields of :class:`hier_allreduce.Strategy`, instead of the program's.
        clock: the path of the file that gets a line at every step; empty before a run.
    """

    name: str
    peer: str = ""
    changes: Dict[str, Any] = {}  # noqa: RUF012  no one changes it
    clock: str = ""

    def as_text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(self._asdict())

    def note(self, **facts: Any) -> None:
        """Write facts about the program beside the clock file; ``bytes`` tells which all-reduce has the gradients."""
        if "bytes" in facts and facts["bytes"] <= _noted.get("bytes", -1):
            return
        _noted.update(facts)
        path = Path(self.clock + ".new")
        path.write_text(json.dumps(_noted), encoding="utf-8")
        path.replace(self.clock + ".facts")  # the reader never sees half a file


@lru_cache(maxsize=None)
def tuned() -> Optional[Candidate]:
    """Return the candidate of this process; None unless ``hier-allreduce tune`` has started it."""
    text = os.environ.get(VARIABLE)
    return Candidate(**json.loads(text)) if text else None


def read_facts(clock: str) -> Dict[str, Any]:
    """Return the facts beside a clock file; none before the program has built an all-reduce."""
    path = Path(clock + ".facts")
    facts: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return facts
