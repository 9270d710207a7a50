"""Damaged files, tables and arguments: each must be read, or refused by an error of this package, and soon.

::

    configs/, texts of tests ─► those that a target reads ─► damage ─► target ─► read │ refused │ a finding

    python -m trust.fuzz --seconds 1200 --seed 1
    python -m trust.fuzz --again strategy /tmp/…/input.yaml      one input again

The targets are the readers of files, ``TF_CONFIG`` and the command line. Each gets the same CPU time.
"""

import contextlib
import functools
import gc
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

import yaml

from hier_allreduce import HierAllreduceError

from .reporting import TOP, Finding, Work, in_processes, parse, report, until

_MOST = 16 << 10  # bytes of one input
_SECONDS = 1.0  # CPU time of one input
_MEMORY = 500 << 20  # bytes that one input may take

_LINES = """{"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": {"type": "worker", "index": 1}}
{gpu: V100, speeds: {nvlink: 22e9}, links: {SYS: 8e9}, shared: {bus: {speed: 12e9, copies: {GPU0: [GPU2, GPU3]}}}}
topo {file} --yaml
plan nvlink-bridges:0,1 --bytes 1e6 --json
plan dgx-1v --algorithm ring --lanes 2
bench --model {file} --rounds 3
launch -n 2 -- python train.py"""
_LAUGHS = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(9))  # prints a billion x
_WORDS = r"""
0 00 1 -1 7 16 65536 1e9 12e9 1e400 1e-400 -0.0 nan .inf 1_000 0x10 0o7 1:30 99999999999999999999 2026-13-45 ² ٣ true
null ~ [[0,1],[2,3]] [] {} {a:{b:[1]}} [&x[*x]] &a *a <<: {?[1,2]:3} "\0" '' "" yes |2 >- --- ... ? - : # %
[ {a: !!binary aGk= !!set !!omap !!timestamp !!float !!int !!python/object/apply:os.system ../.. /dev/null
""".encode().split()
_ODD = [*_WORDS, f"[{_LAUGHS}]".encode()]
_BYTES = (b"\0", b"\xff", b"\t", b"\r", b"\n", b"\x1b[31m", b"\xe2\x80\x8b", b"\xef\xbb\xbf", b"\xed\xa0\x80", b" ")
_PLACES = (rb"[-+]?\d[\d.eE+-]*", rb"[A-Za-z_][\w./-]*:?", rb"(?m)(?<=:)[^\n:]*$")  # a number, a word, a key's value


def seeds():
    """Return the files of ``configs/``, outputs of nvidia-smi, the texts of several lines in tests, and arguments."""
    files = [*(TOP / "configs").rglob("*.*"), *(TOP / "tests" / "topology" / "nvidia_smi").glob("*.txt")]
    found = [path.read_bytes() for path in sorted(files)] + _LINES.encode().split(b"\n")
    for test in sorted((TOP / "tests").rglob("test_*.py")):
        found += re.findall(rb'(?s)"""(.*?)"""', test.read_bytes())
    # long tables say no more than their first lines
    return sorted({b"\n".join(data.split(b"\n")[:60]) for data in found})


