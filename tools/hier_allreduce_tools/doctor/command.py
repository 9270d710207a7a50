"""The command's options, and the text that it prints."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from pathlib import Path
from typing import List

from hier_allreduce._version import __version__
from hier_allreduce.configs import decoded, read_text
from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.formatting import amount, count, table

from .copies import copy_all, faults, report
from .facts import Facts, gather
from .nvidia_smi import ask_nvidia_smi, groups_of
from .nvlinks import Groups, linked_groups, read_table
from .problems import problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    copies = "copy between all pairs of GPUs: bits compared, GB/s, 10 s for each pair"
    add("--copies", action="store_true", help=copies)
    devices = "two or more devices of TensorFlow for --copies: /gpu:0,/gpu:1 (default: all GPUs)"
    add("--devices", type=different_devices, metavar="A,B", help=devices)
    topo = "output of `nvidia-smi topo -m` (- is standard input): print its groups, nothing else"
    add("--topo", metavar="FILE", help=topo)


def different_devices(argument: str) -> List[str]:
    """Read two or more different devices, such as ``/gpu:0,/gpu:1``."""
    devices = argument.split(",")
    for device in devices:
        if not re.match(r"/[cg]pu:\d+$", device):
            raise argparse.ArgumentTypeError(f"{device!r} is no device such as /gpu:0 or /cpu:1")
    if len(devices) < 2 or len(set(devices)) < len(devices):
        raise argparse.ArgumentTypeError(
            f"{argument!r}: expected two or more different devices, such as /gpu:0,/gpu:1"
        )
    return devices


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there are problems."""
    if args.devices and not args.copies:
        raise HierAllreduceError("--devices goes with --copies; add it")
    if args.topo and args.copies:
        raise HierAllreduceError("--topo reads a file, --copies uses this machine: leave one out")
    if args.topo:
        return _read_topo(args.topo)

    # A broken driver answers neither of the two for minutes, so a line says who is asked.
    print("asking nvidia-smi …", file=sys.stderr)
    nvidia = ask_nvidia_smi()
    print("asking TensorFlow for its devices …", file=sys.stderr)
    facts = gather(nvidia)
    todo = problems(facts)
    lines = _lines(facts)

    if args.copies:
        # An unknown GPU is refused here, because TensorFlow's own error does not count GPUs.
        gpus = len(facts.tensorflow.gpus)
        devices = args.devices or [f"/gpu:{gpu}" for gpu in range(gpus)]
        named = [int(device[5:]) for device in devices if device.startswith("/gpu:")]
        if len(devices) < 2 or max(named, default=-1) >= gpus:
            seen = f"TensorFlow sees {count(gpus, 'GPU')}"
            raise HierAllreduceError(f"--copies: {seen}; name --devices such as /cpu:0,/cpu:1")
        print("copying …", file=sys.stderr)
        copy_by_pair = copy_all(devices)
        lines += ["", report(devices, copy_by_pair)]
        todo += faults(copy_by_pair)
    numbered = [f"{index}. {line}" for index, line in enumerate(todo, 1)]
    print("\n".join([*lines, "", *(numbered or ["no known problems"])]))
    return 1 if todo else 0


def _read_topo(file: str) -> int:
    """Print the groups in a saved output of nvidia-smi; on standard error its warnings."""
    if file == "-" and sys.stdin is None:
        raise HierAllreduceError("--topo -: standard input is closed")
    if file == "-":
        output = decoded(sys.stdin.buffer.read())
    elif Path(file).exists():
        output = read_text(Path(file))
    else:
        raise HierAllreduceError(
            f"--topo {file}: no such file; `nvidia-smi topo -m > {file}` writes it"
        )
    try:
        links, warnings = read_table(output)
    except HierAllreduceError as error:
        raise HierAllreduceError(f"--topo {file}: {error}") from None
    # Standard output has one line only, because a script may read it.
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    groups = linked_groups(links)
    if groups:
        print(_groups_line(groups))
    else:
        has_nvlinks = any(map(any, links))
        halves = "no two groups follow the NVLinks better than the halves"
        reason = halves if has_nvlinks else "the GPUs of this table have no NVLinks"
        print(f"keep the default, and write no groups=: {reason}")
    return 0


def _groups_line(groups: Groups) -> str:
    return f'along the NVLinks: Strategy(algorithm="hierarchical", groups={groups})'


def _lines(facts: Facts) -> List[str]:
    """Return the facts as lines, to paste into an issue."""
    where = ", in a container" if facts.in_container else ""
    version_by_package = {
        "hier_allreduce": __version__,
        "python": platform.python_version(),
        **facts.packages,
    }
    lines = [f"{platform.platform()}, {count(facts.cores, 'core')}{where}", ""]
    lines += [table([("package", "version"), *version_by_package.items()]), ""]

    # The table stays without its legend, because the reader of an issue knows its words.
    nvidia = facts.nvidia
    if nvidia.fault:
        lines.append(f"nvidia-smi: {nvidia.fault}")
    lines += [f"nvidia-smi: {gpu.model}, driver {gpu.driver}" for gpu in nvidia.gpus]
    if len(nvidia.gpus) > 1 and nvidia.table:
        lines += ["", nvidia.table.split("\n\n")[0], ""]
    groups = groups_of(nvidia)
    if groups:
        lines.append(_groups_line(groups))

    # A TensorFlow that cannot be used has no line here, because it is the first problem.
    tensorflow = facts.tensorflow
    if not tensorflow.fault:
        built = "with" if tensorflow.cuda else "without"
        seen = count(len(tensorflow.gpus), "GPU")
        lines.append(f"TensorFlow {tensorflow.version}, built {built} CUDA, sees {seen}")
    for gpu in tensorflow.gpus:
        # A GPU of a plug-in may have peers, but TensorFlow lists them for CUDA only.
        direct = ", ".join(map(str, gpu.peers)) or "none"
        peers = f", peers: {direct}" if tensorflow.cuda else ""
        lines.append(f"  {gpu.name} {gpu.model}, {amount(gpu.bytes, binary=True)}{peers}")
    return lines + [f"{variable}={value}" for variable, value in facts.variables.items()]
