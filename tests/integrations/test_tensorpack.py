"""HierarchicalTrainer trains like one tower, saves like tensorpack's trainer, and raises errors."""

import functools
import itertools
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers.forks import run_forked
from helpers.graphs import XPU, gpu_or_cpu, gpus_or_cpus

from hier_allreduce import HierAllreduceError, Strategy

tf1 = tf.compat.v1
BATCH = 4
UPDATES = ("replicated", "once", "sharded")


def in_child(test):
    """Run a test in a child process and an empty folder.

    The process is a child, because importing tensorpack changes global state.
    """

    @functools.wraps(test)
    def run(**arguments):
        program = [
            f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})",
            f"import {test.__module__} as tests",
            f"tests.{test.__name__}.__wrapped__(**{arguments!r})",
        ]
        with tempfile.TemporaryDirectory() as folder:
            done = run_forked("\n".join(program), folder=folder)
        assert done.status == 0, (done.out + done.err)[-5000:]

    return run


def train(trainer, *arguments, **options):
    """Train with a trainer, or with a HierarchicalTrainer on that many devices.

    This is called in a child process.
    """
    from helpers.tensorpack_child import train

    trainer = on_xpus(trainer) if isinstance(trainer, int) else trainer
    return train(trainer, *arguments, **options)


def on_xpus(count, every_epoch=False, **options):
    """Return our trainer on ``count`` devices.

    Without ``every_epoch`` it does not copy variables between towers after an epoch.
    """
    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    trainer = HierarchicalTrainer(gpus_or_cpus(count), **options)
    trainer.BROADCAST_EVERY_EPOCH = every_epoch
    return trainer


def difference(variables, others):
    """Return the largest difference of the trained variables and of the slots that both have.

    Both must have the same trained variables.
    """
    in_both = set(variables) & set(others)
    compared = [name for name in in_both if name.startswith(("hidden/", "out/"))]
    assert {"hidden/W", "hidden/b", "out/W", "out/b"} <= set(compared)
    differences = []
    for name in compared:
        apart = np.subtract(variables[name], others[name])
        differences.append(np.abs(apart).max())
    return max(differences)


def replicas_are_equal(variables):
    """Return whether other towers' variables, slots too, are tower 0's."""
    copies = {name: value for name, value in variables.items() if name.startswith("tower")}
    return bool(copies) and all(
        value == variables[name.split("/", 1)[1]] for name, value in copies.items()
    )


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "accumulate adam", "clip"])
@in_child
def test_towers_train_like_one_with_a_larger_batch(optimizer):
    """No copy between epochs makes the towers alike, and one thread is enough to stage inputs."""
    one = train(1, optimizer, BATCH * 3, epochs=2)["after"]
    for update in UPDATES:
        many = train(on_xpus(3, update=update), optimizer, epochs=2)["after"]
        assert difference(many, one) < 1e-6, update
        assert replicas_are_equal(many) and many["global_step"] == 12, update
        if optimizer == "adam":  # which advances this once a step
            assert many["apply_gradients/beta2_power"] == pytest.approx(0.999**13, rel=1e-5)


@in_child
def test_the_sum_is_the_mean_times_k():
    eight = train(on_xpus(8, average=False), "sgd")["after"]
    assert (
        difference(eight, train(1, "sgd", BATCH * 8, extra=lambda cost: 8 * cost)["after"]) < 1e-5
    )
    assert replicas_are_equal(eight)


@in_child
def test_accumulated_gradients_are_applied_every_kth_step():
    after = train(3, "accumulate sgd", steps=9)["after"]
    assert difference(after, train(1, "sgd*3", BATCH * 9, steps=3)["after"]) < 1e-6
    assert [value for name, value in after.items() if name.endswith("counter")] == [9]


