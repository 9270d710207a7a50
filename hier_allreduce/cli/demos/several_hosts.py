"""The digits on several hosts, here processes of this machine, held against one device with the whole batch.

    python -m hier_allreduce.cli.demos.several_hosts '{"devices": "4", …}'

is one of the hosts; ``hier-allreduce demo --hosts N`` starts them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Sequence

import numpy as np
from tensorpack.callbacks import ScheduledHyperParamSetter
from tensorpack.dataflow import DataFlow, ProxyDataFlow
from tensorpack.train import SimpleTrainer
from tqdm import tqdm

from ...cluster import Cluster, launch
from ...errors import ClusterError
from ...graph import tf1
from ...integrations.cluster import HierarchicalClusterTrainer
from . import digits
from .options import chosen_devices, chosen_strategy
from .tensorpack_run import Run, predict, train
from .terminal import pause

_STEP = "step made, "  # begins the lines with which host 0 tells of a step
_FAULT = "cannot go on: "  # begins the line with which a host tells of an error


class Share(ProxyDataFlow):
    """A host's batches: of every step's H·K, K neighbours."""

    def __init__(self, data: DataFlow, task: int, hosts: int, devices: int):
        super().__init__(data)
        self._task, self._hosts, self._devices = task, hosts, devices

    def __len__(self) -> int:
        return len(self.ds) // self._hosts

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.ds):
            if number // self._devices % self._hosts == self._task:
                yield batch


class _Job:
    """What all processes must have in common."""

    def __init__(self, args: argparse.Namespace):
        self.devices = chosen_devices(args.devices)
        self.towers = args.hosts * len(self.devices)
        self.training, self.testing = digits.load(args.seed)
        self.optimizer = args.optimizer or digits.OPTIMIZER
        self.model = digits.Convnet(args.seed, self.optimizer)
        self.batch = max(1, digits.BATCH // self.towers)
        self.steps = len(self.training.labels) // (self.batch * self.towers)
        self.epochs = args.epochs or digits.EPOCHS
        self._seed = args.seed

    def data(self, parts: int) -> DataFlow:
        return digits.Batches(self.training, self.steps, parts, self.batch * self.towers // parts, self._seed)

    def train(self, trainer: Any, data: DataFlow, bar: Any, **more: Any) -> Run:
        rate = ScheduledHyperParamSetter("learning_rate", digits.rates(self.epochs, digits.RATES[self.optimizer]))
        return train(trainer, self.model, data, self.epochs, bar, [rate], **more)


# ---- one host ----------------------------------------------------------------------------------------


def host(args: argparse.Namespace) -> None:
    """Train this host's towers; leave what came of it in ``args.out``."""
    job = _Job(args)
    cluster = Cluster.from_environment(devices_per_host=len(job.devices))
    trainer = HierarchicalClusterTrainer(
        job.devices, cluster, strategy=chosen_strategy(args.strategy), update=args.update
    )
    data = Share(job.data(job.towers), cluster.task, cluster.size, len(job.devices))
    out = Path(args.out)
    bar = _ToldBar() if cluster.is_chief else tqdm(disable=True)
    run = job.train(trainer, data, bar, out=out if cluster.is_chief else None)
    arrays: Dict[str, Any] = {
        f"{tower} {name}": value for tower, row in enumerate(run.weights) for name, value in row.items()
    }
    np.savez(_result(out, cluster.task), losses=run.losses, audit=str(run.audit or ""), **arrays)


class _ToldBar:
    """A progress bar that another process shows."""

    _words = ""

    def set_postfix_str(self, words: str, refresh: bool) -> None:
        """As tqdm's."""
        self._words = words

    def update(self) -> None:
        """As tqdm's."""
        print(f"{_STEP}{self._words}", flush=True)


def _result(out: Path, task: int) -> Path:
    return out / f"host{task}.npz"


# ---- all of them -------------------------------------------------------------------------------------


def run(args: argparse.Namespace, terminal: IO[str]) -> int:
    """Start the hosts, then train on one device; print a report; 0 if it is good.

    Raises:
        ClusterError: a host failed; the message ends with its words, the log has all of them.
    """
    job = _Job(args)
    faults: List[str] = []
    wanted = {**{key: getattr(args, key) for key in _OPTIONS}, "out": str(args.out)}
    command = [sys.executable, "-m", __name__, json.dumps(wanted)]
    with _bar(terminal, job, f"{args.hosts} hosts with {len(job.devices)} devices each") as bar:

        def take(line: str) -> None:
            who, step, words = line.partition(_STEP)
            if step:
                bar.set_postfix_str(f"{who}{words.rstrip()}", refresh=False)
                bar.update()
            else:
                faults.extend(line.rstrip().split(_FAULT)[1:])
                sys.stdout.write(line)

        status = launch(args.hosts, command, take)
    if status:
        words = faults[0] if faults else "its last words are in the log"
        raise ClusterError(f"a host failed with exit status {status}: {words}")
    many = _joined([_loaded(_result(args.out, task)) for task in range(args.hosts)])
    with _bar(terminal, job, "one device") as bar:
        one = job.train(SimpleTrainer(), job.data(1), bar, device=job.devices[0])
    checkpoint = tf1.train.latest_checkpoint(str(args.out))
    found = predict(job.model, checkpoint, list(job.testing), "digit")
    report = digits.Report(many, one, float(np.mean(found == job.testing.labels)), checkpoint)
    print(report, file=terminal)
    return 1 if report.faults else 0


def _bar(terminal: IO[str], job: _Job, title: str) -> Any:
    return tqdm(total=job.steps * job.epochs, desc=title, file=terminal, unit="step", mininterval=pause(terminal))


_OPTIONS = ("hosts", "devices", "strategy", "update", "optimizer", "epochs", "seed")


def _loaded(path: Path) -> Dict[str, np.ndarray]:
    with np.load(str(path)) as archive:
        return dict(archive)


def _joined(results: Sequence[Dict[str, np.ndarray]]) -> Run:
    """All hosts' towers as one run, with the copies inside host 0."""
    weights: List[Dict[str, np.ndarray]] = []
    for result in results:
        towers = sorted({int(key.split()[0]) for key in result if key not in ("losses", "audit")})
        weights += [{key.split()[1]: result[key] for key in result if key.startswith(f"{tower} ")} for tower in towers]
    losses = np.mean([result["losses"] for result in results], axis=0)
    return Run([float(loss) for loss in losses], weights, f"in host 0, {results[0]['audit']}")


if __name__ == "__main__":
    try:
        host(argparse.Namespace(**json.loads(sys.argv[1])))
    except Exception as error:
        print(f"{_FAULT}{error}", flush=True)
        raise
