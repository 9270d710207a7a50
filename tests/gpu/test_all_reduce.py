"""All-reduces of every kind, as graphs that are placed without help, executed as planned, and exact."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import same_bits
from helpers.placed import Placed, in_place, session, traced

from hier_allreduce import Strategy, allreduce_grads, audit
from hier_allreduce.graph.compat import SUMMABLE_DTYPES
from hier_allreduce.integrations.distribute import HierarchicalAllReduce

# two that share a bucket, one that travels alone, one whose shape is known only when the step runs
SHAPES = [[3, 4], [5], [20000], [2, 3]]
UNKNOWN = 3
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
INTEGERS = tuple(dtype for dtype in SUMMABLE_DTYPES if dtype not in FLOATS)


def arrays(dtype, towers, shapes=SHAPES, high=8):
    """Whole numbers, of which sums are exact; those of integers exceed what 8 bits or 64 hold."""
    dtype, random = tf.as_dtype(dtype), np.random.RandomState(0)
    numpy = dtype.as_numpy_dtype
    rows = [[random.randint(high, size=shape).astype(numpy) for shape in shapes] for _ in range(towers)]
    return [[dtype.max - value for value in row] for row in rows] if dtype.is_integer else rows


def summed(values, dtype):
    """The sum of a column: in float64, complex128 or, with the overflow of their dtype, integers."""
    wide = dtype if tf.as_dtype(dtype).is_integer else "complex128" if "complex" in dtype else "float64"
    return [sum(np.asarray(value).astype(wide) for value in column).astype(wide) for column in zip(*values)]


@pytest.mark.parametrize("dtypes", [FLOATS, INTEGERS], ids=["floats", "integers"])
def test_every_dtype(devices, graph, dtypes):
    towers = devices[:4]
    values = {dtype: arrays(dtype, 4) for dtype in dtypes}
    placed = {dtype: Placed(towers, rows, {UNKNOWN}) for dtype, rows in values.items()}
    results = {dtype: allreduce_grads(placed[dtype].rows, towers, dtype in FLOATS) for dtype in dtypes}
    step = tf.group(*(in_place(towers, rows) for rows in results.values()))
    with session() as running:
        for each in placed.values():
            each.fill(running)
        seen = audit(traced(running, step), graph)
        got = running.run(results)
    assert len(seen.calls) == len(dtypes)
    for dtype, rows in got.items():
        assert same_bits(rows) and {value.dtype.name for row in results[dtype] for value in row} == {dtype}
        for result, exact in zip(rows[3], summed(values[dtype], dtype)):
            assert result.dtype == tf.as_dtype(dtype).as_numpy_dtype
            assert np.array_equal(result.astype(exact.dtype), exact / 4 if dtype in FLOATS else exact), dtype


STRATEGIES = {
    "default": Strategy(),
    "flat": Strategy(algorithm="flat"),
    "tree": Strategy(algorithm="tree"),
    "packed": Strategy(splits=4),
    "16 bits": Strategy(wire_dtype="float16"),
    "planned": Strategy(topology="dgx-1v"),
    "planned, idle": Strategy(topology="dgx-1v", backward=0),
}


@pytest.mark.parametrize("towers", [3, 8])
def test_every_algorithm(devices, graph, towers):
    devices = devices[:towers]
    values = arrays("float32", towers, SHAPES[:3])
    placed = Placed(devices, values)
    results = {name: allreduce_grads(placed.rows, devices, strategy=how) for name, how in STRATEGIES.items()}
    # one step each: in one step of all, Grappler would make sums of the same gradients only once
    steps = [tf.group(in_place(devices, rows)) for rows in results.values()]
    with session() as running:
        placed.fill(running)
        seen = [audit(traced(running, step), graph) for step in steps]
        got = {name: running.run(rows) for name, rows in results.items()}
    assert all(len(step.calls) == 1 for step in seen) and any(step.calls[0].in_order for step in seen)
    for name, rows in got.items():
        assert same_bits(rows)
        assert all(np.array_equal(*pair) for pair in zip(rows[0], summed(values, "float32"))), name


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_sparse_and_missing_gradients(devices, graph, index):
    devices = devices[:3]
    values = [[np.full([4, 2], tower, "float32"), np.array([0, 3, 3, tower], index)] for tower in range(3)]
    placed = Placed(devices, [[*row, np.ones([5000], "float32")] for row in values])
    rows = [
        [tf.IndexedSlices(rows, indices, tf.constant([6, 2])), None, None if tower == 1 else dense]
        for tower, (rows, indices, dense) in enumerate(placed.rows)
    ]
    results = {
        how: allreduce_grads(rows, devices, True, strategy=Strategy(sparse=how, missing="zeros"))
        for how in ("gather", "dense")
    }
    assert all(row[1] is None for rows in results.values() for row in rows)
    kept = {how: [[row[0], row[2]] for row in rows] for how, rows in results.items()}
    step = tf.group(*(in_place(devices, rows) for rows in kept.values()))
    with session() as running:
        placed.fill(running)
        assert len(audit(traced(running, step), graph).calls) == 2
        got = running.run(kept)
    exact = np.zeros([6, 2])
    for rows, indices in values:
        np.add.at(exact, indices, rows / 3)
    gathered, missing = got["gather"][2]
    scattered = np.zeros([6, 2])
    np.add.at(scattered, gathered.indices, gathered.values)
    for result in (scattered, got["dense"][2][0]):
        assert np.allclose(result, exact, rtol=1e-6)
    assert np.allclose(missing, 2 / 3)
    assert gathered.indices.dtype == index


@pytest.mark.tf2
def test_functions_and_eager_calls(devices):
    devices = devices[:3]
    values = arrays("float32", 3, SHAPES[:3])
    rows = []
    for device, row in zip(devices, values):
        with tf.device(device):
            rows.append([tf.identity(tf.constant(value)) for value in row])
    for reduce in (allreduce_grads, tf.function(allreduce_grads)):
        results = reduce(rows, devices)
        for result in results:
            assert all(np.array_equal(*pair) for pair in zip(result, summed(values, "float32")))


@pytest.mark.tf2
@pytest.mark.parametrize("replicas", [3, 8])
def test_mirrored_strategy(devices, replicas):
    strategy = tf.distribute.MirroredStrategy(devices[:replicas], HierarchicalAllReduce())
    with strategy.scope():
        weight = tf.Variable(tf.zeros([3]))

    @tf.function
    def step():
        def one():
            replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            weight.assign_add(tf.distribute.get_replica_context().all_reduce("SUM", 2.0**replica * tf.ones([3])))

        strategy.run(one)

    step()
    for value in strategy.experimental_local_results(weight):
        assert value.numpy().tolist() == [2**replicas - 1] * 3
