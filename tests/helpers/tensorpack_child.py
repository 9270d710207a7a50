"""What test_tensorpack.py runs in processes of their own, because importing tensorpack changes global state.

    main(SCENARIO, FOLDER)      or, by hand in tests/:      python -m helpers.tensorpack_child SCENARIO FOLDER

writes FOLDER/facts.json, which the tests check.
"""

import contextlib
import json
import logging
import os
import sys
import warnings as python_warnings

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
# The first session of a process fixes the number of threads for later ones: one thread is the worst case for staging.
tf1.Session(config=tf1.ConfigProto(inter_op_parallelism_threads=1)).close()

import tensorpack as tp  # noqa: E402
from tensorpack.tfutils import sesscreate  # noqa: E402
from tensorpack.tfutils.gradproc import GlobalNormClip, MapGradient, ScaleGradient, SummaryGradient  # noqa: E402
from tensorpack.tfutils.optimizer import (  # noqa: E402
    AccumGradOptimizer,
    PostProcessOptimizer,
    VariableAssignmentOptimizer,
    apply_grad_processors,
)
from tensorpack.tfutils.summary import add_moving_summary  # noqa: E402
from tensorpack.utils import logger  # noqa: E402

from helpers.optimizers import CASES  # noqa: E402
from hier_allreduce import Strategy, TowerOptimizer  # noqa: E402
from hier_allreduce.errors import HierAllreduceError  # noqa: E402
from hier_allreduce.integrations.tensorpack import HierarchicalTrainer, OrderedAccumGrad  # noqa: E402

FEATURES, CLASSES, BATCH, STEPS = 5, 3, 4, 6


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


def by_name():
    """Freeze a layer and decay weights, by the variables' names."""
    return [
        ScaleGradient([("hidden/W", 0.0), ("out/.*", 5.0)], verbose=False),
        MapGradient(lambda grad, var: grad + 0.1 * var, "out/W"),
    ]


class Foreign(tf.compat.v1.train.Optimizer):
    """A wrapper that is not tensorpack's, such as one for loss scaling."""

    def __init__(self, inside):
        super().__init__(False, "Foreign")
        self._inside = inside

    def compute_gradients(self, *args, **kwargs):
        return self._inside.compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        return self._inside.apply_gradients(*args, **kwargs)


class OwnAccumulation(AccumGradOptimizer):
    """A user's subclass, which counts as tensorpack's does."""


class Distributed(tf.compat.v1.train.GradientDescentOptimizer):
    """An optimizer with the interface of tf.contrib.optimizer_v2, which only TensorFlow 1 has."""

    def _finish(self, state):
        return tf.no_op()


def halve_the_biases(var):
    return var * 0.5 if var.name in ("hidden/b:0", "out/b:0") else None


def look_ahead():
    inside = momentum()
    return PostProcessOptimizer(inside, lambda var: var.assign_sub(0.05 * inside.get_slot(var, "momentum")).op)


OPTIMIZERS = {
    "momentum": momentum,
    "sgd": lambda: tf1.train.GradientDescentOptimizer(0.1),
    "sgd*3": lambda: tf1.train.GradientDescentOptimizer(0.3),
    "adam": lambda: tf1.train.AdamOptimizer(0.05),
    "clip": lambda: apply_grad_processors(
        tf1.train.GradientDescentOptimizer(0.1), [GlobalNormClip(0.05), SummaryGradient()]
    ),
    "by name": lambda: apply_grad_processors(momentum(), [*by_name(), SummaryGradient("out/.*")]),
    "accumulated by name": lambda: AccumGradOptimizer(apply_grad_processors(momentum(), by_name()), 2),
    "wrapped by name": lambda: Foreign(apply_grad_processors(momentum(), by_name())),
    "assigned by name": lambda: VariableAssignmentOptimizer(momentum(), halve_the_biases),
    "moved by slots": look_ahead,
    "scaled embedding": lambda: apply_grad_processors(momentum(), [ScaleGradient([("embedding", 0.5)], verbose=False)]),
    "accumulate sgd": lambda: AccumGradOptimizer(tf1.train.GradientDescentOptimizer(0.1), 3),
    "accumulate adam": lambda: AccumGradOptimizer(tf1.train.AdamOptimizer(0.05), 3),
    "accumulate inside": lambda: Foreign(OrderedAccumGrad(tf1.train.GradientDescentOptimizer(0.1), 3)),
    "unordered inside": lambda: Foreign(AccumGradOptimizer(tf1.train.GradientDescentOptimizer(0.1), 3)),
    "own accumulation": lambda: OwnAccumulation(tf1.train.GradientDescentOptimizer(0.1), 3),
    "distributed": lambda: Distributed(0.1),
    "processor with a variable": lambda: apply_grad_processors(
        tf1.train.GradientDescentOptimizer(0.1), [MapGradient(counted)]
    ),
    **{name: make for name, (make, *_) in CASES.items()},
}


