"""``tf.distribute``: training equals one device, every kind of value is right, and the rest raises errors."""

import contextlib
import copy
import logging
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import distribute_table as table
from helpers.distribute_table import KINDS, MEAN, OURS, PEERS, RING, SENSELESS, SUM
from helpers.forks import run_forked
from helpers.graphs import IS_TF2, cpus, evaluate, gradients_on, started
from helpers.project import TOP

import hier_allreduce
from hier_allreduce import AuditError, HierAllreduceError, Strategy
from hier_allreduce.graph.emit import emitted_in
from hier_allreduce.inspect import audit_first_step
from hier_allreduce.integrations import distribute
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

tf1 = tf.compat.v1
needs_tf2 = pytest.mark.tf2
IS_TF210 = tf.__version__.startswith("2.10.")
PAGE = (TOP / "docs" / "distribute.md").read_text(encoding="utf-8")
HOW_TO = [
    (TOP / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8") for name in ("tower-code", "tf-cnn-benchmarks")
]
TFS_OWN = tf.distribute.HierarchicalCopyAllReduce
WORDS, LENGTH, CLASSES, BATCH = 40, 5, 4, 840  # 840 is a multiple of 2, 3, … 8


def mirrored(count, cross_device_ops=None):
    """Return a MirroredStrategy on ``count`` CPU devices, by default with our all-reduce."""
    return tf.distribute.MirroredStrategy(cpus(count), cross_device_ops=cross_device_ops or HierarchicalAllReduce())


def examples(count):
    numbers = np.random.RandomState(0)
    return numbers.randint(0, WORDS, [count, LENGTH]), numbers.randint(0, CLASSES, [count])


def difference(ours, others):
    return max(np.abs(np.asarray(a, float) - b).max() for a, b in zip(ours, others))


# ---- what ran ------------------------------------------------------------------------------------------


@needs_tf2
def test_the_first_step_of_keras_fit_is_audited():
    keras = pytest.importorskip("keras", "3")
    strategy = mirrored(3, HierarchicalAllReduce(Strategy("ring", pack_below=0)))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    values = np.ones([6, 4], np.float32)

    def fit():
        model.fit(values, values[:, :2], batch_size=6, verbose=0)

    audited = audit_first_step(fit)
    assert [call.plan.algorithm for call in audited.calls] == ["ring"]
    assert sum(audited.copies.values()) == 2 * 2 * 2  # a kernel and a bias along two hops, there and back
    with pytest.raises(AuditError, match="before any other call"):
        audit_first_step(fit)


@needs_tf2
def test_the_first_step_of_a_function_is_audited():
    strategy = mirrored(4)

    def reduced():
        return 2 * tf.distribute.get_replica_context().all_reduce("sum", tf.random.uniform([8]))

    audited = audit_first_step(tf.function(lambda: strategy.run(reduced)))
    assert sum(audited.copies.values()) == 6


def test_this_machine_without_gpus_is_a_warning():
    if not hier_allreduce.graph.gpu_count():
        with pytest.warns(UserWarning, match="TensorFlow sees no GPUs.*hier-allreduce doctor"):
            HierarchicalAllReduce(Strategy(topology="this machine"))


# ---- training --------------------------------------------------------------------------------------


def trained_in_graph(count, cross_device_ops=None, steps=10):
    """Train in a v1 graph with sparse, large and small gradients; return the weights, ``[variable][replica]``."""
    words, labels = examples(BATCH)
    with tf.Graph().as_default() as graph:
        strategy = mirrored(count, cross_device_ops) if count > 1 or cross_device_ops else tf.distribute.get_strategy()
        run = getattr(strategy, "run", None) or strategy.experimental_run_v2
        with strategy.scope():
            optimizer, start = tf1.train.MomentumOptimizer(1.0, 0.9), tf1.glorot_uniform_initializer(seed=1)
            tensors = [
                tf1.get_variable(name, shape, initializer=start, use_resource=True)
                for name, shape in (("table", [WORDS, 8]), ("kernel", [LENGTH * 8, CLASSES]), ("bias", [1, CLASSES]))
            ]

            def step():
                replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
                x, y = (np.split(array, count)[replica] for array in (words, labels))
                hidden = tf.reshape(tf.nn.embedding_lookup(tensors[0], x), [-1, LENGTH * 8])
                logits = tf.matmul(hidden, tensors[1]) + tensors[2]
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
                return optimizer.minimize(tf.reduce_mean(loss) / count)

            train = tf.group(*strategy.experimental_local_results(run(step)))
            copies = [strategy.experimental_local_results(tensor) for tensor in tensors]
        assert bool(emitted_in(graph)) == (count > 1 and not isinstance(cross_device_ops, TFS_OWN))
        with started() as sess:
            for _ in range(steps):
                sess.run(train)
            return sess.run([[variable.read_value() for variable in row] for row in copies])


@pytest.fixture(scope="module")
def one_device():
    return [copies[0] for copies in trained_in_graph(1)]


@pytest.mark.parametrize("count", range(2, 9))
def test_k_devices_train_like_one_with_the_whole_batch(one_device, count):
    copies = trained_in_graph(count)
    assert difference([row[0] for row in copies], one_device) <= 1e-6
    assert all(np.array_equal(row[0], other) for row in copies for other in row[1:])


def test_three_devices_train_over_lanes_like_one(one_device):
    ops = HierarchicalAllReduce(lanes=hier_allreduce.gpu_lanes(cpus(3), 2).lanes)
    copies = trained_in_graph(3, ops)
    assert all(np.array_equal(row[0], other) for row in copies for other in row[1:])
    assert difference([row[0] for row in copies], one_device) <= 1e-6
    assert "lanes=(Lane(device='/cpu:3', tower=0" in repr(ops)


@needs_tf2
def test_a_strategy_that_takes_the_lanes_for_replicas_is_refused():
    ops = HierarchicalAllReduce(lanes=hier_allreduce.gpu_lanes(cpus(2), 1).lanes)
    with pytest.raises(HierAllreduceError, match="same number of lanes: tower 0 has 1, tower 1 has 1, tower 2 has 0"):
        table.reduced(cpus(4), ops, SUM, KINDS["float32"])


def test_one_replica_trains_as_without_a_strategy(one_device):
    """A script that uses whatever GPUs there are must also run where there is one."""
    assert difference([row[0] for row in trained_in_graph(1, HierarchicalAllReduce())], one_device) == 0


@needs_tf2
@pytest.mark.parametrize("operation", [SUM, MEAN])
@pytest.mark.parametrize("kind", ["float32", "IndexedSlices"])
def test_one_replica_gets_its_value_back(operation, kind):
    given = KINDS[kind](0)
    for value, result in zip(given, table.reduced(cpus(1), HierarchicalAllReduce(), operation, KINDS[kind])):
        assert np.array_equal(tf.convert_to_tensor(result[0]), tf.convert_to_tensor(value))


@pytest.mark.parametrize("count", [3, 5, 7])
def test_tensorflows_own_hierarchical_copy_is_wrong_for_odd_k(one_device, count):
    """It drops the last replica's gradient. If this test fails, TensorFlow has repaired it."""
    assert difference([row[0] for row in trained_in_graph(count, TFS_OWN())], one_device) > 0.1


def fitted(
    keras, strategy=None, samples=2 * BATCH, steps_per_execution=1, eager=False, make_data=None, sgd=None, **layers
):
    """Return the weights after ``fit`` on twice the examples, without shuffling."""
    keras.utils.set_random_seed(0)
    words, labels = examples(samples)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = network(keras, **layers)
        model.compile(
            (sgd or keras.optimizers.SGD)(0.3, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
            run_eagerly=eager,
        )
    model.fit((make_data or quick_data)(words, labels, strategy), verbose=0, shuffle=False)
    return model.get_weights()


def data_as_users_write_it(words, labels, strategy):
    # each epoch would make a new iterator, which takes TensorFlow longer than to train
    return tf.data.Dataset.from_tensor_slices((words, labels)).batch(BATCH).repeat(2)


def quick_data(words, labels, strategy):
    """The same batches, each replica reading its part itself.

    The iterator that TensorFlow makes for a plain data set is autotuned on a thread of each device. On a busy machine
    these take up to 40 seconds to end, with nothing to do.
    """

    def part(context):
        shards, options = context.num_input_pipelines, tf.data.Options()
        options.autotune.enabled = False
        data = tf.data.Dataset.from_tensor_slices((words, labels)).shard(shards, context.input_pipeline_id)
        return data.batch(BATCH // shards).repeat(2).with_options(options)

    if strategy is None:
        return part(tf.distribute.InputContext())
    options = tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_fetch_to_device=False,
        experimental_place_dataset_on_device=True,
    )
    return strategy.distribute_datasets_from_function(part, options)


def network(keras, normalized=False, policy="float32"):
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input([LENGTH], dtype="int32"),
            layers.Embedding(WORDS, 8),
            layers.Flatten(),
            *([layers.BatchNormalization(synchronized=True)] if normalized else []),
            layers.Dense(CLASSES, dtype=policy),
            layers.Activation("linear", dtype="float32"),
        ]
    )


