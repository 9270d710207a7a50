"""One host of the jobs in helpers/clusters.py: the program of its process.

It sends pairs to the test: ``("at", point)`` as it goes, ``("facts", …)`` or ``("error", text)`` at
the end. Scenarios call ``reach(point)``, which also waits for the test if the option ``wait_at`` is
that point.
"""

import contextlib
import faulthandler
import functools
import gc
import os
from concurrent import futures
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from emulated_gpu import plugin

import hier_allreduce
from helpers import real_gpus  # noqa: F401  before this program or its children start devices
from helpers.rows import for_each, variables_of, without_none
from hier_allreduce import Cluster, ClusterError, HierAllreduceError, Strategy, allreduce_grads
from hier_allreduce.cluster import health

# In the fork server. Its children's collector skips the objects of modules, and copies no page.
gc.freeze()

tf1 = tf.compat.v1
XPU = os.environ.get("TEST_DEVICES", "cpu")  # the kind under test, as in helpers.graphs
FEATURES, CLASSES, BATCHES, BATCH, RATE = 5, 3, 8, 4, 0.05
SECONDS = 150  # for everything that a host does

DTYPES = ["float32"] * 5 + ["float64", "float16", "bfloat16", "int32", "uint8"]
SHAPES = [(4, 3), (7,), (), (0, 3), (300, 70), (2, 2), (5,), (5,), (6,), (3, 1)]


def devices_of(options):
    return [f"/{XPU}:{k}" for k in range(options["towers"])]


def session_of(cluster, options):
    return cluster.session(config=tf1.ConfigProto(device_count={"CPU": options["towers"]}))


def tower_row(tower):
    """Return a tower's small whole numbers, of several shapes; ``tower`` counts over all hosts."""
    rng = np.random.RandomState(tower)
    return [rng.randint(0, 8, shape).astype(float) for shape in SHAPES]


def sums(cluster, options, reach):
    """Sum all kinds of gradients; return every tower's results, the collectives and the audit."""
    devices = devices_of(options)
    rows = []
    with tf.Graph().as_default() as graph:
        for tower, device in enumerate(devices):
            with tf.device(device):
                dense = tower_row(cluster.task * len(devices) + tower)
                # no graph optimizer folds these into constants
                row = [
                    tf.cast(tf1.placeholder_with_default(v, v.shape), d)
                    for v, d in zip(dense, DTYPES)
                ]
                sparse = tf.IndexedSlices(row[1][:1], tf.constant([cluster.task]), tf.constant([4]))
                rows.append([*row, sparse, None])
        built = {
            "sum": allreduce_grads(rows, devices, cluster=cluster),
            "alone": allreduce_grads(
                rows, devices, strategy=Strategy(chunk_bytes=0), cluster=cluster
            ),
            "mean": allreduce_grads(
                [row[:8] for row in rows], devices, average=True, cluster=cluster
            ),
        }
        fetches = {name: list(map(without_none, result)) for name, result in built.items()}
        with session_of(cluster, options) as session:
            asked = tf1.RunOptions(output_partition_graphs=True)
            seen = tf1.RunMetadata()
            values = session.run(fetches, options=asked, run_metadata=seen)
            again = session.make_callable(fetches["sum"])()
    nodes = [
        node
        for part in seen.partition_graphs
        for node in part.node
        if node.op.startswith("CollectiveReduce")
    ]
    results = {}
    for name, found in {**values, "again": again}.items():
        # the bfloat16 of TensorFlow 1.15 cannot be sent to another process
        results[name] = for_each(functools.partial(np.asarray, dtype=float), found)
    return {
        "results": results,
        "crossed": sorted((node.name, node.device) for node in nodes),
        "audit": str(hier_allreduce.audit(seen, graph)),
    }