@in_child
def test_a_transform_may_leave_out_a_gradient_that_would_be_accumulated():
    trainer = on_xpus(2, transform=lambda grads: [None, *grads[1:]])
    found = train(trainer, "accumulate sgd", steps=3)
    before, after = found["before"], found["after"]
    changed = {
        name for name in ("hidden/W", "hidden/b", "out/W", "out/b") if before[name] != after[name]
    }
    assert changed == {"hidden/b", "out/W", "out/b"}


@pytest.mark.parametrize("niter", [0, -1])
@in_child
def test_a_wrong_number_of_steps_to_accumulate_is_an_error(niter):
    from tensorpack.tfutils.optimizer import AccumGradOptimizer

    make = lambda: AccumGradOptimizer(tf1.train.GradientDescentOptimizer(0.1), niter)  # noqa: E731
    fails([f"niter={niter}: expected a whole number of 1 or more"], train, 2, make)


@in_child
def test_a_file_selects_the_strategy():
    Path("mine.yaml").write_text("algorithm: flat\nchunk_bytes: 0\n")
    after = train(on_xpus(3, update="sharded", strategy="mine.yaml"), "momentum")["after"]
    assert difference(after, train(1, "momentum", BATCH * 3)["after"]) < 1e-6
    assert "tower2/out/b" in after and "tower3/out/b" not in after


@in_child
def test_devices_are_counted_and_listed_by_numbers_of_numpy_too():
    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    for devices in (2, np.int64(2), [0, np.int32(1)], np.arange(2)):
        assert HierarchicalTrainer(devices).devices == ["/gpu:0", "/gpu:1"]


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "accumulate adam"])
@in_child
def test_checkpoints_restore_bit_for_bit(optimizer):
    """Variables and slots go from tensorpack's trainer to ours, and to other numbers of towers."""
    import tensorpack as tp
    from helpers.tensorpack_child import NewSessionCreator

    # tensorpack's trainer is moved to one CPU by soft placement, in a session with enough threads
    config = tf1.ConfigProto(
        allow_soft_placement=True, inter_op_parallelism_threads=16, use_per_session_threads=True
    )

    def stock(towers):
        return tp.SyncMultiGPUTrainerReplicated(list(range(towers)), mode="gpu")

    slots = {
        "momentum": {"Momentum"},
        "adam": {"Adam", "Adam_1"},
        "accumulate adam": {"Adam", "Adam_1", "AccumGrad"},
    }
    checkpoint, steps = None, 0
    for trainer in (stock(3), on_xpus(2), on_xpus(3, update="sharded"), stock(2)):
        theirs = isinstance(trainer, tp.SyncMultiGPUTrainerReplicated)
        session = {"session_creator": NewSessionCreator(config=config)} if theirs else {}
        saver = tp.ModelSaver(checkpoint_dir=f"after{steps}")
        loaded = train(trainer, optimizer, steps=4, load=checkpoint, callbacks=[saver], **session)[
            "before"
        ]
        if checkpoint:
            reader = tf1.train.load_checkpoint(checkpoint)
            saved = {
                key: reader.get_tensor(key).tolist() for key in reader.get_variable_to_shape_map()
            }
            missing = {
                name for name in set(saved) - set(loaded) if not name.endswith("counter")
            }  # one for each tower
            assert not missing and saved["global_step"] == steps
            assert slots[optimizer] <= {
                name.split("/")[-1] for name in saved if name.startswith("hidden/W")
            }
            assert [name for name in set(saved) & set(loaded) if saved[name] != loaded[name]] == []
            assert replicas_are_equal(loaded)
            assert theirs or all(
                value == steps for name, value in loaded.items() if name.endswith("counter")
            )
        steps += 4
        checkpoint = f"after{steps - 4}/model-{steps}"


