"""One host of the jobs in helpers/clusters.py: the program of its process.

It sends pairs to the test: ``("at", place)`` on the way, ``("facts", …)`` or ``("error", text)`` at the end.
"""

import collections
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

from hier_allreduce import (
    AuditError,
    Cluster,
    ClusterError,
    HierAllreduceError,
    Strategy,
    TowerOptimizer,
    allreduce_grads,
    allreduce_grads_and_vars,
    audit,
)
from hier_allreduce.cluster import liveness
from hier_allreduce.cluster.kv_store import KeyValueStore
from hier_allreduce.graph.emit import emitted_in

gc.freeze()  # in the fork server: its children's collector skips what the modules hold, and copies no page of it

tf1 = tf.compat.v1
FEATURES, CLASSES, BATCH, RATE = 5, 3, 4, 0.5
SECONDS = 120  # for everything that a host does


def cpus(count):
    return [f"/cpu:{k}" for k in range(count)]


def constants(devices, rows):
    """Return tensors on their towers' devices that no graph optimizer folds into constants."""
    tensors = []
    for device, row in zip(devices, rows):
        with tf.device(device):
            tensors.append([tf1.placeholder_with_default(value, value.shape) for value in row])
    return tensors


# ---- sums --------------------------------------------------------------------------------------------


def host_rows(task, towers):
    """Return small whole numbers of several dtypes and shapes, different for every tower of every host."""
    rows = []
    for tower in range(towers):
        rng = np.random.RandomState(100 * task + tower)
        shapes = [(4, 3), (7,), (), (1,), (0, 3), (300, 70), (2, 2), (5,), (6,)]
        dtypes = ["float32"] * 6 + ["float64", "float16", "float32"]
        rows.append([rng.randint(-8, 8, shape).astype(dtype) for shape, dtype in zip(shapes, dtypes)])
    return rows


def sums(cluster, options, line):
    """Sum all kinds of gradients by several strategies; return what every tower got."""
    devices = cpus(cluster.devices_per_host)
    with tf.Graph().as_default() as graph:
        grads = constants(devices, host_rows(cluster.task, len(devices)))
        for device, row in zip(devices, grads):
            with tf.device(device):
                row.append(
                    tf.IndexedSlices(row[3] + float(cluster.task), tf.constant([cluster.task]), tf.constant([4]))
                )
                row.append(None)
                row.append(tf.cast(row[1], tf.int32))
        built = {
            "default": allreduce_grads(grads, devices, cluster=cluster),
            "alone": allreduce_grads(grads, devices, strategy=Strategy(pack_below=0), cluster=cluster),
            "wire": allreduce_grads([r[:6] for r in grads], devices, True, strategy="half", cluster=cluster),
            "mean": allreduce_grads([r[:9] for r in grads], devices, average=True, cluster=cluster),
        }
        fetches = {name: [[x for x in row if x is not None] for row in rows] for name, rows in built.items()}
        used = []
        for device, row in zip(devices, fetches["mean"]):
            with tf.device(device):
                used += [-tensor for tensor in row]
        with cluster.session() as session:
            asked, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
            values = session.run(fetches, options=asked, run_metadata=seen)
            session.run(fetches["default"])
            used_seen = tf1.RunMetadata()
            session.run(used, options=asked, run_metadata=used_seen)
    audits = [audited(used_seen, graph), *tampered(used_seen, graph)]
    nodes = [node for part in seen.partition_graphs for node in part.node if node.op.startswith("CollectiveReduce")]
    return {
        "results": values,
        "none": [row[10] is None for row in built["default"]],
        "collectives": sorted([node.name, node.device] for node in nodes),
        "audits": audits,
        "dtypes": sorted({tf.as_dtype(node.attr["T"].type).name for node in nodes}),
    }


def audited(seen, graph):
    """Return the audit of a run, or its error."""
    try:
        return str(audit(seen, graph))
    except AuditError as error:
        return str(error)


def tampered(seen, graph):
    """Yield the audits of a run whose first chunk of the last all-reduce crosses hosts never, or twice."""
    for times in (0, 2):
        changed = tf1.RunMetadata()
        changed.CopyFrom(seen)
        chunk = emitted_in(graph)[-1].scope + emitted_in(graph)[-1].names[0] + "/"
        for part in changed.partition_graphs:
            for node in [n for n in part.node if n.op.startswith("CollectiveReduce") and n.name.startswith(chunk)]:
                if times:
                    part.node.add().CopyFrom(node)
                else:
                    node.op = "Identity"
        yield audited(changed, graph)