FITS = {
    "plain": {"make_data": data_as_users_write_it},
    "steps_per_execution": {"samples": 4 * BATCH, "steps_per_execution": 2},
    "synchronized batch normalization": {"normalized": True},
    "last batch is smaller": {"samples": BATCH + 24},
    "run_eagerly": {"eager": True},
}


@needs_tf2
@pytest.mark.parametrize("how", FITS.values(), ids=FITS)
def test_keras_3_fit(how):
    keras = pytest.importorskip("keras", "3")
    assert difference(fitted(keras, mirrored(3), **how), fitted(keras, **how)) <= 1e-6


@needs_tf2
@pytest.mark.parametrize("how", [{"policy": "mixed_float16"}, {"samples": BATCH + 7}], ids=["mixed_float16", "uneven"])
def test_keras_3_fit_where_k_devices_are_not_one(how):
    """float16 rounds other batches differently, and Keras averages the means of unequal parts.

    So the weights are compared with ReductionToOneDevice's.
    """
    keras = pytest.importorskip("keras", "3")
    weights = fitted(keras, mirrored(3), **how)
    assert difference(weights, fitted(keras, mirrored(3, tf.distribute.ReductionToOneDevice()), **how)) <= 1e-6
    assert all(np.isfinite(array).all() for array in weights)


