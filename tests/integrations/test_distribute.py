"""``tf.distribute``: training equals one device, values are right, and the rest raises errors."""

import contextlib
import copy
import functools
import re
import warnings
from typing import Any, Dict

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    IS_TF2,
    ROUNDING,
    XPU,
    chain,
    config,
    dense,
    equal_in_any_order,
    gpu_or_cpu,
    gpus_or_cpus,
    started,
)
from helpers.project import TOP
from helpers.rows import for_each

import hier_allreduce
from hier_allreduce import AuditError, HierAllreduceError, Strategy
from hier_allreduce.graph.record import log_once
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

tf1 = tf.compat.v1
needs_tf2 = pytest.mark.tf2
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "int64")
WORDS, LENGTH, CLASSES, BATCH = 40, 5, 4, 840  # 840 is a multiple of 2, 3, … 8


def mirrored(count, cross_device_ops=None):
    """Return a MirroredStrategy on ``count`` devices, by default with our all-reduce."""
    return tf.distribute.MirroredStrategy(
        gpus_or_cpus(count), cross_device_ops=cross_device_ops or HierarchicalAllReduce()
    )


def examples(count):
    numbers = np.random.RandomState(0)
    return numbers.randint(0, WORDS, [count, LENGTH]), numbers.randint(0, CLASSES, [count])


def difference(ours, others):
    return max(np.abs(np.asarray(a, float) - b).max() for a, b in zip(ours, others))


# ---- training in graphs, both versions -----------------------------------------------------------


def trained_in_graph(count, cross_device_ops=None, steps=10, audited=False):
    """Train in a v1 graph with sparse, large and small gradients.

    Return the weights, ``[variable][replica]``.
    """
    words, labels = examples(BATCH)
    with tf.Graph().as_default():
        strategy = (
            mirrored(count, cross_device_ops)
            if count > 1 or cross_device_ops
            else tf.distribute.get_strategy()
        )
        run = getattr(strategy, "run", None) or strategy.experimental_run_v2
        with strategy.scope():
            optimizer, start = (
                tf1.train.AdagradOptimizer(0.5),  # its sparse update has a GPU kernel
                tf1.glorot_uniform_initializer(seed=1),
            )
            shapes = {"table": [WORDS, 8], "kernel": [LENGTH * 8, CLASSES], "bias": [1, CLASSES]}
            tensors = [
                tf1.get_variable(name, shape, initializer=start, use_resource=True)
                for name, shape in shapes.items()
            ]

            def step():
                replica = int(
                    tf.get_static_value(
                        tf.distribute.get_replica_context().replica_id_in_sync_group
                    )
                )
                x, y = (np.split(array, count)[replica] for array in (words, labels))
                hidden = tf.reshape(tf.nn.embedding_lookup(tensors[0], x), [-1, LENGTH * 8])
                logits = tf.matmul(hidden, tensors[1]) + tensors[2]
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
                return optimizer.minimize(tf.reduce_mean(loss) / count)

            train = tf.group(*strategy.experimental_local_results(run(step)))
            copies = [strategy.experimental_local_results(tensor) for tensor in tensors]
        with started(*[train] * (steps - 1)) as sess:
            metadata, options = tf1.RunMetadata(), tf1.RunOptions(output_partition_graphs=True)
            sess.run(train, options=options, run_metadata=metadata)
            if audited:
                assert len(hier_allreduce.audit(metadata, sess.graph).calls) == 1
            return sess.run(for_each(lambda variable: variable.read_value(), copies))


@pytest.fixture(scope="module")
def one_device():
    return [copies[0] for copies in trained_in_graph(1)]


@pytest.mark.no_fixed_order("ResourceSparseApplyAdagrad")
@pytest.mark.parametrize("count", range(2, 9))
def test_k_devices_train_like_one_with_the_whole_batch(one_device, count):
    copies = trained_in_graph(count, audited=True)
    assert difference([row[0] for row in copies], one_device) <= 1e-6
    assert all(equal_in_any_order(row[0], other) for row in copies for other in row[1:])


