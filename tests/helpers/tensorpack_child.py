"""Trainings for test_tensorpack.py, in processes of their own: importing tensorpack changes global state.

    main(SCENARIO, FOLDER)      or, by hand in tests/:      python -m helpers.tensorpack_child SCENARIO FOLDER

writes FOLDER/facts.json, which the tests check.
"""

import json
import logging
import os
import sys
import warnings

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
# The first session of a process fixes the number of threads for later ones: one thread is the worst case for staging.
tf1.Session(config=tf1.ConfigProto(inter_op_parallelism_threads=1)).close()

import tensorpack as tp  # noqa: E402
from tensorpack.tfutils.gradproc import GlobalNormClip, MapGradient, ScaleGradient, SummaryGradient  # noqa: E402
from tensorpack.tfutils.optimizer import (  # noqa: E402
    AccumGradOptimizer,
    PostProcessOptimizer,
    VariableAssignmentOptimizer,
    apply_grad_processors,
)
from tensorpack.tfutils.sesscreate import NewSessionCreator  # noqa: E402
from tensorpack.tfutils.summary import add_moving_summary  # noqa: E402
from tensorpack.utils import logger  # noqa: E402

from hier_allreduce.errors import HierAllreduceError  # noqa: E402
from hier_allreduce.integrations.tensorpack import HierarchicalTrainer  # noqa: E402

FEATURES, CLASSES, BATCH, STEPS = 5, 3, 4, 6
UPDATES = ("replicated", "main")


# ---- optimizers --------------------------------------------------------------------------------------


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


def sgd(rate=0.1):
    return tf1.train.GradientDescentOptimizer(rate)


def halve_the_biases(var):
    return var * 0.5 if var.name in ("hidden/b:0", "out/b:0") else None


def look_ahead():
    inside = momentum()
    return PostProcessOptimizer(inside, lambda var: var.assign_sub(0.05 * inside.get_slot(var, "momentum")).op)


def counted(grad, var):
    """Divide a gradient by the number of steps, counted in a variable named after the one that it gets."""
    with tf1.variable_scope("counted", reuse=tf1.AUTO_REUSE):
        name, zeros = f"{var.op.name}/steps", tf1.zeros_initializer()
        steps = tf1.get_variable(name, [], initializer=zeros, trainable=False, use_resource=True)
    return grad / steps.assign_add(1.0)


class OwnAccumulation(AccumGradOptimizer):
    """A user's subclass, which counts as tensorpack's does."""


BY_NAME = [  # freezes a layer and decays weights
    ScaleGradient([("hidden/W", 0.0), ("out/.*", 5.0)], verbose=False),
    MapGradient(lambda grad, var: grad + 0.1 * var, "out/W"),
    SummaryGradient("out/.*"),
]
OPTIMIZERS = {
    "momentum": momentum,
    "sgd": sgd,
    "sgd*3": lambda: sgd(0.3),
    "adam": lambda: tf1.train.AdamOptimizer(0.05),
    "clip": lambda: apply_grad_processors(sgd(), [GlobalNormClip(0.05), SummaryGradient()]),
    "accumulate sgd": lambda: AccumGradOptimizer(sgd(), 3),
    "accumulate adam": lambda: AccumGradOptimizer(tf1.train.AdamOptimizer(0.05), 3),
    "own accumulation": lambda: OwnAccumulation(sgd(), 3),
    "by name": lambda: apply_grad_processors(momentum(), BY_NAME),
    "assigned by name": lambda: VariableAssignmentOptimizer(momentum(), halve_the_biases),
    "moved by slots": look_ahead,
    "processor with a variable": lambda: apply_grad_processors(sgd(), [MapGradient(counted)]),
}


# ---- training ----------------------------------------------------------------------------------------


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
    def __init__(self, optimizer, extra):
        self.optimizer_name, self.extra = optimizer, extra

    def inputs(self):
        return [tf.TensorSpec((None, FEATURES), tf.float32, "x"), tf.TensorSpec((None,), tf.int32, "y")]

    def build_graph(self, x, y):
        for seed, (name, width) in enumerate((("hidden", 8), ("out", CLASSES))):
            with tf1.variable_scope(name):
                init = tf1.glorot_uniform_initializer(seed=seed)
                w = tf1.get_variable("W", [int(x.shape[1]), width], initializer=init, use_resource=True)
                b = tf1.get_variable("b", [width], initializer=tf1.zeros_initializer(), use_resource=True)
            x = tf.matmul(tf.nn.relu(x) if name == "out" else x, w) + b
        cost = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x), name="cost")
        add_moving_summary(cost)
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


