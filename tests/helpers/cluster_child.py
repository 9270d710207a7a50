"""One host of the jobs in helpers/clusters.py: the program of its process.

It sends pairs to the test: ``("at", point)`` on the way, ``("facts", …)`` or ``("error", text)`` at the end.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf

import hier_allreduce
from hier_allreduce import (
    Cluster,
    ClusterError,
    HierAllreduceError,
    Strategy,
    allreduce_grads,
    allreduce_grads_and_vars,
)
from hier_allreduce.cluster import watch

gc.freeze()  # in the fork server: its children's collector skips what the modules hold, and copies no page of it

tf1 = tf.compat.v1
FEATURES, CLASSES, BATCH, RATE = 5, 3, 4, 0.05
SECONDS = 150  # for everything that a host does


def cpus(count):
    return [f"/cpu:{k}" for k in range(count)]


# ---- sums --------------------------------------------------------------------------------------------

DTYPES = ["float32"] * 5 + ["float64", "float16", "bfloat16", "int32", "uint8"]
SHAPES = [(4, 3), (7,), (), (0, 3), (300, 70), (2, 2), (5,), (5,), (6,), (3, 1)]


def tower_row(tower):
    """Return a tower's small whole numbers, of several dtypes and shapes; tower counts over all hosts."""
    rng = np.random.RandomState(tower)
    return [rng.randint(0, 8, shape).astype(float) for shape in SHAPES]


def sums(cluster, options, line):
    """Sum all kinds of gradients; return every tower's results, and what crossed."""
    devices, rows = cpus(cluster.devices_per_host), []
    with tf.Graph().as_default() as graph:
        for tower, device in enumerate(devices):
            with tf.device(device):
                dense = tower_row(cluster.task * len(devices) + tower)
                # no graph optimizer folds these into constants
                row = [tf.cast(tf1.placeholder_with_default(v, v.shape), d) for v, d in zip(dense, DTYPES)]
                sparse = tf.IndexedSlices(row[1][:1], tf.constant([cluster.task]), tf.constant([4]))
                rows.append([*row, sparse, None])
        floats = [row[:8] for row in rows]
        built = {
            "sum": allreduce_grads(rows, devices, cluster=cluster),
            "alone": allreduce_grads(rows, devices, strategy=Strategy(chunk_bytes=0), cluster=cluster),
            "mean": allreduce_grads(floats, devices, average=True, cluster=cluster),
        }
        fetches = {name: [[x for x in row if x is not None] for row in result] for name, result in built.items()}
        with cluster.session() as session:
            asked, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
            values = session.run(fetches, options=asked, run_metadata=seen)
            again = session.make_callable(fetches["sum"])()
    nodes = [node for part in seen.partition_graphs for node in part.node if node.op.startswith("CollectiveReduce")]
    return {
        "results": {**values, "again": again},
        "none": built["sum"][0][-1] is None,
        "crossed": sorted((node.name, node.device) for node in nodes),
        "audit": str(hier_allreduce.audit(seen, graph)),
    }


def shapes(cluster, options, line):
    """Sum a gradient whose shape is known only in each step: ones of some shapes, step by step."""
    devices = cpus(cluster.devices_per_host)
    with tf.Graph().as_default():
        grad = tf1.placeholder(tf.float32, options["declared"], name="w")
        rows = allreduce_grads([[grad] for _ in devices], devices, cluster=cluster)
        with cluster.session() as session:
            for shape in options["fed"]:
                line.send(("at", session.run(rows[-1][0], {grad: np.ones(shape)}).tolist()))


# ---- training ----------------------------------------------------------------------------------------


def data(step, tower):
    """Return the examples of a step for a tower, which counts over all hosts."""
    rng = np.random.RandomState([step, tower])
    labels = rng.randint(CLASSES, size=BATCH)
    return rng.randn(BATCH, FEATURES).astype("float32") + labels[:, None], labels.astype("int32")