@needs_tf2
def test_keras_2_fit():
    keras = pytest.importorskip("tf_keras")
    data = {"make_data": data_as_users_write_it}  # Keras 2 does not find out how long quick_data is
    assert difference(fitted(keras, mirrored(3), **data), fitted(keras, **data)) <= 1e-6


@needs_tf2
@pytest.mark.parametrize("module, oldest, words", [("keras", "3", "def apply("), ("tf_keras", "2", "_gradients(self")])
def test_gradients_cast_as_the_page_says_travel_narrow(module, oldest, words, monkeypatch):
    """What else is reduced, synchronized batch normalization's statistics, keeps its dtype."""
    keras = pytest.importorskip(module, oldest)
    data, travelled = {"make_data": data_as_users_write_it, "normalized": True}, set()
    exact = fitted(keras, mirrored(3), **data)

    def spy(rows, *choices, **more):
        travelled.update((len(row), *{value.dtype.name for value in row}) for row in rows)
        return hier_allreduce.allreduce_grads(rows, *choices, **more)

    monkeypatch.setattr(distribute, "allreduce_grads", spy)
    narrow = fitted(keras, mirrored(3), sgd=example(words, **{module: keras})["NarrowSGD"], **data)
    assert travelled == {(1, "float32"), (5, "bfloat16")}
    assert 0 < difference(narrow, exact) < 0.01


@needs_tf2
def test_a_loop_under_tf_function_keeps_momentum_and_buckets():
    """The small gradients of one step share a bucket: there is one all-reduce for all values."""
    strategy, numbers = mirrored(4), np.arange(24, dtype="float32").reshape(4, 6)

    def replica():
        context = tf.distribute.get_replica_context()
        row = tf.gather(numbers, context.replica_id_in_sync_group)
        return context.all_reduce(MEAN, [row, 2 * row[:3], row[0]])

    step = tf.function(tf.autograph.experimental.do_not_convert(lambda: strategy.run(replica)))
    for value, exact in zip(step(), (numbers.mean(0), 2 * numbers.mean(0)[:3], numbers.mean(0)[0])):
        assert all(np.array_equal(copy, exact) for copy in strategy.experimental_local_results(value))
    (record,) = emitted_in(step.get_concrete_function().graph)
    assert record.plan.chunks == 1


