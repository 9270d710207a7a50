"""The names of ops, by which audits and measurements know what an op is for.

::

    SCOPE / CHUNK / sum             the scope of an all-reduce, its chunk, what the op does
    SCOPE / whole / cut             a whole gradient, which belongs to no chunk yet
"""

from __future__ import annotations

import re

# A tower's gradient, on its way into chunks.
WHOLE = "whole"
FLAT = f"{WHOLE}/flat"
CUT = f"{WHOLE}/cut"
PACK = "pack"
# What is added up.
COLUMN = "column"
SENT = "sent"
GATHER = "gather"
# Its sum, also over hosts.
SUM = "sum"
MEAN = "mean"
ACROSS = "across"
# Its way back.
COPY = "copy"
UNPACK = "unpack"
JOINED = "joined"
SHAPED = "shaped"

# Grappler adds numbers to names, and a sum over hosts is several ops.
_OF_SUM = re.compile(rf"(^|[/_])({COLUMN}|{SENT}|{GATHER}|{SUM}|{MEAN})(_\d+)?$|/{ACROSS}/[^/]+$")


def is_of_sum(op_name: str) -> bool:
    """Return whether an op of an all-reduce takes part in a sum, or in its mean."""
    return bool(_OF_SUM.search(op_name))