def cpus(count):
    return [f"/cpu:{i}" for i in range(count)]


class Data(tp.DataFlow):
    """The same examples in the same order, whatever the batch size."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return 1000

    def __iter__(self):
        rng = np.random.RandomState(1)
        while True:
            examples = [(rng.randn(FEATURES), rng.randint(CLASSES)) for _ in range(self.batch)]
            features, labels = zip(*examples)
            yield [np.array(features, np.float32), np.array(labels, np.int32)]


class Model(tp.ModelDesc):
    def __init__(self, optimizer, graph=None):
        self.optimizer_name, self.extra = optimizer, graph

    def inputs(self):
        return [tf.TensorSpec((None, FEATURES), tf.float32, "x"), tf.TensorSpec((None,), tf.int32, "y")]

    def build_graph(self, x, y):
        seeds = iter(range(9))
        for name, width in (("hidden", 8), ("out", CLASSES)):
            with tf1.variable_scope(name):
                init = tf1.glorot_uniform_initializer(seed=next(seeds))
                w = tf1.get_variable("W", [int(x.shape[1]), width], initializer=init, use_resource=True)
                b = tf1.get_variable("b", [width], initializer=tf1.zeros_initializer(), use_resource=True)
            x = tf.matmul(tf.nn.relu(x) if name == "out" else x, w) + b
        wrong = tf.cast(tf.not_equal(tf.argmax(x, 1, output_type=tf.int32), y), tf.float32, name="wrong")
        cost = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x), name="cost")
        add_moving_summary(cost, tf.reduce_mean(wrong, name="error"))
        return self.extra(cost) if self.extra else cost

    def optimizer(self):
        return OPTIMIZERS[self.optimizer_name]()


class Look(tp.Callback):
    """The values of all variables right before the first step and right after the last one."""

    def _read(self):
        variables = tf1.global_variables() + tf1.local_variables()
        values = tf1.get_default_session().run(variables)
        return {v.op.name: np.asarray(value).tolist() for v, value in zip(variables, values)}

    def _setup_graph(self):
        self.before = self.after = None
        ops = self.graph.get_operations()
        self.histograms = sorted(op.name.split("/", 2)[-1] for op in ops if op.type == "HistogramSummary")

    def _before_run(self, _):
        self.before = self.before or self._read()

    def _after_train(self):
        self.after = self._read()


def train(trainer, optimizer, batch=BATCH, steps=STEPS, epochs=1, load=None, callbacks=(), model=None, **config):
    """Train in a fresh graph; return the variables before and after, and the names of the histograms."""
    look = Look()
    SummaryGradient._summaried_gradient.clear()  # tensorpack makes each summary once in a process, not in a graph
    with tf.Graph().as_default():
        data = config.pop("data", None) or tp.QueueInput(Data(batch))
        tp.launch_train_with_config(
            tp.TrainConfig(
                model=model or Model(optimizer),
                data=data,
                callbacks=[*callbacks, look],
                extra_callbacks=[tp.MovingAverageSummary(), tp.MergeAllSummaries(), tp.RunUpdateOps()],
                session_init=tp.SaverRestore(load) if load else None,
                steps_per_epoch=steps,
                max_epoch=epochs,
                **config,
            ),
            trainer,
        )
    return {"before": look.before, "after": look.after, "histograms": look.histograms}


def never_copying(count, **options):
    """Return our trainer on CPU devices, without rounds of copying between epochs."""
    trainer = HierarchicalTrainer(cpus(count), **options)
    trainer.BROADCAST_EVERY_EPOCH = False
    return trainer


def stock(towers):
    """Return tensorpack's replicated trainer, moved to one CPU by soft placement, in a session with enough threads."""
    config = tf1.ConfigProto(allow_soft_placement=True, inter_op_parallelism_threads=16, use_per_session_threads=True)
    trainer = tp.SyncMultiGPUTrainerReplicated(list(range(towers)), mode="gpu")
    return {"trainer": trainer, "session_creator": sesscreate.NewSessionCreator(config=config)}


