"""Published times and speeds, compared with what the cost model predicts: the tables of docs/calibration.md and README.

::

    python benchmarks/published.py

Each anchor names its source. Anchors from which a default speed was taken are marked ``fitted``: their error is small
by construction. The others were not fitted.
"""

from dataclasses import dataclass, replace
from typing import Callable, List, Sequence, Tuple, Union

from hier_allreduce.bench import load_model
from hier_allreduce.cli.describe_steps import NCCL_BUS
from hier_allreduce.planning import IDLE, Copy, Plan, Reduce, Step, best_plan, pack, simulate
from hier_allreduce.planning.algorithms import plan_of, two_group
from hier_allreduce.topology import GB, Topology, calibrated, load, subset

MB = 1_000_000
MIB = 1 << 20


@dataclass(frozen=True)
class Anchor:
    """One published number, in ``unit`` (``"ms"``, ``"µs"`` or ``"GB/s"``), and the function that predicts it."""

    machine: str
    operation: str
    source: str
    published: float
    unit: str
    predict: Callable[[], float]
    fitted: bool = False


def anchors() -> List[Anchor]:
    """Return all anchors: TensorFlow's all-reduce, single copies, several paths, then NCCL."""
    return [*_tensorflow(), *_copies(), *_many_paths(), *_nccl()]


def published_markdown() -> str:
    """Return the table of ``docs/calibration.md``."""
    rows = ["| machine | what | published | predicted | error | source |", "|---|---|---|---|---|---|"]
    for anchor in anchors():
        predicted = anchor.predict()
        note = " (speed taken from here)" if anchor.fitted else ""
        rows.append(
            f"| {anchor.machine} | {anchor.operation} | {anchor.published:g} {anchor.unit}"
            f" | {predicted:.3g} {anchor.unit} | {predicted / anchor.published - 1:+.0%} | {anchor.source}{note} |"
        )
    return "\n".join(rows)


# ---- ours and NCCL's ---------------------------------------------------------------------------------


LANES = 4
MACHINES = {
    "dgx-1p": "8 × P100, NVLink mesh (DGX-1)",
    "dgx-1v": "8 × V100, NVLink mesh (DGX-1V)",
    "dgx-a100": "8 × A100, NVSwitch",
    "dgx-h100": "8 × H100, NVSwitch",
    "4x-rtx-5090": "4 × RTX 5090, PCIe, no peer access",
}


