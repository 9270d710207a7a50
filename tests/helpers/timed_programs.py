"""Texts of programs that ``tune`` runs without TensorFlow: they write the clock file themselves."""

import subprocess
from pathlib import Path

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from hier_allreduce_tools.tune.protocol import ProgramFacts, Request

with open("groups", "a") as file:
    print(os.getpgrp(), file=file)
asked = Request.read(os.environ["HIER_ALLREDUCE_TUNE"])
algorithm = asked.changes.get("algorithm", "")

def build(**facts):
    plans = {name: name for name in asked.strategies}
    usual = ProgramFacts("keras", "replicated", 4, False, 1 << 20, "auto", plans)
    usual._replace(**{"kept": {"missing": "zeros"}, **facts}).write(asked.clock)

def train(steps, milliseconds=10.0, **facts):
    build(**facts)
    with open(asked.clock, "a") as file:
        for step in range(steps):
            print(100 + 1e-3 * milliseconds * step, file=file)
"""
WAITS = "\nprint('waits', flush=True)\ntime.sleep(1000)\n"


def left_over():
    """Return the process groups of programs in which a process lives."""
    groups = set(Path("groups").read_text().split())
    assert groups
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,stat="], stdout=subprocess.PIPE, check=True, timeout=60
    ).stdout.decode()
    return groups & {line.split()[0] for line in listed.splitlines() if "Z" not in line}
