"""``hier-allreduce bench``: measured comparisons on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, List, Tuple

from ..errors import BenchError
from .arguments import count, device_count, folder, gib, installed, output, refuse_unused
from .plan import read_bytes
from .progress import progress, ticking

if TYPE_CHECKING:
    from ..bench import Case, Contender, Report

MODEL, ROWS, MEMORY = "resnet50", 2048, 8 << 30
MODELS = ("resnet50", "mobilenet_v2", "bert_base", "vgg16", "dlrm_criteo_kaggle")


MODES = {
    "peers": "our all-reduce and others, on a model's gradients",
    "sweep": "strategies of ours that differ in one choice",
    "sizes": "one gradient of each of several sizes, as in nccl-tests",
}
_SIZES = "ours,distribute-0,ring"  # contenders of `bench sizes`


def with_mode(arguments: List[str]) -> List[str]:
    """Return the command's arguments with a mode first: without one it is ``peers``."""
    return arguments if arguments[:1] and arguments[0] in (*MODES, "-h", "--help") else ["peers", *arguments]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's modes, each with its options."""
    modes = parser.add_subparsers(dest="mode", metavar="MODE")
    modes.required = True  # `with_mode` adds the default
    parser.usage = f"{parser.prog} [-h] [MODE] ..."  # after add_subparsers, which would begin the modes' own with it
    parser.epilog = (
        "The default MODE is peers: `bench --model resnet50` is `bench peers --model resnet50`."
        " `bench MODE --help` prints a mode's options."
    )
    subs = {name: modes.add_parser(name, help=summary, description=summary) for name, summary in MODES.items()}
    for name, sub in subs.items():
        _add_common(sub, name)
    for name in ("peers", "sweep"):
        _add_contenders(subs[name])
    contenders = "A,B,…", "only these; ours:NAME is ours with a strategy"
    subs["peers"].add_argument("--contenders", metavar=contenders[0], help=f"{contenders[1]} (default: all)")
    subs["sizes"].add_argument(
        "--contenders", metavar=contenders[0], default=_SIZES, help=f"{contenders[1]} (default: {_SIZES})"
    )
    _add_sizes(subs["sizes"])


