"""``hier-allreduce bench``: measured comparisons on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, Callable, List, Tuple

from ..bench import OPTIMIZERS
from ..errors import BenchError
from ..figures import check_picture
from .arguments import add_split_gpu, count, device_count, folder, gib, installed, output, refuse_unused

if TYPE_CHECKING:
    from ..bench import Case, Contender, Report

MODEL, ROWS, MEMORY = "resnet50", 2048, 8 << 30
DEVICES = 4  # of each of several hosts
MODELS = ("resnet50", "mobilenet_v2", "bert_base", "vgg16", "dlrm_criteo_kaggle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--model", metavar="NAME", help=f"a shipped table of gradient shapes (default: {MODEL})")
    table.add_argument("--shapes", metavar="FILE", help="your own table instead: name, shape, dtype, between tabs")
    add(
        "--devices",
        metavar="K",
        type=device_count,
        help="how many (default: all GPUs if two or more, else 8 CPU devices)",
    )
    add_split_gpu(parser)
    add("--average", action="store_true", help="the mean instead of the sum")
    add("--rounds", metavar="N", type=count, default=15, help="timed steps of each contender (default: 15)")
    add("--contenders", metavar="A,B,…", help="only these; ours:NAME is ours with a strategy (default: all)")
    add("--strategy", metavar="NAME", nargs="+", default=[], help="these strategies of ours too")
    add("--topology", metavar="NAME", nargs="+", default=[], help="ours planned for these machines too")
    add("--sweep", action="store_true", help="instead of the peers, strategies of ours that differ in one choice")
    add("--updates", metavar="OPTIMIZER", help=f"instead: both updates, with {', '.join(OPTIMIZERS)}")
    add("--distribute", action="store_true", help="instead: MirroredStrategy with each of TensorFlow's ops, and ours")
    add("--hosts", metavar="H", type=device_count, help="instead: H hosts, processes on this machine with --devices"
        f" each (default: {DEVICES}), compared with one ring over all and MultiWorkerMirroredStrategy")  # fmt: skip
    add("--peers", nargs="+", help=argparse.SUPPRESS)  # how the hosts are started
    add("--rows", metavar="N", type=count, help=f"rows in each sparse gradient (default: {ROWS})")
    add("--memory", metavar="GIB", type=gib, help="skip contenders that need more memory than this to"
        f" make sparse gradients dense (default: {MEMORY >> 30})")  # fmt: skip
    add("--json", metavar="FILE", type=output, help="write everything that was measured")
    add("--picture", metavar="FILE", type=output, help="draw the ratios")
    add("--trace", metavar="FOLDER", type=folder, help="write what one step of each contender did: a trace for"
        " ui.perfetto.dev, its summary and a picture")  # fmt: skip
    add(
        "--table",
        metavar="FILE",
        type=output,
        help=f"measure sum and mean of {', '.join(MODELS)}, and write a Markdown page, or the data (.csv)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    warnings.filterwarnings("ignore", message="Converting sparse IndexedSlices")  # a peer's; the table shows it
    _check(args)
    if args.updates:
        print(_updates_text(args))
        return 0
    if args.distribute:
        print(_distribute_text(args))
        return 0
    if args.hosts:
        return _measure_hosts(args)
    if args.table:
        _write_page(args)
        return 0
    from ..bench import draw_report, report_text

    name = _name(args)
    report = _measured(args, name, args.average)
    print(report_text(name, report))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"model": name, "rounds": args.rounds, **report.as_dict()}, file, indent=1, ensure_ascii=False)
    if args.picture:
        draw_report(name, report, args.picture)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse missing modules, options without effect and invalid ones before anything is measured."""
    others = (
        "--contenders",
        "--strategy",
        "--topology",
        "--rows",
        "--memory",
        "--json",
        "--picture",
        "--trace",
        "--table",
    )
    one_host = ("--model", "--shapes", "--average", "--sweep", "--updates", "--distribute", "--split-gpu")
    refuse_unused(args, "--hosts", *others, *one_host)
    refuse_unused(args, "--updates", *others, "--sweep", "--distribute")
    refuse_unused(args, "--distribute", *others, "--sweep")
    refuse_unused(args, "--table", "--model", "--shapes", "--average", "--json", "--picture", "--trace")
    refuse_unused(args, "--sweep", "--contenders")
    with installed("the bench", "tf,bench"):
        importlib.import_module("tensorflow")
        importlib.import_module("tqdm")
    if args.updates or args.distribute or args.hosts:
        return
    from ..bench import is_ours

    chosen = _contenders(args)
    if args.trace:
        check_picture("trace.png")
    if args.picture:
        check_picture(args.picture)
        if not any(is_ours(contender.name) for contender in chosen):
            raise BenchError("--picture draws ratios to ours: name ours among the --contenders")