def checkpoint(path):
    reader = tf1.train.load_checkpoint(path)
    return {name: reader.get_tensor(name).tolist() for name in reader.get_variable_to_shape_map()}


# ---- scenarios ---------------------------------------------------------------------------------------


def towers(folder):
    """Train K towers, and one tower with the K-fold batch."""
    facts: dict = {}
    for count in (1, 2, 3, 8):
        for optimizer in ("momentum", "adam"):
            many = train(never_copying(count), optimizer, epochs=2)
            one = train(tp.SimpleTrainer(), optimizer, BATCH * count, epochs=2)
            facts[f"{count} {optimizer}"] = {"many": many["after"], "one": one["after"]}
    return facts


def checkpoints(folder):
    """Load what another trainer has saved, and save for the next: tensorpack's, and ours with two numbers of towers."""
    ours, theirs = (lambda k: {"trainer": HierarchicalTrainer(cpus(k))}), stock
    facts: dict = {}
    for optimizer in ("momentum", "adam", "accumulate adam"):
        saved = None
        for steps, name, trainer in (
            (4, "first", theirs(3)),
            (8, "theirs to ours", ours(2)),
            (12, "ours to ours", ours(3)),
            (16, "ours to theirs", theirs(2)),
        ):
            path = os.path.join(folder, f"{optimizer} {name}".replace(" ", "-"))
            saver = tp.ModelSaver(checkpoint_dir=path)
            loaded = train(optimizer=optimizer, steps=4, load=saved, callbacks=[saver], **trainer)
            facts[f"{optimizer}, {name}"] = {"saved": saved and checkpoint(saved), "loaded": loaded["before"]}
            saved = os.path.join(path, f"model-{steps}")
    path = os.path.join(folder, "inside")
    train(HierarchicalTrainer(cpus(2)), "accumulate inside", steps=4, callbacks=[tp.ModelSaver(checkpoint_dir=path)])
    loaded = train(HierarchicalTrainer(cpus(3)), "accumulate inside", load=os.path.join(path, "model-4"))
    facts["accumulate inside, ours to ours"] = {"loaded": loaded["before"]}
    return facts


