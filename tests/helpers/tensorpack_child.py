"""A small model and its training with tensorpack, in a child process.

The process is a child, because importing tensorpack changes global state.
"""

import os
import re

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
# The first session of a process fixes the number of threads for later ones. One thread is the
# worst case for staging. GPUs need more, since at a step's end a thread waits for each GPU.
THREADS = int(os.environ.get("TF_NUM_INTEROP_THREADS", "1"))
tf1.Session(config=tf1.ConfigProto(inter_op_parallelism_threads=THREADS)).close()

import tensorpack as tp  # noqa: E402
from tensorpack.tfutils.gradproc import (  # noqa: E402
    GlobalNormClip,
    MapGradient,
    ScaleGradient,
    SummaryGradient,
)
from tensorpack.tfutils.optimizer import (  # noqa: E402
    AccumGradOptimizer,
    PostProcessOptimizer,
    VariableAssignmentOptimizer,
    apply_grad_processors,
)
from tensorpack.tfutils.sesscreate import NewSessionCreator as NewSessionCreator  # noqa: E402
from tensorpack.tfutils.summary import add_moving_summary  # noqa: E402

FEATURES, CLASSES, BATCH, STEPS = 5, 3, 4, 6


# ---- optimizers ----------------------------------------------------------------------------------


def momentum():
    return tf1.train.MomentumOptimizer(0.1, 0.9)


def adam():
    return tf1.train.AdamOptimizer(0.05)


def sgd(rate=0.1):
    return tf1.train.GradientDescentOptimizer(rate)


def sgd_with_a_variable():
    return sgd(tf1.get_variable("rate", initializer=0.1, trainable=False, use_resource=True))


def look_ahead():
    inside = momentum()
    return PostProcessOptimizer(
        inside, lambda var: var.assign_sub(0.05 * inside.get_slot(var, "momentum")).op
    )


class DecayAllBut(tf.compat.v1.train.MomentumOptimizer):
    """Momentum that decays all weights but those of the first layer, and no bias.

    As many optimizers do, it knows them by their names.
    """

    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        self.decayed = {var.name for var in var_list if not var.op.name.startswith("hidden/")}

    def _resource_apply_dense(self, grad, var):
        is_decayed = var.name in self.decayed and not re.search(r"/b$", var.op.name)
        return super()._resource_apply_dense(grad + 0.1 * is_decayed * var.read_value(), var)


def counted(grad, var):
    """Divide a gradient by the number of steps.

    They are counted in a variable that is named after ``var``.
    """
    with tf1.variable_scope("counted", reuse=tf1.AUTO_REUSE):
        name, zeros = f"{var.op.name}/steps", tf1.zeros_initializer()
        steps = tf1.get_variable(name, [], initializer=zeros, trainable=False, use_resource=True)
    return grad / steps.assign_add(1.0)


BY_NAME = [  # freezes a layer and decays weights
    ScaleGradient([("hidden/W", 0.0), ("out/.*", 5.0)], verbose=False),
    MapGradient(lambda grad, var: grad + 0.1 * var, "out/W"),
    SummaryGradient("out/.*"),
]
OPTIMIZERS = {
    "momentum": momentum,
    "sgd": sgd,
    "sgd*3": lambda: sgd(0.3),
    "sgd with a variable": sgd_with_a_variable,
    "adam": adam,
    "clip": lambda: apply_grad_processors(sgd(), [GlobalNormClip(0.05), SummaryGradient()]),
    "accumulate sgd": lambda: AccumGradOptimizer(sgd(), 3),
    "accumulate adam": lambda: AccumGradOptimizer(adam(), 3),
    "by name": lambda: apply_grad_processors(momentum(), BY_NAME),
    "assigned by name": lambda: VariableAssignmentOptimizer(
        momentum(), lambda var: var * 0.5 if var.name in ("hidden/b:0", "out/b:0") else None
    ),
    "moved by slots": look_ahead,
    "decayed by name": lambda: DecayAllBut(0.1, 0.9),
    "counted by name": lambda: apply_grad_processors(sgd(), [MapGradient(counted)]),
}


