"""Tools that search for wrong sums, hangs and crashes, each bounded in time. No part of the installed package.

::

    python -m trust.soak                 random all-reduces against float64, long training, threads
    python -m trust.mutants_of_plans     plans with one fault: `verify` and `audit` must notice
    python -m trust.fuzz                 damaged files, tables and arguments
    python -m trust.chaos                hosts that are killed, frozen, late or cut off

Each takes ``--seconds`` and ``--seed``, prints one table, and exits with 1 if it has found anything. docs/testing.md
has the results.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for its helpers
