"""One run of the user's program, ended with all its processes once enough steps are measured.

A run fails if the program ends before it has made enough steps. It hangs if no step comes for a
while. Both are results. GPUs work asynchronously, so single steps tell little, and means over
windows of 20 steps do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import psutil

from ...formatting import count, duration
from ...measured import VARIABLE, Measurement, read_facts
from ...planning.candidate import NOW, Candidate
from . import faults, observer
from .progress import Progress

LEFT_OUT = 10  # steps: compilation, caches, the first batches
WINDOW = 20  # steps
LEAST = LEFT_OUT + WINDOW + 1  # steps of a run
MOST = LEFT_OUT + 100 * WINDOW + 1
MERCY = 5.0  # seconds between SIGTERM and SIGKILL, and for the end after it


class Run(NamedTuple):
    """One run of the program.

    Attributes:
        candidate: its all-reduce.
        seconds: of a step, in every window of 20 steps; none if the run has a fault.
        turn: the number of the turn in which each candidate runs once: runs of a turn are pairs.
        output: the file with what the program has printed.
        fault: why there are no seconds.
        facts: about the program's all-reduce.
        overhead: seconds of the run without its steps: most are the program's start.
    """

    candidate: Candidate
    seconds: List[float]
    turn: int
    output: Path
    fault: str = ""
    facts: Dict[str, Any] = {}  # noqa: RUF012  no one changes it
    overhead: float = 0.0

    @property
    def step(self) -> float:
        """The median of the windows, in seconds."""
        return median(self.seconds)


class _Clock:
    """The steps that a run has made, as its clock file has them."""

    def __init__(self, path: Path):
        self.path = path
        self.begun = time.monotonic()
        self.first = 0.0  # seconds until the first step
        self.last = self.begun  # the moment of the newest step
        self.steps = 0

    def times(self) -> List[float]:
        """Return the seconds of all steps; a line that is still being written is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="ascii").split("\n")[:-1]
        return [float(line) for line in lines if line]

    def look(self) -> None:
        """Count the steps."""
        steps = len(self.times())
        if steps == self.steps:
            return
        self.last = time.monotonic()
        self.first = self.first or self.last - self.begun
        self.steps = steps

    def stepping(self) -> float:
        """Return the seconds between the first and the last step."""
        times = self.times()
        return times[-1] - times[0] if times else 0.0

    def windows(self) -> List[float]:
        """Return the seconds of a step in every window."""
        times = self.times()
        starts = range(LEFT_OUT, len(times) - WINDOW, WINDOW)
        return [(times[start + WINDOW] - times[start]) / WINDOW for start in starts]


class Runner:
    """Runs a program with candidates, until a deadline."""

    def __init__(
        self,
        command: Sequence[str],
        patience: float,
        start_patience: float,
        seconds: float,
        folder: Path,
        progress: Progress,
    ):
        """Begin to count time.

        Args:
            command: the program and its arguments.
            patience: seconds without a step, after which a program hangs.
            start_patience: the same before the first step; it may change between runs.
            seconds: until the deadline of all runs.
            folder: for the programs' outputs.
            progress: tells the user how far it is.
        """
        self.command = list(command)
        self.deadline = time.monotonic() + seconds
        self.patience = patience
        self.start_patience = start_patience
        self._folder = folder
        self._progress = progress
        self._number = 0
        # a folder on PYTHONPATH: Python runs the file of this name at its start
        self._observer = folder / "observer"
        self._observer.mkdir()
        shutil.copy(observer.__file__, self._observer / "sitecustomize.py")

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def run(self, candidate: Candidate, share: float, turn: int) -> Optional[Run]:
        """Run the program for ``share`` seconds of steps; None if the deadline came too early.

        Raises:
            NothingMeasured: the program trains without an all-reduce of this package.
            OSError: the program cannot be started.
        """
        self._number += 1
        name = self._folder / f"{self._number}-{candidate.name}"
        clock = _Clock(name.with_suffix(".clock"))
        output = name.with_suffix(".log")
        setting = Measurement(candidate.peer, candidate.changes, str(clock.path)).as_text()
        process = self._started(setting, output)
        try:
            fault = self._wait(process, clock, share, candidate.name)
        finally:
            end(process, setting)
        if fault is None:
            return None
        facts = read_facts(str(clock.path))
        seconds = clock.windows()
        if fault:
            fault = faults.explained(fault, output)
            seconds = []
        overhead = max(0.0, time.monotonic() - clock.begun - clock.stepping())
        return Run(candidate, seconds, turn, output, fault, facts, overhead)

    def _started(self, setting: str, output: Path) -> Any:
        """Start the program in a process group of its own."""
        paths = [str(self._observer), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            VARIABLE: setting,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        with output.open("wb") as log:
            return subprocess.Popen(
                self.command,
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait(self, process: Any, clock: _Clock, share: float, name: str) -> Optional[str]:
        """Wait until a run has enough steps; return its fault, or "", or None if time is up."""
        while True:
            status = process.poll()  # before the clock: a program that has ended writes no more
            clock.look()
            now = time.monotonic()
            self._show(clock, now, name)
            if clock.steps >= LEAST:
                is_long = now - clock.begun - clock.first > share
                if is_long or status is not None or clock.steps >= MOST or now > self.deadline:
                    return ""
            if status is not None:
                return _early_end(status, clock.steps)
            if now > self.deadline:
                return None
            fault = self._hang(clock, now)
            if fault:
                return fault
            time.sleep(0.1)

    def _hang(self, clock: _Clock, now: float) -> str:
        """Return how a run hangs; an empty text if it does not.

        Raises:
            NothingMeasured: as :meth:`run`.
        """
        waited = now - clock.last
        if not clock.steps:
            observer.check(str(clock.path), self.start_patience)
        allowed = self.patience if clock.steps else self.start_patience
        if waited <= allowed:
            return ""
        after = f"after step {clock.steps}" if clock.steps else "at all"
        return f"hung: no step {after} for {duration(allowed, 4)}, killed"

    def _show(self, clock: _Clock, now: float, name: str) -> None:
        """Tell the user which step of which run it is."""
        who = "the program as it is" if name == NOW else name
        waits = now - clock.begun
        text = f"step {clock.steps}" if clock.steps else f"no step yet for {waits:.0f} s"
        self._progress.show(f"{who}: {text}")


def _early_end(status: int, steps: int) -> str:
    """Return the fault of a program that has ended before it made enough steps."""
    if status == 0:
        return f"ended after {count(steps, 'step')}, {LEAST} are needed"
    by = f"status {status}" if status > 0 else signal.Signals(-status).name
    when = f"after {count(steps, 'step')}" if steps else "before its first step"
    return f"failed: {by} {when}"


def end(process: Any, setting: str) -> None:
    """End all processes of a run: SIGTERM, and SIGKILL after five seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        members = _members(process.pid, setting)
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)
        # psutil.wait_procs would wait for zombies too, which nobody may reap in a container
        deadline = time.monotonic() + MERCY
        while time.monotonic() < deadline:
            process.poll()
            if not _members(process.pid, setting):
                return
            time.sleep(0.02)


def _members(group: int, setting: str) -> List[Any]:
    """Return the processes of a run: of its group, or with its setting in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is somebody else's
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if os.getpgid(process.pid) == group or process.environ().get(VARIABLE) == setting:
                found.append(process)
    return found