@pytest.mark.parametrize(
    "optimizer",
    ["by name", "assigned by name", "moved by slots", "decayed by name", "counted by name"],
)
@in_child
def test_matches_of_names_see_tower_0s_in_every_tower(optimizer):
    import tensorpack as tp

    vars(tf).setdefault(
        "get_default_graph", tf1.get_default_graph
    )  # tensorpack's assignments want TensorFlow 1
    one = train(1, optimizer, BATCH * 3)["after"]
    for update in UPDATES:
        graphs: list = []
        look = tp.CallbackFactory(
            before_train=lambda look, graphs=graphs: graphs.append(look.graph)
        )
        trained = train(on_xpus(3, update=update), optimizer, callbacks=[look])
        before, after = trained["before"], trained["after"]
        assert difference(after, one) < 1e-6 and replicas_are_equal(after), update
        if optimizer == "by name":
            histograms = [
                op.name for op in graphs[0].get_operations() if op.type == "HistogramSummary"
            ]
            assert sorted(name.split("/", 2)[-1] for name in histograms) == [
                "out/W-grad",
                "out/b-grad",
            ]
            assert (
                after["hidden/W"] == before["hidden/W"] and after["hidden/b"] != before["hidden/b"]
            )


# ---- what is around training ---------------------------------------------------------------------


def moving_average(cost):
    """Add a variable that only tower 0 updates, and does not train.

    Batch normalization's averages are such variables.
    """
    import tensorpack as tp

    average = tf1.get_variable(
        "average", [], trainable=False, initializer=tf1.zeros_initializer(), use_resource=True
    )
    if tp.get_current_tower_context().is_main_training_tower:
        tf1.add_to_collection(tf1.GraphKeys.UPDATE_OPS, average.assign_add(cost))
    return cost


@in_child
def test_processors_summaries_checkpoints_and_copies_of_every_epoch():
    """In a session of the user with two towers on one device.

    Moving averages, which differ within an epoch, are not compared.
    """
    import tensorpack as tp
    from helpers.tensorpack_child import NewSessionCreator

    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    tp.logger.set_logger_dir("log", action="k")
    config = tf1.ConfigProto(allow_soft_placement=True, inter_op_parallelism_threads=16)
    before = str(config)
    trained = train(
        HierarchicalTrainer([gpu_or_cpu(0), gpu_or_cpu(1), gpu_or_cpu(0)], check_replicas_every=2),
        "clip",
        epochs=2,
        extra=moving_average,
        callbacks=[tp.ModelSaver(checkpoint_dir="saved")],
        monitors=[tp.JSONWriter()],
        session_creator=NewSessionCreator(config=config),
    )
    _, second = trained["epochs"]
    assert replicas_are_equal(second) and second["average"] != 0 and str(config) == before
    last = tp.JSONWriter.load_existing_json("log")[-1]
    assert "cost" in last and any(name.endswith("hidden/W/rms") for name in last)
    assert (last["epoch_num"], last["global_step"]) == (2, 12)
    assert {"model-6.index", "model-12.index"} <= set(os.listdir("saved"))
    alone = train(1, "clip", BATCH * 3, epochs=2)
    assert difference(trained["after"], alone["after"]) < 1e-6


@in_child
def test_a_period_copies_what_is_not_trained():
    after = train(on_xpus(2, broadcast_every=5), "sgd", extra=moving_average)["after"]
    # copied after the fifth of six steps, so that only the last one is missing
    assert after["average"] > after["tower1/average"] > 0.5 * after["average"]


def weighted(cost):
    """Multiply the cost by a weight that the model has, so that each tower has one."""
    weight = tf1.get_variable("weight_of_loss", initializer=1.0, trainable=False, use_resource=True)
    return cost * weight


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("step_based", [False, True], ids=["epochs", "steps"])
@in_child
def test_a_schedule_sets_a_variable_of_the_model_on_all_towers(step_based, is_wrapped):
    """Before the first step, and in the step for which it was set."""
    import tensorpack as tp

    schedule = [(0, 0.2), (2, 0.6), (4, 0.1)] if step_based else [(0, 0.2), (1, 0.6), (2, 0.1)]

    def trained(trainer, batch):
        setter = tp.ScheduledHyperParamSetter(
            "weight_of_loss", schedule, step_based=step_based, set_at_beginning=True
        )
        if is_wrapped:
            setter = tp.EnableCallbackIf(setter, lambda _: True)
        return train(
            trainer, "momentum", batch, steps=2, epochs=3, extra=weighted, callbacks=[setter]
        )["after"]

    one = trained(1, BATCH * 2)
    for update in UPDATES:
        two = trained(on_xpus(2, update=update), BATCH)
        assert difference(two, one) < 1e-6 and replicas_are_equal(two), update


