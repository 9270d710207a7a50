"""A training step on several hosts: ours, and MultiWorkerMirroredStrategy's with the same model, batch and update.

The peer gives every host one replica where it has no GPU, whatever its logical CPU devices. To see it with as many
towers as ours has, its list of devices is replaced: that is not public, and what it then cannot do is its own error.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple
from unittest import mock

import numpy as np
import tensorflow as tf

from ..cluster import Cluster
from ..graph import make_cpus, replica_values, tf1
from ..training import TowerOptimizer
from .measuring import interleaved

OURS = "ours"
PEER = "MultiWorkerMirroredStrategy, as it is"
PEER_EVERYWHERE = "MultiWorkerMirroredStrategy, on each device"
WIDTHS = (256, 1024, 1024, 10)  # 1.3 million weights, 5.3 MB
WEIGHTS = sum(first * second for first, second in zip(WIDTHS, WIDTHS[1:]))
BATCH = 128  # examples in a step, over all hosts
_RATE, _MOMENTUM = 0.01, 0.9


class Made(NamedTuple):
    """A contender: what makes a step, what reads tower 0's weights, and how many towers each host has."""

    step: Callable[[], Any]
    weights: Callable[[], List[np.ndarray]]
    towers: int


def train(cluster: Cluster, devices: Sequence[str], peers: Sequence[str], rounds: int) -> Dict[str, Any]:
    """Seconds of interleaved steps, on this host.

    Args:
        cluster: the hosts.
        devices: of this host.
        peers: the addresses for the peer's own servers, one for each host.
        rounds: how many steps of each are timed.

    Returns:
        By contender ``seconds`` and ``towers`` (on each host), ``errors`` of those that cannot run, and the largest
        ``difference`` of a weight to ours at the end.
    """
    make_cpus(len(devices))  # the peer's; a session makes its own
    made: Dict[str, Made] = {}
    errors: Dict[str, str] = {}
    for name in (PEER, PEER_EVERYWHERE):
        try:
            made[name] = _peer(peers, cluster.task, len(devices) if name == PEER_EVERYWHERE else 0)
            made[name].step()
        except Exception as error:  # whatever a peer raises is what is reported
            made.pop(name, None)
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    with tf.Graph().as_default() as graph:
        optimizer, rows, weights = _towers(cluster, devices)
        step = optimizer.apply_gradients(rows)
        start = [tf1.global_variables_initializer(), cluster.broadcast(tf1.global_variables()), optimizer.init_op]
    with contextlib.closing(cluster.session(graph)) as session:  # no default session: the peer runs eagerly
        for op in start:
            session.run(op)
        made[OURS] = Made(session.make_callable(step), lambda: session.run(weights), len(devices))
        made[OURS].step()
        seconds = interleaved({name: one.step for name, one in made.items()}, rounds, lambda words: None)
        found = {name: one.weights() for name, one in made.items()}
    off = [float(abs(a - b).max()) for values in found.values() for a, b in zip(values, found[OURS])]
    towers = {name: one.towers for name, one in made.items()}
    return {"seconds": seconds, "towers": towers, "errors": errors, "difference": max(off)}


def _examples(part: int, parts: int) -> Tuple[np.ndarray, np.ndarray]:
    """One of ``parts`` equal parts of the batch."""
    rng = np.random.RandomState(0)
    x, y = rng.rand(BATCH, WIDTHS[0]).astype(np.float32), rng.randint(WIDTHS[-1], size=BATCH).astype(np.int32)
    return np.split(x, parts)[part], np.split(y, parts)[part]


def _start(layer: int) -> np.ndarray:
    rng = np.random.RandomState(layer)
    return rng.normal(0, WIDTHS[layer] ** -0.5, WIDTHS[layer : layer + 2]).astype(np.float32)


def _loss(weights: Sequence[Any], x: Any, y: Any) -> Any:
    *inner, last = weights
    for weight in inner:
        x = tf.nn.relu(tf.matmul(x, weight))
    logits = tf.matmul(x, last)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def _towers(cluster: Cluster, devices: Sequence[str]) -> Tuple[TowerOptimizer, List[Any], List[Any]]:
    optimizer = TowerOptimizer(tf1.train.MomentumOptimizer(_RATE, _MOMENTUM), devices, cluster=cluster)
    rows: List[Any] = []
    first: List[Any] = []
    for tower, device in enumerate(devices):
        x, y = _examples(cluster.task * len(devices) + tower, cluster.size * len(devices))
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            weights = [
                tf1.get_variable(f"w{layer}", initializer=_start(layer), use_resource=True)
                for layer in range(len(WIDTHS) - 1)
            ]
            rows.append(optimizer.compute_gradients(_loss(weights, tf.constant(x), tf.constant(y)), weights))
            first = first or weights
    return optimizer, rows, first


def _peer(addresses: Sequence[str], task: int, devices: int) -> Made:
    """MultiWorkerMirroredStrategy with so many CPU devices on each host, or, if 0, with those that it takes."""
    with contextlib.ExitStack() as changes:
        if devices:
            for change in _every_device(devices):
                changes.enter_context(change)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": list(addresses)}), task_type="worker", task_id=task, rpc_layer="grpc"
            )
        )
    parts, local = strategy.num_replicas_in_sync, len(strategy.extended.worker_devices)
    with strategy.scope():
        weights = [tf.Variable(_start(layer)) for layer in range(len(WIDTHS) - 1)]
        optimizer = tf1.train.MomentumOptimizer(_RATE, _MOMENTUM)
    examples = [_examples(task * local + replica, parts) for replica in range(local)]
    values = [
        strategy.experimental_distribute_values_from_function(
            lambda context, part=part: tf.constant(examples[context.replica_id_in_sync_group % local][part])
        )
        for part in (0, 1)
    ]

    def replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = _loss(weights, x, y) / parts  # the optimizer adds up over the replicas
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    step = tf.function(lambda: strategy.run(replica, args=values), autograph=False)
    return Made(step, lambda: [replica_values(weight)[0].numpy() for weight in weights], local)


def _every_device(count: int) -> Iterator[Any]:
    """What makes a second strategy of this process take ``count`` CPU devices.

    It has numbers of its own for its collectives, and the first one's server: a server that is set up again forgets
    the hosts that are already waiting for this one, and both would wait for ever.
    """
    from tensorflow.python.distribute import collective_all_reduce_strategy as inside

    def local_devices(self: Any, resolver: Any, worker: str) -> Tuple[Tuple[str, ...], str]:
        return tuple(f"{worker}/device:CPU:{number}" for number in range(count)), "CPU"

    yield mock.patch.object(inside.CollectiveAllReduceExtended, "_initialize_local_devices", local_devices)
    yield mock.patch.object(inside.CollectiveAllReduceStrategy, "_collective_key_base", 1000)
    yield mock.patch.object(inside.CollectiveAllReduceExtended, "_std_server_started", True, create=True)
