"""One run of the user's program: its process group is ended once enough steps are made.

A run fails if the program ends before it has made enough steps, or with a status that is not 0. It
hangs if no step comes for a while. Both are results. GPUs work asynchronously, so single steps tell
little, and means over windows of 10 steps do.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from ..text import count, duration
from . import inside
from .journal import Built, Candidate, Journal, Run

SKIPPED = 10  # steps: compilation, caches, the first batches
WINDOW = 10  # steps
STEPS = SKIPPED + 3 * WINDOW + 1  # of a run; a step begins with the one before
TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
LAST_SECONDS = 0.3  # in which a program may still fail after its last step
LOOK_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h has this number
# If the first run hangs, there is time for two others, and with hours nobody waits hours for it.
_START_SHARE = 1 / 3  # of the time of all runs
_LONGEST_START = 600.0  # seconds
_LONGEST_LINE = 160  # characters
# A terminal obeys such characters, so that a table with them would clear the screen.
_CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")


@contextmanager
def noted_signals() -> Iterator[List[int]]:
    """Note signals that end a process, so that none comes between a start and its end."""
    noted: List[int] = []
    handlers = {}
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # One that is ignored stays so, because nohup lets tune outlive its terminal.
        if signal.getsignal(ending) != signal.SIG_IGN:
            handlers[ending] = signal.signal(ending, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        for ending, handler in handlers.items():
            signal.signal(ending, handler)


class Told:
    """What a running program has told so far."""

    def __init__(self) -> None:
        self.begun = self.newest = time.monotonic()
        self.start = 0.0  # seconds until the first step
        self.stage = 0
        self._built_by_sum: Dict[str, Built] = {}
        self._times_by_sum: Dict[str, List[float]] = {}

    def read(self, lines: Sequence[Dict[str, Any]]) -> None:
        """Read lines of the journal."""
        for line in lines:
            self.newest = time.monotonic()
            stages = [stage for stage, key in enumerate(inside.STAGES) if key in line]
            self.stage = max(self.stage, *stages, 0)
            if "built" in line:
                self._built_by_sum[line["sum"]] = Built(**line["built"])
            if "time" in line:
                self._times_by_sum.setdefault(line["sum"], []).append(line["time"])
                self.start = self.start or self.newest - self.begun

    @property
    def _largest(self) -> str:
        """The training's sum: an evaluation adds up less. Of equal sums, the one that runs most."""
        sizes = []
        for sum_name, built in self._built_by_sum.items():
            steps = len(self._times_by_sum.get(sum_name, ()))
            sizes.append((built.bytes, steps, sum_name))
        return max(sizes, default=(0, 0, ""))[2]

    @property
    def built(self) -> Built:
        """The training's all-reduce."""
        return self._built_by_sum.get(self._largest, Built())

    @property
    def times(self) -> List[float]:
        """The seconds of its steps on the system's clock."""
        return self._times_by_sum.get(self._largest, [])

    @property
    def step(self) -> float:
        """The seconds of a step, by the median of its windows."""
        ends = self.times[SKIPPED:STEPS:WINDOW]
        return median((end - begin) / WINDOW for begin, end in zip(ends, ends[1:]))


