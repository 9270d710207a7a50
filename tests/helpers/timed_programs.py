"""Texts of programs that ``tune`` runs without TensorFlow: they write the journal themselves."""

import subprocess
from pathlib import Path

BEGIN = """
import json, os, signal, sys, time
from pathlib import Path

with open("groups", "a") as file:
    print(os.getpgrp(), file=file)
asked = json.loads(os.environ["HIER_ALLREDUCE_TUNE"])
changes = asked["changes"]
algorithm = changes.get("algorithm", "")

def tell(*lines):
    with open(asked["journal"], "a") as file:
        file.writelines(json.dumps(line) + "\\n" for line in lines)

def build(number=1, **facts):
    usual = {"bytes": 1 << 20, "front_end": "keras", "update": "", "towers": 4}
    usual.update(strategy={"missing": "zeros", **changes})
    tell({"sum": str(number), "built": {**usual, **facts}})

def step(steps, milliseconds=10.0, number=1, begin=100.0):
    times = [begin + 1e-3 * milliseconds * step for step in range(steps)]
    tell(*({"sum": str(number), "time": time} for time in times))

def train(steps, milliseconds=10.0):
    build()
    step(steps, milliseconds)
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