@in_child
def test_a_frozen_layer_that_no_name_tells_has_to_be_equal():
    """Keras numbers layers over all towers."""
    numbers = itertools.count()

    def with_a_frozen_layer(cost):
        scale = tf1.get_variable(
            f"layer_{next(numbers)}",
            initializer=tf1.random_normal_initializer(),
            shape=[2],
            trainable=False,
            use_resource=True,
        )
        return cost * tf.reduce_sum(scale)

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"MODEL_VARIABLES.*layer_0"):
        train(2, "sgd", extra=with_a_frozen_layer)


@in_child
def test_towers_that_differ_end_the_training():
    import tensorpack as tp

    def nudge():
        (bias,) = [var for var in tf1.local_variables() if var.op.name == "tower1/out/b"]
        return bias.assign_add(tf.fill(bias.shape, 1e-3)).op

    drift = tp.RunOp(nudge, run_before=False, run_as_trigger=False, run_step=True)
    words = ["tower 1 differs from tower 0 in 1 variable, such as 'out/b'", "equal after step 0"]
    for every, first in ((2, 2), (None, 1), (3, 3)):
        options = {"update": "replicated", "check_replicas_every": every}
        with tf.Graph().as_default():
            trainer = on_xpus(2, **options)
            fails([*words, f"after step {first} "], train, trainer, "sgd", callbacks=[drift])
    train(on_xpus(2, check_replicas_every=0), "sgd", callbacks=[drift])


@in_child
def test_copies_are_compared_in_some_steps():
    """With emulated GPUs, one of which then gets other bits, the step and the link are named."""
    import tensorpack as tp
    from emulated_gpu import plugin
    from helpers.real_gpus import ARE_EMULATED

    class Look(tp.Callback):
        def __init__(self, flip_at=None):
            self.checked, self._steps, self._flip_at = [], 0, flip_at

        def _before_run(self, _):
            self._steps += 1
            if self._steps == self._flip_at:
                plugin.set_flip(0, 1, 1)
            options = tf1.RunOptions(output_partition_graphs=True)
            return tf1.train.SessionRunArgs([], options=options)

        def _after_run(self, _, values):
            partitions = values.run_metadata.partition_graphs
            nodes = [node for partition in partitions for node in partition.node]
            if any(node.name.startswith("hier_allreduce_copy_check") for node in nodes):
                self.checked.append(self._steps)

    for every, checked in ((None, [1, 2, 4]), (3, [3, 6]), (0, [])):
        look = Look()
        train(on_xpus(2, check_replicas_every=every), "adam", callbacks=[look])
        assert look.checked == checked, every
    if ARE_EMULATED:
        told = ["step 4: the copy from tower 0", "to tower 1", "2 checked steps before"]
        trainer = on_xpus(2, strategy=Strategy("flat", main=0))
        fails(told, train, trainer, "sgd", callbacks=[Look(flip_at=4)])


@pytest.mark.parametrize("update", UPDATES)
@in_child
def test_a_reference_variable_is_an_error_before_training(update):
    def with_reference(cost):
        return cost + tf.square(
            tf1.get_variable("first", [], initializer=tf1.ones_initializer(), use_resource=False)
        )

    told = ["'first'", "a reference variable", "tf.compat.v1.enable_resource_variables()"]
    fails(told, train, on_xpus(2, update=update), "sgd", extra=with_reference)


# ---- errors --------------------------------------------------------------------------------------


