"""One run of the user's program: its process group is ended once enough steps are made.

A run fails if the program ends before it has made enough steps, or with a status that is not 0. It
hangs if no step comes for a while. Both are results. GPUs work asynchronously, so single steps tell
little, and means over windows of 10 steps do.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from tqdm import tqdm

from . import inside
from .candidates import changes_of
from .inside.sitecustomize import VARIABLE, MeasuredProgram
from .journal import Run, append, lines_in

SKIPPED = 10  # steps: compilation, caches, the first batches
WINDOW = 10  # steps
STEPS = SKIPPED + 3 * WINDOW + 1  # of a run; a step begins with the one before
TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
LOOK_SECONDS = 0.3  # between two looks at a run
_PR_SET_PDEATHSIG = 1  # linux/prctl.h has this number
_LONGEST_LINE = 160  # characters of a log
# Its thread would make forks unsafe.
tqdm.monitor_interval = 0


class TimeOver(Exception):
    """No other run may end, since the time is over, or a signal came."""


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

    Of several it is the training's: that of an optimizer; else an evaluation adds up fewer bytes.
    Of equal ones, such as those of several processes, it is the one that runs most.
    """
    built_by_sum = {line["sum"]: line["built"] for line in lines if "built" in line}
    times_by_sum = defaultdict(list)
    for line in lines:
        if "time" in line:
            times_by_sum[line["sum"]].append(line["time"])

    def weight(name: str) -> Tuple[bool, int, int]:
        built = built_by_sum[name]
        return bool(built["update"]), built["bytes"], len(times_by_sum[name])

    training = max(built_by_sum, key=weight, default="")
    return built_by_sum.get(training, {}), times_by_sum[training]


class Runner(NamedTuple):
    """Runs a program with candidates, until a deadline or a signal."""

    journal: Path
    settings: Dict[str, Any]  # of the journal
    patience: float  # seconds without a step, which are a hang
    deadline: float  # of the monotonic clock
    signals: Sequence[int]  # that were noted: the first one ends all runs

    def run(self, candidate: str, round: int) -> Run:
        """Run the program with a candidate.

        Raises:
            OSError: the program cannot be started.
            TimeOver: the run was cut.
        """
        folder = self.journal.parent
        log = folder / f"{len(list(folder.glob('*.log'))) + 1}.log"
        offset = self.journal.stat().st_size
        begun = time.monotonic()
        bar = tqdm(desc=candidate, total=STEPS, unit="step", leave=False, disable=None)
        with self._started(candidate, log) as process, bar:
            fault, built, times = self._watched(process, offset, bar)
        took = time.monotonic() - begun
        step = 0.0
        if fault:
            fault += f"; last line of {log}: {_last_line_of(log)}"
        else:
            ends = range(SKIPPED + WINDOW, STEPS, WINDOW)
            step = median(times[end] - times[end - WINDOW] for end in ends) / WINDOW
        run = Run(round, candidate, step, took, fault, **built)
        append(self.journal, {"ended": run._asdict()})
        print(f"round {round}: {candidate}: {fault or f'{1e3 * step:.4g} ms'}", file=sys.stderr)
        return run

    @contextmanager
    def _started(self, candidate: str, log: Path) -> Iterator[Any]:
        """Start the program in a process group of its own, which is ended at the end."""
        measured = MeasuredProgram(str(self.journal), candidate, changes_of(candidate))
        # Our folder is before the user's, because Python takes the first sitecustomize. An empty
        # path would be the current folder.
        folder = os.path.dirname(inside.__file__)
        path = f"{folder}:{os.environ.get('PYTHONPATH') or folder}"
        asked = {VARIABLE: json.dumps(measured._asdict()), "PYTHONPATH": path}
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.settings["program"],
                cwd=self.settings["folder"],
                env={**os.environ, **asked},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_killed_with_parent(),
            )
        try:
            yield process
        finally:
            for ending in (signal.SIGTERM, signal.SIGKILL):
                with suppress(OSError):
                    os.killpg(process.pid, ending)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TERM_SECONDS)

    def _watched(
        self, process: Any, offset: int, bar: Any
    ) -> Tuple[str, Dict[str, Any], List[float]]:
        """Wait until a run, whose lines come after so many bytes, has enough steps.

        Returns:
            its fault, or "", its all-reduce, and the seconds of its steps.
        """
        seen, newest = 0, time.monotonic()
        while not self.signals and time.monotonic() < self.deadline:
            # It is asked before the journal, because a process that has ended writes no more.
            has_ended = process.poll() is not None
            lines = lines_in(self.journal, offset)
            built, times = training_in(lines)
            steps = len(times)
            bar.update(min(steps, STEPS) - bar.n)
            # After its last step, too, a program may still fail.
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
            status = process.returncode
            if has_ended and (status or steps < STEPS):
                return f"ended with status {status} after step {steps} of {STEPS}", built, times
            if steps >= STEPS and not status:
                return "", built, times
            if len(lines) > seen:
                seen, newest = len(lines), time.monotonic()
            if time.monotonic() - newest > self.patience:
                words = f"hung: no step after step {steps} for {self.patience:g} s (--patience)"
                return words, built, times
        raise TimeOver


def _killed_with_parent() -> Callable[[], None]:
    """Return a function for a new process, which Linux then kills with this one."""
    # The library is loaded here, because between fork and exec a process may load nothing.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def ask_for_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # This process may have ended in between.
        if os.getppid() != parent:
            os._exit(1)

    return ask_for_signal


def _last_line_of(log: Path) -> str:
    """Return the last line of a program's output, which is its error where one has ended it.

    It is quoted, because a terminal obeys some characters, and would clear the screen; and cut at
    its end, because the class of an error comes first.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return repr("".join(lines[-1:])[:_LONGEST_LINE])
