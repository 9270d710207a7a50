"""Runs of a user's program: a process group for each, ended once enough steps are measured. No process survives.

A run fails if the program ends before it has made enough steps. It hangs if no step comes for a while.
Both are results.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Generator, List, NamedTuple, Sequence

from tqdm import tqdm

from ..errors import HierAllreduceError
from ..formatting import count, duration
from ..tuned import VARIABLE, Tuned, read_facts
from .candidates import NOW, Candidate, candidates
from .clock import LEAST, MOST, read_times, windows

START = 600.0  # seconds until the first step
MERCY = 5.0  # seconds between SIGTERM and SIGKILL, and for the end after it
FIRST_SHARE = 1 / 20  # of all seconds, for the first run; only its facts tell how many there are
_OUT_OF_MEMORY = ("OOM when allocating", "ResourceExhausted", "out of memory", "CUDA_ERROR_OUT_OF_MEMORY")


class Run(NamedTuple):
    """One run of the program with one candidate.

    Attributes:
        candidate: the all-reduce.
        seconds: of a step, for every window of 20 steps.
        output: the file with the program's output.
        fault: the reason that nothing was measured.
        facts: that the program has written.
    """

    candidate: Candidate
    seconds: List[float]
    output: Path
    fault: str = ""
    facts: Dict[str, Any] = {}  # noqa: RUF012  no one changes it


def measure_all(
    command: Sequence[str], seconds: float, patience: float, only: Sequence[str], folder: Path
) -> Generator[Run, None, None]:
    """Run a program once for each candidate, then again in reversed order: first and last as it is.

    Args:
        command: the program and its arguments.
        seconds: of all runs together; longer if runs of 31 steps take longer, which is said after the first one.
        patience: seconds without a step, after which a program hangs.
        only: names of candidates; empty for all.
        folder: for the programs' outputs.

    Yields: each run. A generator that is closed or interrupted ends the program.

    Raises:
        HierAllreduceError: the program cannot be started, or builds no all-reduce of this package; or as
            :func:`.candidates`.
    """
    with tqdm(unit="run", disable=None, file=sys.stderr) as bar:
        begun = time.monotonic()
        first = _run(command, Candidate(NOW), seconds * FIRST_SHARE, patience, folder / "1-now", bar)
        if "towers" not in first.facts:
            reason = first.fault or "it made its steps without one"
            raise HierAllreduceError(f"{command[0]} builds no all-reduce of this package: {reason}; see {first.output}")
        chosen = candidates(first.facts, only)
        bar.total = 2 * len(chosen)
        longest = max(seconds, bar.total * (time.monotonic() - begun))
        fewer = "; --only A,B measures fewer candidates" if longest > seconds else ""
        bar.write(
            f"{bar.total} runs of {LEAST} to {MOST} steps: at most about {longest / 60:.1f} min{fewer}", sys.stderr
        )
        yield first
        failed = {NOW} if first.fault else set()
        for number, candidate in enumerate([*chosen[1:], *chosen[::-1]], 2):
            if candidate.name not in failed:
                name = folder / f"{number}-{candidate.name}"
                run = _run(command, candidate, seconds / bar.total, patience, name, bar)
                failed.update([candidate.name] if run.fault else [])
                yield run


def _run(command: Sequence[str], candidate: Candidate, share: float, patience: float, name: Path, bar: Any) -> Run:
    clock, output = name.with_suffix(".clock"), name.with_suffix(".log")
    environment = {**os.environ, VARIABLE: Tuned(str(clock), candidate.peer, candidate.changes).as_text()}
    with output.open("wb") as log:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise HierAllreduceError(f"{command[0]} cannot be started: {error}") from None
    try:
        fault = _wait(process, clock, output, share, patience, lambda n: bar.set_description(f"{name.name}, step {n}"))
    finally:
        _end_group(process)
        bar.update(1)
    times = read_times(clock)
    return Run(candidate, [] if fault else windows(times), output, fault, read_facts(str(clock)))


def _wait(process: Any, clock: Path, output: Path, share: float, patience: float, tell: Callable[[int], Any]) -> str:
    """Wait until a program has made enough steps, and return its fault, or an empty text."""
    begun = last = time.monotonic()
    seen = 0
    while True:
        status = process.poll()  # before the file is read: a program that has ended writes no more
        steps, now = len(read_times(clock)), time.monotonic()
        if steps > seen:
            seen, last = steps, now
            tell(steps)
        if steps >= MOST or (steps >= LEAST and (status is not None or now - begun > share)):
            return ""
        if status is not None:
            return _end(status, steps, output)
        allowed = patience if steps else START
        if now - last > allowed:
            where = f"after step {steps}" if steps else "at all"
            return f"hung: no step {where} for {duration(allowed)}, killed; last line: {_last_line(output)}"
        time.sleep(0.1)


def _end(status: int, steps: int, output: Path) -> str:
    """Return the fault of a program that has ended too early."""
    if status == 0:
        return f"ended after {count(steps, 'step')}, {LEAST} are needed"
    text = output.read_text(encoding="utf-8", errors="replace")
    memory = "out of memory, " if any(word in text for word in _OUT_OF_MEMORY) else ""
    by = f"status {status}" if status > 0 else signal.Signals(-status).name
    return f"failed: {memory}{by} after {count(steps, 'step')}; last line: {_last_line(output)}"


def _last_line(output: Path) -> str:
    text = output.read_text(encoding="utf-8", errors="replace").strip()
    return text.rpartition("\n")[2].strip()[:100] or "none"


def _end_group(process: Any) -> None:
    """End all processes of a program's group: SIGTERM, and SIGKILL after five seconds."""
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            deadline = time.monotonic() + MERCY
            while time.monotonic() < deadline:
                process.poll()  # a zombie would count as alive
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    except ProcessLookupError:
        pass  # nobody is left