class Job:
    """A linear classifier on the towers of one host, and its ops before the first step."""

    def __init__(self, cluster, options):
        self.cluster, self.devices = cluster, cpus(cluster.devices_per_host)
        hidden = options.get("width", FEATURES)
        rows, self.feeds, losses = [], [], []
        for tower, device in enumerate(self.devices):
            with tf.device(device), tf1.variable_scope(f"tower{tower}"):
                x, y = tf1.placeholder(tf.float32, [None, FEATURES]), tf1.placeholder(tf.int32, [None])
                start = tf1.random_normal_initializer(seed=cluster.task)  # each host has other weights
                a = tf1.get_variable("a", [FEATURES, hidden], initializer=start, use_resource=True)
                b = tf1.get_variable(options.get("name", "b"), [hidden, CLASSES], initializer=start, use_resource=True)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=tf.matmul(tf.matmul(x, a), b))
                )
                rows.append(list(zip(tf1.gradients(loss, [a, b]), [a, b])))
                self.feeds += [x, y]
                losses.append(loss)
        strategy = Strategy(algorithm=options.get("algorithm", "flat"))
        optimizer = tf1.train.MomentumOptimizer(RATE, 0.9)
        if options.get("update"):
            update = options["update"]
            towers = hier_allreduce.TowerOptimizer(
                optimizer, self.devices, strategy=strategy, update=update, cluster=cluster
            )
            self.step = towers.apply_gradients(rows)
        else:
            reduced = allreduce_grads_and_vars(rows, self.devices, average=True, strategy=strategy, cluster=cluster)
            self.step = tf.group(*[optimizer.apply_gradients(row) for row in reduced])
        self.loss = tf.add_n(losses) / len(losses)
        self.towers = [[v for _, v in row] for row in rows]
        self.copy = [v.assign(w.read_value()) for row in self.towers[1:] for v, w in zip(row, self.towers[0])]
        self.broadcast = cluster.broadcast(tf1.global_variables())
        self.saver = tf1.train.Saver(tf1.global_variables())

    def feed(self, step):
        first, towers = self.cluster.task * len(self.devices), range(len(self.devices))
        return dict(zip(self.feeds, [value for k in towers for value in data(step, first + k)]))


def report_probes(line):
    """Report every probe of another host to the test."""
    probe = watch.probe

    def reporting(address, seconds):
        line.send(("at", "a probe"))
        return probe(address, seconds)

    watch.probe = reporting


def train(cluster, options, line):
    """Train for some steps from host 0's weights, or from a checkpoint that every host restores; or fail somewhere."""
    os.environ.update(options.get("environ", {}))
    if options.get("probes"):
        report_probes(line)
    with tf.Graph().as_default():
        job = Job(cluster, options)
        line.send(("at", "built"))
        if options.get("late"):
            line.recv()
        plain = tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 8})) if options.get("plain") else None
        with plain or cluster.session() as session:
            session.run(tf1.global_variables_initializer())
            if options.get("restore"):
                job.saver.restore(session, options["restore"])
            elif options.get("broadcast", True):
                session.run(job.broadcast)
                session.run(job.copy)
            losses = []
            for step in range(options.get("first", 0), options.get("steps", 6)):
                feed = job.feed(step)
                if step == options.get("bad_at"):
                    feed[job.feeds[1]] = feed[job.feeds[1]] + CLASSES  # no such labels
                losses.append(float(session.run([job.loss, job.step], feed)[0]))
                line.send(("at", step))
                if step == options.get("save_at") and cluster.is_chief:
                    job.saver.save(session, options["folder"])
                if step == options.get("wait_at"):
                    line.recv()
                if step == options.get("raise_at"):
                    raise HierAllreduceError("the program's mistake")
                if step == options.get("spoil_at"):
                    session.run(job.towers[1][0].assign_add(tf.ones_like(job.towers[1][0])))
            if options.get("check"):
                cluster.check_weights(session)
            values = session.run(job.towers)
    return {"losses": losses, "towers": values}


# ---- steps ---------------------------------------------------------------------------------------------


def epochs(cluster, options, line):
    """Run three epochs of three steps each, in one session or three; return the results of each epoch."""
    devices, results = cpus(cluster.devices_per_host), []
    with tf.Graph().as_default():
        batches = tf1.data.make_initializable_iterator(tf.data.Dataset.range(3))
        batch = batches.get_next()
        rows = allreduce_grads([[tf.cast(batch, tf.float32)] for _ in devices], devices, cluster=cluster)
        alone, session = tf.constant(7) + 1, None
        for _ in range(3):
            if options["sessions"] or not session:
                session = cluster.session()
            session.run(batches.initializer)
            steps = []
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    if len(steps) == 3 and options.get("waits"):
                        line.recv()
                    if len(results) == 1:
                        line.send(("at", "the second epoch"))
                    steps.append(session.run(rows[-1][0]))
            assert session.run(alone) == 8
            results.append(steps)
            if options["sessions"]:
                session.close()
    return results


