"""The GPU's model, from a listing that was pasted together with the table of links.

::

    GPU 0: Tesla V100-SXM2-16GB (UUID: …)   ──►   Tesla V100-SXM2-16GB
"""

from __future__ import annotations

import re
from typing import Sequence, Tuple

from .gpus import GPUS, known_gpu

_VENDOR = r"(?:NVIDIA|Tesla|Quadro|GeForce|TITAN)\b"
_KNOWN = "|".join(gpu.pattern for gpu in GPUS)
_LISTINGS = tuple(
    re.compile(pattern)
    for pattern in (
        # nvidia-smi -L, also after a worker's name or a time; reports
        r".*\bGPU [\d,]+:\s+([A-Z].*?)\s+\(UUID",
        r"\W*GPU [\d,]+:\s+(?!GPU-|PCI)([A-Z].*?)(?:\s{2,}.*|\s+[\d.]+ [MG]iB\b.*)?\s*$",
        rf"\W*\d+, (?!P(?:[0-35789]|1\d)\b)((?:{_VENDOR}|[ABHLPTV]\d+)[^,]*?)\s*(?:,|$)",  # --query-gpu=index,name
        rf"\W*({_VENDOR}[^,]*\d[^,]*), (?:GPU-|[\d.]+(?: MiB)?\s*(?:,|$))",  # --query-gpu=name and anything
        r"\W*\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s+[0-9A-F]{4,8}:",  # nvidia-smi alone
        r"\s*Product Name\s*:\s*(\S.*?)\s*$",  # nvidia-smi -q
        rf"(?=.*(?i:{_KNOWN}))\W*({_VENDOR}[\w -]+)\W*$",  # --query-gpu=name; only known models, or remarks match too
        r"\W*Device: \d+, ([^,]+),",  # p2pBandwidthLatencyTest
        r".*\bdevice\s+\d+ \[[\w:.]+\] (\S.*?)\s*$",  # nccl-tests
    )
)
_LONGEST = 500  # characters of a line that lists a GPU; on much longer ones the patterns would take seconds


def gpu_name(lines: Sequence[str]) -> Tuple[str, Tuple[str, ...]]:
    """Return the model that the lines list, and warnings.

    The model is empty if none is listed, and, with a warning, if the GPUs are of several models.
    """
    short = [line for line in lines if len(line) <= _LONGEST]
    for pattern in _LISTINGS:
        names = sorted({match.group(1) for match in map(pattern.match, short) if match})
        models = {known_gpu(name) or name for name in names}  # L40 and L40S are one model here
        if len(models) > 1:
            return "", (f"the GPUs are of several models ({', '.join(names)}); speeds are guessed from the links",)
        if names:
            return names[0], ()
    return "", ()