# ---- training ------------------------------------------------------------------------------------


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
        self.optimizer, self.extra = OPTIMIZERS.get(optimizer, optimizer), extra

    def inputs(self):
        return [
            tf.TensorSpec((None, FEATURES), tf.float32, "x"),
            tf.TensorSpec((None,), tf.int32, "y"),
        ]

    def build_graph(self, x, y):
        for seed, (name, width) in enumerate((("hidden", 8), ("out", CLASSES))):
            with tf1.variable_scope(name):
                init = tf1.glorot_uniform_initializer(seed=seed)
                w = tf1.get_variable(
                    "W", [int(x.shape[1]), width], initializer=init, use_resource=True
                )
                b = tf1.get_variable(
                    "b", [width], initializer=tf1.zeros_initializer(), use_resource=True
                )
            x = tf.matmul(tf.nn.relu(x) if name == "out" else x, w) + b
        cost = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x), name="cost"
        )
        add_moving_summary(cost)
        return self.extra(cost) if self.extra else cost


class Look(tp.Callback):
    """The values of all variables in the first step of each epoch, and at the end."""

    before = after = None

    def _setup_graph(self):
        self.epochs = []

    def _read(self):
        variables = tf1.global_variables() + tf1.local_variables()
        values = tf1.get_default_session().run(variables)
        return {v.op.name: np.asarray(value).tolist() for v, value in zip(variables, values)}

    def _before_run(self, _):
        if self.trainer.local_step == 0:
            self.epochs.append(self._read())
            self.before = self.epochs[0]

    def _after_train(self):
        self.after = self._read()


class Slower(tp.Callback):
    """The chief divides the rate by ten at the end of each epoch."""

    def _setup_graph(self):
        (self.rate,) = (var for var in tf1.global_variables() if var.op.name == "rate")

    def _trigger_epoch(self):
        self.rate.load(self.rate.eval() / 10)


class Rates(tp.Callback):
    """The rate with which each epoch trained on this host."""

    _chief_only = False

    def _setup_graph(self):
        (self.rate,) = (var for var in tf1.global_variables() if var.op.name == "rate")
        self.seen = []

    def _after_epoch(self):
        self.seen.append(float(self.rate.eval()))


class Spoil(tp.Callback):
    """Adds to a weight of this host after its second step."""

    _chief_only = False

    def _setup_graph(self):
        weights = tf1.trainable_variables()[0]
        self.spoil = weights.assign_add(tf.ones_like(weights))
        self.steps = 0

    def _trigger_step(self):
        self.steps += 1
        if self.steps == 2:
            self.trainer.sess.run(self.spoil.op)


def train(
    trainer,
    optimizer,
    batch=BATCH,
    steps=STEPS,
    epochs=1,
    load=None,
    callbacks=(),
    extra=None,
    **config,
):
    """Train in a fresh graph, and return the variables before and after.

    ``optimizer`` is a name or a function that makes one.
    """
    look = Look()
    # tensorpack makes each summary once in a process, where once in a graph would be right
    SummaryGradient._summaried_gradient.clear()
    with tf.Graph().as_default():
        data = config.pop("data", None) or tp.QueueInput(Data(batch))
        tp.launch_train_with_config(
            tp.TrainConfig(
                model=Model(optimizer, extra),
                data=data,
                callbacks=[*callbacks, look],
                extra_callbacks=[
                    tp.MovingAverageSummary(),
                    tp.MergeAllSummaries(),
                    tp.RunUpdateOps(),
                ],
                session_init=tp.SaverRestore(load) if load else None,
                steps_per_epoch=steps,
                max_epoch=epochs,
                **config,
            ),
            trainer,
        )
    return {"before": look.before, "epochs": look.epochs, "after": look.after}