def updates(folder):
    """Update each variable at its main; compare with one tower, and exchange checkpoints with the other trainers."""
    facts: dict = {}
    for optimizer in ("momentum", "adam", "clip", "accumulate adam"):
        trainer = never_copying(4, update="main", strategy="tensorpack", check_replicas_every=2)
        path = os.path.join(folder, f"main-{optimizer}".replace(" ", "-"))
        saver = tp.ModelSaver(checkpoint_dir=path)
        many = train(trainer, optimizer, epochs=2, callbacks=[saver], monitors=[tp.JSONWriter()])
        lines = tp.JSONWriter.load_existing_json(folder)
        drift = [line["replica_drift"] for line in lines if "replica_drift" in line]
        one = train(HierarchicalTrainer(cpus(1)), optimizer, BATCH * 4, epochs=2)
        facts[optimizer] = {"many": many["after"], "one": one["after"], "drift": drift}
        if optimizer == "adam":
            saved = os.path.join(path, "model-12")
            facts["saved"] = checkpoint(saved)
            facts["to theirs"] = train(optimizer=optimizer, load=saved, **stock(2))["before"]
            path = os.path.join(folder, "stock")
            train(optimizer=optimizer, callbacks=[tp.ModelSaver(checkpoint_dir=path)], **stock(3))
            saved = os.path.join(path, "model-6")
            again = HierarchicalTrainer(cpus(3), update="main")
            facts["from theirs"] = [checkpoint(saved), train(again, optimizer, load=saved)["before"]]
    facts["every 5"] = train(never_copying(2, broadcast=5), None, model=Model("sgd", moving_average))["after"]
    config = os.path.join(folder, "mine.yaml")
    with open(config, "w") as file:
        file.write("devices: [/cpu:0, /cpu:1]\nupdate: main\nstrategy: {algorithm: flat, chunk_bytes: 0}\n")
    facts["from file"] = train(HierarchicalTrainer.from_config(config), "sgd")["after"]
    facts["fewer"] = HierarchicalTrainer.from_config("chainer", devices=["/cpu:0", "/cpu:1"]).devices
    facts["two"] = train(tp.SimpleTrainer(), "sgd", BATCH * 2)["after"]
    return facts


def names(folder):
    """Train with gradient processors and wrappers that match variables' names, in three towers and in one."""
    facts: dict = {}
    if not hasattr(tf, "get_default_graph"):
        tf.get_default_graph = tf1.get_default_graph  # tensorpack's assignments after updates want TensorFlow 1
    for optimizer in ("by name", "accumulated by name", "assigned by name", "moved by slots"):
        facts[f"{optimizer}, one"] = train(HierarchicalTrainer(cpus(1)), optimizer, BATCH * 3)
        for update in ("replicated", "main"):
            trainer = never_copying(3, update=update, strategy="tensorpack")
            facts[f"{optimizer}, {update}"] = train(trainer, optimizer)
    facts["wrapped by name, replicated"] = train(never_copying(3), "wrapped by name")
    for count in (1, 3):
        trainer = HierarchicalTrainer(cpus(count), strategy=Strategy(sparse="dense"))
        run = train(trainer, None, BATCH * 3 // count, model=Model("scaled embedding", embedded))
        facts[f"scaled embedding, {count}"] = run["after"]
    facts["nothing missing"] = train(HierarchicalTrainer(cpus(3)), "sgd")
    for update in ("replicated", "main"):
        trainer = never_copying(3, update=update, strategy=Strategy(missing="zeros"))
        facts[f"missing, {update}"] = train(trainer, None, model=Model("sgd", uneven))
    return facts


def counted(grad, var):
    """Divide a gradient by the number of steps, counted in a variable named after the one that it gets."""
    with tf1.variable_scope("counted", reuse=tf1.AUTO_REUSE):
        name, zeros = f"{var.op.name}/steps", tf1.zeros_initializer()
        steps = tf1.get_variable(name, [], initializer=zeros, trainable=False, use_resource=True)
    return grad / steps.assign_add(1.0)


def optimizers(folder):
    """Train with the optimizers of all kinds, in three towers and in one; return the variables, or the error."""
    facts: dict = {}
    for name in [*CASES, "processor with a variable"]:
        for trainer in (HierarchicalTrainer(cpus(1)), never_copying(3), never_copying(3, update="main")):
            label = f"{name}, {'one' if len(trainer.devices) == 1 else 'main' if trainer._at_mains else 'replicated'}"
            try:
                facts[label] = train(trainer, name, BATCH * 3 // len(trainer.devices), steps=3)["after"]
            except HierAllreduceError as error:
                facts[label] = str(error)
    return facts


def uneven(cost):
    """Add a variable that every tower has and only tower 1 has a gradient for."""
    extra = tf1.get_variable("extra", [], initializer=tf1.ones_initializer(), use_resource=True)
    return cost + tf.square(extra) if tp.get_current_tower_context().index == 1 else cost


def embedded(cost):
    """Add a variable whose gradient is sparse and has one row twice."""
    rows = tf1.get_variable("embedding", [4, 2], initializer=tf1.ones_initializer(), use_resource=True)
    return cost + tf.reduce_sum(tf.square(tf.nn.embedding_lookup(rows, [2, 1, 2])))


def accumulation(folder):
    """Accumulate three gradients, with SGD (like plain SGD with three times the rate and batch) and with Adam."""
    three, one = (HierarchicalTrainer(cpus(k), average=average) for k, average in ((3, True), (1, True)))
    facts: dict = {
        "sgd": train(three, "accumulate sgd", steps=9)["after"],
        "plain sgd": train(tp.SimpleTrainer(), "sgd*3", BATCH * 9, steps=3)["after"],
    }
    facts["adam"] = train(never_copying(3), "accumulate adam", steps=9)["after"]
    facts["one adam"] = train(one, "accumulate adam", BATCH * 3, steps=9)["after"]
    twice = OrderedAccumGrad(tf1.train.GradientDescentOptimizer(1.0), 2)
    facts["own towers"] = accumulated_by_hand(twice)
    facts["restored"] = accumulated_by_hand(twice, counted=1)
    try:
        accumulated_by_hand(AccumGradOptimizer(tf1.train.GradientDescentOptimizer(1.0), 2))
    except HierAllreduceError as error:
        facts["unordered"] = str(error)
    return facts


def accumulated_by_hand(optimizer, counted=0):
    """Return three towers' weight after each of six steps with gradient -1; tower 0 starts with a step ``counted``."""
    devices, rows = cpus(3), []
    with tf.Graph().as_default():
        towers = TowerOptimizer(optimizer, devices)
        for k, device in enumerate(devices):
            with tf.device(device), tf1.variable_scope(f"tower{k}"):
                w = tf1.get_variable("w", [], initializer=tf1.zeros_initializer(), use_resource=True)
                rows.append(towers.compute_gradients(-w, [w]))
        op = towers.apply_gradients(rows)
        with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 3})) as session:
            session.run(tf1.global_variables_initializer())
            (counter,) = [var for var in tf1.global_variables() if var.op.name == "AccumGrad/counter"]
            session.run(counter.assign(counted))
            session.run(towers.init_op)
            weights = [var for row in rows for _, var in row]
            return [[float(value) for _ in [session.run(op)] for value in session.run(weights)] for _ in range(6)]


