"""Small sparse gradients that are joined: which ones, and what each tower gets."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, checked, cpus, evaluate, session, tf1

from hier_allreduce import Strategy, allreduce_grads, audit
from hier_allreduce.graph.layout import lay_out

K = 5
GATHER = Strategy(sparse="gather")
STRATEGIES = {
    "flat": GATHER,
    "hierarchical": Strategy(sparse="gather", algorithm="hierarchical"),
    "tree": Strategy(sparse="gather", algorithm="tree"),
    "planned": Strategy(sparse="gather", topology="dgx-1v"),
    "values alone": Strategy(sparse="gather", algorithm="hierarchical", pack_below=40),
}


def rows_of(tower, variable):
    """Return a sparse gradient's rows and indices; tower 2 has none of variable 1."""
    count = 0 if (tower, variable) == (2, 1) else 2 + (tower + variable) % 3
    width = 4 if variable < 3 else 3
    indices = (np.arange(count) * 7 + tower + 10 * variable) % 50
    return (indices[:, np.newaxis] * np.ones([1, width]) + 100.0 * tower).astype("float32"), indices


def sparse_rows(known, devices, variables=5, index="int64"):
    """Return K×N sparse gradients, whose numbers of rows are known when the graph is built, or not."""
    matrix = []
    for tower, device in enumerate(devices):
        row = []
        for variable in range(variables):
            values, indices = rows_of(tower, variable)
            with tf.device(device):
                held = [tf1.placeholder_with_default(array, array.shape) for array in (values, indices.astype(index))]
                if not known:  # nor can Grappler know them
                    count = tf1.random_uniform([], len(values), len(values) + 1, tf.int32)
                    held = [tensor[:count] for tensor in held]
            row.append(tf.IndexedSlices(*held))
        matrix.append(row)
    return matrix


def check(reduced, average=False, devices=K):
    """Check one tower's gradients: each has the rows of all towers, and their own indices."""
    for variable, grad in enumerate(reduced):
        expected = [rows_of(tower, variable) for tower in range(devices)]
        pairs = sorted((i, *v) for v, i in zip(grad.values * (devices if average else 1), grad.indices))
        wanted = sorted((i, *v) for values, indices in expected for v, i in zip(values, indices))
        np.testing.assert_allclose(pairs, wanted, rtol=1e-6)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("known", [True, False], ids=["known rows", "unknown rows"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_tower_gets_the_rows_of_all_in_one_order(graph, strategy, known, average):
    devices = cpus(K)
    reduced = allreduce_grads(sparse_rows(known, devices), devices, average, strategy=STRATEGIES[strategy])
    seen = tf1.RunMetadata()
    with session() as running:
        towers = running.run(reduced, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=seen)
    audit(seen)
    check(towers[0], average)
    for other in towers[1:]:
        for mine, first in zip(other, towers[0]):
            np.testing.assert_array_equal(mine.values, first.values)
            np.testing.assert_array_equal(mine.indices, first.indices)


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_what_is_joined(graph, index):
    devices = cpus(K)
    apart, together = [("indices",), ("values",), ("values",)], [("values", "indices", "counts")] * 2
    for known, parts in ((True, apart), (False, together)):
        matrix = sparse_rows(known, devices, index=index)
        layout = lay_out(checked(matrix, devices, False), GATHER)
        assert [unit.parts for unit in layout.units] == parts
        assert [unit.variables for unit in layout.units if "values" in unit.parts] == [(0, 1, 2), (3, 4)]


def test_indices_of_large_values_are_joined_without_them(graph):
    layout = lay_out(checked(sparse_rows(True, cpus(K)), cpus(K), False), STRATEGIES["values alone"])
    indices, *values = [(unit.parts, unit.variables) for unit in layout.units]
    assert indices == (("indices",), (0, 1, 2, 3, 4))
    assert values == [(("values",), variables) for variables in ((0,), (1,), (2,), (3, 4))]


def test_large_tables_and_those_that_differ_are_not_joined(graph):
    devices = tuple(cpus(2))

    def row(*shapes):
        return [
            tf.IndexedSlices(tf1.placeholder(dtype, shape), tf1.placeholder("int64", shape[:1]))
            for dtype, shape in shapes
        ]

    shapes = [("float32", [5000, 4]), ("float32", [3, 4]), ("float64", [3, 4]), ("float32", [3, 5])]
    layout = lay_out(checked([row(*shapes), row(*shapes)], devices, False), GATHER)
    assert sorted((unit.parts, unit.variables) for unit in layout.units) == [
        (("indices",), (0, 1, 2, 3)),
        *[(("values",), (variable,)) for variable in range(4)],
    ]
    alone = lay_out(checked([row(*shapes), row(*shapes)], devices, False), Strategy(sparse="gather", pack_below=0))
    assert [unit.parts for unit in alone.units] == [("values", "indices")] * 4


def test_tables_of_unknown_rows_that_cannot_be_joined_are_not(graph):
    """Two whose row shapes are not known, and two of a dtype that travels as another."""
    devices = tuple(cpus(2))

    def row():
        given = [("float32", None), ("float32", None), ("int8", [None, 4]), ("int8", [None, 4])]
        values = [tf1.placeholder(dtype, shape) for dtype, shape in given]
        return [tf.IndexedSlices(tensor, tf1.placeholder("int64", [None])) for tensor in values]

    layout = lay_out(checked([row(), row()], devices, False), GATHER)
    assert [(unit.parts, unit.variables) for unit in layout.units] == [
        (("values", "indices"), (variable,)) for variable in range(4)
    ]


def test_a_tower_without_a_gradient_adds_no_rows(graph):
    devices = cpus(K)
    for known in (True, False):
        matrix = sparse_rows(known, devices)
        matrix[2][1] = None
        reduced = allreduce_grads(matrix, devices, strategy=Strategy(sparse="gather", missing="zeros"))
        for row in evaluate(reduced):
            check(row)


@pytest.mark.skipif(not IS_TF2, reason="TensorFlow 1.15 has no tf.function with logical CPU devices")
def test_in_a_function_and_eagerly():
    devices = cpus(K)
    for function in (tf.function, lambda step: step):

        @function
        def step():
            rows = [[map(tf.constant, rows_of(k, v)) for v in range(5)] for k in range(K)]
            return allreduce_grads([[tf.IndexedSlices(*pair) for pair in row] for row in rows], devices)

        for row in step():
            check([tf.IndexedSlices(grad.values.numpy(), grad.indices.numpy()) for grad in row])