def test_one_replica_trains_as_without_a_strategy(one_device):
    """A script that uses whatever GPUs there are must also run where there is one."""
    assert (
        difference([row[0] for row in trained_in_graph(1, HierarchicalAllReduce())], one_device)
        == 0
    )


@pytest.mark.parametrize("count", [3, 5])
def test_tensorflows_hierarchical_copy_is_wrong_for_odd_k(one_device, count):
    """It drops the last replica's gradient. If this test fails, TensorFlow has repaired it."""
    theirs = tf.distribute.HierarchicalCopyAllReduce()
    assert difference([row[0] for row in trained_in_graph(count, theirs)], one_device) > 0.01


def test_several_strategies_share_one_object_and_its_copy(one_device):
    """tf.estimator copies its arguments, so the object must not keep a strategy's state."""
    ours = HierarchicalAllReduce()
    for count in (3, 2, 3):
        for cross_device_ops in (ours, copy.deepcopy(ours)):
            copies = trained_in_graph(count, cross_device_ops)
            assert difference([row[0] for row in copies], one_device) <= 1e-6


@pytest.mark.skipif(IS_TF2, reason="TensorFlow 2.16 and later have no tf.estimator")
def test_an_estimator_trains_like_one_device(tmp_path):
    words, labels = examples(60)

    def model_fn(features, labels, mode):
        kernel = tf1.get_variable(
            "kernel", [LENGTH, CLASSES], initializer=tf1.zeros_initializer(), use_resource=True
        )
        loss = tf1.losses.sparse_softmax_cross_entropy(
            labels, tf.matmul(tf.cast(features, tf.float32), kernel)
        )
        step = tf1.train.GradientDescentOptimizer(0.01).minimize(
            loss, tf1.train.get_or_create_global_step()
        )
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=step)

    def kernel_after(count):
        def input_fn():
            return tf.data.Dataset.from_tensor_slices((words, labels)).repeat().batch(60 // count)

        running = tf.estimator.RunConfig(
            train_distribute=mirrored(count) if count > 1 else None,
            session_config=config(),
        )
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path / str(count)), running)
        estimator.train(input_fn, steps=5)
        return estimator.get_variable_value("kernel")

    alone, together = kernel_after(1), kernel_after(3)
    assert np.abs(alone).max() > 0.01 and difference([together], [alone]) <= 1e-6


# ---- Keras ---------------------------------------------------------------------------------------


def network(keras, normalized=False, policy="float32"):
    layers = keras.layers
    first = [layers.Input([LENGTH], dtype="int32"), layers.Embedding(WORDS, 8), layers.Flatten()]
    normalization = [layers.BatchNormalization(synchronized=True)] if normalized else []
    last = [layers.Dense(CLASSES, dtype=policy), layers.Activation("linear", dtype="float32")]
    return keras.Sequential([*first, *normalization, *last])


