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

from . import inside
from .candidates import changes_of
from .journal import Run, append, lines_in

SKIPPED = 10  # steps: compilation, caches, the first batches
WINDOW = 10  # steps
STEPS = SKIPPED + 3 * WINDOW + 1  # of a run; a step begins with the one before
TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
LAST_SECONDS = 0.3  # in which a program may still fail after its last step
LOOK_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h has this number
_START_PATIENCE = 3  # times as long as for a step
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


def training_in(lines: Sequence[Dict[str, Any]]) -> Tuple[Dict[str, Any], List[float]]:
    """Return a program's all-reduce, and the seconds of its steps, by its lines in the journal.

    Of several it is the training's: an evaluation adds up fewer bytes. Of processes with equally
    many it is the one that runs most.
    """
    built_by_sum: Dict[str, Dict[str, Any]] = {}
    times_by_sum: Dict[str, List[float]] = defaultdict(list)
    for line in lines:
        if "built" in line:
            built_by_sum[line["sum"]] = line["built"]
        else:
            times_by_sum[line["sum"]].append(line["time"])
    sizes = {}
    for name, built in built_by_sum.items():
        sizes[name] = built["bytes"], len(times_by_sum[name])
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return built_by_sum.get(largest, {}), times_by_sum[largest]


class Runner:
    """Runs a program with candidates, until a deadline or a signal."""

    def __init__(
        self,
        journal: Path,
        settings: Dict[str, Any],
        patience: float,
        seconds: float,
        signals: Sequence[int],
        show: Callable[[str], None],
    ):
        self._patience = patience  # seconds without a step, which are a hang
        self._program: List[str] = settings["program"]
        self._folder: str = settings["folder"]
        self._journal = journal
        self._number = len(list(journal.parent.glob("*.log")))  # of the newest run
        self._deadline = time.monotonic() + seconds
        self._signals = signals  # that were noted: the first one ends all runs
        self._show = show  # gets how far a run is
        # Python runs a file of this name at its start if the folder is on PYTHONPATH.
        self._inside = journal.parent / "inside"
        self._inside.mkdir(exist_ok=True)
        shutil.copy(inside.__file__, self._inside / "sitecustomize.py")

    @property
    def log(self) -> Path:
        """The file with the program's output in the newest run."""
        return self._journal.parent / f"{self._number}.log"

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
        self._number += 1
        offset = self._journal.stat().st_size
        begun = time.monotonic()
        process = self._started(candidate)
        try:
            result = self._wait(process, candidate, offset)
        finally:
            _end(process)
        if result is None:
            return None
        fault, built, times = result
        if fault:
            fault += f"; last line of {self.log}: {_last_line_of(self.log)}"
        ends = times[SKIPPED:STEPS:WINDOW]
        windows = [(end - begin) / WINDOW for begin, end in zip(ends, ends[1:])]
        step = 0.0 if fault else median(windows)
        run = Run(round, candidate, step, time.monotonic() - begun, fault, **built)
        append(self._journal, {"run": self._number, **run._asdict()})
        return run

    def _started(self, candidate: str) -> Any:
        """Start the program in a process group of its own."""
        request = {
            "run": self._number,
            "journal": str(self._journal),
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

    def _wait(
        self, process: Any, candidate: str, offset: int
    ) -> Optional[Tuple[str, Dict[str, Any], List[float]]]:
        """Wait until a run, whose lines come after so many bytes, has enough steps.

        Returns:
            its fault, or "", its all-reduce, and the seconds of its steps; None if it is cut.
        """
        seen, newest = 0, time.monotonic()
        while self.seconds_left() > 0:
            # The process is asked before the journal, because one that has ended writes no more.
            status = process.poll()
            # A process that has left the group of an earlier run may still write its lines.
            lines = lines_in(self._journal, offset)
            own = [line for line in lines if line["run"] == self._number]
            if len(own) > seen:
                seen, newest = len(own), time.monotonic()
            built, times = training_in(own)
            steps = len(times)
            if steps >= STEPS and status is None:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(LAST_SECONDS)
            if status:
                by = f"status {status}" if status > 0 else signal.Signals(-status).name
                return f"failed: {by} after step {steps}", built, times
            if steps >= STEPS:
                return "", built, times
            if status == 0:
                return f"ended after step {steps} of {STEPS}", built, times
            self._show(f"{candidate}: step {steps}")
            allowed = self._patience if steps else _START_PATIENCE * self._patience
            if time.monotonic() - newest > allowed:
                fault = f"hung: no step after step {steps} for {allowed:g} s (--patience), killed"
                return fault, built, times
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
