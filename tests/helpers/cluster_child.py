"""One host of the jobs in helpers/clusters.py: the program of its process.

It sends pairs to the test: ``("at", point)`` on the way, ``("facts", …)`` or ``("error", text)`` at the end.
"""

import contextlib
import faulthandler
import gc
import os
from concurrent import futures

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf

import hier_allreduce
from hier_allreduce import Cluster, ClusterError, HierAllreduceError, Strategy, allreduce_grads
from hier_allreduce.cluster import watch

gc.freeze()  # in the fork server: its children's collector skips what the modules hold, and copies no page of it

tf1 = tf.compat.v1
FEATURES, CLASSES, BATCH, RATE = 5, 3, 4, 0.05
SECONDS = 150  # for everything that a host does


DTYPES = ["float32"] * 5 + ["float64", "float16", "bfloat16", "int32", "uint8"]
SHAPES = [(4, 3), (7,), (), (0, 3), (300, 70), (2, 2), (5,), (5,), (6,), (3, 1)]


def cpus(cluster):
    return [f"/cpu:{k}" for k in range(cluster.devices_per_host)]


def tower_row(tower):
    """Return a tower's small whole numbers, of several dtypes and shapes; tower counts over all hosts."""
    rng = np.random.RandomState(tower)
    return [rng.randint(0, 8, shape).astype(float) for shape in SHAPES]


def sums(cluster, options, line):
    """Sum all kinds of gradients; return every tower's results, and what crossed."""
    devices, rows = cpus(cluster), []
    with tf.Graph().as_default() as graph:
        for tower, device in enumerate(devices):
            with tf.device(device):
                dense = tower_row(cluster.task * len(devices) + tower)
                # no graph optimizer folds these into constants
                row = [tf.cast(tf1.placeholder_with_default(v, v.shape), d) for v, d in zip(dense, DTYPES)]
                sparse = tf.IndexedSlices(row[1][:1], tf.constant([cluster.task]), tf.constant([4]))
                rows.append([*row, sparse, None])
        built = {
            "sum": allreduce_grads(rows, devices, cluster=cluster),
            "alone": allreduce_grads(rows, devices, strategy=Strategy(chunk_bytes=0), cluster=cluster),
            "mean": allreduce_grads([row[:8] for row in rows], devices, average=True, cluster=cluster),
        }
        fetches = {name: [[x for x in row if x is not None] for row in result] for name, result in built.items()}
        with cluster.session() as session:
            asked, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
            values = session.run(fetches, options=asked, run_metadata=seen)
            again = session.make_callable(fetches["sum"])()
    nodes = [node for part in seen.partition_graphs for node in part.node if node.op.startswith("CollectiveReduce")]
    # the bfloat16 of TensorFlow 1.15 cannot be sent to another process
    plain = {
        name: [[x.astype("float32") if x.dtype.name == "bfloat16" else x for x in row] for row in result]
        for name, result in {**values, "again": again}.items()
    }
    return {
        "results": plain,
        "none": built["sum"][0][-1] is None,
        "crossed": sorted((node.name, node.device) for node in nodes),
        "audit": str(hier_allreduce.audit(seen, graph)),
    }


def fed(cluster, options, line):
    """Add up ones of the shapes in ``fed``, step by step, in one thread or two; in a step with None nothing crosses."""
    tf1.disable_control_flow_v2()
    devices, results = cpus(cluster), []
    with tf.Graph().as_default():
        x, crosses = tf1.placeholder(tf.float32, options.get("declared"), name="w"), tf1.placeholder(tf.bool, [])
        rows = [[x + 0.0] for _ in devices]
        total = tf1.cond(crosses, lambda: allreduce_grads(rows, devices, cluster=cluster)[-1][0], lambda: x + 0.0)

        def run(feed):
            try:
                return session.run(total, feed).tolist()
            except ClusterError as error:
                line.send(("at", "an error"))
                return str(error)

        with cluster.session() as session, futures.ThreadPoolExecutor(2) as pool:
            for step, shape in enumerate(options["fed"]):
                if step == options.get("waits_before"):
                    line.recv()
                feed = {x: np.ones(shape or [1]), crosses: shape is not None}
                results += sorted(pool.map(run, [feed] * options.get("threads", 1)), key=str)
                line.send(("at", step))
    return results


def data(step, tower):
    """Return the examples of a step for a tower, which counts over all hosts."""
    rng = np.random.RandomState([step, tower])
    labels = rng.randint(CLASSES, size=BATCH)
    return rng.randn(BATCH, FEATURES).astype("float32") + labels[:, None], labels.astype("int32")