def fitted(
    keras,
    strategy=None,
    samples=2 * BATCH,
    steps_per_execution=1,
    eager=False,
    compiled=False,
    **layers,
):
    """Return the weights after ``fit`` on twice the examples, without shuffling."""
    keras.utils.set_random_seed(0)
    data = tf.data.Dataset.from_tensor_slices(examples(samples)).batch(BATCH).repeat(2)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = network(keras, **layers)
        model.compile(
            keras.optimizers.SGD(0.3, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
            run_eagerly=eager,
            # Keras 3 would compile a step on one GPU, and emulated GPUs have no XLA
            jit_compile=compiled,
        )
    model.fit(data, verbose=0, shuffle=False)
    return model.get_weights()


FITS = {
    "plain": {},
    "steps_per_execution": {"samples": 4 * BATCH, "steps_per_execution": 2},
    "synchronized batch normalization": {"normalized": True},
    "last batch is smaller": {"samples": BATCH + 24},
    "run_eagerly": {"eager": True},
}


@needs_tf2
@pytest.mark.no_fixed_order("the gradient of Embedding", "BatchNormalization")
@pytest.mark.parametrize("how", FITS.values(), ids=FITS)
def test_keras_3_fits_three_replicas_like_one_device(how):
    keras = pytest.importorskip("keras", "3")
    assert difference(fitted(keras, mirrored(3), **how), fitted(keras, **how)) <= ROUNDING


@needs_tf2
@pytest.mark.cpu_only("emulated GPUs have no XLA")
def test_keras_3_compiles_the_step_of_one_replica():
    keras = pytest.importorskip("keras", "3")
    assert difference(fitted(keras, mirrored(1), compiled=True), fitted(keras)) <= ROUNDING


@needs_tf2
@pytest.mark.no_fixed_order("the gradient of Embedding")
@pytest.mark.parametrize(
    "how", [{"policy": "mixed_float16"}, {"samples": BATCH + 7}], ids=["mixed_float16", "uneven"]
)
def test_keras_3_fits_as_with_reduction_to_one_device(how):
    """One device gives other weights.

    float16 rounds, and Keras averages the means of batches of different sizes.
    """
    keras = pytest.importorskip("keras", "3")
    weights = fitted(keras, mirrored(3), **how)
    assert (
        difference(weights, fitted(keras, mirrored(3, tf.distribute.ReductionToOneDevice()), **how))
        <= ROUNDING
    )
    assert all(np.isfinite(array).all() for array in weights)


def class_on_the_page(name):
    """Return a class of the page about Keras."""
    page = (TOP / "docs/how-to/keras.md").read_text(encoding="utf-8")
    names: Dict[str, Any] = {}
    for program in re.findall(r"<!-- tested -->\n```\w*\n(.*?)```", page, re.DOTALL):
        exec(program, names)
    return names[name]


@needs_tf2
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_clipping_as_on_the_page_is_that_of_one_device(policy):
    """Clipped gradients of a scaled loss would move the weights by a 256th of a step."""
    keras = pytest.importorskip("keras", "3")
    clipped = class_on_the_page("Clipped")

    def trained(strategy=None, policy="float32"):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.layers.Input([4]), keras.layers.Dense(3, dtype=policy)]
            model = clipped([*layers, keras.layers.Activation("linear", dtype="float32")])
            optimizer = keras.optimizers.SGD(0.1)
            if policy == "mixed_float16":  # as compile() does under a global policy
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256)
            model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
            before = model.get_weights()
        x = np.random.RandomState(0).rand(12, 4)
        seen = model.fit(x, 50 * x[:, :3], batch_size=6, shuffle=False, verbose=0).history
        moved = [after - start for start, after in zip(before, model.get_weights())]
        return moved, {name: values[0] for name, values in seen.items()}

    (moved, seen), (expected, metrics) = trained(mirrored(3), policy), trained()
    assert set(seen) == {"loss", "mae"} and seen == pytest.approx(metrics, rel=1e-3)
    assert np.sqrt(sum((array**2).sum() for array in expected)) == pytest.approx(0.2, rel=0.01)
    assert difference(moved, expected) <= (1e-6 if policy == "float32" else 1e-3)


@needs_tf2
def test_gradients_travel_in_16_bits_as_on_the_page(caplog):
    keras: Any = pytest.importorskip("keras", "3")
    log_once.cache_clear()  # another test may have logged it
    caplog.set_level("INFO", "hier_allreduce")

    def trained(optimizer):
        keras.utils.set_random_seed(0)
        with mirrored(3).scope():
            model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(3)])
            model.compile(optimizer(0.1), "mse", jit_compile=False)
        x = np.random.RandomState(0).rand(12, 4)
        model.fit(x, x[:, :3], batch_size=12, verbose=0)
        return model.get_weights()

    narrow = trained(class_on_the_page("NarrowSGD"))
    assert any(" in bfloat16" in line for line in caplog.messages)
    assert 0 < difference(narrow, trained(keras.optimizers.SGD)) < 0.01


