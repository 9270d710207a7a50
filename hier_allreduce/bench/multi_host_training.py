"""A training step on several hosts: ours and MultiWorkerMirroredStrategy's, with the same model, batch and update.

Without a GPU the strategy has one replica on each host, whatever the number of its logical CPU devices.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..cluster import Cluster
from ..graph import make_logical_cpus, replica_values, tf1
from ..training import TowerOptimizer
from .measuring import interleaved

OURS = "ours"
PEER = "MultiWorkerMirroredStrategy"
WIDTHS = (256, 1024, 1024, 10)  # 1.3 million weights, 5.3 MB
WEIGHTS = sum(first * second for first, second in zip(WIDTHS, WIDTHS[1:]))
BATCH = 128  # examples in a step, over all hosts
_RATE, _MOMENTUM = 0.01, 0.9


class Trainer(NamedTuple):
    """A contender: a function that runs a step, one that reads tower 0's weights, and the towers on each host."""

    step: Callable[[], Any]
    weights: Callable[[], List[np.ndarray]]
    towers: int


def train(cluster: Cluster, devices: Sequence[str], peers: Sequence[str], rounds: int) -> Dict[str, Any]:
    """Measure the training steps of all contenders in turn, on this host.

    Args:
        cluster: the hosts.
        devices: this host's devices.
        peers: the addresses for the peer's own servers, one for each host.
        rounds: the number of timed steps of each contender.

    Returns:
        By contender ``seconds``, ``towers`` (on each host) and ``errors`` (of those that cannot run); and the largest
        ``difference`` of a final weight from ours.
    """
    make_logical_cpus(len(devices))  # the peer's; a session makes its own
    trainers: Dict[str, Trainer] = {}
    errors: Dict[str, str] = {}
    try:
        peer = _peer(peers, cluster.task)
        peer.step()
        trainers[PEER] = peer
    except Exception as error:  # a peer may raise anything; the report shows it
        errors[PEER] = f"{type(error).__name__}: {error}".splitlines()[0]
    with tf.Graph().as_default() as graph:
        optimizer, rows, weights = _towers(cluster, devices)
        step = optimizer.apply_gradients(rows)
        start = [tf1.global_variables_initializer(), cluster.broadcast(tf1.global_variables()), optimizer.init_op]
    with contextlib.closing(cluster.session(graph)) as session:  # no default session: the peer runs eagerly
        for op in start:
            session.run(op)
        trainers[OURS] = Trainer(session.make_callable(step), lambda: session.run(weights), len(devices))
        trainers[OURS].step()
        steps = {name: trainer.step for name, trainer in trainers.items()}
        seconds = interleaved(steps, rounds, lambda stage: None)
        final = {name: trainer.weights() for name, trainer in trainers.items()}
    towers = {name: trainer.towers for name, trainer in trainers.items()}
    return {"seconds": seconds, "towers": towers, "errors": errors, "difference": _difference(final)}


def _difference(final: Dict[str, List[np.ndarray]]) -> float:
    """Return the largest difference of any contender's weight from ours."""
    return max(float(abs(a - b).max()) for values in final.values() for a, b in zip(values, final[OURS]))


def _examples(part: int, parts: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return one of ``parts`` equal parts of the batch."""
    rng = np.random.RandomState(0)
    x, y = rng.rand(BATCH, WIDTHS[0]).astype(np.float32), rng.randint(WIDTHS[-1], size=BATCH).astype(np.int32)
    return np.split(x, parts)[part], np.split(y, parts)[part]


def _initial_weights(layer: int) -> np.ndarray:
    rng = np.random.RandomState(layer)
    return rng.normal(0, WIDTHS[layer] ** -0.5, WIDTHS[layer : layer + 2]).astype(np.float32)


def _loss(weights: Sequence[Any], x: Any, y: Any) -> Any:
    *hidden, last = weights
    for weight in hidden:
        x = tf.nn.relu(tf.matmul(x, weight))
    logits = tf.matmul(x, last)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def _towers(cluster: Cluster, devices: Sequence[str]) -> Tuple[TowerOptimizer, List[Any], List[Any]]:
    """Build ours: the optimizer, the towers' gradients and variables, and tower 0's weights."""
    optimizer = TowerOptimizer(tf1.train.MomentumOptimizer(_RATE, _MOMENTUM), devices, cluster=cluster)
    rows: List[Any] = []
    first: List[Any] = []
    for tower, device in enumerate(devices):
        x, y = _examples(cluster.task * len(devices) + tower, cluster.size * len(devices))
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            weights = [
                tf1.get_variable(f"w{layer}", initializer=_initial_weights(layer), use_resource=True)
                for layer in range(len(WIDTHS) - 1)
            ]
            rows.append(optimizer.compute_gradients(_loss(weights, tf.constant(x), tf.constant(y)), weights))
            first = first or weights
    return optimizer, rows, first


def _peer(addresses: Sequence[str], task: int) -> Trainer:
    """Build the same model under MultiWorkerMirroredStrategy."""
    cluster = tf.train.ClusterSpec({"worker": list(addresses)})
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            cluster, task_type="worker", task_id=task, rpc_layer="grpc"
        )
    )
    replicas, local = strategy.num_replicas_in_sync, len(strategy.extended.worker_devices)
    with strategy.scope():
        weights = [tf.Variable(_initial_weights(layer)) for layer in range(len(WIDTHS) - 1)]
        optimizer = tf1.train.MomentumOptimizer(_RATE, _MOMENTUM)
    examples = [_examples(task * local + replica, replicas) for replica in range(local)]
    inputs = [
        strategy.experimental_distribute_values_from_function(
            lambda context, part=part: tf.constant(examples[context.replica_id_in_sync_group % local][part])
        )
        for part in (0, 1)
    ]

    def replica_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = _loss(weights, x, y) / replicas  # the optimizer adds up over the replicas
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    step = tf.function(lambda: strategy.run(replica_step, args=inputs), autograph=False)
    return Trainer(step, lambda: [replica_values(weight)[0].numpy() for weight in weights], local)
