"""All-reduces of other libraries, predicted beside ours: TensorFlow's, tensorpack's, and NCCL as published.

::

    ReductionToOneDevice            each gradient alone; their sums on GPU0
    HierarchicalCopyAllReduce       all gradients joined in one chunk; two halves
    tensorpack, mode gpu            each gradient alone; sums on GPU0, GPU1, … in rotation
    tensorpack, mode hierarchical   8 GPUs only: all gradients joined, cut into 8 equal chunks; two halves
"""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence, Tuple

from ..topology import Topology, links_of, nvlinks
from .algorithms import flat, hierarchical, schedules_of
from .chunks import Chunk, Gradient, Range, chunks_of
from .plan import Plan
from .simulator import Case, Simulation, Work

USABLE = (
    "ReductionToOneDevice",
    "HierarchicalCopyAllReduce",
)  # in every program under MirroredStrategy
TENSORPACK = "tensorpack, mode hierarchical"
NCCL = "NCCL as published, if nothing overlaps"

# NCCL's all-reduce of 1 GiB: a pattern of the GPUs' name, K, the kinds of NVLinks, and bytes/s as nccl-tests
# count them on the bus: gradients' bytes × 2(K-1)/K, divided by the seconds
PUBLISHED: Tuple[Tuple[str, int, Tuple[str, ...], float], ...] = (
    ("P100", 8, ("NV1",), 62.24e9),  # Tartan (Li et al. 2018), NCCL 2
    ("V100", 8, ("NV1", "NV2"), 135.5e9),  # nccl-tests on OCI BM.GPU3.8, NCCL 2.22
    ("V100", 16, ("NV6",), 123.14e9),  # nccl-tests on 12 of the 16 GPUs
    ("A100", 8, ("NV12",), 230.1e9),  # nccl-tests on OCI BM.GPU4.8
    ("H100", 8, ("NV18",), 466.35e9),  # Azure ND H100 v5, with NVLS
    ("H200", 8, ("NV18",), 467.58e9),  # Azure ND H200 v5, with NVLS
    ("RTX 2080 Ti", 2, (), 4.0e9),  # nccl-tests, no peer access, a personal blog
    ("RTX 5090", 4, (), 35e9),  # github.com/NVIDIA/nccl/issues/1639, no peer access
)


def published_nccl(machine: Topology) -> Optional[float]:
    """Return the bytes/s on the bus of NCCL on a machine's model, known by GPUs and NVLinks; None without a source."""
    kinds = tuple(sorted({kind for row in machine.kinds for kind in row if nvlinks(kind)}))
    for gpu, count, links, bus in PUBLISHED:
        if re.search(rf"{gpu}(?!\d| Ti)", machine.gpu, re.I) and (count, links) == (
            len(machine),
            kinds,
        ):
            return bus
    return None


def exposed_by_others(
    machine: Topology,
    gradients: Sequence[Gradient],
    cases: Sequence[Case],
    with_tensorpack: bool = False,
) -> Dict[str, List[float]]:
    """Return by the name of each other all-reduce the seconds that it leaves exposed in each case, on K ≥ 2 devices."""
    towers, links, total = (
        len(machine),
        links_of(machine),
        sum(gradient.bytes for gradient in gradients),
    )
    in_flat = Plan(towers, schedules_of(flat, towers), 0, "flat")
    in_halves = Plan(towers, schedules_of(hierarchical, towers), 0, "hierarchical")
    alone = chunks_of(gradients, 0)
    found = {
        USABLE[0]: Work(in_flat._replace(schedules=in_flat.schedules[:1]), alone, gradients),
        USABLE[1]: _joined(in_halves, gradients, 1),
    }
    if with_tensorpack:
        found["tensorpack, mode gpu"] = Work(in_flat, alone, gradients)
    if with_tensorpack and towers == 8:  # on any other number of GPUs it takes another mode
        found[TENSORPACK] = _joined(in_halves, gradients, 8)
    seconds = {
        name: [Simulation(work, links, case).exposed for case in cases]
        for name, work in found.items()
    }
    published, moved = published_nccl(machine), total * 2 * (towers - 1) / towers
    return {**seconds, NCCL: [moved / published] * len(cases)} if published else seconds


def _joined(plan: Plan, gradients: Sequence[Gradient], count: int) -> Work:
    """Return the work of all gradients joined, cut into equal chunks, and joined and cut again afterwards."""
    size = sum(gradient.bytes for gradient in gradients) // count
    everything = tuple(
        Range(number, 0, gradient.elements) for number, gradient in enumerate(gradients)
    )
    work = Work(plan, [Chunk(everything, size)] * count, gradients)
    joining = 2 + len(gradients)  # reshapes, a concat, a split
    work.packing = [joining] + [0] * (count - 1)
    work.unpacking = [0] * (count - 1) + [joining]
    return work