def _add_common(parser: argparse.ArgumentParser, mode: str) -> None:
    """Add the options of most modes."""
    default = "all GPUs if two or more, else 8 CPU devices"
    parser.add_argument("--devices", metavar="K", type=device_count, help=f"how many (default: {default})")
    parser.add_argument("--rounds", metavar="N", type=count, default=15, help="timed steps of each (default: 15)")
    parser.add_argument("--average", action="store_true", help="the mean instead of the sum")
    parser.add_argument(
        "--split-gpu",
        metavar="K",
        type=device_count,
        help="cut each GPU into K logical GPUs first; they share its memory, and have no links between them",
    )
    if mode != "sizes":
        _add_model(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--model", metavar="NAME", help=f"a shipped table of gradient shapes (default: {MODEL})")
    table.add_argument("--shapes", metavar="FILE", help="your own table instead: name, shape, dtype, between tabs")


def _add_contenders(parser: argparse.ArgumentParser) -> None:
    """Add the options of the modes that compare all-reduces of a model's gradients."""
    add = parser.add_argument
    add("--strategy", metavar="NAME", nargs="+", default=[], help="these strategies of ours too")
    add("--topology", metavar="NAME", nargs="+", default=[], help="ours planned for these machines too")
    add("--rows", metavar="N", type=count, help=f"rows in each sparse gradient (default: {ROWS})")
    add("--memory", metavar="GIB", type=gib, help="skip contenders that need more memory than this to"
        f" make sparse gradients dense (default: {MEMORY >> 30})")  # fmt: skip
    add("--json", metavar="FILE", type=output, help="write everything that was measured")
    add("--trace", metavar="FOLDER", type=folder, help="write what one step of each contender did: a trace for"
        " ui.perfetto.dev, and its summary")  # fmt: skip
    add(
        "--table",
        metavar="FILE",
        type=output,
        help=f"measure sum and mean of {', '.join(MODELS)}, and write a Markdown page, or the data (.csv)",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options that nccl-tests have, with the same letters."""
    add = parser.add_argument
    add("-b", "--least", metavar="SIZE", type=read_bytes, default=64 << 10, help="the first size (default: 64KiB)")
    add("-e", "--most", metavar="SIZE", type=read_bytes, default=64 << 20, help="the last size (default: 64MiB)")
    add("-f", "--factor", metavar="F", type=factor, default=4, help="from one size to the next (default: 4)")
    add("--json", metavar="FILE", type=output, help="write everything that was measured")


def factor(text: str) -> int:
    """Read the factor between sizes: a whole number of 2 or more."""
    number = count(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 2 or more")
    return number


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.filterwarnings("ignore", message="Converting sparse IndexedSlices")  # a peer's; the table shows it
    with installed("the bench", "tf,bench"):
        importlib.import_module("tensorflow")
        importlib.import_module("tqdm")
    if args.mode in ("peers", "sweep"):
        return _measure_contenders(args)
    return _measure_sizes(args)


def _measure_contenders(args: argparse.Namespace) -> int:
    _check(args)
    if args.table:
        _write_page(args)
        return 0
    from ..bench import report_text

    name = _name(args)
    report = _measured(args, name, args.average)
    print(report_text(name, report))
    if args.json:
        _write_json(args.json, {"model": name, "rounds": args.rounds, **report.as_dict()})
    return 0


def _write_json(path: str, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)


def _check(args: argparse.Namespace) -> None:
    """Refuse options without effect and invalid ones before anything is measured."""
    refuse_unused(args, "--table", "--model", "--shapes", "--average", "--json", "--trace")
    _contenders(args)


def _measure_sizes(args: argparse.Namespace) -> int:
    """Measure each size, and print the table."""
    from ..bench import WARM_UP, find_contender, measure, size_case, sizes_text, sweep_sizes

    if args.least > args.most:
        raise BenchError(f"--least {args.least} bytes is more than --most {args.most}")
    contenders = [find_contender(name) for name in _names(args)]
    devices = _devices(args)
    sizes = sweep_sizes(args.least, args.most, args.factor)
    with progress(len(sizes) * (1 + len(contenders) + WARM_UP + args.rounds)) as bar:
        reports = {
            size: measure(size_case(size, devices, args.average), contenders, args.rounds, False, ticking(bar))
            for size in sizes
        }
    print(sizes_text(reports))
    if args.json:
        _write_json(args.json, [{"bytes": size, **report.as_dict()} for size, report in reports.items()])
    return 0


def _name(args: argparse.Namespace) -> str:
    return args.shapes or args.model or MODEL


def _contenders(args: argparse.Namespace) -> List[Contender]:
    from ..bench import all_contenders, find_contender, ours, planned_for, sweep_contenders

    names = _names(args)
    if names:
        chosen = [find_contender(name) for name in names if name != "floor"]
    else:
        chosen = list(sweep_contenders() if args.mode == "sweep" else all_contenders())
    chosen += [ours(strategy) for strategy in args.strategy]
    chosen += [planned_for(name) for name in args.topology]
    return list({contender.name: contender for contender in chosen}.values())


def _names(args: argparse.Namespace) -> List[str]:
    chosen = args.contenders or "" if args.mode in ("peers", "sizes") else ""
    return [name.strip() for name in chosen.split(",") if name.strip()]


def _case(args: argparse.Namespace, name: str, average: bool) -> Case:
    from ..bench import Case, load_model

    memory = MEMORY if args.memory is None else args.memory
    return Case(load_model(name), _devices(args), average, args.rows or ROWS, memory)


def _devices(args: argparse.Namespace) -> Tuple[str, ...]:
    from ..bench import devices_here, split_gpu

    if args.split_gpu:
        split_gpu(args.split_gpu)
    return devices_here(args.devices)


def _measured(args: argparse.Namespace, name: str, average: bool) -> Report:
    from ..bench import WARM_UP, measure

    contenders = _contenders(args)
    case = _case(args, name, average)
    floor = not _names(args) or "floor" in _names(args)
    parts = 1 + len(contenders) + WARM_UP + args.rounds
    with progress(parts) as bar:
        return measure(case, contenders, args.rounds, floor, ticking(bar), args.trace)


# ---- the page --------------------------------------------------------------------------------------


def _measured_apart(args: argparse.Namespace, name: str, average: bool) -> Report:
    """Measure one case in a process of its own, so that nothing it leaves in memory affects the next.

    Raises:
        BenchError: the process was killed.
    """
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        try:
            return process.submit(_measured, args, name, average).result()
        except BrokenProcessPool:
            raise BenchError(f"{name}: its process was killed, probably because memory ran out") from None


def _write_page(args: argparse.Namespace) -> None:
    """Measure the sum and the mean of every model. Rewrite the page after each, so that an interrupted run has one."""
    from ..bench import page_csv, page_markdown, report_text

    command = " ".join(["hier-allreduce", *sys.argv[1:]])
    cases: List[Tuple[str, Report]] = []
    as_data = args.table.lower().endswith(".csv")
    for name in MODELS:
        for average in (False, True):
            report = _measured_apart(args, name, average)
            cases.append((name, report))
            with open(args.table, "w", encoding="utf-8") as file:
                file.write(page_csv(cases) if as_data else page_markdown(cases, command, args.mode == "sweep"))
            print(report_text(name, report), end="\n\n", flush=True)
