"""``hier-allreduce bench``: measured comparisons on this machine."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import TYPE_CHECKING, Any, List, Tuple

from ..bench import load_model
from ..errors import HierAllreduceError
from ..formatting import count as count_of
from ..formatting import duration
from ..presets import write_text
from .common import (
    MODEL,
    add_devices,
    add_model,
    count,
    device_count,
    folder,
    import_tensorflow,
    output,
    progress,
    say,
    ticking,
)
from .plan import read_bytes

if TYPE_CHECKING:
    from ..bench import Contender
    from ..sampling import Tick

_SIZES = "ours,distribute-0,ring"  # contenders of `bench sizes`
# a contender takes so many times as long as ours, the first: its own graph, and its part of the one of all, which
# comes last; measured with mobilenet_v2 on 8 devices and resnet50 on 4
_REST = 2
# the options of one mode only, by their names in the parsed arguments
_OPTIONS = {"peers": ("model", "topology", "trace"), "sizes": ("least", "most", "factor")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's modes and options."""
    add = parser.add_argument
    add("mode", nargs="?", choices=tuple(_OPTIONS), default="peers", help="peers (the default): our all-reduce and"
        " others, on a model's gradients; sizes: one gradient of each of several sizes, as in nccl-tests")  # fmt: skip
    add_devices(parser)
    add("--rounds", metavar="N", type=count, default=15, help="timed steps of each (default: 15)")
    add("--average", action="store_true", help="the mean instead of the sum")
    add("--split-gpu", metavar="K", type=device_count, help="cut each GPU into K logical GPUs first; they share its"
        " memory's speed and have no links between them")  # fmt: skip
    add("--contenders", metavar="A,B,…", help="only these; ours:NAME is ours with a strategy, by its name or file, or"
        f" with a function of yours, FILE.py:FUNCTION (default: all; for sizes {_SIZES})")  # fmt: skip
    add("--json", metavar="FILE", type=output, help="write everything that was measured")
    add_model(parser)
    add("--topology", metavar="NAME", nargs="+", default=[], help="ours planned for these machines too")
    add("--trace", metavar="FOLDER", type=folder, help="write what one step of each contender did: a trace for"
        " ui.perfetto.dev, and its summary")  # fmt: skip
    add("-b", "--least", metavar="SIZE", type=read_bytes, help="sizes: the first one (default: 64KiB)")
    add("-e", "--most", metavar="SIZE", type=read_bytes, help="sizes: the last one (default: 64MiB)")
    add("-f", "--factor", metavar="F", type=factor, help="sizes: from one to the next (default: 4)")


def factor(text: str) -> int:
    """Read the factor between sizes: a whole number of 2 or more."""
    return count(text, 2)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    (other,) = set(_OPTIONS) - {args.mode}
    unused = [f"--{name}" for name in _OPTIONS[other] if getattr(args, name)]
    if unused:
        raise HierAllreduceError(f"`bench {args.mode}` makes no use of {', '.join(unused)}, which `bench {other}` has")
    warnings.filterwarnings("ignore", message="Converting sparse IndexedSlices")  # a peer's; the table shows it
    if args.mode == "peers":
        load_model(args.model or MODEL)  # a wrong name is told before TensorFlow is imported
    import_tensorflow("the bench")
    return _measure_peers(args) if args.mode == "peers" else _measure_sizes(args)


def _measure_peers(args: argparse.Namespace) -> int:
    from ..bench import WARM_UP, Case, measure, report_text

    name = args.model or MODEL
    names = _names(args.contenders or "")
    contenders = _contenders(names, args.topology)
    case = Case(load_model(name), _devices(args), args.average)
    with progress(1 + len(contenders) + WARM_UP + args.rounds) as bar:
        floor = not names or "floor" in names
        tick = _foretelling(bar, len(contenders), args.rounds)
        report = measure(case, contenders, args.rounds, floor, tick, args.trace)
    print(report_text(name, report))
    if args.json:
        _write_json(args.json, {"model": name, "rounds": args.rounds, **report.as_dict()})
    return 0


def _measure_sizes(args: argparse.Namespace) -> int:
    """Measure each size, and print the table."""
    from ..bench import WARM_UP, find_contender, measure, size_case, sizes_text, sweep_sizes

    least, most = args.least or 64 << 10, args.most or 64 << 20
    if least > most:
        raise HierAllreduceError(f"--least {least} bytes is more than --most {most}")
    contenders = [find_contender(name) for name in _names(args.contenders or _SIZES)]
    devices = _devices(args)
    sizes = sweep_sizes(least, most, args.factor or 4)
    with progress(len(sizes) * (1 + len(contenders) + WARM_UP + args.rounds)) as bar:
        reports, began = {}, time.monotonic()
        for size in reversed(sizes):  # the largest first, since that tells how long the others take at most
            case = size_case(size, devices, args.average)
            reports[size] = measure(case, contenders, args.rounds, False, ticking(bar))
            if len(reports) == 1 < len(sizes):
                most = (len(sizes) - 1) * (time.monotonic() - began)
                say(bar, f"{count_of(len(sizes) - 1, 'smaller size')}: at most about {_about(most)}")
    reports = {size: reports[size] for size in sizes}
    print(sizes_text(reports))
    if args.json:
        _write_json(args.json, [{"bytes": size, **report.as_dict()} for size, report in reports.items()])
    return 0


def _foretelling(bar: Any, contenders: int, rounds: int) -> Tick:
    """Return ``ticking(bar)``, which also says how long the other contenders, and then the rounds, will take."""
    from ..bench import WARM_UP

    began: List[float] = []  # the stages: the baseline, each contender, the rounds that warm up, the others
    tick = ticking(bar)

    def foretell(stage: str) -> None:
        began.append(time.monotonic())
        if len(began) == 3 and contenders > 1:
            rest = _REST * (contenders - 1) * (began[-1] - began[-2])
            say(bar, f"{count_of(contenders - 1, 'more contender')}: about {_about(rest)}")
        if len(began) == 2 + contenders + WARM_UP:
            say(bar, f"{count_of(rounds, 'round')}: about {_about(rounds * (began[-1] - began[-2]))}")
        tick(stage)

    return foretell


def _about(seconds: float) -> str:
    return duration(float(f"{seconds:.1g}"))


def _write_json(path: str, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False))


def _names(text: str) -> List[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _contenders(names: List[str], topologies: List[str]) -> List[Contender]:
    from ..bench import all_contenders, find_contender, planned_for

    chosen = [find_contender(name) for name in names if name != "floor"] if names else list(all_contenders())
    chosen += [planned_for(name) for name in topologies]
    return list({contender.name: contender for contender in chosen}.values())


def _devices(args: argparse.Namespace) -> Tuple[str, ...]:
    from ..bench import devices_here
    from ..logical import split_gpu

    if args.split_gpu:
        split_gpu(args.split_gpu)
    return devices_here(args.devices)
