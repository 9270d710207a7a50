"""The command's options, and the text that it prints."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from pathlib import Path
from typing import List

from ..._version import __version__
from ...configs import decoded, read_text
from ...errors import HierAllreduceError
from ...formatting import amount, count, table
from ..options import naming
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


def different_devices(text: str) -> List[str]:
    """Read two or more different devices, such as ``/gpu:0,/gpu:1``."""
    found = text.split(",")
    for device in found:
        if not re.match(r"/[cg]pu:\d+$", device):
            raise argparse.ArgumentTypeError(f"{device!r} is no device such as /gpu:0 or /cpu:1")
    if len(found) < 2 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected two or more different devices, such as /gpu:0,/gpu:1"
        )
    return found


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there are problems."""
    if args.devices and not args.copies:
        raise HierAllreduceError("--devices goes with --copies; add it")
    if args.topo and args.copies:
        raise HierAllreduceError("--topo reads a file, --copies uses this machine: leave one out")
    if args.topo:
        return _read_topo(args.topo)
    print("asking nvidia-smi …", file=sys.stderr)
    nvidia = ask_nvidia_smi()
    print("asking TensorFlow for its devices …", file=sys.stderr)
    facts = gather(nvidia)
    todo = problems(facts)
    lines = _lines(facts)
    if args.copies:
        devices = args.devices or [f"/gpu:{number}" for number in range(len(facts.tensorflow.gpus))]
        _check_devices(devices, len(facts.tensorflow.gpus))
        print("copying …", file=sys.stderr)
        found = copy_all(devices)
        lines += ["", report(devices, found)]
        todo += faults(found)
    numbered = [f"{number}. {line}" for number, line in enumerate(todo, 1)]
    print("\n".join([*lines, "", *(numbered or ["no known problems"])]))
    return 1 if todo else 0


def _read_topo(name: str) -> int:
    """Print the groups in a saved output of nvidia-smi; on standard error its warnings."""
    if name == "-" and sys.stdin is None:
        raise HierAllreduceError("--topo -: standard input is closed")
    if name == "-":
        text = decoded(sys.stdin.buffer.read())
    elif Path(name).exists():
        text = read_text(Path(name))
    else:
        raise HierAllreduceError(
            f"--topo {name}: no such file; `nvidia-smi topo -m > {name}` writes it"
        )
    with naming(f"--topo {name}"):
        found = read_table(text)
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    groups = linked_groups(found.links)
    default = (
        "keep the default, and write no groups=: no two groups follow the NVLinks better than its"
        " halves"
    )
    print(_groups_line(groups) if groups else default)
    return 0


def _groups_line(groups: Groups) -> str:
    return f'along the NVLinks: Strategy(algorithm="hierarchical", groups={groups})'


def _check_devices(devices: List[str], gpus: int) -> None:
    numbers = [int(device[5:]) for device in devices if device.startswith("/gpu:")]
    if len(devices) < 2 or max(numbers, default=-1) >= gpus:
        raise HierAllreduceError(
            f"--copies: TensorFlow sees {count(gpus, 'GPU')}; name --devices such as /cpu:0,/cpu:1"
        )


def _lines(facts: Facts) -> List[str]:
    """Return the facts as lines, to paste into an issue."""
    where = ", in a container" if facts.in_container else ""
    versions = {
        "hier_allreduce": __version__,
        "python": platform.python_version(),
        **facts.packages,
    }
    lines = [f"{platform.platform()}, {count(facts.cores, 'core')}{where}", ""]
    lines += [table([("package", "version"), *versions.items()]), ""]
    lines += _nvidia_lines(facts)
    lines += _tensorflow_lines(facts)
    return lines + [f"{name}={value}" for name, value in facts.variables.items()]


def _nvidia_lines(facts: Facts) -> List[str]:
    nvidia = facts.nvidia
    if nvidia.fault:
        return [f"nvidia-smi: {nvidia.fault}"]
    lines = [f"nvidia-smi: {gpu.model}, driver {gpu.driver}" for gpu in nvidia.gpus]
    if len(nvidia.gpus) > 1 and nvidia.table:
        lines += ["", nvidia.table.split("\n\n")[0], ""]  # without its legend
    groups = groups_of(nvidia, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [*lines, *([_groups_line(groups)] if groups else [])]


def _tensorflow_lines(facts: Facts) -> List[str]:
    found = facts.tensorflow
    if found.fault:
        return []  # it is the first problem
    built = "with" if found.cuda else "without"
    seen = count(len(found.gpus), "GPU")
    lines = [f"TensorFlow {found.version}, built {built} CUDA, sees {seen}"]
    for gpu in found.gpus:
        peers = f", peers: {', '.join(map(str, gpu.peers)) or 'none'}" if found.cuda else ""
        lines.append(f"  {gpu.name} {gpu.model}, {amount(gpu.bytes, binary=True)}{peers}")
    return lines