@pytest.mark.skipif(IS_TF2, reason="TensorFlow 2.16 and later have no tf.estimator")
def test_an_estimator_trains_like_one_device(tmp_path):
    words, labels = examples(60)

    def model_fn(features, labels, mode):
        kernel = tf1.get_variable("kernel", [LENGTH, CLASSES], initializer=tf1.zeros_initializer(), use_resource=True)
        loss = tf1.losses.sparse_softmax_cross_entropy(labels, tf.matmul(tf.cast(features, tf.float32), kernel))
        step = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, tf1.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=step)

    def kernel_after(count):
        def input_fn():
            return tf.data.Dataset.from_tensor_slices((words, labels)).repeat().batch(60 // count)

        config = tf.estimator.RunConfig(
            train_distribute=mirrored(count) if count > 1 else None,
            session_config=tf1.ConfigProto(device_count={"CPU": 3}),
        )
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path / str(count)), config)
        estimator.train(input_fn, steps=5)
        return estimator.get_variable_value("kernel")

    alone, together = kernel_after(1), kernel_after(3)
    assert np.abs(alone).max() > 0.01 and difference([together], [alone]) <= 1e-6


# ---- the benchmark ---------------------------------------------------------------------------------


@needs_tf2
def test_the_benchmark_marks_wrong_results(tmp_path):
    """It runs in its own process, because the default's collectives allow one number of devices in a process."""
    (tmp_path / "model.tsv").write_text("name\tshape\tdtype\nW\t100,200\tfloat32\nb\t200\tfloat32\n")
    program = (TOP / "benchmarks" / "mirrored.py").read_text(encoding="utf-8")
    done = run_forked(program, "--model", "model.tsv", "--devices", "3", "--rounds", "3", folder=tmp_path)
    assert done.status == 0, done.err[-2000:]
    rows = [line for line in done.out.splitlines() if re.search(r"  -?\d+[.]\d+  .* \d+\b", line)]
    wrong = [row.split("  ")[0] for row in rows if row.endswith("WRONG")]
    assert len(rows) == 5
    assert wrong == ["HierarchicalCopyAllReduce", "HierarchicalCopyAllReduce(num_packs=0)"]


# ---- kinds of values -------------------------------------------------------------------------------


# A worker runs all tests of a kind, which have outcomes in common.
each_kind = pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.xdist_group(k)) for k in KINDS])


@needs_tf2
@each_kind
@pytest.mark.parametrize("count", [3, 4])
def test_every_kind_of_value_is_right_or_refused(kind, count):
    refused = dict.fromkeys(SENSELESS, "HierAllreduceError")
    if not IS_TF210:  # 2.10 brings int32 to this package; later ones refuse two of them
        refused["two int32 in one batch"] = "ValueError"
    for compiled in (True, False):
        outcomes = {table.outcome(OURS, kind, count, op, compiled) for op in table.ops_of(kind)}
        assert outcomes == {refused.get(kind, "right")}


@needs_tf2
@each_kind
def test_the_page_says_what_the_installed_version_does(kind):
    if f"| TensorFlow {tf.__version__} |" not in PAGE:
        pytest.skip("the page is about another version")
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {kind} |")]
    cells = dict(zip(PEERS, row.strip("| ").split(" | ")[1:]))
    for peer in set(PEERS) - {RING}:
        assert cells[peer] == table.cell(peer, kind), peer


@needs_tf2
def test_a_mean_of_integers_is_tensorflows():
    (got,) = table.reduced(cpus(3), HierarchicalAllReduce(), MEAN, KINDS["int64"])
    assert got[0].dtype == tf.float64


@needs_tf2
def test_sparse_values_stay_sparse_where_dense_is_smaller():
    (got,) = table.reduced(cpus(8), HierarchicalAllReduce(), SUM, KINDS["IndexedSlices"])
    assert all(isinstance(value, tf.IndexedSlices) for value in got)
    (got,) = table.reduced(cpus(8), HierarchicalAllReduce(Strategy(sparse="dense")), SUM, KINDS["IndexedSlices"])
    assert not any(isinstance(value, tf.IndexedSlices) for value in got)


