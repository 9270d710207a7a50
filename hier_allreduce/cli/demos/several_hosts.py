"""The digits on several hosts, here processes of this machine, checked against one device with the whole batch.

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

from ...cluster import Cluster, launch, publish, read_event
from ...errors import ClusterError
from ...integrations.cluster import HierarchicalClusterTrainer
from . import digits
from .digit_images import RATES, load
from .options import chosen_devices, chosen_strategy
from .tensorpack_run import Run, train
from .terminal import pause

_OPTIONS = ("hosts", "devices", "strategy", "update", "optimizer", "epochs", "seed")


class Share(ProxyDataFlow):
    """A host's batches: of the H·K batches of each step, K consecutive ones."""

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
    """What all processes have in common."""

    def __init__(self, args: argparse.Namespace):
        self.devices = chosen_devices(args.devices)
        self.towers = args.hosts * len(self.devices)
        self.training, self.testing = load(args.seed)
        self.optimizer = args.optimizer or digits.OPTIMIZER
        self.model = digits.Convnet(args.seed, self.optimizer)
        self.batch = max(1, digits.BATCH // self.towers)
        self.steps = len(self.training.labels) // (self.batch * self.towers)
        self.epochs = args.epochs or digits.EPOCHS
        self._seed = args.seed

    def data(self, parts: int) -> DataFlow:
        return digits.Batches(self.training, self.steps, parts, self.batch * self.towers // parts, self._seed)

    def bar(self, terminal: IO[str], title: str) -> Any:
        return tqdm(total=self.steps * self.epochs, desc=title, file=terminal, unit="step", mininterval=pause(terminal))

    def train(self, trainer: Any, data: DataFlow, bar: Any, **options: Any) -> Run:
        rate = ScheduledHyperParamSetter("learning_rate", digits.rates(self.epochs, RATES[self.optimizer]))
        return train(trainer, self.model, data, self.epochs, bar, [rate], **options)


# ---- one host ----------------------------------------------------------------------------------------


def host(args: argparse.Namespace) -> None:
    """Train this host's towers; save the losses, the weights and the audit in ``args.out``."""
    job = _Job(args)
    cluster = Cluster.from_environment(devices_per_host=len(job.devices))
    trainer = HierarchicalClusterTrainer(
        job.devices, cluster, strategy=chosen_strategy(args.strategy), update=args.update
    )
    data = Share(job.data(job.towers), cluster.task, cluster.size, len(job.devices))
    out = Path(args.out)
    bar = _PublishedBar() if cluster.is_chief else tqdm(disable=True)
    run = job.train(trainer, data, bar, out=out if cluster.is_chief else None)
    weights: Dict[str, Any] = {
        f"{tower} {name}": value for tower, row in enumerate(run.weights) for name, value in row.items()
    }
    np.savez(_result(out, cluster.task), losses=run.losses, audit=str(run.audit or ""), **weights)


class _PublishedBar:
    """A progress bar that the launching process shows; it has the methods of tqdm that a training calls."""

    _postfix = ""

    def set_postfix_str(self, postfix: str, refresh: bool) -> None:
        self._postfix = postfix

    def update(self) -> None:
        publish(step=self._postfix)


def _result(out: Path, task: int) -> Path:
    return out / f"host{task}.npz"


# ---- all hosts ---------------------------------------------------------------------------------------


def run(args: argparse.Namespace, terminal: IO[str]) -> int:
    """Train on all hosts, then on one device; print a report. Return 0 if all checks pass, else 1.

    Raises:
        ClusterError: a host failed; the message ends with that host's error, and the log has all its output.
    """
    job = _Job(args)
    _train_on_hosts(args, job, terminal)
    many = _joined([_loaded(_result(args.out, task)) for task in range(args.hosts)])
    with job.bar(terminal, "one device") as bar:
        one = job.train(SimpleTrainer(), job.data(1), bar, device=job.devices[0])
    return digits.reported(many, one, job.model, job.testing, args.out, terminal, job.epochs)


def _train_on_hosts(args: argparse.Namespace, job: _Job, terminal: IO[str]) -> None:
    """Start the hosts and wait for them, while a bar shows the steps of host 0."""
    errors: List[str] = []
    options = {**{name: getattr(args, name) for name in _OPTIONS}, "out": str(args.out)}
    command = [sys.executable, "-m", __name__, json.dumps(options)]
    with job.bar(terminal, f"{args.hosts} hosts with {len(job.devices)} devices each") as bar:

        def take(line: str) -> None:
            event = read_event(line)
            if event is None:
                sys.stdout.write(line)
            elif "error" in event:
                errors.append(event["error"])
                sys.stdout.write(f"{event['error']}\n")
            else:
                bar.set_postfix_str(f"[host 0] {event['step']}", refresh=False)
                bar.update()

        status = launch(args.hosts, command, take)
    if status:
        reason = errors[0] if errors else "its output is in the log"
        raise ClusterError(f"a host failed with exit status {status}: {reason}")


def _loaded(path: Path) -> Dict[str, np.ndarray]:
    with np.load(str(path)) as archive:
        return dict(archive)


def _joined(results: Sequence[Dict[str, np.ndarray]]) -> Run:
    """Return all hosts' towers as one run, with the copies inside host 0."""
    weights: List[Dict[str, np.ndarray]] = []
    for result in results:
        towers: Dict[int, Dict[str, np.ndarray]] = {}
        for key in result.keys() - {"losses", "audit"}:
            tower, name = key.split()
            towers.setdefault(int(tower), {})[name] = result[key]
        weights += [towers[tower] for tower in sorted(towers)]
    losses = np.mean([result["losses"] for result in results], axis=0)
    return Run([float(loss) for loss in losses], weights, f"in host 0, {results[0]['audit']}")


if __name__ == "__main__":
    try:
        host(argparse.Namespace(**json.loads(sys.argv[1])))
    except Exception as error:
        publish(error=str(error))
        raise
