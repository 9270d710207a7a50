"""Trainings on eight GPUs, for test_trainings.py: each prints the bits of its weights."""

import hashlib
import itertools

import numpy as np
import tensorflow as tf
from helpers.graphs import started
from helpers.rows import for_each, variables_of

from hier_allreduce import TowerOptimizer
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

tf1 = tf.compat.v1
GPUS = [f"/gpu:{k}" for k in range(8)]
WORDS, WIDTH, CLASSES, STEPS = 50, 300, 4, 6


def examples(tower):
    random = np.random.RandomState(tower)
    return random.randint(WORDS, size=64).astype("int64"), random.randint(CLASSES, size=64)


def towers(update):
    """Train a table and two matrices with a TowerOptimizer.

    Their gradients are sparse, large and small.
    """
    optimizer = TowerOptimizer(tf1.train.AdagradOptimizer(0.1), GPUS, update=update)
    rows = []
    for tower, gpu in enumerate(GPUS):
        with tf.device(gpu), tf1.variable_scope(f"tower{tower}", use_resource=True):
            words, labels = examples(tower)
            start = tf1.glorot_uniform_initializer(seed=1)
            shapes = {"table": [WORDS, WIDTH], "hidden": [WIDTH, WIDTH], "out": [WIDTH, CLASSES]}
            table, hidden, out = [
                tf1.get_variable(name, shape, initializer=start) for name, shape in shapes.items()
            ]
            inputs = tf.nn.embedding_lookup(table, tf1.placeholder_with_default(words, [64]))
            logits = tf.matmul(tf.tanh(tf.matmul(inputs, hidden)), out)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            variables = [table, hidden, out]
            rows.append(optimizer.compute_gradients(tf.reduce_mean(losses), var_list=variables))
    step = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, *[step] * STEPS) as session:
        return session.run(variables_of(rows))


def replicated():
    with tf.Graph().as_default():
        return towers("replicated")


def once():
    with tf.Graph().as_default():
        return towers("once")


def sharded():
    with tf.Graph().as_default():
        return towers("sharded")


def loop():
    """MirroredStrategy() takes all GPUs; the step is a tf.function."""
    strategy = tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())
    assert strategy.num_replicas_in_sync == len(GPUS)
    values = np.random.RandomState(0).randn(WIDTH, CLASSES).astype("float32")
    with strategy.scope():
        weights = tf.Variable(values)

    @tf.function
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, tf.float32)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.matmul(weights, weights, transpose_a=True) - number) ** 2)
            (gradient,) = context.all_reduce("mean", tape.gradient(loss, [weights]))
            weights.assign_sub(1e-4 * gradient)

        strategy.run(replica)

    for _ in range(STEPS):
        step()
    return [[var] for var in strategy.experimental_local_results(weights)]


def fit():
    """Keras' fit with MirroredStrategy()."""
    import keras

    strategy = tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())
    assert strategy.num_replicas_in_sync == len(GPUS)
    words, labels = (np.concatenate(parts) for parts in zip(*map(examples, range(8))))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Embedding(WORDS, WIDTH), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.layers.Input([], dtype="int64"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.3, momentum=0.9), loss)
    model.fit(words, labels, batch_size=256, epochs=2, shuffle=False, verbose=0)
    columns = [variable.value.values for variable in model.trainable_variables]
    return list(zip(*columns))


def tensorpack():
    """HierarchicalTrainer(8): GPUs by number."""
    import tensorpack as tp
    from helpers import tensorpack_child

    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    trainer = HierarchicalTrainer(8)
    trainer.BROADCAST_EVERY_EPOCH = False
    # the towers take batches in any order, so all are the same one
    batch = next(iter(tensorpack_child.Data(tensorpack_child.BATCH)))
    batches = tp.dataflow.DataFromGenerator(lambda: itertools.repeat(batch))
    data = tp.QueueInput(batches)
    after = tensorpack_child.train(trainer, "momentum", data=data)["after"]
    trained = [name for name in sorted(after) if name.split("/")[0] in ("hidden", "out")]
    prefixes = ["", *(f"tower{k}/" for k in range(1, 8))]
    rows = []
    for prefix in prefixes:
        rows.append([np.float32(after[prefix + name]) for name in trained])
    return rows


def run(name):
    """Print ``finite`` and a hash of all towers' weights, or what is wrong with them."""
    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[: len(GPUS)], "GPU")
    train = globals()[name]
    hashes = set()
    is_finite = True
    for row in for_each(np.asarray, train()):
        is_finite = is_finite and all(np.isfinite(value).all() for value in row)
        bits = b"".join(value.tobytes() for value in row)
        hashes.add(hashlib.sha256(bits).hexdigest())
    if len(hashes) > 1:
        print("towers differ", *hashes)
    else:
        print("finite" if is_finite else "NaN", *hashes)