def callbacks(folder):
    """Train with summaries, inference, gradient processors, BROADCAST_EVERY_EPOCH, and the sum."""
    path = os.path.join(folder, "callbacks")
    test = tp.BatchData(tp.FixedSizeData(tp.MapData(Data(1), lambda dp: [dp[0][0], dp[1][0]]), 20), 10)
    trainer = HierarchicalTrainer(["/cpu:0", "/cpu:1", "/cpu:0"], strategy="tree")
    clipped = train(
        trainer,
        "clip",
        epochs=2,
        callbacks=[
            tp.ModelSaver(checkpoint_dir=path),
            tp.InferenceRunner(test, [tp.ScalarStats("cost"), tp.ClassificationError("wrong", "validation")]),
        ],
        monitors=[tp.JSONWriter()],
    )
    facts: dict = {
        "monitors": tp.JSONWriter.load_existing_json(folder)[-1],
        "clip": clipped["after"],
        "one clip": train(tp.SimpleTrainer(), "clip", BATCH * 3, epochs=2)["after"],
        "files": sorted(os.listdir(path)),
        "sum": train(HierarchicalTrainer(cpus(3), average=False), "sgd", data=tp.FeedInput(Data(BATCH)))["after"],
        "three times": train(tp.SimpleTrainer(), "sgd*3", BATCH * 3)["after"],
    }
    for every_epoch in (True, False):
        trainer = HierarchicalTrainer(cpus(2), strategy=Strategy("hierarchical", groups=((0,), (1,))))
        trainer.BROADCAST_EVERY_EPOCH = every_epoch
        facts[f"broadcast {every_epoch}"] = train(trainer, None, model=Model("sgd", moving_average))["after"]
    return facts