@needs_tf2
@pytest.mark.parametrize("destination", ["/cpu:0", "/cpu:5"])
def test_one_destination(destination):
    strategy = mirrored(3)
    value = strategy.run(lambda: tf.fill([2], tf.distribute.get_replica_context().replica_id_in_sync_group + 1))
    value = strategy.run(lambda x: tf.cast(x, tf.float32), (value,))
    got = strategy.extended.reduce_to(SUM, value, destination)
    assert np.array_equal(got, [6, 6]) and got.device.endswith(destination[-1])
    (got,) = strategy.extended.batch_reduce_to(SUM, [(value, destination)])
    assert np.array_equal(got, [6, 6]) and got.device.endswith(destination[-1])


@needs_tf2
def test_values_go_to_the_devices_of_a_variable():
    strategy = mirrored(3)
    with strategy.scope():
        variable = tf.Variable(tf.zeros([2]))
    value = strategy.run(lambda: tf.fill([2], 2.0 ** tf.cast(replica_number(), tf.float32)))
    (got,) = strategy.extended.batch_reduce_to(SUM, [(value, variable)])
    parts = strategy.experimental_local_results(got)
    assert [part.device[-1] for part in parts] == ["0", "1", "2"]
    assert all(np.array_equal(part, [7, 7]) for part in parts)


def replica_number():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


@needs_tf2
def test_gather_reduce_and_variables_that_are_summed_on_reading():
    strategy = mirrored(3)
    value = strategy.run(lambda: tf.fill([1, 2], replica_number()))
    assert np.array_equal(strategy.gather(value, axis=0), [[0, 0], [1, 1], [2, 2]])
    assert np.array_equal(strategy.reduce(SUM, value, axis=None), [[3, 3]])
    assert np.array_equal(strategy.reduce(MEAN, value, axis=0), [1, 1])
    with strategy.scope():
        total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    strategy.run(lambda: total.assign_add(tf.cast(replica_number(), tf.float32)))
    assert total.numpy() == 3


@needs_tf2
@pytest.mark.parametrize(
    "count, strategy",
    [(8, "tensorpack"), (3, "muji"), (3, "auto"), (5, None), (8, Strategy(topology="dgx-1v"))],
)
def test_strategies_by_name_and_a_topology(count, strategy):
    (got,) = table.reduced(cpus(count), HierarchicalAllReduce(strategy), SUM, KINDS["float32"])
    assert all(np.array_equal(value, np.full([2, 3], 2**count - 1)) for value in got)


def test_several_strategies_share_one_object_and_its_copy(one_device):
    """tf.estimator copies its arguments. The object must not keep state of a strategy or a graph."""
    ours = HierarchicalAllReduce()
    for count in (3, 2, 3):
        for cross_device_ops in (ours, copy.deepcopy(ours)):
            copies = trained_in_graph(count, cross_device_ops)
            assert difference([row[0] for row in copies], one_device) <= 1e-6


# ---- plain graph code, as the pages show it ----------------------------------------------------------


