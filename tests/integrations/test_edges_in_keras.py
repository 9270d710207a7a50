"""Control edges in the function of Keras' ``fit``: TensorFlow keeps all, and no bit differs.

Emulated GPUs delay each copy and each kernel at random.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import XPU, gpus_or_cpus

from hier_allreduce import Strategy, audit
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

pytestmark = [
    pytest.mark.tf2,
    pytest.mark.skipif(XPU == "cpu", reason="towers on CPU devices have no control edges"),
]
REPLICAS, LAYERS, SIZE, WORDS, LENGTH, BATCH, STEPS = 3, 4, 32, 40, 4, 6, 2


@pytest.fixture
def keras():
    """Keras 3; ops without a kernel on emulated GPUs, such as those of strings, move to the CPU."""
    keras = pytest.importorskip("keras", "3")
    tf.config.set_soft_device_placement(True)
    return keras


def model_of(keras, edges=True, policy="float32", steps=1, **options):
    """Return a model with an embedding, batch normalization and dropout under MirroredStrategy."""
    keras.utils.set_random_seed(0)
    strategy = Strategy("flat", chunk_bytes=4 * SIZE * SIZE, edges=edges)
    mirrored = tf.distribute.MirroredStrategy(
        gpus_or_cpus(REPLICAS), cross_device_ops=HierarchicalAllReduce(strategy)
    )
    layers = keras.layers
    with mirrored.scope():
        network = [layers.Input([LENGTH]), layers.Embedding(WORDS, SIZE // LENGTH)]
        network.append(layers.Flatten())
        for _ in range(LAYERS):
            network += [layers.Dense(SIZE, activation="tanh", dtype=policy)]
            network += [layers.BatchNormalization(dtype=policy), layers.Dropout(0.1, dtype=policy)]
        network.append(layers.Dense(1))
        model = keras.Sequential(network)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **options)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=16)
        # XLA has no emulated GPU.
        model.compile(optimizer, "mse", steps_per_execution=steps, jit_compile=False)
    return model


def data():
    numbers = np.random.RandomState(0)
    count = BATCH * STEPS
    return numbers.randint(0, WORDS, [count, LENGTH]), numbers.normal(size=[count, 1])


def fit(model):
    model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)


def values(model):
    """Return the variables of the model and its optimizer, on each replica."""
    strategy = model.distribute_strategy
    found: list = []
    for variable in [*model.variables, *model.optimizer.variables]:
        found += map(np.asarray, strategy.experimental_local_results(variable.value))
    return found


@functools.lru_cache(maxsize=None)
def values_without_edges(keras, **options):
    model = model_of(keras, edges=False, **options)
    calls = audit(lambda: fit(model)).calls
    assert calls and not any(call.all_reduce.edges for call in calls)
    return values(model)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("options", [{}, {"clipnorm": 1.0}], ids=["plain", "clipnorm"])
def test_fit_keeps_all_edges_and_trains_the_same_bits(keras, options, steps):
    """Neither a loop around several steps loses an edge, nor an op on each gradient."""
    model = model_of(keras, steps=steps, **options)
    calls = audit(lambda: fit(model)).calls
    assert sum(call.edges for call in calls) == sum(len(call.all_reduce.edges) for call in calls)
    assert any(call.edges for call in calls)
    for value, without in zip(values(model), values_without_edges(keras, **options)):
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(value, without)


def test_float16_gets_no_edges(keras):
    """Keras' LossScaleOptimizer reduces in a branch, when all gradients are ready."""
    model = model_of(keras, policy="mixed_float16")
    calls = audit(lambda: fit(model)).calls
    assert calls and not any(call.all_reduce.edges for call in calls)
    assert all(np.isfinite(value).all() for value in values(model))


def test_a_trained_model_is_exported_and_loaded(keras, tmp_path):
    model = model_of(keras)
    fit(model)
    words = data()[0][:REPLICAS]
    expected = np.asarray(model(words))
    model.export(str(tmp_path / "exported"), verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    served = exported.serve(words.astype("float32"))
    np.testing.assert_allclose(np.asarray(served), expected, rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(np.asarray(loaded(words)), expected, rtol=1e-5, atol=1e-6)


def test_a_saved_training_step_keeps_its_edges(keras, tmp_path):
    """TensorFlow loads the first replica's variables for all, and so its first loss is the same."""
    model = model_of(keras)
    fit(model)  # makes the optimizer's variables
    words, goals = (array[:BATCH] for array in data())

    def replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(words) - goals) ** 2)
        weights = model.trainable_weights
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    saved = tf.Module()
    saved.state = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
    saved.step = tf.function(lambda: model.distribute_strategy.run(replica).values, autograph=False)
    graph = saved.step.get_concrete_function().graph
    tf.saved_model.save(saved, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert edges_of(loaded.step.concrete_functions[0].graph) == edges_of(graph) != set()
    assert loaded.step()[0].numpy() == saved.step()[0].numpy()


def edges_of(graph):
    """Return the ops outside of all-reduces that wait for one, by its sum and by name."""
    return {
        (before.name, op.name)
        for op in graph.get_operations()
        for before in op.control_inputs
        if "hier_allreduce" in before.name and "hier_allreduce" not in op.name
    }