def fed(cluster, options, reach):
    """Add up ones in the steps for which ``fed`` is true, in one thread or two.

    In the others nothing crosses.
    """
    tf1.disable_control_flow_v2()
    devices = devices_of(options)
    results = []
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [1])
        crosses = tf1.placeholder(tf.bool, [])
        rows = [[x + 0.0] for _ in devices]
        total = tf1.cond(
            crosses, lambda: allreduce_grads(rows, devices, cluster=cluster)[-1][0], lambda: x + 0.0
        )

        def run(feed):
            try:
                return session.run(total, feed).tolist()
            except ClusterError as error:
                reach("an error")
                return str(error)

        with session_of(cluster, options) as session, futures.ThreadPoolExecutor(2) as pool:
            reach("open")
            for step, is_crossing in enumerate(options["fed"]):
                feed = {x: [1.0], crosses: is_crossing}
                results += sorted(pool.map(run, [feed] * options.get("threads", 1)), key=str)
                reach(step)
    return results


OPTIMIZERS = {
    "momentum": lambda rate: tf1.train.MomentumOptimizer(rate, 0.9),
    "less momentum": lambda rate: tf1.train.MomentumOptimizer(rate, 0.5),
    "fed": lambda rate: tf1.train.MomentumOptimizer(tf1.placeholder_with_default(rate, []), 0.9),
}


def model(cluster, devices, options):
    """Build a linear classifier.

    Return its step's number, the loss, the train op, the ops of the start, the variables, and the
    optimizer's hook.
    """
    hidden = options.get("width", FEATURES)
    step = tf1.placeholder(tf.int32, [])
    rows = []
    losses = []
    for tower, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{tower}", use_resource=True):
            # other examples on all towers of all hosts
            rng = np.random.RandomState(cluster.task * len(devices) + tower)
            y = rng.randint(CLASSES, size=[BATCHES, BATCH])
            x = rng.randn(BATCHES, BATCH, FEATURES) + y[..., None]
            start = tf1.random_normal_initializer(seed=cluster.task)  # each host has other weights
            a = tf1.get_variable("a", [FEATURES, hidden], initializer=start)
            b = tf1.get_variable(options.get("name", "b"), [hidden, CLASSES], initializer=start)
            logits = tf.matmul(tf.matmul(tf.constant(x, tf.float32)[step % BATCHES], a), b)
            labels = tf.constant(y)[step % BATCHES]
            losses.append(
                tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
                )
            )
            grads = tf1.gradients(losses[-1], [a, b])
            rows.append(list(zip(grads, [a, b])))
    choices: dict = {
        "strategy": options.get("algorithm", "flat"),
        "update": options.get("update", "replicated"),
    }
    rate = options.get("rate", RATE)
    users = OPTIMIZERS[options.get("optimizer", "momentum")](rate)
    choices.update(options.get("choices", {}))
    optimizer = hier_allreduce.TowerOptimizer(users, devices, cluster=cluster, **choices)
    train_op = optimizer.apply_gradients(rows)
    start = [cluster.broadcast(tf1.global_variables()), optimizer.init_op]
    loss = tf.add_n(losses) / len(losses)
    return step, loss, train_op, start, variables_of(rows), optimizer.hook()


