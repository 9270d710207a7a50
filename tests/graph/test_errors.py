"""Wrong input is an error before the first op is added, in words that say where and what."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, XPU, chain, gpu_or_cpu, gpus_or_cpus, on_towers, tf1

from hier_allreduce import (
    ClusterError,
    HierAllreduceError,
    Strategy,
    allreduce_grads,
    allreduce_grads_and_vars,
)
from hier_allreduce.graph.names import variable_names

SHAPES = "all_grads[tower][variable]"
IN_ORDER = "list the variables in one order on every tower"
ONE_DEVICE = "a device is a string such as '/gpu:0', a tf.DeviceSpec"


def raises(words, function, *args, error=HierAllreduceError, **kwargs):
    """``function`` raises ``error`` with all the words, and leaves the graph as it was."""
    words = [word.replace("(/cpu:", f"(/{XPU}:") for word in words]
    before = len(tf1.get_default_graph().get_operations())
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert len(tf1.get_default_graph().get_operations()) == before


def rows(dtype="float32"):
    """Gradients ``v0`` and ``v1`` of shapes [3] and [2, 2] on four towers."""
    shapes = {"v0": [3], "v1": [2, 2]}
    return [
        [tf1.placeholder(dtype, shapes[v], name=f"{v}_of_tower{tower}") for v in shapes]
        for tower in range(4)
    ]


def entry(tower, variable, value):
    """The rows with another entry, and where that is."""
    matrix = rows()
    matrix[tower][variable] = value
    return matrix


def of(dtype, shape=(3,)):
    return tf1.placeholder(dtype, shape)


def of_another_graph():
    with tf.Graph().as_default():
        return tf.constant([1.0, 2.0, 3.0])


def slices(values=(1, 2), indices=(1,), dtype="int64", shape=(3, 2)):
    dense_shape = None if shape is None else tf.constant(shape, tf.int64)
    return tf.IndexedSlices(of("float32", values), of(dtype, indices), dense_shape)


# all_grads, and words of the message
MATRICES = [
    (lambda: rows()[:3], "3 rows of gradients for 4 devices", "one row for each device"),
    (lambda: rows() + rows()[:1], "5 rows of gradients for 4 devices"),
    (lambda: list(zip(*rows())), "2 rows of gradients for 4 devices", "zip(*all_grads)"),
    (lambda: of("float32", [4, 2]), SHAPES, "it is one ", "Tensor"),
    (lambda: None, SHAPES, "it is one NoneType"),
    (lambda: [row[0] for row in rows()], "tower 0 (/cpu:0): its row is one", "Tensor"),
    (lambda: dict(enumerate(rows())), "tower 0 (/cpu:0): its row is one int"),
    (
        lambda: [row[: 1 + (k != 2)] for k, row in enumerate(rows())],
        "tower 1 (/cpu:1) has 2, tower 2 (/cpu:2) has 1",
    ),
    (
        lambda: [(g for g in row[k // 3 :]) for k, row in enumerate(rows())],
        "tower 3 (/cpu:3) has 1",
    ),
    (
        lambda: [[(grad, "v") for grad in row] for row in rows()],
        "expected a gradient, not a tuple",
        "allreduce_grads_and_vars",
    ),
    (
        lambda: entry(2, 1, [1.0, 2.0]),
        "tower 2 (/cpu:2), variable 1",
        "expected a gradient, not a list",
    ),
    (
        lambda: entry(3, 0, np.zeros(3)),
        "tower 3 (/cpu:3), variable 0 ('v0_of_tower0')",
        "not ndarray",
        "convert_to",
    ),
    (
        lambda: entry(2, 0, of(tf.bool)),
        "tower 2 (/cpu:2), variable 0",
        "bool has no sum",
        "cast it to a number",
    ),
    (
        lambda: entry(3, 0, of_another_graph()),
        "tower 3 (/cpu:3), variable 0",
        "does not belong",
        "graph.as_default()",
    ),
    (
        lambda: entry(2, 0, of("float16")),
        "tower 2 (/cpu:2), variable 0",
        "tower 1: float32, tower 2: float16",
        "cast",
    ),
    (
        lambda: entry(1, 1, of("float32", [2, 3])),
        "tower 1 (/cpu:1), variable 1",
        "tower 0: (2, 2), tower 1: (2, 3)",
    ),
    (
        lambda: entry(3, 0, of("float32", [1])),
        "tower 3 (/cpu:3), variable 0",
        "tower 2: (3,), tower 3: (1,)",
    ),
    (
        lambda: entry(3, 1, of("float32", [None, 5])),
        "tower 3 (/cpu:3), variable 1",
        ", 5))",
        "build the same model",
    ),
    (
        lambda: [row[:: 1 - 2 * (k == 2)] for k, row in enumerate(rows())],
        "tower 2 (/cpu:2), variable 0",
        IN_ORDER,
    ),
    (
        lambda: entry(1, 0, None),
        "tower 1 (/cpu:1), variable 0",
        "None on towers [1]",
        "missing='zeros'",
    ),
    (
        lambda: entry(1, 0, slices((3, 2), (2,))),
        "values of shape (3, 2) and indices of shape (2,)",
        "one index for",
    ),
    (
        lambda: entry(1, 0, tf.IndexedSlices(of("float32", [1, 2]), np.array([0]))),
        "not with indices that are ndarray",
    ),
    (
        lambda: entry(1, 1, slices(shape=(1, 2))),
        "tower 1 (/cpu:1), variable 1",
        "tower 0: (2, 2), tower 1: (1, 2)",
    ),
    (
        lambda: [[slices(dtype=d)] for d in ("int64", "int32") * 2],
        "variable 0",
        "dtype of the indices differs",
    ),
]


@pytest.mark.parametrize("number", range(len(MATRICES)))
def test_a_matrix_that_cannot_be_reduced(graph, number):
    make, *words = MATRICES[number]
    raises(words, allreduce_grads, make(), gpus_or_cpus(4))


# devices, and words of the message
DEVICES = [
    ([0, 1, 2, 3], "tower 0: 0 is not a device (did you mean '/gpu:0'?); ", ONE_DEVICE),
    (list(np.arange(4) + 2), "is not a device (did you mean '/gpu:2'?)", ONE_DEVICE),
    (["/cpu:0", "/cpu:1", "/cpu:2", True], "tower 3: True is not a device; ", ONE_DEVICE),
    (["/cpu:0", b"/cpu:1", "/cpu:2", "/cpu:3"], "tower 1: b'/cpu:1' is not a device"),
    (["/cpu:0", "nonsense", "/cpu:2", "/cpu:3"], "tower 1: 'nonsense' is not a device", ONE_DEVICE),
    (["/cpu:0", "/cpu:one", "/cpu:2", "/cpu:3"], "tower 1: '/cpu:one' is not a device"),
    (["/cpu:0", "/cpu:-1", "/cpu:2", "/cpu:3"], "tower 1: '/cpu:-1' is not a device"),
    ("/cpu:0", "devices must be a list with one device for each tower, not '/cpu:0'"),
    ({"/cpu:0"}, "devices must be a list with one device for each tower, not {'/cpu:0'}"),
    (None, "devices must be a list with one device for each tower, not None"),
    (np.int64(4), "devices must be a list with one device for each tower, not "),
    (np.array(4), "devices must be a list with one device for each tower, not array(4)"),
    ([], "devices is empty"),
]


@pytest.mark.parametrize("number", range(len(DEVICES)))
def test_devices_that_are_none(graph, number):
    devices, *words = DEVICES[number]
    raises(words, allreduce_grads, rows(), devices)


# options, and words of the message
OPTIONS = [
    *(
        ({"average": value}, f"average={value!r}", "True for the mean, False for the sum")
        for value in ("sum", 1, None)
    ),
    *(
        ({"name": name}, f"name={name!r} is not a name scope")
        for name in ("a b", "/x", "_a", "-a", "é", 7)
    ),
    (
        {"strategy": Strategy("hierarchical", groups=((0, 1), (2,)))},
        "groups=((0, 1), (2,))",
        "towers 0 to 3",
    ),
    ({"strategy": Strategy("flat", main=4)}, "main=4", "towers 0, 1, 2, 3"),
    (
        {"strategy": Strategy(lambda devices, chunk: [])},
        "<lambda>(4, 0)",
        "on tower 0, misses towers [1, 2, 3]",
    ),
    ({"strategy": 5}, "strategy=5", "expected a Strategy"),
    (
        {"cluster": "cluster.yaml", "error": ClusterError},
        "cluster='cluster.yaml'",
        "expected a hier_allreduce.Cluster",
    ),
]


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_options_that_do_not_fit(graph, number):
    options, *words = OPTIONS[number]
    raises(words, allreduce_grads, rows(), gpus_or_cpus(4), **options)


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_integers_have_no_mean(graph, dtype):
    words = ["variable 0 ('v0_of_tower0')", f"{dtype} has no exact mean", "sums it"]
    raises(words, allreduce_grads, rows(dtype), gpus_or_cpus(4), True)


@pytest.mark.parametrize("algorithm", ["auto", "flat", "tree", "hierarchical", "flat_tree", chain])
@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8"])
def test_small_integers_have_sums_on_two_gpus_only(graph, dtype, algorithm):
    gpus = [f"/gpu:{k}" for k in range(4)]
    words = ["tower 0 (/gpu:0), variable 0 ('v0_of_tower0')", dtype, "more than 2 towers", "int32"]
    raises(words, allreduce_grads, rows(dtype), gpus, strategy=Strategy(algorithm))
    assert len(allreduce_grads(rows(dtype)[:2], gpus[:2], strategy=Strategy(algorithm))) == 2
    assert len(allreduce_grads(rows(dtype), ["/cpu:0"] * 4, strategy=Strategy(algorithm))) == 4


def test_rows_of_int64_stay_sparse_on_gpus(graph):
    sparse = [
        [tf.IndexedSlices(of("int64", [1, 2]), of("int64", [1]), of("int64", [2]))]
        for _ in range(2)
    ]
    gpus = ["/gpu:0", "/gpu:1"]
    assert len(allreduce_grads(sparse, gpus)) == 2
    words = ["tower 0 (/gpu:0), variable 0", "rows of int64", "sparse='gather'"]
    raises(words, allreduce_grads, sparse, gpus, strategy=Strategy(sparse="dense"))


def test_rows_without_a_shape_cannot_be_made_dense(graph):
    words = ["tower 0 (/cpu:0), variable 0", "no dense_shape", "sparse='gather'"]
    raises(
        words,
        allreduce_grads,
        [[slices(shape=None)] for _ in range(2)],
        gpus_or_cpus(2),
        strategy=Strategy(sparse="dense"),
    )


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_unsigned_integers_are_added_where_tensorflow_can(graph, dtype):
    two = rows(dtype)[:2]
    if IS_TF2:
        allreduce_grads(two, gpus_or_cpus(2))
    else:
        raises([f"{dtype} has no sum in this TensorFlow"], allreduce_grads, two, gpus_or_cpus(2))


@pytest.mark.tf2
def test_eagerly_the_checks_are_the_same():
    two = [[tf.zeros([3])], [tf.zeros([4])]]
    with pytest.raises(
        HierAllreduceError, match=r"tower \d \(/.pu:\d\), variable 0 .*the shape differs"
    ):
        allreduce_grads(two, gpus_or_cpus(2))
    with pytest.raises(HierAllreduceError, match=r"tower 1: <function .* is not a device"):
        allreduce_grads([[tf.zeros([3])]] * 2, [gpu_or_cpu(0), lambda op: gpu_or_cpu(1)])
    with pytest.raises(HierAllreduceError, match=r"tower 0: PhysicalDevice.*list_logical_devices"):
        allreduce_grads([[tf.zeros([3])]] * 2, tf.config.list_physical_devices("CPU") * 2)
    with pytest.raises(
        HierAllreduceError, match=r"tower 1 \(/.pu:1\), variable 0 .*does not belong"
    ):
        allreduce_grads([[tf.zeros([3])], [of_another_graph()]], gpus_or_cpus(2))
    with tf.Graph().as_default(), pytest.raises(
        HierAllreduceError, match=r"tower 1 .*variable 0 .*does not belong"
    ):
        allreduce_grads([[of("float32")], two[0]], gpus_or_cpus(2))
    with pytest.raises(
        HierAllreduceError, match=r"tower \d \(/.pu:\d\), variable 0 .*the shape differs"
    ):
        tf.function(
            lambda: allreduce_grads(two, gpus_or_cpus(2))
        )()  # translated by autograph, which wraps other errors


# ---- pairs ---------------------------------------------------------------------------------------


def named(names):
    """Rows of (gradient, variable) for variables of these names; one name is one variable."""
    made = {
        name: tf1.get_variable(name, [2], use_resource=True)
        for name in sorted({n for row in names for n in row})
    }
    return [[(tf.identity(made[name]), made[name]) for name in row] for row in names]


# The names of two towers' variables. Tower 1 lists them in another order.
ORDERS = [
    [["tower0/w", "tower0/b"], ["tower1/b", "tower1/w"]],
    [["net/gpu_0/w", "net/gpu_0/b"], ["net/gpu_1/b", "net/gpu_1/w"]],
    [["w/k", "v/k"], ["v_1/k", "w_1/k"]],  # TensorFlow numbers the copies of a layer
    [["w0", "v0"], ["v1", "w1"]],
    # scopes of the model, which are no towers' ones
    [["s1/w", "s2/w"], ["tower1/s2/w", "tower1/s1/w"]],
    [["t1/v", "t1/w"], ["tower1/t1/w", "tower1/t1/v"]],
    [["gpu_0/t1/w", "gpu_0/t2/w"], ["gpu_1/t2/w", "gpu_1/t1/w"]],
    [["t1/w", "t2/w"], ["t2/w", "t1/w"]],
    [["tower0/t1/w", "shared", "tower0/t2/w"], ["tower1/t2/w", "shared", "tower1/t1/w"]],
]


@pytest.mark.parametrize("names", ORDERS)
def test_towers_that_list_their_variables_in_another_order(graph, names):
    pairs = named(names)
    raises(
        ["tower 1 (/cpu:1), variable 0", "tower 0 has ", IN_ORDER],
        allreduce_grads_and_vars,
        pairs,
        gpus_or_cpus(2),
    )
    assert (
        len(
            allreduce_grads_and_vars(
                [sorted(row, key=lambda pair: pair[1].name) for row in pairs], gpus_or_cpus(2)
            )
        )
        == 2
    )


NAMES = [
    ([["layer/w", "layer/b"], ["tower1/layer/w", "tower1/layer/b"]], ["layer/w", "layer/b"]),
    ([["tower0/layer/w", "tower0/b"], ["tower1/layer/w", "tower1/b"]], ["layer/w", "b"]),
    ([["model_0/t1/w", "model_0/t1/b"], ["model_1/t1/w", "model_1/t1/b"]], ["t1/w", "t1/b"]),
    ([["tower0/w", "all/shared"], ["tower1/w", "all/shared"]], ["w", "all/shared"]),
    ([["w", "t1/b"]], ["w", "t1/b"]),
    (
        [["conv/w", "conv_1/w", "out/w"], ["conv_2/w", "conv_3/w", "out_1/w"]],
        ["conv/w", "conv_1/w", "out/w"],
    ),
]


@pytest.mark.parametrize("names, shown", NAMES)
def test_variables_are_called_by_their_names_in_the_model(graph, names, shown):
    assert variable_names(named(names), gpus_or_cpus(len(names))) == shown
    assert len(allreduce_grads_and_vars(named_again(names), gpus_or_cpus(len(names)))) == len(names)


def named_again(names):
    with tf1.variable_scope(tf1.get_variable_scope(), reuse=True):
        return named(names)


UNEVEN = [
    ([["t1/w", "t2/w", "b"], ["tower1/t1/w", "tower1/b"]], "t2/w"),
    ([["m_0/layer/w"], ["m_1/layer/w", "m_1/layer/b"]], "layer/b"),
    ([["all/w"], ["all/w", "tower1/only/b", "tower1/c"]], "c, only/b"),
]


@pytest.mark.parametrize("names, some", UNEVEN)
def test_towers_with_more_or_fewer_variables(graph, names, some):
    raises(
        [f"; not on every tower: {some}"], allreduce_grads_and_vars, named(names), gpus_or_cpus(2)
    )


@pytest.mark.parametrize("mixed_up", [lambda pairs: list(zip(*pairs)), lambda pairs: pairs[::-1]])
@pytest.mark.parametrize("count", [2, 3])
def test_rows_and_towers_mixed_up(graph, mixed_up, count):
    """As many towers as variables: N rows of K would be added up in silence."""
    pairs = on_towers(
        gpus_or_cpus(count),
        lambda tower: named([[f"tower{tower}/{name}" for name in "wbc"[:count]]])[0],
    )
    words = [" (/cpu:", "the variable is on", "rows[tower][variable]"]
    raises(words, allreduce_grads_and_vars, mixed_up(pairs), gpus_or_cpus(count))


def test_variables_that_towers_share_may_be_anywhere(graph):
    (first,), (second,) = on_towers(gpus_or_cpus(2), lambda tower: named([[f"shared{tower}"]])[0])
    assert len(allreduce_grads_and_vars([[second, first]] * 2, gpus_or_cpus(2))) == 2


PAIRS = [
    (lambda grad, var: (grad, None), "expected a variable after the gradient, not None"),
    (lambda grad, var: (tf.cast(grad, tf.bool), var), "('b')", "bool has no sum"),
    (lambda grad, var: grad, "expected a (gradient, variable) pair"),
    (lambda grad, var: (grad,), "expected a (gradient, variable) pair"),
]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs_that_are_none(graph, number):
    make, *words = PAIRS[number]
    pairs = named([["w", "b"], ["tower1/w", "tower1/b"]])
    pairs[1][1] = make(*pairs[1][1])
    raises(
        ["tower 1 (/cpu:1), variable 1", *words], allreduce_grads_and_vars, pairs, gpus_or_cpus(2)
    )


def test_several_towers_with_reference_variables_get_a_warning(graph):
    def made(tower, resource):
        return tf1.get_variable(f"{resource}{tower}", [2], use_resource=resource)

    pairs = [
        [(tf.zeros([2]), made(tower, resource)) for resource in (True, False)] for tower in range(2)
    ]
    with pytest.warns(
        UserWarning, match="1 of 2 .* 'False0'.*enable_resource_variables.*--use_resource_vars"
    ) as seen:
        allreduce_grads_and_vars(pairs, gpus_or_cpus(2))
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allreduce_grads_and_vars(pairs[:1], gpus_or_cpus(1))
        allreduce_grads_and_vars([row[:1] for row in pairs], gpus_or_cpus(2))