def moving_average(cost):
    """Add a variable that is not trained and that only tower 0 updates, like batch normalisation's averages."""
    average = tf1.get_variable("average", [], trainable=False, initializer=tf1.zeros_initializer(), use_resource=True)
    tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign_add(cost))
    return cost


def warned(folder):
    """Train in ways that log a warning; return the warnings."""
    facts: dict = {}

    def references(cost):
        for name in ("first", "second"):
            cost += tf.square(tf1.get_variable(name, [], initializer=tf1.ones_initializer(), use_resource=False))
        return cost

    for name, count, extra in (("references", 2, references), ("one tower", 1, references), ("none", 2, None)):
        with warnings() as facts[name]:
            train(HierarchicalTrainer(cpus(count)), None, model=Model("sgd", extra))

    def nudge():
        (bias,) = [var for var in tf1.local_variables() if var.op.name == "tower1/out/b"]
        return bias.assign_add(tf.fill(bias.shape, 1e-3)).op

    drift = tp.RunOp(nudge, run_before=False, run_as_trigger=False, run_step=True)
    for name, update, more in (
        ("average, replicated", "replicated", []),
        ("average, main", "main", []),
        ("average and weight", "replicated", [drift]),
    ):
        with warnings() as facts[name]:
            trainer = HierarchicalTrainer(cpus(3), update=update, check_replicas_every=2)
            train(trainer, None, steps=3, model=Model("momentum", moving_average), callbacks=more)
    return facts