def nccl_markdown() -> str:
    """Return a table of 1 GB all-reduced on several machines: our GB/s, both limits, and NCCL's published GB/s."""
    rows = [
        f"| GPUs | ours, predicted | with {LANES} lanes, predicted | TensorFlow's limit | limit of the links"
        " | NCCL, published | NCCL / ours, without and with lanes |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset, machine in MACHINES.items():
        topology = load(preset)
        limit, links = (pack(topology, ideal_links=ideal).limit / GB for ideal in (False, True))
        ours = 1 / best_plan(topology, int(GB), IDLE).seconds
        # where the links are the limit already, lanes have nothing to add
        with_lanes = 1 / best_plan(topology, int(GB), IDLE, lanes=LANES).seconds if links > limit else ours
        nccl = NCCL_BUS[topology.name] / GB / (2 * (len(topology) - 1) / len(topology))
        cells = [machine, *(f"{speed:.3g}" for speed in (ours, with_lanes, limit, links, nccl))]
        rows.append(f"| {' | '.join([*cells, f'{nccl / ours:.1f}, {nccl / with_lanes:.1f}'])} |")
    return "\n".join(rows)


# ---- TensorFlow's rule ------------------------------------------------------------------------------


def _tensorflow() -> List[Anchor]:
    source = "tf_cnn_benchmarks, hierarchical_copy, 51 MB of gradients"
    return [
        Anchor("DGX-1, 8x P100", "two-group all-reduce, 8 packs", source, 10, "ms", lambda: _two_group(_even_sizes(8))),
        Anchor(
            "DGX-1, 8x P100",
            "two-group all-reduce, ResNet-50's 161 tensors one by one",
            source,
            26,
            "ms",
            lambda: _two_group(_resnet50_sizes()),
        ),
    ]


def _even_sizes(packs: int) -> List[int]:
    return [51 * MB // packs] * packs


def _resnet50_sizes() -> List[int]:
    elements = [variable.elements for variable in load_model("resnet50")]
    return [51 * MB * count // sum(elements) for count in elements]


def _two_group(sizes: Sequence[int]) -> float:
    plan = plan_of(two_group, 8, range(len(sizes)))
    return 1e3 * simulate(plan, load("dgx-1p"), sizes, ordered=False).seconds


# ---- single copies ----------------------------------------------------------------------------------


def _copies() -> List[Anchor]:
    tartan = "Tartan (Li et al. 2018), p2pBandwidthLatencyTest"
    by_size = "Tartan, copies by size"
    blink = "Blink+, NCCL broadcast between two GPUs"
    return [
        Anchor("DGX-1, 8x P100", "copy over NV1", tartan, 18.41, "GB/s", lambda: _copy("dgx-1p", 0, 1, 64 * MIB), True),
        Anchor("DGX-1, 8x P100", "copy of 1 MiB over NV1", by_size, 15.78, "GB/s", lambda: _copy("dgx-1p", 0, 1, MIB)),
        Anchor(
            "DGX-1, 8x P100", "copy of 64 KiB over NV1", by_size, 4.93, "GB/s", lambda: _copy("dgx-1p", 0, 1, 65536)
        ),
        Anchor("DGX-1, 8x P100", "copy without NVLink", tartan, 9.19, "GB/s", lambda: _copy("dgx-1p", 0, 5, 64 * MIB)),
        Anchor("DGX-1, 8x P100", "smallest copy over NV1", tartan, 9.6, "µs", lambda: _start("dgx-1p", 0, 1), True),
        Anchor("DGX-1, 8x P100", "smallest copy without NVLink", tartan, 23.5, "µs", lambda: _start("dgx-1p", 0, 5)),
        Anchor("DGX-1V", "copy over NV1, 1 GiB", blink, 22.9, "GB/s", lambda: _copy("dgx-1v", 0, 1, 1024 * MIB), True),
        Anchor("DGX-1V", "copy over NV2, 1 GiB", blink, 45.77, "GB/s", lambda: _copy("dgx-1v", 0, 3, 1024 * MIB)),
        Anchor("DGX-1V", "copy over NV1, 1 MiB", blink, 15.74, "GB/s", lambda: _copy("dgx-1v", 0, 1, MIB)),
        Anchor(
            "2x RTX 2080 Ti, PIX",
            "copy of 1 GiB, peer access off",
            "nccl-tests broadcast, personal blog",
            11.09,
            "GB/s",
            lambda: _copy(calibrated(load("pcie-switch"), {"gpu": "GeForce RTX 2080 Ti"}), 0, 1, 1024 * MIB),
        ),
    ]


def _copy(machine: Union[str, Topology], src: int, dst: int, size: int) -> float:
    topology = load(machine) if isinstance(machine, str) else machine
    plan = Plan(len(topology), 1, (Copy(0, src, dst),))
    return size / simulate(plan, topology, [size], ordered=False).seconds / GB


def _start(machine: str, src: int, dst: int) -> float:
    return 1e6 * load(machine).link(src, dst).latency


# ---- several paths between two GPUs -----------------------------------------------------------------


def _many_paths() -> List[Anchor]:
    source = "Blink+, 4x V100 of a DGX-1V, 1 GiB"
    three, two = ((0, 1), (0, 2, 1), (0, 3, 1)), ((0, 3), (0, 1, 3))
    return [
        Anchor("DGX-1V", "broadcast 0→1 by 0-1, 0-2-1, 0-3-1", source, 66.63, "GB/s", lambda: _paths(three, False)),
        Anchor("DGX-1V", "all-reduce 0, 1 by 0-1, 0-2-1, 0-3-1", source, 58.93, "GB/s", lambda: _paths(three, True)),
        Anchor("DGX-1V", "broadcast 0→3 by 0-3, 0-1-3", source, 63.79, "GB/s", lambda: _paths(two, False)),
        Anchor("DGX-1V", "all-reduce 0, 3 by 0-3, 0-1-3", source, 58.72, "GB/s", lambda: _paths(two, True)),
    ]


def _paths(paths: Sequence[Tuple[int, ...]], both_ways: bool) -> float:
    """Return GB/s of 1 GiB in 64 chunks a path, as NCCL: ideal links, and no op that a host dispatches.

    A path's share is by its slowest link.
    """
    machine = load("dgx-1v")
    topology = replace(machine, speeds=replace(machine.speeds, dispatch=0.0))
    slowest = [min(topology.link(*hop).bandwidth for hop in zip(path, path[1:])) for path in paths]
    steps: List[Step] = []
    sizes: List[int] = []
    for _ in range(64):
        for path, bandwidth in zip(paths, slowest):
            sizes.append(round(1024 * MIB / 64 * bandwidth / sum(slowest)))
            steps += _there(path, len(sizes) - 1, both_ways)
    run = simulate(Plan(len(topology), len(sizes), tuple(steps)), topology, sizes, ideal_links=True, ordered=False)
    return 1024 * MIB / run.seconds / GB


def _there(path: Tuple[int, ...], chunk: int, both_ways: bool) -> List[Step]:
    """Return a copy along a path; to all-reduce its two ends, the sum at the far end and the copy back."""
    hops = list(zip(path, path[1:]))
    if not both_ways:
        return [Copy(chunk, src, dst) for src, dst in hops]
    there: List[Step] = [Copy(chunk, src, dst) for src, dst in hops[:-1]]
    back: List[Step] = [Copy(chunk, dst, src) for src, dst in reversed(hops)]
    return [*there, Reduce(chunk, (hops[-1][0],), hops[-1][1]), *back]


# ---- NCCL: ideal links ------------------------------------------------------------------------------


def _nccl() -> List[Anchor]:
    tartan = "Tartan, NCCL 2, 1 GiB, bus bandwidth"
    tests = "nccl-tests all_reduce, bus bandwidth"
    p100, v100, a100, h100, rtx = (speed / GB for speed in NCCL_BUS.values())
    issue = "[NVIDIA/nccl#1639](https://github.com/NVIDIA/nccl/issues/1639), NVIDIA's driver 570, bus bandwidth"
    return [
        Anchor("DGX-1, 2 of 8 P100", "NCCL all-reduce", tartan, 17.28, "GB/s", lambda: _bus("dgx-1p", 2)),
        Anchor("DGX-1, 4 of 8 P100", "NCCL all-reduce", tartan, 52.09, "GB/s", lambda: _bus("dgx-1p", 4)),
        Anchor("DGX-1, 8x P100", "NCCL all-reduce", tartan, p100, "GB/s", lambda: _bus("dgx-1p", 8)),
        Anchor("DGX-1V", "NCCL 2.4 all-reduce, 128 MiB", tests, 129.14, "GB/s", lambda: _bus("dgx-1v", 8)),
        Anchor("8x V100 (OCI)", "NCCL 2.22 all-reduce, 1 GiB", tests, v100, "GB/s", lambda: _bus("dgx-1v", 8)),
        Anchor("DGX-2, 12 of 16 V100", "NCCL all-reduce, 1 GiB", tests, 123.14, "GB/s", lambda: _bus("dgx-2", 12)),
        Anchor("8x A100 (OCI)", "NCCL all-reduce, 1 GiB", tests, a100, "GB/s", lambda: _bus("dgx-a100", 8)),
        Anchor("8x H100 (Azure)", "NCCL all-reduce with NVLS, 1 GiB", tests, h100, "GB/s", lambda: _bus("dgx-h100", 8)),
        Anchor(
            "4 of 8 RTX 5090", "NCCL all-reduce, no peer access", issue, rtx, "GB/s", lambda: _bus("4x-rtx-5090", 4)
        ),
    ]


def _bus(machine: str, devices: int) -> float:
    """Return the bus bandwidth of the best tree packing on ideal NVLinks alone; NCCL multiplies by 2(K-1)/K."""
    whole = calibrated(load(machine), {"links": {"SYS": 1e7}})
    part: Topology = subset(whole, range(devices))
    return pack(part, ideal_links=True).rate / GB * 2 * (devices - 1) / devices


if __name__ == "__main__":
    print(f"{published_markdown()}\n\n{nccl_markdown()}")
