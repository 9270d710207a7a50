"""Runs of a user's program: a process group for each, ended once enough steps are measured. No run survives.

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
from typing import Any, Dict, Generator, List, NamedTuple, Sequence

from tqdm import tqdm

from ..cluster.place import place
from ..errors import HierAllreduceError
from ..formatting import count, duration
from ..tuned import VARIABLE, Tuned, read_facts
from .candidates import NOW, Candidate, candidates
from .clock import ENOUGH, LEAST, read_times, windows

MERCY = 5.0  # seconds between SIGTERM and SIGKILL, and for the end after it
_OUT_OF_MEMORY = ("OOM when allocating", "ResourceExhausted", "out of memory", "CUDA_ERROR_OUT_OF_MEMORY")


class Limits(NamedTuple):
    """Seconds: of all runs together, without a step after the first one, and until the first step."""

    total: float
    patience: float = 60.0
    start: float = 600.0
    rounds: int = 2


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


def check_one_host() -> None:
    """Raise a HierAllreduceError where the environment describes several hosts."""
    hosts = len(place(os.environ).hosts)
    if hosts > 1:
        raise HierAllreduceError(f"this environment describes {hosts} hosts; tune measures one host: unset TF_CONFIG")


def measure_all(
    command: Sequence[str], limits: Limits, only: Sequence[str], folder: Path
) -> Generator[Run, None, None]:
    """Run a program once for each candidate, then again in reversed order: first and last as it is.

    Args:
        command: the program and its arguments.
        limits: seconds.
        only: names of candidates; empty for all.
        folder: for the programs' outputs.

    Yields: each run. A generator that is closed or interrupted ends the program.

    Raises:
        HierAllreduceError: the program cannot be started, or builds no all-reduce of this package; or as
            :func:`.candidates`.
    """
    with tqdm(total=2 * limits.rounds, unit="run", disable=None, file=sys.stderr) as bar:
        first = _run(command, Candidate(NOW), limits, limits.total / 8, folder / "1-now", bar)
        if "towers" not in first.facts:
            reason = first.fault or "it made its steps without one"
            raise HierAllreduceError(f"{command[0]} builds no all-reduce of this package: {reason}; see {first.output}")
        yield first
        chosen, failed = candidates(first.facts, only), {first.candidate.name} if first.fault else set()
        bar.total = len(chosen) * limits.rounds
        share = limits.total / bar.total
        for number in range(1, limits.rounds + 1):
            for candidate in chosen[1:] if number == 1 else chosen[::-1] if number % 2 == 0 else chosen:
                if candidate.name not in failed:
                    name = folder / f"{number}-{candidate.name}"
                    yield _run(command, candidate, limits, share, name, bar)


def _run(command: Sequence[str], candidate: Candidate, limits: Limits, share: float, name: Path, bar: Any) -> Run:
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
        fault = _wait(process, clock, output, limits, share, lambda n: bar.set_description(f"{name.name}, step {n}"))
    finally:
        end_group(process)
        bar.update(1)
    times = read_times(clock)
    return Run(candidate, [] if fault else windows(times), output, fault, read_facts(str(clock)))


def _wait(process: Any, clock: Path, output: Path, limits: Limits, share: float, tell: Any) -> str:
    """Wait until a program has made enough steps, and return its fault, or an empty text."""
    begun = last = time.monotonic()
    seen = 0
    while True:
        status = process.poll()  # before the file is read: a program that has ended writes no more
        steps, now = len(read_times(clock)), time.monotonic()
        if steps > seen:
            seen, last = steps, now
            tell(steps)
        if steps >= ENOUGH or (steps >= LEAST and (status is not None or now - begun > share)):
            return ""
        if status is not None:
            return _end(status, steps, output)
        allowed = limits.patience if steps else limits.start
        if now - last > allowed:
            where = f"after step {steps}" if steps else "at all"
            return f"hung: no step {where} for {duration(allowed)}, killed; last line: {_last_line(output)}"
        time.sleep(0.1)


def _end(status: int, steps: int, output: Path) -> str:
    if status == 0:
        return f"ended after {count(steps, 'step')}, {LEAST} are needed"
    text = output.read_text(encoding="utf-8", errors="replace")[-20000:]
    memory = "out of memory, " if any(word in text for word in _OUT_OF_MEMORY) else ""
    by = f"status {status}" if status > 0 else signal.Signals(-status).name
    return f"failed: {memory}{by} after {count(steps, 'step')}; last line: {_last_line(output)}"


def _last_line(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace")[-5000:].split("\n")
    return next((line.strip()[:100] for line in reversed(lines) if line.strip()), "none")


def end_group(process: Any) -> None:
    """End all processes of a program's group: SIGTERM, and SIGKILL after five seconds."""
    if sys.platform == "win32":
        raise NotImplementedError("no process groups")  # the command does not start any program there
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + MERCY
        _signal(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()  # a zombie would count as alive
            if not _signal(process.pid, 0):
                return
            time.sleep(0.02)


def _signal(group: int, number: int) -> bool:
    """Send a signal to a process group, and return whether the group has processes."""
    try:
        if sys.platform != "win32":
            os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
