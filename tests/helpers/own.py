"""The algorithms of ``examples/algorithms.py``."""

import runpy
from pathlib import Path

FILE = str(Path(__file__).parents[2] / "examples" / "algorithms.py")
ALGORITHMS = runpy.run_path(FILE)["ALGORITHMS"]


def cases(counts):
    """Return (algorithm, devices) for the numbers of devices to which the algorithms apply."""
    return [(each, count) for each in ALGORITHMS for count in counts if each.__name__ != "two_quads" or count % 2 == 0]