def shapes(cluster, options, line):
    """Sum a gradient whose shape is known only in each step: the sum of ones of some shapes, step by step."""
    devices = cpus(cluster.devices_per_host)
    with tf.Graph().as_default():
        grad = tf1.placeholder(tf.float32, options["declared"])
        rows = [[(grad, tf1.get_variable(f"w{k}", [2, 3], use_resource=True))] for k in range(len(devices))]
        ((total, _),) = allreduce_grads_and_vars(rows, devices, cluster=cluster)[-1]
        broadcast = cluster.broadcast(tf1.global_variables())
        with cluster.session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(broadcast)
            for shape in options["fed"]:
                line.send(("at", session.run(total, {grad: np.ones(shape)}).tolist()))


# ---- training ----------------------------------------------------------------------------------------


def data(step, hosts, towers):
    """Return the examples of a step for all towers of all hosts: [hosts, towers, batch, …]."""
    rng = np.random.RandomState(step)
    labels = rng.randint(CLASSES, size=(hosts, towers, BATCH))
    return rng.randn(hosts, towers, BATCH, FEATURES).astype("float32") + labels[..., None], labels.astype("int32")


class Job:
    """A linear classifier on the towers of one host, and its ops before the first step."""

    def __init__(self, cluster, options):
        self.cluster, self.devices = cluster, cpus(cluster.devices_per_host)
        hidden = options.get("width", FEATURES)
        rows, self.feeds, losses = [], [], []
        for tower, device in enumerate(self.devices):
            with tf.device(device), tf1.variable_scope(f"tower{tower}"):
                x, y = tf1.placeholder(tf.float32, [None, FEATURES]), tf1.placeholder(tf.int32, [None])
                start = tf1.random_normal_initializer(seed=cluster.task)
                a = tf1.get_variable("a", [FEATURES, hidden], initializer=start, use_resource=True)
                b = tf1.get_variable("b", [hidden, CLASSES], initializer=start, use_resource=True)
                c = tf1.get_variable(options.get("name", "c"), [CLASSES], initializer=start, use_resource=True)
                logits = tf.matmul(tf.matmul(x, a), b) + c
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
                rows.append(list(zip(tf1.gradients(loss, [a, b, c]), [a, b, c])))
                self.feeds += [x, y]
                losses.append(loss)
        strategy = Strategy(pack_below=options.get("pack_below", 1 << 16))
        optimizer = tf1.train.MomentumOptimizer(RATE, 0.9)
        if options.get("update"):
            towers = TowerOptimizer(
                optimizer, self.devices, strategy=strategy, update=options["update"], cluster=cluster
            )
            self.step = towers.apply_gradients(rows)
        else:
            reduced = allreduce_grads_and_vars(rows, self.devices, average=True, strategy=strategy, cluster=cluster)
            self.step = tf.group(*[optimizer.apply_gradients(row) for row in reduced])
        self.loss = tf.add_n(losses) / len(losses)
        self.towers = [[v for _, v in row] for row in rows]
        variables = tf1.global_variables()
        self.copy = [
            v.assign(w.read_value()) for row in self.towers[1:] for v, w in zip(row, self.towers[0])
        ]  # slots are zeros everywhere
        self.broadcast = cluster.broadcast(variables)
        self.saver = tf1.train.Saver(variables)

    def feed(self, step):
        x, y = data(step, self.cluster.size, len(self.devices))
        task = self.cluster.task
        return dict(zip(self.feeds, [v for k in range(len(self.devices)) for v in (x[task, k], y[task, k])]))


def all_patient(line):
    """Make every probe of the other hosts wait for its answer, and report it to the test."""
    probe = liveness.faults

    def faults(hosts, seconds):
        line.send(("at", "a probe"))
        return probe(hosts, SECONDS)

    liveness.faults = faults


def blind():
    """Make every probe find all other hosts alive, as after a quick restart of one that died."""
    liveness.faults = lambda hosts, seconds: {}


def all_busy():
    """Make every server accept an entry of the key-value store at the third attempt only."""
    put, attempts = KeyValueStore.put, collections.Counter()

    def put_at_third_attempt(self, task, key, text):
        attempts[task, key] += 1
        return attempts[task, key] > 2 and put(self, task, key, text)

    KeyValueStore.put = put_at_third_attempt


