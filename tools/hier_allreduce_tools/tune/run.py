"""One run of the user's program: its process group is ended once enough steps are made.

A run fails if the program ends before it has made enough steps, or with a status that is not 0. It
hangs if no step comes for a while. Both are results. GPUs work asynchronously, so single steps tell
little, and means over windows of 10 steps do.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from ..text import count
from . import inside
from .candidates import changes_of
from .journal import Built, Journal, Run

SKIPPED = 10  # steps: compilation, caches, the first batches
WINDOW = 10  # steps
STEPS = SKIPPED + 3 * WINDOW + 1  # of a run; a step begins with the one before
TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
LAST_SECONDS = 0.3  # in which a program may still fail after its last step
LOOK_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h has this number
# If the first run hangs, there is time for two others, and with hours nobody waits hours for it.
_START_SHARE = 1 / 4  # of the time of all runs
_LONGEST_START = 600.0  # seconds
_LONGEST_LINE = 160  # characters of a log


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


def training_in(lines: Sequence[Dict[str, Any]]) -> Tuple[Built, List[float]]:
    """Return a program's all-reduce, and the seconds of its steps, by its lines in the journal.

    Of several it is the training's: an evaluation adds up fewer bytes. Of those with equally many
    it is the one that runs most.
    """
    built_by_sum: Dict[str, Built] = {}
    times_by_sum: Dict[str, List[float]] = defaultdict(list)
    for line in lines:
        if "built" in line:
            built_by_sum[line["sum"]] = Built(**line["built"])
        else:
            times_by_sum[line["sum"]].append(line["time"])
    sizes = {name: (built.bytes, len(times_by_sum[name])) for name, built in built_by_sum.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return built_by_sum.get(largest, Built()), times_by_sum[largest]


def step_of(times: Sequence[float]) -> float:
    """Return the seconds of a step, by the median of its windows."""
    ends = times[SKIPPED:STEPS:WINDOW]
    return median((end - begin) / WINDOW for begin, end in zip(ends, ends[1:]))


class Runner:
    """Runs a program with candidates, until a deadline or a signal."""

    def __init__(
        self,
        journal: Journal,
        settings: Dict[str, Any],
        patience: float,
        seconds: float,
        signals: Sequence[int],
        show: Callable[[str], None],
    ):
        self.patience = patience  # seconds without a step, which are a hang
        self.start_patience = min(_START_SHARE * seconds, _LONGEST_START)
        self._program: List[str] = settings["program"]
        self._folder: str = settings["folder"]
        self._journal = journal
        self._deadline = time.monotonic() + seconds
        self._signals = signals  # that were noted: the first one ends all runs
        self._show = show  # gets how far a run is
        # Python runs a file of this name at its start if the folder is on PYTHONPATH.
        self._inside = journal.path.parent / "inside"
        self._inside.mkdir(exist_ok=True)
        shutil.copy(inside.__file__, self._inside / "sitecustomize.py")

    @property
    def log(self) -> Path:
        """The file with the program's output in the newest run."""
        return self._journal.path.parent / f"{self._journal.runs}.log"

    def seconds_left(self) -> float:
        """Return the seconds until no other run may begin."""
        return 0.0 if self._signals else self._deadline - time.monotonic()

    def run(self, candidate: str, round: int) -> Optional[Run]:
        """Run the program with a candidate; None if the time is over, or a signal came.

        Raises:
            OSError: the program cannot be started.
        """
        if self.seconds_left() <= 0:
            return None
        self._journal.runs += 1
        self._journal.new_lines()
        lines: List[Dict[str, Any]] = []
        begun = time.monotonic()
        process = self._started(candidate)
        try:
            fault = self._wait(process, candidate, lines)
        finally:
            _end(process)
        if fault is None:
            return None
        if fault:
            fault += f"; last line of {self.log}: {_last_line_of(self.log)}"
        built, times = training_in(lines)
        step = 0.0 if fault else step_of(times)
        run = Run(round, candidate, step, time.monotonic() - begun, fault, built)
        line = {"run": self._journal.runs, **run._asdict(), "built": built._asdict()}
        self._journal.write(line)
        return run

    def _started(self, candidate: str) -> Any:
        """Start the program in a process group of its own."""
        request = {
            "run": self._journal.runs,
            "journal": str(self._journal.path),
            "candidate": candidate,
            "changes": changes_of(candidate),
        }
        # Its folder is before the user's, because Python takes the first sitecustomize.
        paths = [str(self._inside), os.environ.get("PYTHONPATH", "")]
        asked = {inside.VARIABLE: json.dumps(request), "PYTHONPATH": ":".join(filter(None, paths))}
        with self.log.open("wb") as log:
            return subprocess.Popen(
                self._program,
                cwd=self._folder,
                env={**os.environ, **asked},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_killed_with_parent(),
            )

    def _wait(self, process: Any, candidate: str, lines: List[Dict[str, Any]]) -> Optional[str]:
        """Wait until a run has enough steps; return its fault, or "", or None if it is cut.

        ``lines`` gets those of the run.
        """
        newest = time.monotonic()
        while self.seconds_left() > 0:
            # The process is asked before the journal, because one that has ended writes no more.
            status = process.poll()
            for line in self._journal.new_lines():
                # A process that has left the group of an earlier run may still write its lines.
                if line.get("run") == self._journal.runs:
                    lines.append(line)
                    newest = time.monotonic()
            steps = len(training_in(lines)[1])
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
            self._show(f"{candidate}: step {steps}")
            allowed = self.patience if steps else self.start_patience
            if time.monotonic() - newest > allowed:
                return f"hung: no step after step {steps} for {allowed:.3g} s, killed"
            time.sleep(LOOK_SECONDS)
        return None


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


def _last_line_of(log: Path) -> str:
    """Return the last line of a program's output, which is its error where one has ended it.

    It is quoted, because a terminal obeys some characters, and would clear the screen; and cut at
    its end, because the class of an error comes first.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return repr(next(filter(str.strip, reversed(lines)), "")[:_LONGEST_LINE])
