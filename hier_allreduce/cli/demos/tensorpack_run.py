"""One training by tensorpack, with what a comparison needs: every step's loss, the weights, the audited step."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

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
from tensorpack.tfutils.sessinit import SaverRestore
from tensorpack.train import TrainConfig, launch_train_with_config

from ...graph import Audit, audit, tf1

_AUDITED_STEP = 1  # not the first one, which also fills the staging areas


@dataclass
class Run:
    """What a training left behind.

    Attributes:
        losses: for each step the mean of the towers' losses.
        weights: ``weights[tower][variable]``.
        audit: the copies of one step between the devices, or what there is to say of them; None with a single tower.
    """

    losses: List[float] = field(default_factory=list)
    weights: List[Dict[str, np.ndarray]] = field(default_factory=list)
    audit: Union[Audit, str, None] = None

    @property
    def drift(self) -> float:
        """The largest difference of a weight between tower 0 and another tower."""
        return max((largest_difference(self.weights[0], other) for other in self.weights[1:]), default=0.0)


def largest_difference(weights: Dict[str, np.ndarray], others: Dict[str, np.ndarray]) -> float:
    """Over all entries of all variables."""
    return max(float(np.max(np.abs(weights[name] - others[name]))) for name in weights)


class Watch(Callback):
    """Fills a :class:`Run` and a progress bar."""

    _chief_only = False  # every host of several has its towers

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
            prefix = re.match(r"tower(\d+)/", variable.op.name)
            tower, name = (int(prefix.group(1)), variable.op.name[prefix.end() :]) if prefix else (0, variable.op.name)
            self.run.weights[tower][name] = value

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
    """Train in a graph of its own.

    Args:
        trainer: a tensorpack trainer.
        model: a ``ModelDesc`` whose cost is called ``cost``.
        data: a ``DataFlow`` of one epoch; every tower takes one of its batches in each step.
        epochs: how many.
        bar: a ``tqdm`` bar, moved on by every step.
        callbacks: more of them.
        out: where to save checkpoints and TensorBoard's events, if anywhere.
        device: where everything goes that the trainer does not place itself.
    """
    watch = Watch(bar)
    towers = len(getattr(trainer, "devices", [device]))
    saving = [ModelSaver(max_to_keep=1, checkpoint_dir=str(out))] if out else []
    with tf.Graph().as_default(), tf.device(device):
        config = TrainConfig(
            model=model,
            data=QueueInput(data),
            callbacks=[*callbacks, *saving, watch],
            # tensorpack's defaults without its progress bar, which starts again with every epoch
            extra_callbacks=[MovingAverageSummary(), MergeAllSummaries(), RunUpdateOps()],
            monitors=[ScalarPrinter(), *([TFEventWriter(str(out))] if out else [])],
            steps_per_epoch=len(data) // towers,
            max_epoch=epochs,
        )
        launch_train_with_config(config, trainer)
    return watch.run


def predict(model: Any, checkpoint: str, inputs: List[np.ndarray], output: str) -> np.ndarray:
    """A tensor of a saved model, by name, for ``inputs`` in the order of the model's."""
    names = [spec.name for spec in model.get_input_signature()]
    config = PredictConfig(model=model, session_init=SaverRestore(checkpoint), input_names=names, output_names=[output])
    return OfflinePredictor(config)(*inputs)[0]