def _name(args: argparse.Namespace) -> str:
    return args.shapes or args.model or MODEL


def _contenders(args: argparse.Namespace) -> List[Contender]:
    from ..bench import all_contenders, find_contender, ours, planned_for, sweep_contenders

    names = _names(args)
    if names:
        chosen = [find_contender(name) for name in names if name != "floor"]
    else:
        chosen = list(sweep_contenders() if args.sweep else all_contenders())
    chosen += [ours(strategy) for strategy in args.strategy]
    chosen += [planned_for(name) for name in args.topology]
    return list({contender.name: contender for contender in chosen}.values())


def _names(args: argparse.Namespace) -> List[str]:
    return [name.strip() for name in (args.contenders or "").split(",") if name.strip()]


def _case(args: argparse.Namespace, name: str, average: bool) -> Case:
    from ..bench import Case, devices_here, load_model
    from ..graph import split_gpus

    if args.split_gpu:
        split_gpus(args.split_gpu)
    devices = devices_here(args.devices)
    memory = MEMORY if args.memory is None else args.memory
    return Case(load_model(name), devices, average, args.rows or ROWS, memory)


def _updates_text(args: argparse.Namespace) -> str:
    from ..bench import WARM_UP, compare_updates
    from ..training import UPDATES

    name = _name(args)
    case = _case(args, name, args.average)
    with _bar(len(UPDATES) + WARM_UP + args.rounds) as bar:
        compared = compare_updates(case, args.updates, args.rounds, _ticking(bar))
    return f"{name}, {args.updates}, {len(case.devices)} devices\n{compared.text()}"


def _distribute_text(args: argparse.Namespace) -> str:
    from ..bench import MIRRORED_CONTENDERS, WARM_UP, compare_mirrored

    name = _name(args)
    case = _case(args, name, args.average)
    with _bar(1 + len(MIRRORED_CONTENDERS) + WARM_UP + args.rounds) as bar:
        compared = compare_mirrored(case, args.rounds, _ticking(bar))
    return f"{name}, MirroredStrategy on {len(case.devices)} devices ({case.devices[0]} …)\n{compared.text()}"


def _measure_hosts(args: argparse.Namespace) -> int:
    """Start the hosts and print their measurements, or be one of the hosts; return the exit status."""
    from ..bench import measure_hosts, run_host

    devices = args.devices or DEVICES
    if args.peers:
        run_host(devices, args.rounds, args.peers)
        return 0
    status, text = measure_hosts(args.hosts, devices, args.rounds, sys.stderr.write)
    if not status:
        print(text)
    return status


def _bar(parts: int) -> Any:
    from tqdm import tqdm

    layout = "{desc:24}{bar:40} {n_fmt}/{total_fmt} {elapsed}"
    return tqdm(total=parts, file=sys.stderr, leave=False, disable=None, bar_format=layout)


def _ticking(bar: Any) -> Callable[[str], None]:
    def tick(stage: str) -> None:
        bar.set_description_str(stage, refresh=False)
        bar.update()

    return tick


def _measured(args: argparse.Namespace, name: str, average: bool) -> Report:
    from ..bench import WARM_UP, measure

    contenders = _contenders(args)
    case = _case(args, name, average)
    floor = not _names(args) or "floor" in _names(args)
    parts = 1 + len(contenders) + WARM_UP + args.rounds
    with _bar(parts) as bar:
        return measure(case, contenders, args.rounds, floor, _ticking(bar), args.trace)


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
                file.write(page_csv(cases) if as_data else page_markdown(cases, command, args.sweep))
            print(report_text(name, report), end="\n\n", flush=True)