@needs_tf2
def test_clipping_as_on_the_page_takes_embeddings_and_unused_weights():
    keras: Any = pytest.importorskip("keras", "3")
    clipped = class_on_the_page("Clipped")

    class WithUnused(keras.layers.Layer):
        def build(self, shape):
            self.unused = self.add_weight(shape=[2])

        def call(self, x):
            return x

    def trained(strategy=None):
        keras.utils.set_random_seed(0)
        layers = keras.layers
        with strategy.scope() if strategy else contextlib.nullcontext():
            first = [layers.Input([2], dtype="int32"), layers.Embedding(4, 3), layers.Flatten()]
            model = clipped([*first, WithUnused(), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        words = np.arange(12).reshape(6, 2) % 4
        model.fit(words, np.ones([6, 1]), batch_size=6, shuffle=False, verbose=0)
        return model.get_weights()

    assert difference(trained(mirrored(3)), trained()) <= 1e-6


@needs_tf2
@pytest.mark.parametrize("sparse", ["auto", "rows"])
def test_keras_3_trains_an_embedding_like_a_matrix_of_one_hot_rows(sparse):
    """Alone, its Adam would square each of the gradients of a row, and not their sum."""
    keras = pytest.importorskip("keras", "3")
    words = np.array([[0], [1], [0], [0], [0], [1]])

    def trained(layer, x, scope):
        with scope:
            model = keras.Sequential([layer(), keras.layers.Flatten()])
            model.compile(keras.optimizers.Adam(0.1), "mse", jit_compile=False)
        model.fit(x, np.ones([6, 1]), batch_size=6, epochs=3, shuffle=False, verbose=0)
        return model.get_weights()[0]

    table = lambda: keras.layers.Embedding(2, 1, embeddings_initializer="zeros")  # noqa: E731
    matrix = lambda: keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")  # noqa: E731
    expected = trained(matrix, np.eye(2)[words[:, 0]], contextlib.nullcontext())
    strategy = mirrored(3, HierarchicalAllReduce(Strategy(sparse=sparse)))
    assert trained(table, words, strategy.scope()) == pytest.approx(expected, abs=1e-5)


@needs_tf2
def test_keras_2_fits_three_replicas_like_one_device():
    keras = pytest.importorskip("tf_keras")
    assert difference(fitted(keras, mirrored(3)), fitted(keras)) <= 1e-6


@needs_tf2
def test_keras_2_clips_the_sum():
    """The page about Keras says so."""
    keras = pytest.importorskip("tf_keras")

    def trained(strategy=None):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.layers.Input([4]), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse", jit_compile=False)
            before = model.get_weights()
        x = np.random.RandomState(0).rand(6, 4).astype(np.float32)
        goal = 50 * x[:, :3] * np.arange(6)[:, None]  # the towers' gradients differ
        model.fit(x, goal, batch_size=6, shuffle=False, verbose=0)
        return [after - start for start, after in zip(before, model.get_weights())]

    moved, expected = trained(mirrored(3)), trained()
    assert np.sqrt(sum((array**2).sum() for array in expected)) == pytest.approx(0.1, rel=0.01)
    assert difference(moved, expected) <= 1e-6


@needs_tf2
@pytest.mark.not_emulated("DynamicStitch")
@pytest.mark.parametrize("kind", [HierarchicalAllReduce, tf.distribute.ReductionToOneDevice])
def test_keras_3_limits_of_every_all_reduce(kind):
    """The page about Keras has them. If this test fails, Keras has repaired one."""
    keras = pytest.importorskip("keras", "3")

    def fit(batch, **options):
        with mirrored(3, kind()).scope():
            model = keras.Sequential([keras.layers.Dense(2)])
            model.compile(keras.optimizers.SGD(0.1, **options), "mse")
        model.fit(np.ones([batch, 4]), np.ones([batch, 2]), batch_size=6, verbose=0)

    fit(6 + 4)  # the second batch may be of any size
    with pytest.raises(tf.errors.InvalidArgumentError, match="same size and shape"):
        fit(4)
    with pytest.raises(RuntimeError, match="merge_call"):
        fit(6, gradient_accumulation_steps=2)


@needs_tf2
@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_the_first_step_of_fit_is_audited(package):
    keras = pytest.importorskip(package)
    strategy = mirrored(3, HierarchicalAllReduce(Strategy(chain, chunk_bytes=0)))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    values = np.ones([6, 4], np.float32)

    def fit():
        model.fit(values, values[:, :2], batch_size=6, verbose=0)

    audited = hier_allreduce.audit(fit)
    assert [audited.all_reduce.algorithm for audited in audited.calls] == ["chain"]
    assert (
        sum(audited.copies.values()) == 2 * 2 * 2
    )  # a kernel and a bias along two hops, there and back
    with pytest.raises(AuditError, match="before any other call"):
        hier_allreduce.audit(fit)


@needs_tf2
def test_a_step_that_reduces_twice_is_audited():
    """The name scope of one all-reduce is the end of the other's: sgd/hier_allreduce/."""
    keras = pytest.importorskip("keras", "3")
    with mirrored(3).scope():
        model = class_on_the_page("Clipped")([keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
    values = np.ones([6, 4], np.float32)
    audited = hier_allreduce.audit(
        lambda: model.fit(values, values[:, :2], batch_size=6, verbose=0)
    )
    assert len(audited.calls) == 2 and not audited.skipped


@needs_tf2
def test_the_first_step_of_a_function_is_audited():
    strategy = mirrored(4)

    def reduced():
        return 2 * tf.distribute.get_replica_context().all_reduce("sum", tf.random.uniform([8]))

    inner = tf.function(lambda: strategy.run(reduced))
    audited = hier_allreduce.audit(
        tf.function(lambda: [2 * value for value in strategy.experimental_local_results(inner())])
    )
    assert sum(audited.copies.values()) == 6


# ---- kinds of values -----------------------------------------------------------------------------


def full(replica, shape, dtype):
    """2^replica everywhere: no two sets of replicas have the same sum."""
    power = 2.0 ** tf.cast(replica, tf.float32)  # GPUs have no powers of int32
    return tf.cast(tf.fill(shape, power), dtype)


def sparse(replica, dense_shape=(16, 3)):
    indices = tf.cast(tf.stack([replica, replica + 1]), tf.int64)
    shape = None if dense_shape is None else tf.constant(dense_shape, tf.int64)
    return tf.IndexedSlices(full(replica, [2, 3], "float32"), indices, shape)


def of_dtype(dtype, replica):
    return [full(replica, [2, 3], dtype)]


def sparse_on_replica_0(replica):
    if tf.get_static_value(replica) == 0:
        return [sparse(replica)]
    return [full(replica, [16, 3], "float32")]


def of_unknown_shape(replica):
    shape = tf.stack([2 + 0 * replica, -1])
    return [tf.reshape(full(replica, [6], "float32"), shape)]


# of replica r, the values that are reduced together
KINDS: Dict[str, Any] = {
    **{dtype: functools.partial(of_dtype, dtype) for dtype in DTYPES},
    "float16 and float32": lambda r: [full(r, [2, 3], "float16"), full(r, [4], "float32")],
    "float32 and int64": lambda r: [full(r, [2, 3], "float32"), full(r, [4], "int64")],
    "IndexedSlices": lambda r: [sparse(r)],
    "IndexedSlices without dense_shape": lambda r: [sparse(r, None)],
    "IndexedSlices and dense": lambda r: [sparse(r), full(r, [4], "float32")],
    "IndexedSlices on some": sparse_on_replica_0,
    "unknown shape": of_unknown_shape,
    "no elements": lambda r: [full(r, [0, 3], "float32"), full(r, [4], "float32")],
    "scalar": lambda r: [full(r, [], "float32")],
}


def other_shape_on_replica_2(replica):
    shape = [1, 4] if tf.get_static_value(replica) == 2 else [3, 1]
    return [full(replica, shape, "float32")]


def other_dtype_on_replica_2(replica):
    dtype = "float64" if tf.get_static_value(replica) == 2 else "float32"
    return [full(replica, [3], dtype)]


FAULTY = {
    "shape differs": other_shape_on_replica_2,
    "dtype or shape differs": other_dtype_on_replica_2,
    "bool": lambda r: [full(r, [3], "bool")],
}


def reduced(count, cross_device_ops, reduce_op, make, compiled=True):
    """Return the results of all replicas, ``[variable][replica]``."""
    strategy = mirrored(count, cross_device_ops)

    def together(strategy, *values):
        return strategy.extended.batch_reduce_to(reduce_op, [(value, value) for value in values])

    def replica():
        context = tf.distribute.get_replica_context()
        return context.merge_call(together, make(context.replica_id_in_sync_group))

    @tf.autograph.experimental.do_not_convert
    def step():
        return strategy.run(replica)

    got = (tf.function(step) if compiled else step)()
    return [strategy.experimental_local_results(value) for value in got]


@needs_tf2
@pytest.mark.parametrize("compiled", [True, False], ids=["function", "eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 4])
def test_every_kind_of_value_is_right(kind, count, compiled):
    make, share = KINDS[kind], {SUM: 1, MEAN: count}
    for operation in (SUM, MEAN):
        got = reduced(count, HierarchicalAllReduce(), operation, make, compiled)
        rows = [make(tf.constant(replica)) for replica in range(count)]
        for results, values in zip(got, zip(*rows)):
            exact = sum(dense(value, (16, 3)) for value in values) / share[operation]
            tolerance = 1e-2 if results[0].dtype.size == 2 else 1e-6
            assert len(results) == count
            assert all(np.allclose(dense(result, (16, 3)), exact, tolerance) for result in results)


@needs_tf2
def test_dtypes_and_sparsity_of_results():
    (mean,) = reduced(3, HierarchicalAllReduce(), MEAN, KINDS["int64"])
    assert mean[0].dtype == tf.float64  # as TensorFlow has it
    (large,) = reduced(
        3, HierarchicalAllReduce(), MEAN, lambda r: [full(0 * r, [2], "float16") * 40000]
    )
    assert all(np.array_equal(value, [40000, 40000]) for value in large)
    kinds = ((None, 16, False), (None, 32, True), ("rows", 16, True), ("dense", 32, False))
    for sparse_as, height, is_sparse in kinds:  # 16 rows have more bytes than a table of 16 rows
        ours = HierarchicalAllReduce(Strategy(sparse=sparse_as) if sparse_as else None)
        (got,) = reduced(8, ours, SUM, lambda r, height=height: [sparse(r, (height, 3))])
        assert all(isinstance(value, tf.IndexedSlices) == is_sparse for value in got)


@needs_tf2
def test_small_values_of_one_step_share_a_chunk():
    strategy, numbers = mirrored(4), np.arange(24, dtype="float32").reshape(4, 6)

    def replica(given):  # on GPUs TensorFlow would fold the sums of constants
        context = tf.distribute.get_replica_context()
        row = tf.gather(given, context.replica_id_in_sync_group)
        return context.all_reduce(MEAN, [row, 2 * row[:3], row[0]])

    @tf.function
    @tf.autograph.experimental.do_not_convert
    def step(given):
        return strategy.run(replica, args=(given,))

    results: list = []
    audited = hier_allreduce.audit(lambda: results.extend(step(tf.constant(numbers))))
    for value, exact in zip(
        results, (numbers.mean(0), 2 * numbers.mean(0)[:3], numbers.mean(0)[0])
    ):
        assert all(
            np.array_equal(result, exact) for result in strategy.experimental_local_results(value)
        )
    assert [len(call.all_reduce.tensors) for call in audited.calls] == [1]


def replica_number():
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


@needs_tf2
def test_results_are_on_the_devices_that_were_asked_for():
    strategy = mirrored(3)
    value = strategy.run(lambda: tf.fill([2], 2.0 ** replica_number()))
    for device in (gpu_or_cpu(0), gpu_or_cpu(5)):
        for got in (
            strategy.extended.reduce_to(SUM, value, device),
            *strategy.extended.batch_reduce_to(SUM, [(value, device)]),
        ):
            assert np.array_equal(got, [7, 7]) and got.device.endswith(device[-1])
    with strategy.scope():
        variable = tf.Variable(tf.zeros([2]))
    (got,) = strategy.extended.batch_reduce_to(SUM, [(value, variable)])
    results = strategy.experimental_local_results(got)
    assert [result.device[-1] for result in results] == ["0", "1", "2"]
    assert all(np.array_equal(result, [7, 7]) for result in results)


@needs_tf2
def test_values_of_all_replicas_on_one_device_are_added_up_there():
    """They are no all-reduce, which would warn of replicas on one device."""
    ours = HierarchicalAllReduce()

    def on_first():
        with tf.device(gpu_or_cpu(0)):
            return tf.fill([2], replica_number() + 1)

    value = mirrored(3, ours).run(on_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = ours.reduce(SUM, value, destinations=value)
    assert all(np.array_equal(result, [6, 6]) for result in got.values)


@needs_tf2
def test_one_replicas_value_on_another_device_is_copied_to_its_variable():
    """Clipped or accumulated on the CPU, for example."""
    strategy = mirrored(1)
    with strategy.scope():
        variable = tf.Variable([0.0])

    def add_up():
        with tf.device(gpu_or_cpu(1)):
            grad = tf.fill([1], 3.0)

        def merge(strategy, grad):
            return strategy.extended.batch_reduce_to(SUM, [(grad, variable)])

        return tf.distribute.get_replica_context().merge_call(merge, (grad,))

    (got,) = strategy.run(add_up)
    assert np.array_equal(got, [3]) and got.device.endswith(f"{XPU.upper()}:0")


@needs_tf2
def test_gather_reduce_and_variables_that_are_summed_on_reading():
    strategy = mirrored(3)
    value = strategy.run(lambda: tf.fill([1, 2], replica_number()))
    assert np.array_equal(strategy.gather(value, axis=0), [[0, 0], [1, 1], [2, 2]])
    assert np.array_equal(strategy.reduce(SUM, value, axis=None), [[3, 3]])
    assert np.array_equal(strategy.reduce(MEAN, value, axis=0), [1, 1])
    on_read, summed = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    with strategy.scope():
        total = tf.Variable(0.0, synchronization=on_read, aggregation=summed)
    strategy.run(lambda: total.assign_add(replica_number()))
    assert total.numpy() == 3


# ---- bad input -----------------------------------------------------------------------------------


@needs_tf2
@pytest.mark.parametrize("others", [0, 1])
def test_the_sum_of_one_tensor_for_all_replicas_is_an_error(others):
    """TensorFlow would take it for the sum: 2 instead of 6."""
    constant = tf.constant(2.0)
    with pytest.raises(HierAllreduceError, match="3 replicas pass the very same tensor"):
        reduced(
            3, HierarchicalAllReduce(), SUM, lambda r: [constant, *KINDS["float32"](r)[:others]]
        )
    assert reduced(3, HierarchicalAllReduce(), MEAN, lambda r: [constant])[0][0].numpy() == 2


@needs_tf2
@pytest.mark.parametrize(
    "kind, where", [("shape differs", 2), ("dtype or shape differs", 2), ("bool", 0)]
)
def test_errors_name_the_replica_and_the_value(kind, where):
    words = rf"tower {where} \(/{XPU}:{where}\), variable 0.*{kind}"
    with pytest.raises(HierAllreduceError, match=words):
        reduced(3, HierarchicalAllReduce(), SUM, FAULTY[kind])


@needs_tf2
@pytest.mark.parametrize("replicas, lines", [(8, 0), (7, 1)])
def test_a_line_says_which_batches_keras_needs(replicas, lines, caplog):
    log_once.cache_clear()  # another test may have logged it
    caplog.set_level("INFO", "hier_allreduce")
    reduced(replicas, HierarchicalAllReduce(), SUM, lambda tower: [tf.ones([3])])
    line = f"{replicas} replicas: batches: multiples of {replicas}, for Keras"
    assert caplog.messages.count(line) == lines


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"strategy": "hierarchial"}, "there are "),
        ({"strategy": 3}, "algorithm=3: expected one of"),
        (
            {"strategy": Strategy(wire_dtype="bfloat16")},
            "wire_dtype='bfloat16': TensorFlow does not say which",
        ),
    ],
)
def test_a_wrong_option_is_an_error_that_names_the_right_one(arguments, words):
    with pytest.raises(HierAllreduceError, match=words):
        HierarchicalAllReduce(**arguments)