def damaged(data, rng, others):
    """Return ``data`` with one to six random changes; ``others`` are texts to take parts from."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        (change,) = rng.choices([*_DAMAGE], _DAMAGE.values())
        data = change(data, rng.randint(0, len(data)), rng, rng.choice(others))[:_MOST]
    return data


def _other_bytes(data, at, rng, other):
    new = rng.choice((bytes([rng.randrange(256)]), rng.choice(_BYTES), b""))
    return data[:at] + new + data[at + rng.choice((0, 1, 1, 8)) :]


def _other_lines(data, at, rng, other):
    lines = data.split(b"\n")
    number, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[to : to + rng.randrange(2)] = [b" " * rng.randrange(5) + lines[number]] * rng.choice((0, 1, 1, 1, 2, 3, 300))
    return b"\n".join(lines)


def _other_word(data, at, rng, other):
    pattern = rng.choice(_PLACES)
    start, end = rng.choice([match.span() for match in re.finditer(pattern, data)] or [(at, at)])
    alike = re.findall(pattern, rng.choice((data, data, other))) or _ODD
    new = rng.choice(rng.choice((alike, alike, _ODD)))
    return data[:start] + rng.choices((new, (new * 5000)[:5000]), (50, 1))[0] + data[end:]


def _other_value(data, at, rng, other):
    """Change a value of a YAML text."""
    with contextlib.suppress(Exception):
        boxes = [] if b"*" in data else [{"": yaml.safe_load(data)}]  # aliases can stand for very many values
        for box in boxes:
            parts = box.values() if isinstance(box, dict) else box
            boxes += [part for part in parts if isinstance(part, (dict, list))]
        box = rng.choice([box for box in boxes if box])
        key = rng.choice([*box] if isinstance(box, dict) else range(len(box)))
        box[key] = yaml.safe_load(rng.choice(_ODD))
        return yaml.safe_dump(boxes[0][""]).encode()
    return data


def _spliced(data, at, rng, other):
    return data[:at] + other[rng.randint(0, len(other)) :]


def _encoded(data, at, rng, other):
    text = data.decode("utf-8", "replace").replace(*rng.choice((" \t", "\t ", ("\n", "\r\n"), "01", ("GPU", "gpu"))))
    return text.encode(rng.choice(("utf-8", "utf-16", "utf-16-le", "utf-8-sig", "latin-1", "utf-32")), "replace")


_DAMAGE = {_other_bytes: 4, _other_lines: 6, _other_word: 10, _other_value: 4, _spliced: 2, _encoded: 1}


def targets():
    """Return ``{name: function of a file's path}``."""
    from hier_allreduce.bench.models import load_model
    from hier_allreduce.cli import entry
    from hier_allreduce.cluster.config import check_config, from_tf_config, read_config
    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer
    from hier_allreduce.planning import Strategy
    from hier_allreduce.topology import load

    def tf_config(path):
        hosts, task = from_tf_config(Path(path).read_bytes().decode("utf-8", "replace"))
        check_config(hosts, task, 8)

    return {
        "table": load,
        "machine": load,
        "strategy": Strategy.load,
        "cluster": read_config,
        "shapes": load_model,
        "TF_CONFIG": tf_config,
        "arguments": functools.partial(_command_line, entry.parser()),
        "trainer": HierarchicalTrainer.from_config,
    }


def _command_line(parser, path):
    """Parse a file's words as arguments; run the command if it only reads."""
    words = Path(path).read_bytes().decode("utf-8", "replace").replace("{file}", path).split()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")
    with mock.patch.multiple(sys, stdin=io.TextIOWrapper(io.BytesIO()), stdout=out, stderr=out):
        try:
            args = parser.parse_args(words)
            if args.command == "topo" and args.topology and not args.picture:
                args.main(args)
        except SystemExit as end:
            if end.code:
                raise HierAllreduceError("refused by the parser") from None


class Judge:
    """Gives one input after another to targets, and keeps what is wrong, each place in the code once."""

    def __init__(self, functions, folder):
        self.counts, self.findings = Counter(), []
        self._functions, self._folder, self._known = functions, folder, set()

    def judge(self, target, data):
        """Give ``data`` to a target; return whether it was read, and the seconds of CPU time."""
        path = os.path.join(self._folder, "input.txt" if target == "table" else "input.yaml")
        Path(path).write_bytes(data)
        outcome, fault, seconds = self._outcome(target, path)
        if not fault and seconds > _SECONDS:  # on a busy machine the first time is not the input's alone
            seconds = min(self._outcome(target, path)[2] for _ in range(3))
            if seconds > _SECONDS:
                outcome, fault = f"{target} is slow", f"it takes {seconds:.1f} s of CPU time"
        self.counts.update(["inputs", f"  {target}", *([] if fault else [f"  {outcome}"])])
        if fault and outcome not in self._known:
            self._known.add(outcome)
            self.findings.append(Finding(target, shutil.copy(path, tempfile.mkdtemp(prefix="fuzz")), fault))
        return outcome == "read", seconds

    def _outcome(self, target, path):
        """Return "read", "refused" or where something is wrong; what is wrong, or ""; and the seconds of CPU time."""
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 10 * _SECONDS)  # then it is given up
        try:
            self._functions[target](path)
            outcome, fault = "read", ""
        except HierAllreduceError:
            outcome, fault = "refused", ""
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__, -60)
            place = [frame for frame in frames if "hier_allreduce" in frame.filename][-1:]
            outcome, fault = f"{type(error).__name__} {place}", traceback.format_exc(-8)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return outcome, fault, time.process_time() - began


def search(judge, names, seed, rounds):
    """Damage what each target reads; the target that has taken the least CPU time is next."""
    given, spent = seeds(), dict.fromkeys(names, 0.0)
    # a generator for each target: how fast the others are does not change what it gets
    random_of = {name: random.Random(f"{seed} {name}") for name in names}
    readable = {name: [data for data in given if judge.judge(name, data)[0]] for name in names}
    for _ in rounds:
        target = min(spent, key=spent.get)
        _, taken = judge.judge(target, damaged(random_of[target].choice(readable[target]), random_of[target], given))
        spent[target] += taken


def inputs(seed, seconds):
    """Give damaged inputs to all targets until the time is over."""
    functions = targets()
    gc.freeze()
    signal.signal(signal.SIGPROF, signal.default_int_handler)  # a KeyboardInterrupt, which no reader catches
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # in memory: a disk is slower than the readers
        os.chdir(folder)
        judge = Judge(functions, folder)
        search(judge, functions, seed, until(seconds))
    return judge.counts, judge.findings


def main(argv=None):
    """Search, or repeat one input."""

    def add(parser):
        parser.add_argument("--again", nargs=2, metavar=("TARGET", "FILE"), help="give one input to a target again")

    args = parse(__doc__, argv, 1200, add)
    if args.again:
        print("read:", targets()[args.again[0]](args.again[1]))
        return 0
    began = time.monotonic()
    counts, findings = in_processes([[Work(inputs, args.seed + n, args.seconds, {})] for n in range(args.processes)])
    rows = [*counts.items(), ("findings", len(findings))]
    return report(args, began, rows, findings, lambda found: f"python -m trust.fuzz --again {found.part} {found.seed}")


if __name__ == "__main__":
    sys.exit(main())
