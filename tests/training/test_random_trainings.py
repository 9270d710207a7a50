"""K towers train random models like one device that has the mean of their targets.

`make soak` runs more.
"""

import re

import numpy as np
import tensorflow as tf
from helpers.graphs import chain, gpu_or_cpu, gpus_or_cpus, started
from helpers.optimizers import (
    SGD,
    Chooses,
    Clipped,
    Clipping,
    Counting,
    CountingInACondition,
    Lamb,
    OwnSlots,
    Velocity,
    Wrapper,
    by_get_variable,
    by_slot_creator,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hier_allreduce import Strategy, TowerOptimizer

tf1 = tf.compat.v1
train = tf1.train
EXAMPLES = settings().max_examples
NORM = re.compile(r"^(tower0/|model/replica_0/)?norm/")
OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: train.AdamOptimizer(0.1),
    "adagrad": lambda: train.AdagradOptimizer(0.1),
    "ftrl": lambda: train.FtrlOptimizer(0.1),
    "rmsprop": lambda: train.RMSPropOptimizer(0.01, centered=True),
    "counter": lambda: Counting(0.1),
    "counter in a condition": lambda: CountingInACondition(0.1),
    "clips variables": lambda: Clipping(0.1),
    "clips gradients": lambda: Clipped(0.1),
    "fixed name": lambda: Lamb(0.1),
    "free names": Velocity,
    "own slots by names": lambda: OwnSlots(by_get_variable),
    "own slots": lambda: OwnSlots(by_slot_creator),
    "decays by op.name": lambda: Chooses(lambda var: "norm" not in var.op.name),
    "decays by match": lambda: Chooses(lambda var: not NORM.match(var.name)),
}
WRAPPERS = {
    "none": lambda optimizer: optimizer,
    "halves": lambda optimizer: Wrapper(optimizer, lambda grad: grad * 0.5),
    "twice": lambda optimizer: Wrapper(Wrapper(optimizer), lambda grad: grad * 2.0),
}
NAMES = ("w", "norm/beta", "tower0/w", "block_1/w", "block_1/norm/w_1", "x/y/z")
SCOPES = ("tower{}", "tensorpack", "model/replica_{}", "")


@st.composite
def trainings(draw):
    return {
        "towers": draw(st.integers(1, 5)),
        "update": draw(st.sampled_from(["replicated", "once", "sharded"])),
        "scope": draw(st.sampled_from(SCOPES)),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "wrapper": draw(st.sampled_from(sorted(WRAPPERS))),
        "names": draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)),
        "algorithm": draw(st.sampled_from(["auto", "hierarchical", "tree", chain])),
        "chunk_bytes": draw(st.sampled_from([None, 0])),
        "average": draw(st.booleans()),
        "has_unused": draw(st.booleans()),
    }


def trained(case, towers):
    """Return the variables of each tower after three steps; tower k's target is k + 2."""
    with tf.Graph().as_default():
        strategy = Strategy(algorithm=case["algorithm"], chunk_bytes=case["chunk_bytes"])
        optimizer = TowerOptimizer(
            WRAPPERS[case["wrapper"]](OPTIMIZERS[case["optimizer"]]()),
            gpus_or_cpus(towers),
            average=case["average"],
            strategy=strategy,
            update=case["update"],
        )
        rows = []
        for k in range(towers):
            inside = case["scope"].format(k)
            if case["scope"] == "tensorpack":
                inside = f"tower{k}" if k else ""
            with tf.device(gpu_or_cpu(k)), tf1.variable_scope(inside or tf1.get_variable_scope()):
                create = tf1.get_variable if case["scope"] else variable
                # no variable starts at a target: Adam would make a step of a gradient that is noise
                start = np.array([1.25, 2.25, 3.25], "float32")
                variables = [
                    create(name, initializer=start + n, use_resource=True)
                    for n, name in enumerate(case["names"])
                ]
                target = float(k + 2) if towers > 1 else (case["towers"] - 1) / 2 + 2
                scale = 0.1 if case["average"] or towers > 1 else 0.1 * case["towers"]
                loss = tf.add_n([tf.reduce_sum((var - target) ** 2) for var in variables]) * scale
                row = optimizer.compute_gradients(loss, variables)
                if case["has_unused"]:
                    unused = create(
                        "unused", initializer=np.array([0], "float32"), use_resource=True
                    )
                    row.insert(1, (None, unused))
                rows.append(row)
        op = optimizer.apply_gradients(rows)
        spoilt = [var.assign(var + 1.0) for _, var in rows[-1]] if towers > 1 else []
        with started(*spoilt, optimizer.init_op) as sess:
            for _ in range(3):
                sess.run(op)
            optimizer.check_replicas(sess)
            used = []
            for row in rows:
                used.append([var for grad, var in row if grad is not None])
            return np.array(sess.run(used))


def variable(name, initializer, use_resource):
    return tf1.Variable(initializer, name=name, use_resource=use_resource)


@settings(max_examples=EXAMPLES if EXAMPLES > 100 else 8)
@given(trainings())
def test_towers_train_like_one_device(case):
    alone = trained(case, 1)
    got = trained(case, case["towers"])
    np.testing.assert_allclose(got, np.repeat(alone, case["towers"], axis=0), rtol=1e-4, atol=1e-5)
