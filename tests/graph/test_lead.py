"""Control edges that hold the launching thread near the sums of its GPU."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import gpus_or_cpus, session
from helpers.rows import for_each

from hier_allreduce import Strategy, allreduce_grads
from hier_allreduce.graph import lead

tf1 = tf.compat.v1
TOWERS, LAYERS, SIZE = 3, 12, 1024
ALONE = Strategy("flat", chunk_bytes=4 * SIZE)  # each gradient is a chunk


def gpus(towers=TOWERS):
    """Return GPUs by name; tests run on CPU devices where there are none."""
    return [f"/gpu:{tower}" for tower in range(towers)]


def tower(number):
    """Return the weights of a tower, and the output of each of its layers."""
    weights, layers = [], []
    with tf.device(f"/gpu:{number}"), tf1.name_scope(f"tower{number}"):
        value = tf.ones([SIZE]) * (1.0 + number)
        for layer in range(LAYERS):
            name = f"w{number}_{layer}"
            weights.append(tf1.get_variable(name, [SIZE], use_resource=True))
            value = tf.tanh(value * weights[-1])
            layers.append(value)
    return weights, layers


def gradients(loss, weights, number):
    """Return the gradients of a tower's loss."""
    with tf.device(f"/gpu:{number}"):
        return tf1.gradients(loss, weights)


def usual():
    """Return the gradients of towers that share nothing."""
    rows = []
    for number in range(TOWERS):
        weights, layers = tower(number)
        rows.append(gradients(tf.reduce_sum(layers[-1]), weights, number))
    return rows


def residual():
    """Return gradients of layers with a way around: the pass enters each by two ops."""
    rows = []
    for number in range(TOWERS):
        with tf.device(f"/gpu:{number}"), tf1.variable_scope(f"tower{number}"):
            weights, value = [], tf.ones([SIZE]) * (1.0 + number)
            for layer in range(LAYERS):
                weights.append(tf1.get_variable(f"w{layer}", [SIZE], use_resource=True))
                value = tf.tanh(value * weights[-1]) + 0.5 * value
        rows.append(gradients(tf.reduce_sum(value), weights, number))
    return rows


def with_offsets():
    """Return gradients of layers with two variables: that of the weights leads nowhere."""
    rows = []
    for number in range(TOWERS):
        with tf.device(f"/gpu:{number}"), tf1.variable_scope(f"tower{number}"):
            variables, value = [], tf.ones([SIZE]) * (1.0 + number)
            for layer in range(LAYERS):
                weight = tf1.get_variable(f"w{layer}", [SIZE], use_resource=True)
                offset = tf1.get_variable(f"b{layer}", [SIZE], use_resource=True)
                value = tf.tanh(value * weight + offset)
                variables += [weight, offset]
        rows.append(gradients(tf.reduce_sum(value), variables, number))
    return rows