def example(words, **modules):
    """Return what the pages' Python block that contains ``words`` defines."""
    blocks = [block for page in (PAGE, *HOW_TO) for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    (block,) = [block for block in blocks if words in block]
    defined = {"tf": tf, "hier_allreduce": hier_allreduce, "BatchAllReduceAlgorithm": object, **modules}
    exec(block, defined)
    return defined


def test_the_hook_for_tower_code(graph):
    devices, rows = cpus(3), []
    for tower, device in enumerate(devices):
        with tf.device(device):
            variable = tf1.get_variable(f"tower{tower}/W", [2], use_resource=True)
            rows.append([(gradients_on([device], [[np.float32([tower, 3])]])[0][0], variable)])
    reduced = example("def aggregate(")["aggregate"](rows)
    assert [var.name for ((_, var),) in reduced] == [f"tower{k}/W:0" for k in range(3)]
    assert all(np.array_equal(grad, [1, 3]) for grad in evaluate([grad for ((grad, _),) in reduced]))


def test_the_hook_for_tf_cnn_benchmarks(graph):
    rows = gradients_on(cpus(3), [[np.float32([2**k]), np.float32(5)] for k in range(3)])
    algorithm = example("_do_batch_all_reduce")["HierarchicalAlgorithm"]()
    assert evaluate(algorithm._do_batch_all_reduce(rows)) == [(7, 15)] * 3


# ---- bad input -------------------------------------------------------------------------------------


@needs_tf2
@pytest.mark.parametrize("others", [0, 1])
def test_one_tensor_for_all_replicas_is_refused(others):
    """TensorFlow would take it for the sum: 2 instead of 6."""
    constant = tf.constant(2.0)
    with pytest.raises(HierAllreduceError, match="3 replicas pass the very same tensor"):
        table.reduced(cpus(3), HierarchicalAllReduce(), SUM, lambda r: [constant, *KINDS["float32"](r)[:others]])
    assert table.reduced(cpus(3), HierarchicalAllReduce(), MEAN, lambda r: [constant])[0][0].numpy() == 2


def test_devices_of_several_hosts_are_refused(graph):
    if not IS_TF2:
        pytest.skip("TensorFlow 1.15 refuses them itself")
    hosts = [f"/job:worker/task:{task}/cpu:0" for task in range(2)]
    strategy = tf.distribute.MirroredStrategy(hosts, cross_device_ops=HierarchicalAllReduce())
    with pytest.raises(
        HierAllreduceError, match=r"several hosts \(/job:worker/task:0, /job:worker/task:1\).*MultiWorker"
    ):
        strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(SUM, [tf.fill([2], 1.0)]))


@needs_tf2
@pytest.mark.skipif(IS_TF210, reason="TensorFlow 2.10 ignores it without a warning")
def test_tensorflows_warning_names_an_ignored_ops_object(monkeypatch, caplog):
    """TensorFlow does so with jit_compile on GPUs; here it is told that the CPUs are GPUs."""
    from tensorflow.python.distribute import mirrored_strategy

    strategy = mirrored(2, HierarchicalAllReduce("tensorpack"))
    monkeypatch.setattr(mirrored_strategy, "_is_gpu_device", lambda device: True)
    logger = tf1.logging.get_logger() if hasattr(tf1.logging, "get_logger") else logging.getLogger("tensorflow")
    monkeypatch.setattr(logger, "propagate", True)
    replica = tf.autograph.experimental.do_not_convert(
        lambda: tf.distribute.get_replica_context().all_reduce(SUM, [tf.fill([2], 1.0)])
    )
    with contextlib.suppress(tf.errors.OpError, ValueError):
        tf.function(lambda: strategy.run(replica), jit_compile=True, autograph=False).get_concrete_function()
    assert "HierarchicalAllReduce(strategy='tensorpack') is provided to initialize MirroredStrategy, it is ignored" in (
        caplog.text
    )


@needs_tf2
def test_errors_name_the_replica_and_the_value():
    with pytest.raises(HierAllreduceError, match=r"tower 2 \(.*CPU:2\), variable 0.*shape differs"):
        table.reduced(cpus(3), HierarchicalAllReduce(), SUM, KINDS["shapes [3, 1] and [1, 4]"])


@needs_tf2
@pytest.mark.parametrize(
    "make",
    [lambda x: tf.RaggedTensor.from_row_lengths(x, [1, 2]), lambda x: tf.sparse.from_dense(x)],
    ids=["RaggedTensor", "SparseTensor"],
)
def test_tensors_of_several_parts_are_refused_by_name(make):
    strategy = mirrored(3)
    with pytest.raises(HierAllreduceError, match=r"replica 0: a (Ragged|Sparse)Tensor cannot be all-reduced"):
        strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(SUM, make(tf.ones([3]))))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"strategy": "tensorpak"}, "did you mean 'tensorpack'"),
        ({"strategy": 3}, "expected a Strategy"),
        ({"strategy": Strategy(wire_dtype="bfloat16")}, "wire_dtype='bfloat16': TensorFlow does not say which"),
        ({"strategy": "half"}, "cast the gradients .*docs/distribute.md"),
    ],
)
def test_wrong_choices_are_refused_at_once(arguments, words):
    with pytest.raises(HierAllreduceError, match=words):
        HierarchicalAllReduce(**arguments)