def accumulate(cluster, options, line):
    """Apply the sums of every two steps' gradients in a cond; return the variable on every tower after each step."""
    tf1.disable_control_flow_v2()
    devices, totals, rows = cpus(cluster.devices_per_host), [], []
    with tf.Graph().as_default():
        optimizer = tf1.train.GradientDescentOptimizer(1.0)
        count = tf1.get_variable("count", [], initializer=tf1.zeros_initializer(), use_resource=True)
        for tower, device in enumerate(devices):
            with tf.device(device), tf1.variable_scope(f"tower{tower}"):
                w, total = (
                    tf1.get_variable(n, [], initializer=tf1.zeros_initializer(), use_resource=True) for n in "wt"
                )
                totals.append(total.assign_add(-float(4 * cluster.task + tower)))
                rows.append((total, w))

        def applied():
            pairs = [[(total.read_value(), w)] for total, w in rows]
            reduced = allreduce_grads_and_vars(pairs, devices, average=True, cluster=cluster)
            with tf1.control_dependencies([optimizer.apply_gradients(row) for row in reduced]):
                return tf.group(*[total.assign(0.0) for total, _ in rows])

        with tf1.control_dependencies([*totals, count.assign_add(1.0)]):
            step = tf1.cond(tf.equal(count.read_value() % 2, 0), applied, tf.no_op)
        seen = []
        with cluster.session() as session:
            session.run(tf1.global_variables_initializer())
            for number in range(6):
                if number == options.get("waits_before"):
                    line.recv()
                session.run(step)
                line.send(("at", number))
                seen.append(session.run([w for _, w in rows]))
    return seen


def threads(cluster, options, line):
    """Begin a step on the chief while another thread is in one; return the first one's result and the other's error."""
    devices, begun, errors = cpus(cluster.devices_per_host), threading.Event(), []

    def begin(value):
        begun.set()
        return value

    with tf.Graph().as_default():
        value = tf.reshape(tf1.py_func(begin, [np.float32(1.0)], tf.float32), [])
        rows = allreduce_grads([[value]] * len(devices), devices, cluster=cluster)
        with cluster.session() as session:

            def run_too():
                begun.wait(SECONDS)
                try:
                    session.run(rows[0][0])
                except (ClusterError, tf.errors.OpError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                line.send(("at", "the second step"))

            if cluster.is_chief:
                threading.Thread(target=run_too).start()
            else:
                line.recv()
            result = session.run(rows[0][0])
    return result, errors


# ---- tensorpack ----------------------------------------------------------------------------------------


def tensorpack(cluster, options, line):
    """Train the model of tensorpack_child; each host takes its share of every step's batches."""
    from tensorpack.utils import logger

    from helpers import tensorpack_child as child
    from hier_allreduce.integrations.cluster import HierarchicalClusterTrainer

    towers, optimizer, folder = cluster.devices_per_host, options["optimizer"], options["folder"]
    logger.set_logger_dir(os.path.join(folder, f"log{cluster.task}"), action="k")

    class Share(child.Data):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number // towers % cluster.size == cluster.task:
                    yield batch

    class Tell(child.tp.Callback):
        _chief_only = False

        def _trigger(self):
            line.send(("at", self.epoch_num))
            if (self.epoch_num, cluster.task) == (options.get("die_after"), options.get("who")):
                line.recv()
                os.kill(os.getpid(), signal.SIGKILL)

    child.Data, child.Look._chief_only = Share, False
    if options.get("update") == "one":
        trainer, batch = child.tp.SimpleTrainer(), child.BATCH * options["towers"]
    else:
        trainer = HierarchicalClusterTrainer(cpus(towers), cluster, update=options.get("update", "replicated"))
        batch = child.BATCH
    look = child.train(
        trainer,
        optimizer,
        batch,
        epochs=options.get("epochs", 2),
        callbacks=[child.tp.ModelSaver(checkpoint_dir=os.path.join(folder, "saved")), Tell()],
        load=options.get("load") if cluster.is_chief else None,
        starting_epoch=options.get("starting_epoch", 1),
        monitors=[],
    )
    return {**look, "chief": trainer.is_chief, "saved": sorted(os.listdir(os.path.join(folder, "saved")))}


def main(scenario, arguments, options, line):
    """Run a scenario; ``line`` is a connection to the test."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # no process stays, and a hanging one prints its stacks
    try:
        line.send(("facts", globals()[scenario](Cluster(**arguments), options, line)))
    except (HierAllreduceError, tf.errors.OpError) as error:
        line.send(("error", f"{type(error).__name__}: {error}"))
