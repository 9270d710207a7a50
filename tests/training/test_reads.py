"""No update overtakes a gradient that still reads the variable."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, gpu_or_cpu, gpus_or_cpus, started
from helpers.optimizers import Chooses

from hier_allreduce import Strategy, TowerOptimizer

tf1 = tf.compat.v1
UPDATES = pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
MAKE = {
    "plain": lambda: tf1.train.GradientDescentOptimizer(0.25),
    "decays first": lambda: Chooses(lambda var: True),
}


def before(op):
    """Return all ops that an op needs, by data or control edges."""
    needed, waiting = set(), [op]
    while waiting:
        op = waiting.pop()
        if op not in needed:
            needed.add(op)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return needed


def losses(rows_read):
    """Return K rows of the variables a and b, and a loss whose gradient for b reads a.

    They have two dtypes, so that no chunk has both.
    """
    rows = []
    for k, device in enumerate(gpus_or_cpus(3)):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            start = np.arange(12.0).reshape(4, 3) / 10
            a, b = [
                tf1.get_variable(name, initializer=start.astype(dtype), use_resource=True)
                for name, dtype in (("a", "float32"), ("b", "float64"))
            ]
            read = tf.gather(a, [0, 2]) if rows_read else a.read_value()
            pulled = tf.cast(tf.stop_gradient(tf.tanh(a.read_value())), tf.float64)
            distance = tf.reduce_sum((b.read_value() - pulled) ** 2)
            loss = tf.reduce_sum(read**2) + tf.cast(distance, tf.float32)
            rows.append((loss, [a, b]))
    return rows


def written(op, var):
    reads = ("Read", "ResourceGather", "VariableShape")
    return not op.type.startswith(reads) and op.inputs[0] is var.handle


@UPDATES
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("rows_read", [False, True], ids=["dense", "rows"])
def test_each_write_waits_for_all_reads_of_its_tower(graph, update, make, rows_read):
    whole = Strategy(chunk_bytes=0)
    optimizer = TowerOptimizer(MAKE[make](), gpus_or_cpus(3), update=update, strategy=whole)
    towers = losses(rows_read)
    rows = [optimizer.compute_gradients(loss, row) for loss, row in towers]
    needed = set()
    for row in rows:
        for grad, _ in row:
            needed |= before(grad.values.op if isinstance(grad, tf.IndexedSlices) else grad.op)
    built_before = set(graph.get_operations())
    optimizer.apply_gradients(rows)
    for _, row in towers:
        for var in row:
            users = var.handle.consumers()
            reads = {op for op in users if op in needed and not written(op, var)}
            writers = [op for op in users if op not in built_before and written(op, var)]
            assert reads and writers
            for writer in writers:
                assert reads <= before(writer), (writer.name, writer.type)


@UPDATES
def test_each_write_waits_for_what_a_transform_reads(graph, update):
    """Weight decay that lags, or reads another variable. A transform has one tower's variables."""
    towers = losses(rows_read=False)
    variables = [row for _, row in towers]

    def decay(grads):
        a = variables[0][0]
        return [grads[0] + 0.1 * a.read_value(), grads[1] + tf.cast(a.read_value(), tf.float64)]

    optimizer = TowerOptimizer(MAKE["plain"](), gpus_or_cpus(3), update=update, transform=decay)
    rows = [optimizer.compute_gradients(loss, row) for loss, row in towers]
    built_before = set(graph.get_operations())
    optimizer.apply_gradients(rows)
    users = variables[0][0].handle.consumers()
    reads = [op for op in users if op.type == "ReadVariableOp" and "transform" in op.name]
    writers = [op for op in users if op not in built_before and written(op, variables[0][0])]
    assert len(reads) == 2 * (1 if update == "once" else 3) and writers
    for writer in writers:
        assert before(writer).issuperset(reads), writer.name


@UPDATES
def test_the_step_is_counted_after_the_transforms_of_all_towers_have_read_it(graph, update):
    towers = losses(rows_read=False)
    step = tf1.get_variable("step", initializer=0, trainable=False, use_resource=True)
    slower = lambda grads: [grad * tf.cast(step.read_value(), grad.dtype) for grad in grads]  # noqa: E731
    optimizer = TowerOptimizer(MAKE["plain"](), gpus_or_cpus(3), update=update, transform=slower)
    rows = [optimizer.compute_gradients(loss, row) for loss, row in towers]
    op = optimizer.apply_gradients(rows, global_step=step)
    users = step.handle.consumers()
    reads = [user for user in users if "transform" in user.name and user in before(op)]
    (count,) = [user for user in users if user.type == "AssignAddVariableOp"]
    assert reads and before(count).issuperset(reads)


