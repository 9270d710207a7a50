"""Damaged files, tables and arguments: each must be read, or refused by an error of this package, and soon.

::

    seeds ─► damage ─► file ─► nvidia-smi | machine | calibration | strategy | trainer | cluster |
               ▲                 shapes | TF_CONFIG | arguments of the command line
               └── coverage (atheris, where it is installed)

::

    python -m trust.fuzz --seconds 1200 --seed 1
    python -m trust.fuzz --again /tmp/….input --target strategy      one input again
"""

import contextlib
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

from .damage import damaged, seeds
from .reporting import Finding, Work, in_processes, parse, report

_SECONDS = 1.0  # CPU time of one input
_STOPPED = 10  # seconds of CPU time after which an input is given up
_MEMORY = 500 << 20  # bytes that one input may take
_KEPT = 20  # findings of one worker
# A file that is written anew for each input belongs into memory: a disk takes more time for it than its reader does.
_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # a terminal would obey some of them

_ARGUMENTS = """topo dgx-1v --yaml
topo {file} --calibration {file}
topo --anchors
plan p3.8xlarge --bytes 10MB --steps
plan nvlink-bridges:0,1 --bytes 1e6 --json
plan h100-nvl-4 --backlog 1ms
plan dgx-1v --algorithm ring
plan - --bytes 1GB
bench --model resnet50 --rounds 3 --devices 4
bench --shapes {file} --memory 1.5
demo --job keras --devices 3 --seed 4
launch -n 2 -- python train.py
--version
topo --help"""


class TooLong(Exception):
    """An input has taken more CPU time than any may."""


# ---- targets ---------------------------------------------------------------------------------------


def _targets(with_tensorflow):
    """Return ``{name: function of a file's path}``."""
    from hier_allreduce.bench.models import load_model
    from hier_allreduce.cluster.config import check_config, from_tf_config, read_config
    from hier_allreduce.planning import Strategy
    from hier_allreduce.topology import decoded, from_yaml, load
    from hier_allreduce.topology.machine_file import read_calibration

    def tf_config(path):
        hosts, task = from_tf_config(Path(path).read_bytes().decode("utf-8", "replace"))
        check_config(hosts, task, 8)

    targets = {
        "machine": lambda path: from_yaml(decoded(Path(path).read_bytes())),
        "table": load,
        "strategy": Strategy.load,
        "calibration": read_calibration,
        "cluster": read_config,
        "shapes": load_model,
        "TF_CONFIG": tf_config,
        "arguments": _command_line,
    }
    if with_tensorflow:
        from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

        targets["trainer"] = HierarchicalTrainer.from_config
    return targets


def _command_line(path):
    """Parse a file's words as arguments; run the commands that only read."""
    from hier_allreduce.cli import entry

    words = Path(path).read_bytes().decode("utf-8", "replace").replace("{file}", path).split()
    _command_line.parser = getattr(_command_line, "parser", None) or entry.parser()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(b""))
        try:
            args = _command_line.parser.parse_args(words)
            if args.command == "topo" and args.topology and not args.picture:
                args.main(args)
        finally:
            sys.stdin = stdin


# ---- one input -------------------------------------------------------------------------------------


class Judge:
    """Runs one input after another and keeps what is wrong, each place in the code once."""

    def __init__(self, folder, targets, is_guided):
        self.is_guided = is_guided
        self._scratch = tempfile.TemporaryDirectory(prefix="fuzz", dir=_IN_MEMORY)
        self.targets, self.path = targets, os.path.join(self._scratch.name, "input")
        self.counts, self.findings, self._known, self._folder = Counter(), [], set(), folder
        signal.signal(signal.SIGPROF, self._stop)
        if not is_guided:  # atheris has a limit of its own
            with open("/proc/self/statm", encoding="ascii") as statm:
                now = int(statm.read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, resource.RLIM_INFINITY))

    def close(self):
        """Remove the file of the last input."""
        self._scratch.cleanup()

    @staticmethod
    def _stop(number, frame):
        raise TooLong

    def _again(self, target):
        """Return the seconds of CPU time that the last input takes once more."""
        began = time.process_time()
        with contextlib.suppress(Exception):
            self.targets[target](self.path)
        return time.process_time() - began

    def judge(self, target, data):
        """Give ``data`` to a target; return what is wrong, "" if nothing is."""
        from hier_allreduce import HierAllreduceError

        with open(self.path, "wb") as file:
            file.write(data)
        self.counts["inputs"] += 1
        self.counts["  guided by coverage"] += self.is_guided
        self.counts[f"  {target}"] += 1
        began, fault = time.process_time(), ""
        signal.setitimer(signal.ITIMER_PROF, _STOPPED)
        try:
            self.targets[target](self.path)
            self.counts["  read"] += 1
        except HierAllreduceError as error:
            self.counts["  refused"] += 1
            if _UNPRINTABLE.search(str(error)):
                fault = f"a message with control characters: {str(error)[:300]!r}"
                place = f"{target} prints control characters"
        except BaseException as error:
            fault = f"{type(error).__name__}: {str(error)[:300]}\n{_tail(error)}"
            place = f"{type(error).__name__} {_place(error)}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = time.process_time() - began
        if not fault and seconds > _SECONDS:  # on a busy machine the first time is not the input's alone
            seconds = min(seconds, *(self._again(target) for _ in range(3)))
        if not fault and seconds > _SECONDS:
            fault = place = f"{target} takes {seconds:.1f} s of CPU time"
            place = f"{target} is slow"
        if fault and place not in self._known and len(self._known) < _KEPT:
            self._known.add(place)
            kept = os.path.join(self._folder, f"{len(self._known)}.input")
            shutil.copy(self.path, kept)
            self.findings.append(Finding(target, kept, fault))
        return fault