def train(cluster, options, line):
    """Run some steps from the start or a checkpoint, with a pause, an error or a death at a step."""
    if options.get("patient"):
        all_patient(line)
    if options.get("blind"):
        blind()
    if options.get("busy"):
        all_busy()
    checkpoint, first = options.get("checkpoint"), options.get("first", 0)
    with tf.Graph().as_default():
        job = Job(cluster, options)
        line.send(("at", "built"))
        if options.get("late"):
            line.recv()
        with cluster.session() as session:
            session.run(tf1.global_variables_initializer())
            if cluster.is_chief and first:
                job.saver.restore(session, checkpoint)
            session.run(job.broadcast)
            if not first:
                session.run(job.copy)
            losses = []
            for step in range(first, options.get("steps", 6)):
                feed = job.feed(step)
                if step == options.get("bad_at"):
                    feed[job.feeds[1]] = feed[job.feeds[1]] + CLASSES  # no such labels
                losses.append(float(session.run([job.loss, job.step], feed)[0]))
                line.send(("at", step))
                if step == options.get("save_at") and cluster.is_chief:
                    job.saver.save(session, checkpoint)
                if step == options.get("wait_at"):
                    line.recv()
                if step == options.get("raise_at"):
                    raise HierAllreduceError("the program's own mistake")
                if step == options.get("die_at") and cluster.task == options["who"]:
                    os.kill(os.getpid(), options["signal"])
            values = session.run(job.towers)
    return {"losses": losses, "towers": values, "bits": [[value.tobytes() for value in row] for row in values]}


# ---- data that end -------------------------------------------------------------------------------------


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


# ---- control flow ---------------------------------------------------------------------------------------


def accumulate(cluster, options, line):
    """Apply the sums of every two steps' gradients in a cond; return the variable on every tower after each step."""
    tf1.disable_control_flow_v2()
    devices, totals, rows = cpus(cluster.devices_per_host), [], []
    with tf.Graph().as_default():
        optimizer = TowerOptimizer(tf1.train.GradientDescentOptimizer(1.0), devices, cluster=cluster)
        count = tf1.get_variable("count", [], initializer=tf1.zeros_initializer(), use_resource=True)
        for tower, device in enumerate(devices):
            with tf.device(device), tf1.variable_scope(f"tower{tower}"):
                w, total = (
                    tf1.get_variable(n, [], initializer=tf1.zeros_initializer(), use_resource=True) for n in "wt"
                )
                totals.append(total.assign_add(-float(4 * cluster.task + tower)))
                rows.append((total, w))

        def applied():
            train = optimizer.apply_gradients([[(total.read_value(), w)] for total, w in rows])
            with tf.control_dependencies([train]):
                return tf.group(*[total.assign(0.0) for total, _ in rows])

        with tf.control_dependencies([*totals, count.assign_add(1.0)]):
            step = tf.cond(tf.equal(count.read_value() % 2, 0), applied, tf.no_op)
        broadcast, seen = cluster.broadcast(tf1.global_variables()), []
        with cluster.session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(broadcast)
            if options.get("waits"):
                line.recv()
            for number in range(6):
                session.run(step)
                line.send(("at", number))
                seen.append(session.run([w for _, w in rows]))
    return seen


# ---- threads -----------------------------------------------------------------------------------------


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


# ---- a session that is closed -----------------------------------------------------------------------


def leave(cluster, options, line):
    """Return what is left after the end of a session: sessions on the hosts' servers, and threads."""
    opened = []

    class Session(tf1.Session):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            opened.append(self)

    tf1.Session = Session
    with tf.Graph().as_default(), cluster.session() as session:
        session.run(tf.no_op())
    waiting = [thread for thread in threading.enumerate() if thread.name.startswith("hier_allreduce")]
    for thread in waiting:
        thread.join(SECONDS)
    return {
        "opened": len(opened),
        "open": sum(not session._closed for session in opened),
        "threads": sum(thread.is_alive() for thread in waiting),
    }


# ---- a server alone ------------------------------------------------------------------------------------


def serve(cluster, options, line):
    """Start a server that does nothing until the test goes on."""
    server = tf1.train.Server({"worker": list(cluster.hosts)}, job_name="worker", task_index=cluster.task)
    line.send(("at", "serving"))
    line.recv()
    return server.target


def main(scenario, arguments, options, line):
    """Run a scenario; ``line`` is a connection to the test."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # no process stays, and a hanging one prints its stacks
    try:
        line.send(("facts", globals()[scenario](Cluster(**arguments), options, line)))
    except (HierAllreduceError, tf.errors.OpError) as error:
        line.send(("error", f"{type(error).__name__}: {error}"))
