"""One training by tensorpack that records what a comparison needs: each step's loss, the weights, an audited step."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import tensorflow as tf
from tensorpack.callbacks import (
    Callback,
    MergeAllSummaries,
    ModelSaver,
    MovingAverageSummary,
    RunUpdateOps,
    ScalarPrinter,
    TFEventWriter,
)
from tensorpack.input_source import QueueInput
from tensorpack.predict import OfflinePredictor, PredictConfig
from tensorpack.tfutils.common import get_default_sess_config
from tensorpack.tfutils.sesscreate import NewSessionCreator
from tensorpack.tfutils.sessinit import SaverRestore
from tensorpack.train import TrainConfig, launch_train_with_config

from ...graph import tf1
from ...inspect import Audit, audit

_AUDITED_STEP = 1  # not the first step, which also fills the staging areas


@dataclass
class Run:
    """The record of a training.

    Attributes:
        losses: for each step, the mean of the towers' losses.
        weights: ``weights[tower][variable]``, at the end.
        audit: the copies of one step between the devices; None with a single tower.
    """

    losses: List[float] = field(default_factory=list)
    weights: List[Dict[str, np.ndarray]] = field(default_factory=list)
    audit: Optional[Audit] = None

    @property
    def drift(self) -> float:
        """The largest difference of a weight between tower 0 and another tower."""
        return max((largest_difference(self.weights[0], other) for other in self.weights[1:]), default=0.0)


def largest_difference(weights: Dict[str, np.ndarray], others: Dict[str, np.ndarray]) -> float:
    """Return the largest difference between two towers' weights, over all entries of all variables."""
    return max(float(np.max(np.abs(weights[name] - others[name]))) for name in weights)


class Recorder(Callback):
    """Fills a :class:`Run`, and advances a progress bar."""

    def __init__(self, bar: Any):
        self.run = Run()
        self._bar = bar

    def _setup_graph(self) -> None:
        self._costs = [tower["cost"] for tower in self.trainer.towers.training()]

    def _before_run(self, _: Any) -> Any:
        options = tf1.RunOptions(output_partition_graphs=self._audited())
        return tf1.train.SessionRunArgs(self._costs, options=options)

    def _after_run(self, _: Any, values: Any) -> None:
        if self._audited():
            self.run.audit = audit(values.run_metadata, self.graph)
        self.run.losses.append(float(np.mean(values.results, dtype=np.float64)))
        self._bar.set_postfix_str(f"loss {self.run.losses[-1]:.4f}", refresh=False)
        self._bar.update()

    def _after_train(self) -> None:
        variables = tf1.trainable_variables()
        values = self.trainer.sess.run(variables)
        self.run.weights = [{} for _ in self._costs]
        for variable, value in zip(variables, values):
            ((tower, name),) = re.findall(r"^(?:tower(\d+)/)?(.*)$", variable.op.name)
            self.run.weights[int(tower or 0)][name] = value

    def _audited(self) -> bool:
        return len(self._costs) > 1 and len(self.run.losses) == _AUDITED_STEP


def train(
    trainer: Any,
    model: Any,
    data: Any,
    epochs: int,
    bar: Any,
    callbacks: List[Callback],
    out: Optional[Path] = None,
    device: Optional[str] = None,
) -> Run:
    """Train in a graph of its own; return the record.

    Args:
        trainer: a tensorpack trainer.
        model: a ``ModelDesc`` whose cost is named ``cost``.
        data: a ``DataFlow`` of one epoch; in each step, every tower takes one batch.
        epochs: the number of epochs.
        bar: a ``tqdm`` bar, advanced by each step.
        callbacks: further callbacks.
        out: the folder for checkpoints and TensorBoard's events; None saves nothing.
        device: the device of everything that the trainer does not place itself.
    """
    recorder = Recorder(bar)
    towers = len(getattr(trainer, "devices", [device]))
    savers = [ModelSaver(max_to_keep=1, checkpoint_dir=str(out))] if out else []
    event_writers = [TFEventWriter(str(out))] if out else []
    with tf.Graph().as_default(), tf.device(device):
        config = TrainConfig(
            model=model,
            data=QueueInput(data),
            callbacks=[*callbacks, *savers, recorder],
            # tensorpack's defaults without its progress bar, which restarts with every epoch
            extra_callbacks=[MovingAverageSummary(), MergeAllSummaries(), RunUpdateOps()],
            monitors=[ScalarPrinter(), *event_writers],
            session_config=get_default_sess_config(),
            steps_per_epoch=len(data) // towers,
            max_epoch=epochs,
        )
        launch_train_with_config(config, trainer)
    return recorder.run


def predict(model: Any, checkpoint: str, inputs: List[np.ndarray], output: str) -> np.ndarray:
    """Return the tensor named ``output`` of a saved model, for ``inputs`` in the order of the model's inputs."""
    names = [spec.name for spec in model.get_input_signature()]
    config = PredictConfig(
        model=model,
        session_creator=NewSessionCreator(config=get_default_sess_config()),
        session_init=SaverRestore(checkpoint),
        input_names=names,
        output_names=[output],
    )
    return OfflinePredictor(config)(*inputs)[0]
