"""What the tools share: arguments, worker processes with a deadline, and the table at the end."""

import argparse
import faulthandler
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

TOP = Path(__file__).resolve().parents[1]
_SHOWN = 5  # findings that are printed in full
_MOST_TEXT = 2500  # characters of one finding
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
    parser.add_argument("--json", metavar="FILE", help="write the counts into FILE too")
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
    git = subprocess.run(
        ["git", "-C", str(TOP), "describe", "--always", "--dirty"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    python = ".".join(map(str, sys.version_info[:3]))
    tensorflow = getattr(sys.modules.get("tensorflow"), "__version__", None) or _installed("tensorflow")
    commit = git.stdout.decode().strip() or "no commit"
    return f"{commit}, Python {python}, TensorFlow {tensorflow}, {os.cpu_count()} cores, no GPU"


def _installed(name):
    try:
        from importlib import metadata
    except ImportError:  # Python 3.7
        return "1.15"
    for package in (f"{name}-cpu", name):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def _short(text):
    """Return the end of a long text: the innermost frames of a traceback, and the case."""
    return text if len(text) < _MOST_TEXT else f"…{text[-_MOST_TEXT:]}"


def report(args, began, rows, findings, reproduce):
    """Print the table and the first findings with the command that repeats each; return the exit status."""
    from hier_allreduce.formatting import table

    print(f"{machine()}; seed {args.seed}, {time.monotonic() - began:.0f} s")
    print(table([["what", "count"], *rows]))
    for finding in findings[:_SHOWN]:
        print(f"\nFOUND in {finding.part}: {_short(finding.text)}\nagain: {reproduce(finding)}")
    if len(findings) > _SHOWN:
        print(f"\nand {len(findings) - _SHOWN} more findings")
    if args.json:
        found = [finding._asdict() for finding in findings]
        content = {"counts": {str(name): value for name, value in rows}, "findings": found}
        Path(args.json).write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    return 1 if findings else 0
