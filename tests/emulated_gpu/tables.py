"""Trainings of two tables on 2 to 8 GPUs, for test_sum_order.py: 50 steps, many equal indices.

The gradient of the large table stays sparse, and that of the small one is made dense.
"""

import numpy as np
import tensorflow as tf
from helpers.graphs import held, started
from helpers.rows import for_each, variables_of

from hier_allreduce import TowerOptimizer
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

tf1 = tf.compat.v1
HEIGHTS, WIDTH, READ, STEPS = (1000, 4), 8, 32, 50
TOWERS = range(2, 9)


def gpus(towers):
    return [f"/gpu:{tower}" for tower in range(towers)]


def tables():
    """Return the tables of the current variable scope."""
    start = tf1.glorot_uniform_initializer(seed=1)
    return [
        tf1.get_variable(f"table{height}", [height, WIDTH], initializer=start, use_resource=True)
        for height in HEIGHTS
    ]


def loss(tower, variables):
    """Return a tower's loss: it reads few of its tables' rows, and each of them often."""
    random = np.random.RandomState(tower)
    terms = []
    for height, table in zip(HEIGHTS, variables):
        indices = held(random.randint(min(height, 20), size=READ).astype("int64"))
        rows = tf.nn.embedding_lookup(table, indices)
        terms.append(tf.reduce_sum(tf.tanh(rows) * random.randn(READ, WIDTH).astype("float32")))
    return tf.add_n(terms)


def adagrad():
    return tf1.train.AdagradOptimizer(0.1)  # its sparse update has a GPU kernel


def replicated(towers, update="replicated"):
    """Return the weights of K towers of a TowerOptimizer."""
    optimizer = TowerOptimizer(adagrad(), gpus(towers), update=update)
    rows = []
    for tower, gpu in enumerate(gpus(towers)):
        with tf.device(gpu), tf1.variable_scope(f"tower{tower}"):
            variables = tables()
            rows.append(optimizer.compute_gradients(loss(tower, variables), var_list=variables))
    step = optimizer.apply_gradients(rows)
    with started(optimizer.init_op, *[step] * STEPS) as session:
        return session.run(variables_of(rows))


def main(towers):
    return replicated(towers, "sharded")


def mirrored(towers):
    """Return the weights of K replicas of a MirroredStrategy."""
    strategy = tf.distribute.MirroredStrategy(gpus(towers), HierarchicalAllReduce())
    with strategy.scope():
        variables, optimizer = tables(), adagrad()

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return optimizer.minimize(loss(int(tf.get_static_value(replica)), variables))

        train = tf.group(*strategy.experimental_local_results(strategy.run(step)))
    columns = [strategy.experimental_local_results(variable) for variable in variables]
    rows = list(zip(*columns))
    with started(*[train] * STEPS) as session:
        return session.run(for_each(lambda variable: variable.read_value(), rows))


def tensorpack(towers):
    """Return the weights of the K towers of a HierarchicalTrainer."""
    import tensorpack as tp
    from helpers import tensorpack_child

    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    def with_tables(cost):
        tower = tp.tfutils.tower.get_current_tower_context().index
        return cost + loss(tower, tables())

    trainer = HierarchicalTrainer(towers)
    trainer.BROADCAST_EVERY_EPOCH = False
    trained = tensorpack_child.train(trainer, adagrad, steps=STEPS, extra=with_tables)["after"]
    names = [f"table{height}" for height in HEIGHTS]
    prefixes = ["", *(f"tower{tower}/" for tower in range(1, towers))]
    return [[np.float32(trained[prefix + name]) for name in names] for prefix in prefixes]


def by_each_tower(towers):
    """Return K sums of the same rows, which each tower adds up for itself."""
    rows = tf1.placeholder("float32", [READ, WIDTH])
    sums = []
    for gpu in gpus(towers):
        with tf.device(gpu):
            sums.append([tf.math.unsorted_segment_sum(rows, tf.zeros([READ], "int64"), 1)])
    with started() as session:
        return session.run(sums, {rows: np.random.RandomState(0).randn(READ, WIDTH)})


def run(name):
    """Print for each number of towers how many different bits they end with."""
    for towers in TOWERS:
        with tf.Graph().as_default():
            rows = globals()[name](towers)
        assert len(rows) == towers
        assert all(np.isfinite(value).all() for row in rows for value in row)
        bits = {b"".join(np.asarray(value).tobytes() for value in row) for row in rows}
        print(f"{towers} towers: {len(bits)}")