def model(cluster, devices, options):
    """Build a linear classifier; return the feeds, the loss, the train op and the towers' variables."""
    hidden, rows, feeds, losses = options.get("width", FEATURES), [], [], []
    for tower, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{tower}", use_resource=True):
            x, y = tf1.placeholder(tf.float32, [None, FEATURES]), tf1.placeholder(tf.int32, [None])
            start = tf1.random_normal_initializer(seed=cluster.task)  # each host has other weights
            a = tf1.get_variable("a", [FEATURES, hidden], initializer=start)
            b = tf1.get_variable(options.get("name", "b"), [hidden, CLASSES], initializer=start)
            logits = tf.matmul(tf.matmul(x, a), b)
            losses.append(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)))
            rows.append(list(zip(tf1.gradients(losses[-1], [a, b]), [a, b])))
            feeds += [x, y]
    optimizer, strategy = tf1.train.MomentumOptimizer(RATE, 0.9), Strategy(algorithm=options.get("algorithm", "flat"))
    if "update" in options:
        shared = {"strategy": strategy, "cluster": cluster, "update": options["update"]}
        train_op = hier_allreduce.TowerOptimizer(optimizer, devices, **shared).apply_gradients(rows)
    else:
        reduced = hier_allreduce.allreduce_grads_and_vars(
            rows, devices, average=True, strategy=strategy, cluster=cluster
        )
        train_op = tf.group(*[optimizer.apply_gradients(row) for row in reduced])
    return feeds, tf.add_n(losses) / len(losses), train_op, [[v for _, v in row] for row in rows]


def train(cluster, options, line):
    """Train for some steps from host 0's weights, or from a checkpoint that every host restores; or fail somewhere."""
    os.environ.update(options.get("environ", {}))
    probe = watch.probe
    if options.get("probes"):  # it reports them to the test
        watch.probe = lambda *address: line.send(("at", "a probe")) or probe(*address)
    with tf.Graph().as_default():
        devices = cpus(cluster)
        feeds, loss, train_op, towers = model(cluster, devices, options)
        start = [cluster.broadcast(tf1.global_variables())]
        start += [[v.assign(w.read_value()) for row in towers[1:] for v, w in zip(row, towers[0])]]
        saver = tf1.train.Saver(tf1.global_variables())
        line.send(("at", "built"))
        if options.get("late"):
            line.recv()
        plain = tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 8})) if options.get("plain") else None
        with plain or cluster.session() as session:
            session.run(tf1.global_variables_initializer())
            if options.get("restore"):
                saver.restore(session, options["restore"])
            for op in start if options.get("broadcast", True) else []:
                session.run(op)
            losses = []
            for step in range(options.get("first", 0), options.get("steps", 6)):
                values = [v for k in range(len(devices)) for v in data(step, cluster.task * len(devices) + k)]
                losses.append(session.run([loss, train_op], dict(zip(feeds, values)))[0])
                line.send(("at", step))
                if step == options.get("save_at") and cluster.is_chief:
                    saver.save(session, options["folder"])
                if step == options.get("wait_at"):
                    line.recv()
                if step == options.get("raise_at"):
                    raise HierAllreduceError("the program's mistake")
                if step == options.get("spoil_at"):
                    session.run(towers[1][0].assign_add(tf.ones_like(towers[1][0])))
            if options.get("check"):
                cluster.check_weights(session)
            return {"losses": losses, "towers": session.run(towers)}


def epochs(cluster, options, line):
    """Run three epochs of three steps each, in one session or three; return the results of each epoch."""
    results: list = []
    with tf.Graph().as_default():
        batches = tf1.data.make_initializable_iterator(tf.data.Dataset.range(3))
        batch = tf.cast(batches.get_next(), tf.float32)
        rows = allreduce_grads([[batch]] * cluster.devices_per_host, cpus(cluster), cluster=cluster)
        alone, session = tf.constant(7) + 1, None
        for epoch in range(3):
            session = cluster.session() if options["sessions"] or not session else session
            session.run(batches.initializer)
            results.append([])
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    if len(results[-1]) == 3 and options.get("waits"):
                        line.recv()
                    line.send(("at", f"epoch {epoch}"))
                    results[-1].append(session.run(rows[-1][0]))
            assert session.run(alone) == 8
            if options["sessions"]:
                session.close()
    return results


def tensorpack(cluster, options, line):
    """Train the model of tensorpack_child for an epoch; each host takes its share of every step's batches."""
    import tensorpack as tp

    from helpers import tensorpack_child as child
    from hier_allreduce.integrations.cluster import HierarchicalClusterTrainer

    towers, folder = cluster.devices_per_host, options["folder"]
    tp.utils.logger.set_logger_dir(os.path.join(folder, f"log{cluster.task}"), action="k")

    class Share(child.Data):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number // towers % cluster.size == cluster.task:
                    yield batch

    child.Data, child.Look._chief_only = Share, False  # type: ignore[misc]
    return child.train(
        HierarchicalClusterTrainer(cpus(cluster), cluster, update=options["update"]),
        options["optimizer"],
        epochs=options["epoch"],
        callbacks=[tp.callbacks.ModelSaver(checkpoint_dir=os.path.join(folder, "saved"))],
        load=options["load"] if cluster.is_chief else None,
        starting_epoch=options["epoch"],
        monitors=[],
    )


def main(scenario, arguments, options, line):
    """Run a scenario; ``line`` is a connection to the test."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # no process stays, and a hanging one prints its stacks
    try:
        line.send(("facts", globals()[scenario](Cluster(**arguments), options, line)))
    except (HierAllreduceError, tf.errors.OpError) as error:
        line.send(("error", f"{type(error).__name__}: {error}"))