def on_tower_1(cost, everywhere):
    """Add a variable that only tower 1 has a gradient for; or that only tower 1 has."""
    import tensorpack as tp

    here = tp.get_current_tower_context().index == 1
    if not here and not everywhere:
        return cost
    extra = tf1.get_variable("extra", [], initializer=tf1.ones_initializer(), use_resource=True)
    return cost + tf.square(extra) if here else cost


def fails(words, function, *arguments, **options):
    """``function`` raises an error with all the words."""
    with pytest.raises(HierAllreduceError) as caught:
        function(*arguments, **options)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


# the arguments of HierarchicalTrainer, and words of its error
ARGUMENTS: dict = {
    "no devices": ({"devices": []}, ["devices is empty"]),
    "no GPUs": ({"devices": 0}, ["devices is empty"]),
    "a text": ({"devices": "8"}, ["tower 0: '8' is not a device"]),
    "no list": ({"devices": "0,1"}, ["tower 0: '0' is not a device"]),
    "quoted id": ({"devices": ["0"]}, ["tower 0: '0'"]),
    "algorithm": (
        {"devices": 8, "strategy": "hierarchic"},
        ["there are", "tree", "flat"],
    ),
    "update": (
        {"devices": 8, "update": "mian"},
        ["update='mian': expected one of replicated, once, sharded"],
    ),
    "lists of devices": ({"devices": [[0], [0, 1]]}, ["tower 0: [0] is not a device"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
@in_child
def test_a_wrong_argument_is_an_error_of_the_constructor(case):
    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    arguments, words = ARGUMENTS[case]
    fails(words, HierarchicalTrainer, **arguments)


@pytest.mark.cpu_only("an error where there are no GPUs")
@in_child
def test_devices_that_do_not_exist_are_an_error_before_training():
    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    words = ["tower 0: /gpu:0 does not exist", "/cpu:0", 'devices=["/cpu:0", "/cpu:1", …]']
    fails(words, train, HierarchicalTrainer(8), "sgd")


@in_child
def test_a_session_with_too_few_devices_is_an_error_before_training():
    from helpers.tensorpack_child import NewSessionCreator

    two = tf1.ConfigProto(allow_soft_placement=True, device_count={XPU.upper(): 2})
    words = [f"tower 2: {gpu_or_cpu(2)} does not exist", gpu_or_cpu(1)]
    fails(words, train, 3, "sgd", session_creator=NewSessionCreator(config=two))


@in_child
def test_an_input_that_towers_cannot_share_is_an_error_before_training():
    import tensorpack as tp
    from helpers.tensorpack_child import Data

    feed = tp.FeedInput(Data(BATCH))
    fails(["FeedInput", "same batch", "QueueInput"], train, 2, "sgd", data=feed)
    staged = tp.StagingInput(tp.QueueInput(Data(BATCH)), 2)
    fails(["StagingInput", "nr_stage=2", "nr_stage=1"], train, 2, "sgd", data=staged)


@in_child
def test_a_gradient_or_variable_of_one_tower_only_is_an_error_before_training():
    words = ["tower 0", "'extra'", "None on towers [0]", "missing='zeros'"]
    fails(words, train, 2, "sgd", extra=lambda cost: on_tower_1(cost, everywhere=True))
    words = [
        f"tower 0 ({gpu_or_cpu(0)}) has 4",
        f"tower 1 ({gpu_or_cpu(1)}) has 5",
    ]
    fails(words, train, 2, "sgd", extra=lambda cost: on_tower_1(cost, everywhere=False))


# ---- the cost of a step --------------------------------------------------------------------------


@pytest.mark.cpu_only("emulated GPUs have no streams in a trace: see test_trace.py")
@in_child
def test_the_callback_tells_what_a_step_costs():
    from hier_allreduce_tools.cost.tensorpack import CostCallback

    callback = CostCallback(step=4, folder="told")
    train(3, "adam", callbacks=[callback])
    found = callback.cost
    assert found is not None and len(found.towers) == 3
    assert all(tower.pass_end > 0 for tower in found.towers)
    with open("told/cost.json", encoding="utf-8") as file:
        assert json.load(file)["summary"] == found.summary