@UPDATES
@pytest.mark.parametrize("flow", ["v1", pytest.param("v2", marks=pytest.mark.tf2)])
@pytest.mark.parametrize("kind", ["cond", "while"])
def test_nothing_is_overtaken_in_a_branch_or_a_loop(graph, update, kind, flow):
    """The forward pass and the update are in it. Without the wait some of these steps go wrong."""
    if IS_TF2:
        (tf1.enable_control_flow_v2 if flow == "v2" else tf1.disable_control_flow_v2)()
    values = np.random.RandomState(0).randn(2, 150, 150).astype("float32")
    variables, optimizers = [], []
    for k, device in enumerate(gpus_or_cpus(2)):
        with tf.device(device), tf1.variable_scope(f"tower{k}"):
            row = [
                tf1.get_variable(name, initializer=value, use_resource=True)
                for name, value in zip("ab", values)
            ]
        variables.append(row)

    def step():
        optimizer = TowerOptimizer(MAKE["plain"](), gpus_or_cpus(2), update=update)
        optimizers.append(optimizer)
        rows = []
        for k, (a, b) in enumerate(variables):
            with tf.device(gpu_or_cpu(k)):
                pulled = tf.stop_gradient(tf.tanh(a) * 0 + a.read_value())
                loss = tf.reduce_sum(a * a) + tf.reduce_sum((b - pulled) ** 2)
                rows.append(list(zip(tf.gradients(loss, [a, b]), [a, b])))
        return optimizer.apply_gradients(rows)

    try:
        one = tf1.placeholder_with_default(1, [])
        if kind == "cond":
            op = tf.cond(one > 0, lambda: tf.group(step()), lambda: tf.group())
        else:
            body = lambda i: (tf.tuple([i + 1], control_inputs=[step()])[0],)  # noqa: E731
            op = tf.while_loop(lambda i: i < one, body, [tf.constant(0)])
        start = tf1.global_variables_initializer()
        a, b = values
        with started(optimizers[0].init_op) as sess:
            for _ in range(20):
                for fetched in (start, optimizers[0].init_op, op):
                    sess.run(fetched)
                for row in sess.run(variables):
                    np.testing.assert_allclose(row[0], a - 0.5 * a, atol=1e-4)
                    np.testing.assert_allclose(row[1], b - 0.5 * (b - a), atol=1e-4)
    finally:
        if IS_TF2:
            tf1.enable_control_flow_v2()


KINDS = {
    "cond": lambda one, a: tf.cond(one > 0, a.read_value, lambda: tf.zeros([2])),
    "case": lambda one, a: tf.case([(one > 0, a.read_value)], default=lambda: tf.zeros([2])),
    "loop": lambda one, a: tf.while_loop(
        lambda i, _: i < one, lambda i, sum: (i + 1, sum + a.read_value()), [0, tf.zeros([2])]
    )[1],
    "switch": lambda one, a: tf.switch_case(one, [lambda: tf.zeros([2]), a.read_value]),
}


@UPDATES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flow", ["v1", pytest.param("v2", marks=pytest.mark.tf2)])
def test_a_write_waits_for_the_gradient_if_a_branch_reads(graph, update, kind, flow):
    """An edge from a branch would wait for the choice of the branch, not for the read in it."""
    if IS_TF2:
        (tf1.enable_control_flow_v2 if flow == "v2" else tf1.disable_control_flow_v2)()
    try:
        one, rows, raw = tf1.placeholder_with_default(1, []), [], []
        for k, device in enumerate(gpus_or_cpus(2)):
            with tf.device(device), tf1.variable_scope(f"tower{k}"):
                # Of two dtypes, so that no chunk has both.
                a = tf1.get_variable("a", [2], use_resource=True)
                b = tf1.get_variable("b", [2], tf.float64, use_resource=True)
                pulled = tf.cast(tf.stop_gradient(KINDS[kind](one, a)), tf.float64)
                distance = tf.reduce_sum((b - pulled) ** 2)
                loss = tf.reduce_sum(a * a) + tf.cast(distance, tf.float32)
                raw.append(tf.gradients(loss, [a, b]))
                rows.append(list(zip(raw[-1], [a, b])))
        built_before = set(graph.get_operations())
        strategy = Strategy(chunk_bytes=0)
        TowerOptimizer(
            MAKE["plain"](), gpus_or_cpus(2), update=update, strategy=strategy
        ).apply_gradients(rows)
        for (_, of_b), row in zip(raw, rows):
            a = row[0][1]
            added = [op for op in a.handle.consumers() if op not in built_before]
            writers = [op for op in added if written(op, a)]
            assert writers
            # A functional loop, unlike a branch, ends when all that is in it has ended.
            loops = {op for op in before(of_b.op) if op.type in ("While", "StatelessWhile")}
            for writer in writers:
                assert before(writer) & {of_b.op, *loops}
    finally:
        if IS_TF2:
            tf1.enable_control_flow_v2()