def _place(error):
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "hier_allreduce" in frame.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _tail(error):
    return "".join(traceback.format_list(traceback.extract_tb(error.__traceback__, -60)[-8:]))


def _chosen(rng, names):
    """Return a target; the slow ones are rarer."""
    return rng.choices(names, [{"trainer": 1, "arguments": 5}.get(name, 20) for name in names])[0]


# ---- two engines -----------------------------------------------------------------------------------


def inputs(seed, seconds, with_tensorflow=False):
    """Damaged inputs without guidance."""
    judge, rng, given = _begun(seed, with_tensorflow)
    names, end = sorted(judge.targets), time.monotonic() + seconds
    while time.monotonic() < end:
        target = _chosen(rng, names)
        judge.judge(target, damaged(_seed(target, rng, given), rng, given))
    judge.close()
    return judge.counts, judge.findings


def guided(seed, seconds):
    """Damaged inputs guided by the coverage of this package's code; the process ends with the search."""
    import pickle

    import atheris

    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["hier_allreduce"]):
        _targets(False)
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:  # atheris ends its process when the time is over
        os.close(mine)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        _guided_child(atheris, seed, seconds, theirs)
    os.close(theirs)
    with os.fdopen(mine, "rb") as line:
        last = b""
        for record in _records(line):
            last = record
    os.waitpid(child, 0)
    return pickle.loads(last) if last else (Counter(), [Finding("guided", seed, "atheris has ended at once")])


def _records(line):
    while True:
        head = line.read(8)
        if len(head) < 8:
            return
        yield line.read(int.from_bytes(head, "big"))


def _guided_child(atheris, seed, seconds, line):
    import pickle

    judge, rng, given = _begun(seed, False, is_guided=True)
    names, end, sent = sorted(judge.targets), time.monotonic() + seconds, [time.monotonic()]
    corpus = Path(tempfile.mkdtemp(prefix="corpus"))
    for number, data in enumerate(given):
        target = rng.randrange(len(names))
        (corpus / str(number)).write_bytes(bytes([target]) + data)

    def test(data):
        if data:
            judge.judge(names[data[0] % len(names)], data[1:])
        if time.monotonic() - sent[0] > 2 or time.monotonic() > end:
            sent[0] = time.monotonic()
            record = pickle.dumps((judge.counts, judge.findings))
            os.write(line, len(record).to_bytes(8, "big") + record)
        if time.monotonic() > end:
            shutil.rmtree(corpus, ignore_errors=True)
            judge.close()
            os._exit(0)

    def mutate(data, most, chosen):
        own = random.Random(chosen)
        changed = damaged(data[1:], own, given) if own.random() < 0.8 else atheris.Mutate(data[1:] or b"x", most - 1)
        head = bytes([names.index(_chosen(own, names))]) if own.random() < 0.1 or not data else data[:1]
        return (head + changed)[:most]

    # the other engine has the longer inputs, which say nothing new about coverage
    options = [f"-seed={seed + 1}", "-max_len=8192", "-verbosity=0", "-rss_limit_mb=4096", "-timeout=60", str(corpus)]
    atheris.Setup(["fuzz", *options], test, custom_mutator=mutate, internal_libfuzzer=True)
    atheris.Fuzz()


def _begun(seed, with_tensorflow, is_guided=False):
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    folder = tempfile.mkdtemp(prefix="fuzz")
    os.chdir(folder)
    sys.setrecursionlimit(1000)  # Python's own
    targets, given = _targets(with_tensorflow), seeds()
    gc.freeze()
    return Judge(folder, targets, is_guided), random.Random(seed), given


def _seed(target, rng, given):
    if target == "arguments":
        return rng.choice(_ARGUMENTS.split("\n")).encode()
    if target == "TF_CONFIG" and rng.random() < 0.9:
        return b'{"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": {"type": "worker", "index": 1}}'
    return rng.choice(given)


def _has_atheris():
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def main(argv=None):
    """Search, or repeat one input."""

    def add(parser):
        parser.add_argument("--again", metavar="FILE", help="give this input to --target, and say what happens")
        parser.add_argument("--target", default="machine")

    args = parse(__doc__, argv, 1200, add)
    if args.again:
        function = _targets(args.target == "trainer")[args.target]
        print("read:", function(args.again))
        return 0
    began, engine = time.monotonic(), guided if _has_atheris() else inputs
    if args.processes == 1:
        share = args.seconds / 2
        queues = [[Work(engine, args.seed, share, {}), Work(inputs, args.seed + 1, share, {"with_tensorflow": True})]]
    else:
        options = {"with_tensorflow": True}
        queues = [[Work(engine, args.seed, args.seconds, {})], [Work(inputs, args.seed + 1, args.seconds, options)]]
    counts, findings = in_processes(queues)
    rows = [*counts.items(), ("findings", len(findings))]
    return report(
        args, began, rows, findings, lambda found: f"python -m trust.fuzz --target {found.part} --again {found.seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
