"""One run of the user's program, ended with all its processes once enough steps are measured.

A run fails if the program ends before it has made enough steps, or if its times cannot be read. It
hangs if no step comes for a while. Both are results. GPUs work asynchronously, so single steps tell
little, and means over windows of 20 steps do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from hier_allreduce.formatting import count, duration
from . import faults, observer
from .candidates import Candidate
from .processes import adopt_orphans, end
from .progress import Progress
from .protocol import ProgramFacts, Request

LEFT_OUT = 10  # steps: compilation, caches, the first batches
TRACED = LEFT_OUT  # the last of them
WINDOW = 20  # steps
LEAST = LEFT_OUT + WINDOW + 1  # steps of a run
MOST = LEFT_OUT + 100 * WINDOW + 1
CLOCK_SET = 0.01  # seconds by which the system's clock may part from a monotonic one in a run
UNREADABLE = "failed: the times cannot be read"  # how the fault of such a run begins
TIME_OVER = "the time was over"  # likewise
CLOCK_WAS_SET = "the system's clock was set"  # how such a fault ends
# If the first run hangs, there is time for two others, and with hours nobody waits hours for it.
START_SHARE = 1 / 3  # of the time of all runs, for the start of the first one
LONGEST_START = 600.0  # seconds


class Run(NamedTuple):
    """One run of the program.

    Attributes:
        candidate: its all-reduce.
        seconds: a step's seconds in every window of 20 steps; none if the run failed.
        round: the number of the round in which each candidate runs once; 0 is the first run.
        output: the file with what the program has printed.
        fault: how the program failed or hung, or that the time was over.
        facts: what the program has told about its all-reduce.
        overhead: seconds of the run without its steps: most are the program's start.
    """

    candidate: Candidate
    seconds: List[float]
    round: int
    output: Path
    fault: str = ""
    facts: ProgramFacts = ProgramFacts()
    overhead: float = 0.0

    @property
    def has_hung(self) -> bool:
        """Whether the program stopped making steps."""
        return self.fault.startswith("hung")

    @property
    def is_cut(self) -> bool:
        """Whether the deadline has ended it, which tells nothing about the candidate."""
        return self.fault.startswith(TIME_OVER)

    @property
    def lost_its_times(self) -> bool:
        """Whether somebody has set the clock, which tells nothing about the candidate either."""
        return self.fault.endswith(CLOCK_WAS_SET)

    @property
    def step(self) -> float:
        """The median of the windows, in seconds."""
        return median(self.seconds)


class _Clock:
    """The steps that a run has made, as its clock file has them."""

    def __init__(self, path: Path):
        self.path = path
        self.begun = time.monotonic()
        self.start = 0.0  # seconds until the first step
        self.newest = self.begun  # the moment of the newest step
        self.steps = 0
        self._ahead = time.time() - self.begun  # the wall clock's lead over the monotonic one

    def lines(self) -> List[str]:
        """Return a line for each step; one that is still being written is left out."""
        if not self.path.exists():
            return []
        return self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]

    def look(self) -> None:
        """Count the steps."""
        steps = len(self.lines())
        if steps == self.steps:
            return
        self.newest = time.monotonic()
        self.start = self.start or self.newest - self.begun
        self.steps = steps

    def windows(self) -> List[float]:
        """Return the seconds of a step in every window.

        Raises:
            ValueError: the times cannot be read.
        """
        times = [float(line) for line in self.lines()]
        # The steps have the wall clock's time, which somebody may set in the middle of a run.
        if abs(time.time() - time.monotonic() - self._ahead) > CLOCK_SET:
            raise ValueError(CLOCK_WAS_SET)
        seconds = []
        for start in range(LEFT_OUT, len(times) - WINDOW, WINDOW):
            seconds.append((times[start + WINDOW] - times[start]) / WINDOW)
        # NaN fails every comparison, so that it is refused here too.
        if not all(0 < step < float("inf") for step in seconds):
            raise ValueError("times do not rise")
        return seconds


class Runner:
    """Runs a program with candidates, until a deadline.

    Attributes:
        start_patience: seconds without a first step, after which a program hangs; later runs may
            have others.
    """

    def __init__(
        self,
        command: Sequence[str],
        patience: float,
        seconds: float,
        folder: Path,
        progress: Progress,
    ):
        """Begin to count time.

        Args:
            command: the program and its arguments.
            patience: seconds without another step, after which a program hangs.
            seconds: the time until the deadline of all runs.
            folder: where the outputs of the programs go.
            progress: tells the user how far it is.
        """
        self.command = list(command)
        self.deadline = time.monotonic() + seconds
        self.patience = patience
        self.start_patience = min(START_SHARE * seconds, LONGEST_START)
        self._folder = folder
        self._progress = progress
        self._started_runs = 0
        self._strangers = adopt_orphans()
        # Python runs a file of this name at its start if the folder is on PYTHONPATH.
        self._observer = folder / "observer"
        self._observer.mkdir()
        shutil.copy(observer.__file__, self._observer / "sitecustomize.py")

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.deadline - time.monotonic()

    def run(
        self,
        candidate: Candidate,
        seconds: float,
        round: int,
        strategies: Optional[Dict[str, Dict[str, Any]]] = None,
    ) -> Run:
        """Run the program, with so many seconds of steps.

        Args:
            candidate: its all-reduce.
            seconds: the time from the first step on; a run has at least 31 steps.
            round: the number of the round; only in round 0 the whole program may be refused.
            strategies: changes of other candidates, whose plans the facts are to have.

        Raises:
            NothingMeasured: in round 0, the program trains without an all-reduce of this package,
                or leaves the PYTHONPATH of ``tune`` out.
            OSError: the program cannot be started.
        """
        self._started_runs += 1
        stem = self._folder / f"{self._started_runs}-{candidate.name.replace(' ', '-')}"
        clock = _Clock(stem.with_suffix(".clock"))
        output = stem.with_suffix(".log")
        # A trace slows its step down, so that only the first run has one, which counts in no ratio.
        traced = 0 if round else TRACED
        request = Request(
            baseline=candidate.baseline,
            changes=candidate.changes,
            clock=str(clock.path),
            strategies=strategies or {},
            traced=traced,
        )
        process = self._started(request, output)
        try:
            fault = self._wait(process, clock, seconds, candidate, round)
        finally:
            end(process, self._strangers)
        took = time.monotonic() - clock.begun
        facts = ProgramFacts.read(str(clock.path))
        run = Run(candidate, [], round, output, facts=facts, overhead=took)
        # A program may fail before any Python starts, but one that hangs or ends should have one.
        should_have = round == 0 and fault and not fault.startswith("failed")
        if should_have and not observer.has_begun(str(clock.path)):
            raise faults.NothingMeasured(
                f"{' '.join(self.command)} {fault}: no Python in it has the PYTHONPATH that tune"
                " sets; let the program add to it (PYTHONPATH=.:$PYTHONPATH), and leave out -E, -I"
                " and -S"
            )
        if fault:
            return run._replace(fault=faults.explained(fault, output))
        try:
            windows = clock.windows()
        except ValueError as error:
            return run._replace(fault=f"{UNREADABLE}: {error}")
        overhead = max(0.0, took - (clock.newest - clock.begun - clock.start))
        return run._replace(seconds=windows, overhead=overhead)

    def _started(self, request: Request, output: Path) -> Any:
        """Start the program in a process group of its own."""
        # The observer's folder is before the user's, because Python takes the first sitecustomize.
        paths = [str(self._observer), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            observer.VARIABLE: request.text,
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

    def _wait(
        self, process: Any, clock: _Clock, seconds: float, candidate: Candidate, round: int
    ) -> str:
        """Wait until a run has enough steps, and return its fault, or "".

        Raises:
            NothingMeasured: as :meth:`run`.
        """
        while True:
            # The process is asked before the clock, because one that has ended writes no more.
            status = process.poll()
            clock.look()
            now = time.monotonic()
            waited = now - clock.begun
            step = f"step {clock.steps}" if clock.steps else f"no step yet for {waited:.0f} s"
            self._progress.show(f"{candidate.name}: {step}")
            if clock.steps >= LEAST:
                is_long = now - clock.begun - clock.start > seconds
                if is_long or status is not None or clock.steps >= MOST or now > self.deadline:
                    return ""
            if status == 0:
                return f"ended after {count(clock.steps, 'step')}, {LEAST} are needed"
            if status is not None:
                by = f"status {status}" if status > 0 else signal.Signals(-status).name
                after = f"after {count(clock.steps, 'step')}"
                return f"failed: {by} {after if clock.steps else 'before its first step'}"
            if now > self.deadline:
                return f"{TIME_OVER} before step {LEAST}" if clock.steps else f"{TIME_OVER}: {step}"
            # Without ours the clock sees no step, so the first run shows that the program has it.
            if not clock.steps and round == 0:
                observer.check(str(clock.path))
            allowed = self.patience if clock.steps else self.start_patience
            if now - clock.newest > allowed:
                after = f"after step {clock.steps}" if clock.steps else "at all"
                return f"hung: no step {after} for {duration(allowed, 4)}, killed"
            time.sleep(0.1)
