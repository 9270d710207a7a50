"""What the tools share: arguments, worker processes with a deadline, and the table at the end."""

import argparse
import faulthandler
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parents[1]
_SHOWN = 5  # findings that are printed in full
_MOST_TEXT = 2500  # characters of one finding, its last ones: the innermost frames, and the case
_GRACE = 120  # seconds that a worker may take after its deadline, to start and to finish what it has begun


class Finding(NamedTuple):
    """Something that must not happen: in which part, with which seed, and what it was."""

    part: str
    seed: object
    text: str


class Work(NamedTuple):
    """One call in a worker process: ``function(seed, seconds, **options)`` returns ``(Counter, [Finding])``."""

    function: object
    seed: int
    seconds: float
    options: dict


def parse(doc, argv, seconds, add=None):
    """Return the arguments that all tools have; ``add(parser)`` adds a tool's own."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=seconds, help="time to search (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2), help="default: %(default)s")
    if add:
        add(parser)
    return parser.parse_args(argv)


def in_processes(queues):
    """Run lists of Work, one process for each list; return all counts and findings.

    A worker that dies or hangs is a finding.
    """
    context = multiprocessing.get_context("spawn")
    running = []
    for works in queues:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(works, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append((process, mine, works))
    counts, findings = Counter(), []
    for process, line, works in running:
        for work in works:
            part, done = work.function.__name__, None
            if line.poll(work.seconds + _GRACE):
                try:
                    done = line.recv()
                except EOFError:
                    process.join(_GRACE)
            if done is None:
                state = "hangs" if process.is_alive() else f"died with status {process.exitcode}"
                findings.append(Finding(part, work.seed, f"the worker {state}"))
                break
            counts.update(done[0])
            findings += done[1]
        process.kill()
        process.join()
    return counts, findings


def _serve(works, line):
    for work in works:
        faulthandler.dump_traceback_later(work.seconds + _GRACE - 20)  # where a worker that hangs is
        try:
            line.send(work.function(work.seed, work.seconds, **work.options))
        except BaseException:
            line.send((Counter(), [Finding(work.function.__name__, work.seed, traceback.format_exc())]))
            raise


def until(seconds):
    """Yield numbers from 0 until the time is over; at least one."""
    end, number = time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < end:
        yield number
        number += 1


def machine():
    """Return the commit, the versions and the cores, for the head of a table."""
    import tensorflow as tf

    git = subprocess.run(
        ["git", "-C", str(TOP), "describe", "--always", "--dirty"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    python = ".".join(map(str, sys.version_info[:3]))
    commit = git.stdout.decode().strip() or "no commit"
    return f"{commit}, Python {python}, TensorFlow {tf.__version__}, {os.cpu_count()} cores, no GPU"


def report(args, began, rows, findings, reproduce):
    """Print the table and the first findings with the command that repeats each; return the exit status."""
    from hier_allreduce.formatting import table

    print(f"{machine()}; seed {args.seed}, {time.monotonic() - began:.0f} s")
    print(table([["what", "count"], *rows]))
    for finding in findings[:_SHOWN]:
        print(f"\nFOUND in {finding.part}: {finding.text[-_MOST_TEXT:]}\nagain: {reproduce(finding)}")
    if len(findings) > _SHOWN:
        print(f"\nand {len(findings) - _SHOWN} more findings")
    return 1 if findings else 0