def train(cluster, options, reach):
    """Train from host 0's weights, or from a checkpoint that every host restores; or fail."""
    os.environ.update(options.get("environ", {}))
    if options.get("heartbeats"):  # it reports them to the test
        heartbeat = health.heartbeat
        health.heartbeat = lambda *asked: reach("a heartbeat") or heartbeat(*asked)
    with tf.Graph().as_default():
        # A host may build more than others, and its ops then have other names.
        for number in range(options.get("more_ops", 0)):
            tf.constant(float(number), name="Momentum/learning_rate")
        built = model(cluster, devices_of(options), options)
        number, loss, train_op, start, towers, hook = built
        hook.begin()
        saver = tf1.train.Saver(tf1.global_variables())
        reach("built")
        with session_of(cluster, options) as session:
            session.run(tf1.global_variables_initializer())
            if options.get("restore"):
                saver.restore(session, options["restore"])
            for op in start if options.get("broadcast", True) else start[1:]:
                session.run(op)
            hook.after_create_session(session, None)
            asked = tf1.train.SessionRunArgs([loss, train_op])
            context = tf1.train.SessionRunContext(asked, session)
            hooks = [] if options.get("without_hook") else [hook]
            losses = []
            for step in range(options.get("first", 0), options.get("steps", 6)):
                if step == options.get("flip_at"):
                    plugin.set_flip(0, 1, 1)
                more = [hook.before_run(context) or tf1.train.SessionRunArgs([]) for hook in hooks]
                fetches = [*asked.fetches, *(added.fetches for added in more)]
                loss_now, _, *results = session.run(fetches, {number: step})
                losses.append(loss_now)
                for hook, result in zip(hooks, results):
                    hook.after_run(context, tf1.train.SessionRunValues(result, None, None))
                if step == options.get("save_at") and cluster.is_chief:
                    saver.save(session, options["folder"])
                reach(step)
                if step == options.get("raise_at"):
                    raise HierAllreduceError("the program's mistake")
                if step == options.get("spoil_at"):
                    session.run(towers[1][0].assign_add(tf.ones_like(towers[1][0])))
            return {"losses": losses, "towers": session.run(towers)}


def epochs(cluster, options, reach):
    """Run ``epochs[s]`` epochs of three steps in session s, and return each epoch's results."""
    results: list = []
    with tf.Graph().as_default():
        batches = tf1.data.make_initializable_iterator(tf.data.Dataset.range(3))
        batch = tf.cast(batches.get_next(), tf.float32)
        rows = allreduce_grads([[batch]] * options["towers"], devices_of(options), cluster=cluster)
        for count in options["epochs"]:
            with session_of(cluster, options) as session:
                for _ in range(count):
                    session.run(
                        batches.initializer
                    )  # needs no other host, so the end of the data does not prevent it
                    results.append([])
                    with contextlib.suppress(tf.errors.OutOfRangeError):
                        while True:
                            reach((len(results), len(results[-1])))
                            results[-1].append(session.run(rows[-1][0]))
    return results


def tensorpack(cluster, options, reach):
    """Train the model of tensorpack_child for an epoch, each host on its share of the batches."""
    import tensorpack as tp

    from helpers import tensorpack_child as child
    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    towers = options["towers"]
    folder = options["folder"]
    tp.utils.logger.set_logger_dir(os.path.join(folder, f"log{cluster.task}"), action="k")

    def share():
        batches = enumerate(child.Data(child.BATCH))
        return (
            batch for number, batch in batches if number // towers % cluster.size == cluster.task
        )

    child.Look._chief_only = False  # type: ignore[misc]
    choices = {"update": options.get("update", "replicated")}
    first = options.get("epoch", 1)
    rates: Any = [child.Slower(), child.Rates()] if options.get("slower") else []
    spoiler = [child.Spoil()] if options.get("spoil") else []
    trained = child.train(
        HierarchicalTrainer(devices_of(options), cluster=cluster, **choices),
        options["optimizer"],
        data=tp.QueueInput(tp.dataflow.DataFromGenerator(share)),
        epochs=options.get("epochs", first),
        callbacks=[
            tp.callbacks.ModelSaver(checkpoint_dir=os.path.join(folder, "saved")),
            *rates,
            *spoiler,
        ],
        load=options.get("load") if cluster.is_chief else None,
        starting_epoch=first,
        monitors=[],
    )
    return {**trained, "rates": rates[-1].seen if rates else None}


def main(scenario, arguments, options, line):
    """Run a scenario; ``line`` is a connection to the test."""

    def reach(point):
        line.send(("at", point))
        if point == options.get("wait_at"):
            line.recv()

    faulthandler.dump_traceback_later(
        SECONDS, exit=True
    )  # no process stays, and a hanging one prints its stacks
    try:
        line.send(("facts", globals()[scenario](Cluster(**arguments), options, reach)))
    except (HierAllreduceError, tf.errors.OpError) as error:
        line.send(("error", f"{type(error).__name__}: {error}"))
