"""What ``tune`` and the programs that it measures tell each other.

::

    tune ──► HIER_ALLREDUCE_TUNE={"baseline": "", "changes": {…}, "clock": "3.clock", …}
    tune ◄── 3.clock         a line with the time at every step
    tune ◄── 3.clock.facts   the program's all-reduce
    tune ◄── 3.clock.begun   Python has run ``observer``; 3.clock.seen: TensorFlow runs without ours
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, NamedTuple

from hier_allreduce.errors import HierAllreduceError
from .observer import VARIABLE


class Request(NamedTuple):
    """What a program is to do in one run.

    Attributes:
        baseline: the name of an all-reduce that is not ours; empty for ours.
        changes: fields of :class:`hier_allreduce.Strategy`, instead of the program's.
        clock: the path of the file that gets a line at every step.
        strategies: changes of other candidates by their names; the program tells their plans.
        traced: the number of the step whose cost the program tells, from 1; 0 for none.
    """

    baseline: str
    changes: Dict[str, Any]
    clock: str
    strategies: Dict[str, Dict[str, Any]] = {}  # noqa: RUF012  no one changes it
    traced: int = 0

    @property
    def text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(self._asdict())

    @classmethod
    def read(cls, setting: str) -> Request:
        """Return the request in the environment variable.

        Raises:
            HierAllreduceError: ``tune`` has not written it.
        """
        try:
            return cls(**json.loads(setting))
        except (TypeError, ValueError):
            raise HierAllreduceError(
                f"{VARIABLE}={setting!r}: `hier-allreduce tune` sets this variable for the program"
                " that it runs; leave it as it is"
            ) from None


class ProgramFacts(NamedTuple):
    """The all-reduce that a program has built.

    Attributes:
        front_end: ``"towers"``, ``"keras"`` or ``"tensorpack"``.
        update: how it updates the variables.
        towers: K; 0 before it is built.
        gpus: whether some towers are on GPUs.
        bytes: the size of all gradients of a tower.
        plan: a text that differs between plans; of two all-reduces, that with more bytes.
        plans: such a text for each of the request's ``strategies`` that fits K towers.
        kept: fields of the program's strategy that are no defaults, for candidates of ours that
            change other ones; a function as ``algorithm`` is None.
        cost: the cost of the traced step, in a line.
    """

    front_end: str = "towers"
    update: str = "replicated"
    towers: int = 0
    gpus: bool = False
    bytes: int = -1
    plan: str = ""
    plans: Dict[str, str] = {}  # noqa: RUF012  no one changes it
    kept: Dict[str, Any] = {}  # noqa: RUF012  no one changes it
    cost: str = ""

    @classmethod
    def read(cls, clock: str) -> ProgramFacts:
        """Return the facts beside a clock file."""
        path = Path(clock + ".facts")
        if not path.exists():
            return cls()
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, clock: str) -> None:
        """Write the facts beside a clock file."""
        path = Path(clock + ".facts.new")
        path.write_text(json.dumps(self._asdict()), encoding="utf-8")
        # The file gets its name when it is whole, so that the reader never sees half a file.
        path.replace(clock + ".facts")