def sharing():
    """Return gradients of losses that read what another tower has computed."""
    built = [tower(number) for number in range(TOWERS)]
    rows = []
    for number, (weights, layers) in enumerate(built):
        _, others = built[number - 1]
        loss = tf.reduce_sum(layers[-1] * others[2] + others[LAYERS // 2])
        rows.append(gradients(loss, weights, number))
    return rows


def crossing():
    """Return gradients that read late gradients of other towers; they leave no op to hold."""
    rows = usual()
    first = [row[0] for row in rows]
    crossed = []
    for number, row in enumerate(rows):
        crossed.append([grad + first[number - 1] for grad in row])
    return crossed


def of_reduced():
    """Return gradients of losses that read gradients which are reduced already."""
    reduced = allreduce_grads(usual(), gpus(), strategy=ALONE)
    rows = []
    with tf1.variable_scope("second"):
        for number in range(TOWERS):
            weights, layers = tower(number)
            loss = tf.reduce_sum(layers[-1] + reduced[number][3])
            rows.append(gradients(loss, weights, number))
    return rows


def reduced_before():
    """Return gradients of two branches; another all-reduce has them in the other order."""
    rows = []
    for number in range(TOWERS):
        weights, layers = tower(number)
        with tf1.variable_scope("branch"):
            more_weights, more_layers = tower(number)
        loss = tf.reduce_sum(layers[-1] + more_layers[-1])
        rows.append(gradients(loss, [*weights, *more_weights], number))
    allreduce_grads([row[LAYERS:] + row[:LAYERS] for row in rows], gpus(), strategy=ALONE)
    return rows


def of_loops():
    """Return gradients of losses in loops and branches."""
    rows = []
    for number in range(TOWERS):
        weights, layers = tower(number)
        with tf.device(f"/gpu:{number}"):
            middle, end = layers[LAYERS // 2], layers[-1]
            chosen = tf1.cond(tf.reduce_sum(middle) > 0, lambda m=middle: m * 2, lambda m=middle: m)
            looped = tf1.while_loop(lambda n, _: n < 3, lambda n, e: (n + 1, e * 0.5), [0, end])[1]
        rows.append(gradients(tf.reduce_sum(chosen + looped), weights, number))
    return rows


def through_loops():
    """Return gradients of layers, each of which is a branch or a loop."""
    rows = []
    for number in range(TOWERS):
        with tf.device(f"/gpu:{number}"), tf1.name_scope(f"tower{number}"):
            weights, value = [], tf.ones([SIZE]) * (1.0 + number)
            for layer in range(LAYERS):
                weights.append(tf1.get_variable(f"w{number}_{layer}", [SIZE], use_resource=True))
                value = tf.tanh(value * weights[-1])
                if layer % 2:
                    value = tf1.while_loop(lambda v: False, lambda v: v * 0.5, [value])
                else:
                    held = value
                    value = tf1.cond(held[0] < 9, lambda h=held: h * 0.5, lambda h=held: h)
            rows.append(gradients(tf.reduce_sum(value), weights, number))
    return rows


def ancestors(tensors):
    """Return all ops that some tensors need."""
    found, waiting = set(), [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return found


def edges(graph):
    """Return the pairs (sum, op that waits for it) in a graph."""
    return [
        (before, op)
        for op in graph.get_operations()
        for before in op.control_inputs
        if "hier_allreduce" in before.name and "hier_allreduce" not in op.name
    ]


def first_needs(rows):
    """Return the ops of gradients, each with the number of the first chunk that needs it."""
    needed_by: dict = {}
    for chunk, grads in enumerate(reversed(list(zip(*rows)))):  # the last one is ready first
        for op in ancestors(grads):
            needed_by.setdefault(op, chunk)
    return needed_by


@pytest.mark.parametrize("model", [usual, residual], ids=lambda f: f.__name__)
def test_each_sum_holds_what_comes_half_a_pass_later(graph, model):
    rows = model()
    needed_by = first_needs(rows)
    allreduce_grads(rows, gpus(), strategy=ALONE)
    pairs = set()
    for before, op in edges(graph):
        of_sum = max(needed_by[source] for source in ancestors(before.outputs) & set(needed_by))
        pairs.add((of_sum, needed_by[op], before.device, op.device))
    expected = set()
    for chunk in range(LAYERS // 2):
        root = f"/device:GPU:{chunk % TOWERS}"
        expected.add((chunk, chunk + LAYERS // 2, root, root))
    assert pairs == expected


@pytest.mark.parametrize("model", [usual, residual, with_offsets], ids=lambda f: f.__name__)
def test_edges_come_in_the_order_in_which_ops_were_made(graph, monkeypatch, model):
    """TensorFlow lists an op's control inputs in an order that differs between processes."""
    added: dict = {}

    def add(before, after):
        added.setdefault(before, []).append(after)

    monkeypatch.setattr(lead, "add_control_edge", add)
    allreduce_grads(model(), gpus(), strategy=ALONE)
    place = {op: n for n, op in enumerate(graph.get_operations())}
    assert added
    for held in [list(added), *added.values()]:
        assert held == sorted(held, key=lambda op: place[op])


@pytest.mark.parametrize("model", [usual, residual, with_offsets], ids=lambda f: f.__name__)
def test_no_op_of_the_later_pass_goes_around_a_sum(graph, model):
    rows = model()
    needed_by = first_needs(rows)
    ends = {grad.op for row in rows for grad in row}
    passed = {op for op in needed_by if "gradients" in op.name}
    needs = {op: ancestors(op.outputs) & passed for op in passed - ends}
    allreduce_grads(rows, gpus(), strategy=ALONE)
    held_by: dict = {}
    for before, op in edges(graph):
        held_by.setdefault(before, set()).add(op)
    assert held_by
    for before, held in held_by.items():
        assert not held & ends  # a gradient that is complete need not wait
        first = min(needed_by[op] for op in held)
        for op, earlier in needs.items():
            is_later = op.device == before.device and needed_by[op] >= first
            if is_later and any(needed_by[source] < first for source in earlier):
                assert before in ancestors(op.outputs)


def test_late_gradients_wait_for_early_sums_of_their_tower():
    with tf.Graph().as_default() as graph:
        rows = usual()
        allreduce_grads(rows, gpus(), strategy=ALONE)
        found = edges(graph)
    assert found
    assert {op.device for _, op in found} == {f"/device:GPU:{k}" for k in range(TOWERS)}
    for before, op in found:
        assert before.device == op.device
        early = [grad for row in rows for grad in row[-3:]]
        assert op not in ancestors(early)


@pytest.mark.parametrize(
    "model",
    [usual, sharing, crossing, of_reduced, reduced_before, of_loops, through_loops],
    ids=lambda f: f.__name__,
)
def test_sums_are_right_and_no_op_waits_for_itself(model):
    with tf.Graph().as_default() as graph:
        rows = model()
        reduced = allreduce_grads(rows, gpus(), strategy=ALONE)
        is_held = bool(edges(graph))
        with session(allow_soft_placement=True) as sess:
            sess.run(tf1.global_variables_initializer())
            raw, sums = sess.run([rows, reduced])
    assert is_held == (model is not crossing)
    for n in range(LAYERS):
        expected = sum(np.float64(row[n]) for row in raw)
        for row in sums:
            np.testing.assert_allclose(row[n], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(row[n], sums[0][n])


def test_no_loss_waits_even_of_an_early_layer():
    with tf.Graph().as_default() as graph:
        rows, losses = [], []
        for number in range(TOWERS):
            weights, layers = tower(number)
            with tf.device(f"/gpu:{number}"):
                early = tf.reduce_sum(tf.tanh(layers[1]))  # a head that only late gradients need
                losses.append(tf.reduce_sum(layers[-1]) + early)
            rows.append(gradients(losses[-1], weights, number))
        allreduce_grads(rows, gpus(), strategy=ALONE)
        assert edges(graph)
        assert not any("hier_allreduce" in op.name for op in ancestors(losses))


def test_a_session_that_has_seen_the_pass_runs_without_edges():
    """TensorFlow logs that it does not follow them."""
    with tf.Graph().as_default(), session(allow_soft_placement=True) as sess:
        rows = usual()
        sess.run(tf1.global_variables_initializer())
        raw = sess.run(rows)
        reduced = allreduce_grads(rows, gpus(), strategy=ALONE)
        np.testing.assert_allclose(sess.run(reduced)[0][0], sum(row[0] for row in raw), rtol=1e-5)


def test_they_can_be_switched_off(graph):
    strategy = Strategy("flat", chunk_bytes=4 * SIZE, edges=False)
    allreduce_grads(usual(), gpus(), strategy=strategy)
    assert not edges(graph)


def test_two_towers_do_not_wait(graph):
    allreduce_grads(usual()[:2], gpus(2), strategy=ALONE)
    assert not edges(graph)


def test_a_session_that_is_open_early_follows_edges():
    with tf.Graph().as_default() as graph, session(allow_soft_placement=True) as sess:
        rows = usual()
        reduced = allreduce_grads(rows, gpus(), strategy=ALONE)
        assert edges(graph)
        sess.run(tf1.global_variables_initializer())
        raw, sums = sess.run([rows, reduced])
        np.testing.assert_allclose(sums[0][0], sum(row[0] for row in raw), rtol=1e-5)


def test_a_hierarchical_sum_holds_no_gradient():
    with tf.Graph().as_default() as graph:
        allreduce_grads(usual(), gpus(), strategy=Strategy("hierarchical", chunk_bytes=4 * SIZE))
        assert not edges(graph)


def test_towers_on_cpu_devices_do_not_wait():
    with tf.Graph().as_default() as graph:
        with tf.device("/cpu:0"):
            weights = [tf1.get_variable(f"w{n}", [SIZE]) for n in range(LAYERS)]
        rows = []
        for number in range(TOWERS):
            with tf.device(f"/cpu:{number}"):
                rows.append(tf1.gradients(tf.reduce_sum(tf.add_n(weights) ** 2), weights))
        allreduce_grads(rows, [f"/cpu:{k}" for k in range(TOWERS)], strategy=ALONE)
        assert not edges(graph)


def test_towers_without_any_gradient_need_no_edge(graph):
    assert allreduce_grads([[None, None]] * TOWERS, gpus()) == [[None, None]] * TOWERS


def test_gradients_that_are_checked_before_all_sums_close_no_cycle(graph):
    """Every sum needs every gradient then, through the control edges of the user."""
    rows = usual()
    checks = [tf1.check_numerics(grad, "not finite") for row in rows for grad in row]
    with tf.control_dependencies(checks):
        reduced = allreduce_grads(rows, gpus(), strategy=ALONE)
    with session(allow_soft_placement=True) as sess:
        sess.run(tf1.global_variables_initializer())
        expected, got = sess.run([rows, reduced])
    for row in got:
        np.testing.assert_allclose(row, np.sum(expected, 0), rtol=1e-5)


# ops on each gradient when the pass is over, as programs and libraries add them
ON_GRADIENTS = {
    "identity": tf.identity,
    "cast": lambda grad: tf.cast(tf.cast(grad, tf.float16), tf.float32),
    "scaled": lambda grad: 0.5 * grad,
    "clipped by value": lambda grad: tf.clip_by_value(grad, -1.0, 1.0),
    "clipped by norm": lambda grad: tf.clip_by_norm(grad, 1.0),
}


def changed(rows, change):
    """Return K×N gradients after an op on each of them, on its tower."""
    changed_rows = []
    for device, row in zip(gpus(), rows):
        with tf.device(device):
            changed_rows.append(list(map(change, row)))
    return changed_rows


@pytest.mark.parametrize("change", ON_GRADIENTS.values(), ids=ON_GRADIENTS)
@pytest.mark.parametrize("model", [usual, residual, with_offsets], ids=lambda f: f.__name__)
def test_an_op_on_each_gradient_loses_no_edge(model, change):
    held = []
    for rows_of in (model, lambda: changed(model(), change)):
        with tf.Graph().as_default() as graph:
            allreduce_grads(rows_of(), gpus(), strategy=ALONE)
            held.append({(before.device, op.name) for before, op in edges(graph)})
    assert held[0] and held[0] <= held[1]


def test_a_norm_over_all_gradients_leaves_nothing_to_hold(graph):
    rows = [tf.clip_by_global_norm(row, 1.0)[0] for row in usual()]
    allreduce_grads(rows, gpus(), strategy=ALONE)
    assert not edges(graph)


def of_function(change=lambda grad: grad, layer=lambda value: value):
    """Return the edges of a function that reduces gradients; it runs, and gives right sums.

    ``change`` changes each gradient when the pass is over, and ``layer`` is in each layer.
    """
    graphs = []

    @tf.function(autograph=False)
    def step(start):
        rows = []
        for number in range(TOWERS):
            with tf.device(f"/gpu:{number}"):
                weights = [start * float(n + number) for n in range(LAYERS)]
                value = start
                for weight in weights:
                    value = layer(tf.tanh(value * weight))
                grads = tf1.gradients(tf.reduce_sum(value), weights)
                rows.append(list(map(change, grads)))
        graphs.append(start.graph)
        return rows, allreduce_grads(rows, gpus(), strategy=ALONE)

    with tf.Graph().as_default(), session(allow_soft_placement=True) as sess:
        traced = step(tf.ones([SIZE]) / 9)
        sess.run(tf1.global_variables_initializer())
        raw, sums = sess.run(traced)
    for n in range(LAYERS):
        expected = sum(np.float64(row[n]) for row in raw)
        for row in sums:
            np.testing.assert_allclose(row[n], expected, rtol=1e-5, atol=1e-6)
    return edges(graphs[0])


@pytest.mark.tf2
def test_a_function_holds_what_a_graph_of_a_session_holds(graph):
    allreduce_grads(usual(), gpus(), strategy=ALONE)
    assert len(of_function()) == len(of_function(change=tf.identity)) == len(edges(graph)) > 0


@pytest.mark.tf2
def test_checks_that_tensorflow_orders_later_close_no_cycle():
    """Those of a tower wait for those of the tower before, so that each sum needs nearly all."""
    assert not of_function(change=lambda grad: tf1.check_numerics(grad, "not finite"))


@pytest.mark.tf2
def test_gradients_that_write_one_variable_close_no_cycle():
    """TensorFlow lets the writes of one tower wait for those of the tower before."""
    made: list = []

    @tf.custom_gradient
    def counted(value):
        def grad(upstream):
            with tf.control_dependencies([made[0].assign_add(tf.reduce_sum(upstream))]):
                return tf.identity(upstream)

        return tf.identity(value), grad

    def layer(value):
        if not made:
            with tf.init_scope(), tf.device("/cpu:0"):
                made.append(tf1.get_variable("passed", [], use_resource=True))
        return counted(value)

    held = of_function(layer=layer)
    assert {before.device for before, _ in held} <= {f"/device:GPU:{TOWERS - 1}"}


@pytest.mark.tf2
def test_a_function_that_reduces_gradients_of_another_graph_holds_nothing(graph):
    rows = usual()
    graphs = []

    @tf.function(autograph=False)
    def reduce():
        graphs.append(tf1.get_default_graph())
        return allreduce_grads(rows, gpus(), strategy=ALONE)

    reduce()
    assert not edges(graph) and not edges(graphs[0])


def test_gradients_without_a_device_hold_nothing(graph):
    """No device tells their towers apart. Rows among them become dense after all were made."""
    rows = []
    for number in range(TOWERS):
        weights = [tf1.get_variable(f"w{number}_{n}", [SIZE], use_resource=True) for n in range(12)]
        table = tf1.get_variable(f"table{number}", [4, SIZE], use_resource=True)
        read = tf.nn.embedding_lookup(table, [1, 2, 1]) if number else table
        value = tf.reduce_sum(read, 0)
        for weight in weights:
            value = tf.tanh(value * weight)
        rows.append(tf1.gradients(tf.reduce_sum(value), [table, *weights]))
    dense = for_each(tf.convert_to_tensor, rows)
    reduced = allreduce_grads(rows, gpus(), strategy=ALONE)
    assert not edges(graph)
    with session(allow_soft_placement=True) as sess:
        sess.run(tf1.global_variables_initializer())
        raw, sums = sess.run([dense, reduced])
    for row in sums:
        for n, total in enumerate(row):
            expected = sum(grads[n] for grads in raw)
            np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)


def reading_again():
    """Return gradients that read their variable in the backward pass."""
    rows = []
    for number in range(TOWERS):
        with tf.device(f"/gpu:{number}"), tf1.variable_scope(f"tower{number}"):
            weights, value = [], tf.ones([SIZE]) * (1.0 + number)
            for layer in range(LAYERS):
                weight = tf1.get_variable(f"w{layer}", [SIZE], use_resource=True)
                value = tf.tanh(times(value, weight))
                weights.append(weight)
            rows.append(tf1.gradients(tf.reduce_sum(value), weights))
    return rows


def times(value, weight):
    """Return a product whose gradient reads the variable once more, as recomputed layers do."""

    @tf.custom_gradient
    def product(value, read):
        def grad(upstream):
            with tf.control_dependencies([upstream]):
                again = weight.read_value()
            return upstream * again, upstream * value

        return value * read, grad

    return product(value, weight.value())


def test_an_op_that_reads_a_variable_does_not_wait_since_its_update_does_not():
    with tf.Graph().as_default() as graph:
        allreduce_grads(reading_again(), gpus(), strategy=ALONE)
        held = {op.type for _, op in edges(graph)}
    assert held
    assert "ReadVariableOp" not in held


def test_towers_with_reference_variables_do_not_wait():
    """An update overwrites them in place, under the ops that have still to read them."""
    rows = []
    with tf.Graph().as_default() as graph:
        for number in range(TOWERS):
            with tf.device(f"/gpu:{number}"):
                weights, value = [], tf.ones([SIZE])
                for n in range(LAYERS):
                    name = f"w{number}_{n}"
                    weights.append(tf1.get_variable(name, [SIZE], use_resource=False))
                    value = tf.tanh(value * weights[-1])
                rows.append(tf1.gradients(tf.reduce_sum(value), weights))
        allreduce_grads(rows, gpus(), strategy=ALONE)
        assert not edges(graph)


@pytest.mark.tf2
def test_checks_that_autograph_orders_later_close_no_cycle(graph):
    """Its feature AUTO_CONTROL_DEPS adds edges to the graph of a session, too."""

    def step():
        rows = changed(usual(), lambda grad: tf1.check_numerics(grad, "not finite"))
        return rows, allreduce_grads(rows, gpus(), strategy=ALONE)

    ordered = tf.autograph.experimental.Feature.AUTO_CONTROL_DEPS
    converted = tf.autograph.to_graph(step, recursive=False, experimental_optional_features=ordered)
    fetched = converted()
    with session(allow_soft_placement=True) as sess:
        sess.run(tf1.global_variables_initializer())
        raw, reduced = sess.run(fetched)
    for row in reduced:
        np.testing.assert_allclose(row, np.sum(raw, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.tf2
@pytest.mark.cpu_only("emulated GPUs have no XLA compiler")
@pytest.mark.parametrize("compiled", ["step", "towers"])
def test_xla_may_compile_a_step_or_its_towers(compiled):
    devices = gpus_or_cpus(TOWERS)

    def tower(start):
        weights = [start * float(n) for n in range(LAYERS)]
        value = start
        for weight in weights:
            value = tf.tanh(value * weight)
        return tf1.gradients(tf.reduce_sum(value), weights)

    tower = tf.function(tower, autograph=False, jit_compile=compiled == "towers")

    @tf.function(autograph=False, jit_compile=compiled == "step")
    def step(start):
        rows = []
        for number, device in enumerate(devices):
            with tf.device(device):
                rows.append(tower(start * (number + 1.0)))
        return rows, allreduce_grads(rows, devices, strategy=ALONE)

    raw, sums = step(tf.ones([SIZE]) / 9)
    for row in sums:
        for n, total in enumerate(row):
            expected = sum(np.float64(grads[n]) for grads in raw)
            np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