class Runner:
    """Runs a program with candidates, until a deadline or a signal."""

    def __init__(
        self,
        settings: Dict[str, Any],
        journal: Journal,
        seconds: float,
        signals: Sequence[int],
        show: Callable[[str], None],
    ):
        self.program: List[str] = settings["program"]
        self.patience: float = settings["patience"]  # seconds without a step, which are a hang
        self._folder: str = settings["folder"]
        self.start_patience = min(_START_SHARE * seconds, _LONGEST_START)
        self._journal = journal
        self._deadline = time.monotonic() + seconds
        self._signals = signals  # that were noted: the first one ends all runs
        self._show = show  # gets how far a run is
        # Python runs a file of this name at its start if the folder is on PYTHONPATH.
        self._inside = journal.path.parent / "inside"
        self._inside.mkdir(exist_ok=True)
        shutil.copy(inside.__file__, self._inside / "sitecustomize.py")

    @property
    def is_over(self) -> bool:
        """Whether no other run may begin."""
        return bool(self._signals) or self.seconds_left() <= 0

    @property
    def log(self) -> Path:
        """The file with the program's output in the newest run."""
        return self._journal.path.parent / f"{self._journal.runs}.log"

    def seconds_left(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline - time.monotonic()

    def run(self, candidate: Candidate, round: int) -> Optional[Run]:
        """Run the program with a candidate; None if the time was over, or a signal came.

        Raises:
            OSError: the program cannot be started.
        """
        self._journal.runs += 1
        self._journal.new_lines()
        told = Told()
        process = self._started(candidate)
        try:
            fault = self._wait(process, candidate, told)
        finally:
            _end(process)
        if fault is None:
            return None
        step = told.step if fault == "" else 0.0
        # Whoever sets the system's clock back must not decide which all-reduce is used.
        if step <= 0:
            step = 0.0
            fault = fault or "failed: the clock of the system was set"
            fault += f"; last line of {self.log}: {last_line_of(self.log)}"
        took = time.monotonic() - told.begun
        run = Run(round, candidate, step, took, told.start, told.stage, fault, told.built)
        self._journal.end_run(run)
        return run

    def _started(self, candidate: Candidate) -> Any:
        """Start the program in a process group of its own."""
        request = {
            "run": self._journal.runs,
            "journal": str(self._journal.path),
            "baseline": candidate.baseline,
            "changes": candidate.changes,
        }
        # Its folder is before the user's, because Python takes the first sitecustomize.
        paths = [str(self._inside), os.environ.get("PYTHONPATH", "")]
        asked = {inside.VARIABLE: json.dumps(request), "PYTHONPATH": ":".join(filter(None, paths))}
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self.program,
                cwd=self._folder,
                env={**os.environ, **asked},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_killed_with_parent(),
            )

    def _wait(self, process: Any, candidate: Candidate, told: Told) -> Optional[str]:
        """Wait until a run has enough steps; return its fault, or "", or None if it is cut."""
        while True:
            # The process is asked before the journal, because one that has ended writes no more.
            status = process.poll()
            # A process that has left the group of an earlier run may still write its lines.
            lines = self._journal.new_lines()
            told.read([line for line in lines if line.get("run") == self._journal.runs])
            steps = len(told.times)
            if steps >= STEPS and status is None:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(LAST_SECONDS)
            if status:
                by = f"status {status}" if status > 0 else signal.Signals(-status).name
                return f"failed: {by} after {count(steps, 'step')}"
            if steps >= STEPS:
                return ""
            if status == 0:
                return f"ended after {count(steps, 'step')}, {STEPS} are needed"
            if self.is_over:
                return None
            waits = f"step {steps}" if steps else f"no step yet ({inside.STAGES[told.stage]})"
            self._show(f"{candidate.name}: {waits}")
            allowed = self.patience if steps else self.start_patience
            if time.monotonic() - told.newest > allowed:
                return f"hung: no step after step {steps} for {duration(allowed)}, killed"
            time.sleep(LOOK_SECONDS)


def _killed_with_parent() -> Optional[Callable[[], None]]:
    """Return a function for a new process, which Linux then kills with this one."""
    if sys.platform != "linux":
        return None
    # The library is loaded here, because between fork and exec a process may load nothing.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_for_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        # This process may have ended in between.
        if os.getppid() != parent:
            os._exit(1)

    return ask_for_signal


def _end(process: Any) -> None:
    """End the process group of a run: SIGTERM, and SIGKILL after five seconds."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(process.pid, ending)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERM_SECONDS)


def last_line_of(log: Path) -> str:
    """Return the last line of a program's output, which is its error where one has ended it."""
    # A bar ends its lines with \r only, so that all of them would be one line without this.
    lines = re.split(r"[\r\n]+", log.read_text(encoding="utf-8", errors="replace"))
    shown = [_CONTROL.sub("", line).strip()[:_LONGEST_LINE] for line in lines]
    return next(filter(None, reversed(shown)), "none")