def train(trainer, optimizer, batch=BATCH, steps=STEPS, epochs=1, load=None, callbacks=(), extra=None, **config):
    """Train in a fresh graph; return the variables before and after, and the names of the histograms."""
    look = Look()
    SummaryGradient._summaried_gradient.clear()  # tensorpack makes each summary once in a process, not in a graph
    with tf.Graph().as_default():
        data = config.pop("data", None) or tp.QueueInput(Data(batch))
        tp.launch_train_with_config(
            tp.TrainConfig(
                model=Model(optimizer, extra),
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
    return {"trainer": trainer, "session_creator": NewSessionCreator(config=config)}


# ---- parts of models ---------------------------------------------------------------------------------


def uneven(cost):
    """Add a variable that only tower 1 has a gradient for."""
    extra = tf1.get_variable("extra", [], initializer=tf1.ones_initializer(), use_resource=True)
    return cost + tf.square(extra) if tp.get_current_tower_context().index == 1 else cost


def lonely(cost):
    """Add a trained variable that only tower 1 has."""
    return uneven(cost) if tp.get_current_tower_context().index == 1 else cost


def layered(cost):
    """Add one of tensorpack's layers, which need Keras 2."""
    return cost + tf.reduce_sum(tp.FullyConnected("layer", tf.reshape(cost, [1, 1]), 1))


def moving_average(cost):
    """Add a variable that is not trained and that only tower 0 updates, like batch normalisation's averages."""
    average = tf1.get_variable("average", [], trainable=False, initializer=tf1.zeros_initializer(), use_resource=True)
    if tp.get_current_tower_context().is_main_training_tower:
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign_add(cost))
    return cost


def references(cost):
    return cost + tf.square(tf1.get_variable("first", [], initializer=tf1.ones_initializer(), use_resource=False))


def nudge():
    (bias,) = [var for var in tf1.local_variables() if var.op.name == "tower1/out/b"]
    return bias.assign_add(tf.fill(bias.shape, 1e-3)).op


# ---- scenarios ---------------------------------------------------------------------------------------


def training(folder):
    """Train K towers, and one tower with the K-fold batch."""
    facts: dict = {}
    for optimizer in ("momentum", "adam", "accumulate adam", "clip"):
        facts[f"{optimizer}, one"] = train(HierarchicalTrainer(cpus(1)), optimizer, BATCH * 3, epochs=2)["after"]
        for update in UPDATES:
            facts[f"{optimizer}, {update}"] = train(never_copying(3, update=update), optimizer, epochs=2)["after"]
    facts["eight"] = train(never_copying(8, average=False), "sgd")["after"]
    facts["eight times"] = train(tp.SimpleTrainer(), "sgd", BATCH * 8, extra=lambda cost: 8 * cost)["after"]
    facts["accumulate sgd"] = train(never_copying(3), "accumulate sgd", steps=9)["after"]
    facts["sgd*3"] = train(tp.SimpleTrainer(), "sgd*3", BATCH * 9, steps=3)["after"]
    config = os.path.join(folder, "mine.yaml")
    with open(config, "w") as file:
        file.write("devices: 8\nupdate: main\nstrategy: {algorithm: flat, chunk_bytes: 0}\n")
    facts["from file"] = train(HierarchicalTrainer.from_config(config, devices=cpus(3)), "momentum", epochs=2)["after"]
    return facts


def checkpoints(folder):
    """Load what another trainer has saved, and save for the next: tensorpack's, and ours with two numbers of towers."""
    facts: dict = {}
    for optimizer in ("momentum", "adam", "accumulate adam"):
        saved = None
        for steps, name, trainer in (
            (4, "first", stock(3)),
            (8, "theirs to ours", {"trainer": HierarchicalTrainer(cpus(2))}),
            (12, "ours to the mains", {"trainer": HierarchicalTrainer(cpus(3), update="main")}),
            (16, "the mains to theirs", stock(2)),
        ):
            path = os.path.join(folder, f"{optimizer} {name}".replace(" ", "-"))
            saver = tp.ModelSaver(checkpoint_dir=path)
            loaded = train(optimizer=optimizer, steps=4, load=saved, callbacks=[saver], **trainer)["before"]
            if saved:
                reader = tf1.train.load_checkpoint(saved)
                values = {key: reader.get_tensor(key).tolist() for key in reader.get_variable_to_shape_map()}
                facts[f"{optimizer}, {name}"] = {"saved": values, "loaded": loaded}
            saved = os.path.join(path, f"model-{steps}")
    return facts


def names(folder):
    """Train with gradient processors and wrappers that match variables' names, in three towers and in one."""
    facts: dict = {}
    if not hasattr(tf, "get_default_graph"):
        tf.get_default_graph = tf1.get_default_graph  # tensorpack's assignments after updates want TensorFlow 1
    for optimizer in ("by name", "assigned by name", "moved by slots"):
        facts[f"{optimizer}, one"] = train(HierarchicalTrainer(cpus(1)), optimizer, BATCH * 3)
        for update in UPDATES:
            facts[f"{optimizer}, {update}"] = train(never_copying(3, update=update), optimizer)
    return facts


def around(folder):
    """Train with summaries, copies, comparisons, a session of the user, and warnings."""
    path = os.path.join(folder, "saved")
    config = tf1.ConfigProto(allow_soft_placement=True, inter_op_parallelism_threads=16)
    facts: dict = {"config": [str(config)]}
    facts["many"] = train(
        HierarchicalTrainer(["/cpu:0", "/cpu:1", "/cpu:0"], check_replicas_every=2),
        "clip",
        epochs=2,
        extra=moving_average,
        callbacks=[tp.ModelSaver(checkpoint_dir=path)],
        monitors=[tp.JSONWriter()],
        session_creator=NewSessionCreator(config=config),
    )["after"]
    facts["config"].append(str(config))
    facts["monitors"] = tp.JSONWriter.load_existing_json(folder)[-1]
    facts["one"] = train(tp.SimpleTrainer(), "clip", BATCH * 3, epochs=2)["after"]
    facts["files"] = sorted(os.listdir(path))
    facts["every 5"] = train(never_copying(2, broadcast_every=5), "sgd", extra=moving_average)["after"]
    messages: list = []
    handler = logging.Handler(logging.WARNING)
    setattr(handler, "emit", lambda record: messages.append(record.getMessage()))  # noqa: B010
    logger._logger.addHandler(handler)
    drift = tp.RunOp(nudge, run_before=False, run_as_trigger=False, run_step=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(never_copying(2, check_replicas_every=2), "sgd", steps=3, extra=references, callbacks=[drift])
    facts["warnings"] = messages + [str(warning.message) for warning in caught]
    return facts


def refusals(folder):
    """Return the text of the error that each bad input raises."""
    slip = os.path.join(folder, "slip.yaml")
    with open(slip, "w") as file:
        file.write("devises: 2\n")
    two = NewSessionCreator(config=tf1.ConfigProto(allow_soft_placement=True, device_count={"CPU": 2}))
    cases = {
        "no devices": lambda: HierarchicalTrainer([]),
        "no GPUs": lambda: HierarchicalTrainer(0),
        "no list": lambda: HierarchicalTrainer("0,1"),
        "quoted id": lambda: HierarchicalTrainer(["0"]),
        "algorithm": lambda: HierarchicalTrainer(8, strategy="hierarchic"),
        "update": lambda: HierarchicalTrainer(8, update="mian"),
        "preset": lambda: HierarchicalTrainer.from_config("chaner"),
        "key": lambda: HierarchicalTrainer.from_config(slip),
        "gpus": lambda: train(HierarchicalTrainer(8), "sgd"),
        "few cpus": lambda: train(HierarchicalTrainer(cpus(3)), "sgd", session_creator=two),
        "feed": lambda: train(HierarchicalTrainer(cpus(2)), "sgd", data=tp.FeedInput(Data(BATCH))),
        "uneven": lambda: train(HierarchicalTrainer(cpus(2)), "sgd", extra=uneven),
        "lonely": lambda: train(HierarchicalTrainer(cpus(2)), "sgd", extra=lonely),
        "mode": lambda: HierarchicalTrainer(8, mode="hierarchical"),
        "option": lambda: HierarchicalTrainer(8, strategi="flat"),
        "two staged": lambda: train(
            HierarchicalTrainer(cpus(2)), "sgd", data=tp.StagingInput(tp.QueueInput(Data(BATCH)), nr_stage=2)
        ),
        "keras 3": lambda: train(HierarchicalTrainer(cpus(2)), "sgd", extra=layered),
        "own accumulation": lambda: train(HierarchicalTrainer(cpus(2)), "own accumulation"),
        "processor with a variable": lambda: train(HierarchicalTrainer(cpus(2)), "processor with a variable"),
    }
    facts: dict = {}
    for name, case in cases.items():
        try:
            case()
            facts[name] = ""
        except HierAllreduceError as error:
            facts[name] = str(error)
    return facts


def main(scenario, folder):
    logger.set_logger_dir(folder, action="k")
    facts = globals()[scenario](folder)
    with open(os.path.join(folder, "facts.json"), "w") as file:
        json.dump(facts, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