@contextlib.contextmanager
def warnings():
    """Collect tensorpack's warnings, and Python's, in a list."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    setattr(handler, "emit", lambda record: messages.append(record.getMessage()))  # noqa: B010
    logger._logger.addHandler(handler)
    try:
        with python_warnings.catch_warnings(record=True) as caught:
            python_warnings.simplefilter("always")
            yield messages
        messages += [str(warning.message) for warning in caught]
    finally:
        logger._logger.removeHandler(handler)


def sessions(folder):
    """Train in sessions that the user configures, in a process whose first session had one thread."""
    config = tf1.ConfigProto(allow_soft_placement=True, inter_op_parallelism_threads=16)
    before, facts = str(config), {}
    creator = sesscreate.NewSessionCreator(config=config)
    adapted = sesscreate.SessionCreatorAdapter(creator, lambda session: session)
    saver = tp.ModelSaver(checkpoint_dir=folder)
    facts["one"] = train(HierarchicalTrainer(cpus(1)), "sgd", BATCH * 3, callbacks=[saver])["after"]
    facts["two towers"] = train(HierarchicalTrainer(cpus(2)), "sgd", session_creator=creator)["after"]
    facts["own threads"] = train(HierarchicalTrainer(cpus(3)), "sgd", session_creator=creator)["after"]
    facts["adapted"] = train(HierarchicalTrainer(cpus(3)), "sgd", session_creator=adapted)["after"]
    facts["config"] = [before, str(config)]
    roomy = tf1.ConfigProto(device_count={"CPU": 2}, inter_op_parallelism_threads=16, use_per_session_threads=True)
    chief = tf1.train.ChiefSessionCreator(config=roomy)
    loaded = train(HierarchicalTrainer(cpus(2)), "sgd", load=os.path.join(folder, "model-6"), session_creator=chief)
    facts["finalized"] = loaded["before"]
    return facts


def refusals(folder):
    """Return the class and text of the error that each bad input raises."""

    def lonely(cost):
        return uneven(cost) if tp.get_current_tower_context().index == 1 else cost

    def run(trainer, **more):
        return train(trainer, "sgd", **more)

    def tower_user(cost):
        with tf1.variable_scope("tower_user"):
            w = tf1.get_variable("W", [], initializer=tf1.zeros_initializer(), use_resource=True)
        return cost + w

    def layered(cost):
        return cost + tf.reduce_sum(tp.FullyConnected("layer", tf.reshape(cost, [1, 1]), 1))

    slip = os.path.join(folder, "slip.yaml")
    with open(slip, "w") as file:
        file.write("devises: 2\n")
    chief = tf1.train.ChiefSessionCreator(config=tf1.ConfigProto(allow_soft_placement=True))
    two_cpus = sesscreate.NewSessionCreator(config=tf1.ConfigProto(allow_soft_placement=True, device_count={"CPU": 2}))

    def staged():
        return tp.StagingInput(tp.QueueInput(Data(BATCH)), nr_stage=2)

    cases = {
        "no devices": lambda: HierarchicalTrainer([]),
        "zero GPUs": lambda: HierarchicalTrainer(0),
        "too many GPUs": lambda: HierarchicalTrainer(10**12),
        "no list": lambda: HierarchicalTrainer("/gpu:0"),
        "set": lambda: HierarchicalTrainer({0, 1}),
        "quoted": lambda: HierarchicalTrainer("0,1"),
        "quoted id": lambda: HierarchicalTrainer(["0"]),
        "bool": lambda: HierarchicalTrainer([True]),
        "negative": lambda: HierarchicalTrainer([0, -1]),
        "typing error": lambda: HierarchicalTrainer(["/gpux:0"]),
        "algorithm": lambda: HierarchicalTrainer(8, strategy="hierarchic"),
        "update": lambda: HierarchicalTrainer(8, update="mian"),
        "period": lambda: HierarchicalTrainer(8, broadcast=-2),
        "preset": lambda: HierarchicalTrainer.from_config("chaner"),
        "key": lambda: HierarchicalTrainer.from_config(slip),
        "change": lambda: HierarchicalTrainer.from_config("chainer", device=4),
        "mode": lambda: HierarchicalTrainer(8, mode="hierarchical"),
        "option": lambda: HierarchicalTrainer(8, strategi="flat"),
        "keras 3": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("sgd", layered)),
        "groups": lambda: HierarchicalTrainer(4, strategy=Strategy("hierarchical", groups=((0, 1), (3,)))),
        "average": lambda: HierarchicalTrainer(2, average="sum"),  # type: ignore[arg-type]
        "gpus": lambda: run(HierarchicalTrainer(8)),
        "gpu ids": lambda: run(HierarchicalTrainer([0, "/cpu:0"])),
        "own session": lambda: run(HierarchicalTrainer(cpus(2)), session_creator=chief),
        "few cpus": lambda: run(HierarchicalTrainer(cpus(3)), session_creator=two_cpus),
        "feed": lambda: run(HierarchicalTrainer(cpus(2)), data=tp.PlaceholderInput()),
        "uneven": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("sgd", uneven)),
        "unordered inside": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("unordered inside")),
        "own accumulation": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("own accumulation")),
        "distributed": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("distributed")),
        "scaled embedding": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("scaled embedding", embedded)),
        "two staged": lambda: run(HierarchicalTrainer(cpus(2)), data=staged()),
        "one tower, two staged": lambda: run(HierarchicalTrainer(cpus(1)), data=staged()),
        "towers' names": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("sgd", tower_user)),
        "lonely": lambda: run(HierarchicalTrainer(cpus(2)), model=Model("sgd", lonely)),
    }
    facts: dict = {}
    for name, case in cases.items():
        try:
            case()
            facts[name] = ["nothing", ""]
        except HierAllreduceError as error:
            facts[name] = [type(error).__name__, str(error)]
    numbers = {"a count": np.int64(2), "ids": [np.int32(0), np.uint8(1)], "an array": np.arange(2)}
    facts["devices"] = {name: HierarchicalTrainer(number).devices for name, number in numbers.items()}
    return facts


def main(scenario, folder):
    logger.set_logger_dir(folder, action="k")
    facts = globals()[scenario](folder)
    with open(os.path.join(folder, "facts.json"), "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
