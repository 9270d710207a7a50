"""Wrong input is an error before the first op is added, in words that say where and what."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    XPU,
    evaluate,
    gpu_or_cpu,
    gpus_or_cpus,
    on_towers,
    tf1,
)
from helpers.rows import for_each

import hier_allreduce
from hier_allreduce import (
    ClusterError,
    HierAllreduceError,
    Strategy,
    allreduce_grads,
    allreduce_grads_and_vars,
)
from hier_allreduce.graph.names import variable_names
from hier_allreduce.graph.rows import variables_in

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
    matrix = []
    for tower in range(4):
        v0 = tf1.placeholder(dtype, [3], name=f"v0_of_tower{tower}")
        v1 = tf1.placeholder(dtype, [2, 2], name=f"v1_of_tower{tower}")
        matrix.append([v0, v1])
    return matrix


def of(dtype, shape=(3,)):
    return tf1.placeholder(dtype, shape)


def of_another_graph():
    with tf.Graph().as_default():
        return tf.constant([1.0, 2.0, 3.0])


def slices(values=(1, 2), indices=(1,), dtype="int64", shape=(3, 2)):
    dense_shape = None if shape is None else tf.constant(shape, tf.int64)
    return tf.IndexedSlices(of("float32", values), of(dtype, indices), dense_shape)


def row_of_tower_2_is(changed):
    """Return the rows with ``changed(row)`` as tower 2's."""
    matrix = rows()
    matrix[2] = changed(matrix[2])
    return matrix


def iterators():
    """Return the rows as iterators, of which tower 3's has one gradient."""
    matrix = rows()
    del matrix[3][0]
    return list(map(iter, matrix))


def rows_of_pairs():
    return for_each(lambda grad: (grad, "v"), rows())


# a function that makes all_grads, and words of the message
MATRICES: dict = {
    "a row is missing": (
        lambda: rows()[:3],
        "3 rows of gradients for 4 devices",
        "one row for each device",
    ),
    "a row too many": (lambda: rows() + rows()[:1], "5 rows of gradients for 4 devices"),
    "columns": (
        lambda: list(zip(*rows())),
        "2 rows of gradients for 4 devices",
        "all_grads[tower][variable]",
    ),
    "a shorter row": (
        lambda: row_of_tower_2_is(lambda row: row[:1]),
        "tower 1 (/cpu:1) has 2, tower 2 (/cpu:2) has 1",
    ),
    "a shorter iterator": (iterators, "tower 3 (/cpu:3) has 1"),
    "another order": (
        lambda: row_of_tower_2_is(lambda row: row[::-1]),
        "tower 2 (/cpu:2), variable 0",
        IN_ORDER,
    ),
    "pairs": (rows_of_pairs, "expected a tf.Tensor, or tf.IndexedSlices of tensors, not tuple"),
}


@pytest.mark.parametrize("case", MATRICES)
def test_a_matrix_of_another_form_is_an_error(graph, case):
    make, *words = MATRICES[case]
    raises(words, allreduce_grads, make(), gpus_or_cpus(4))


# tower, variable, a function that makes its gradient, and words of the message
GRADIENTS: dict = {
    "a list": (2, 1, lambda: [1.0, 2.0], "tf.IndexedSlices of tensors, not list"),
    "an array": (3, 0, lambda: np.zeros(3), "('v0_of_tower0')", "not ndarray"),
    "a bool": (2, 0, lambda: of(tf.bool), "bool has no sum", "cast it to a number"),
    "strings": (2, 0, lambda: of(tf.string), "string has no sum"),
    "of another graph": (3, 0, of_another_graph, "does not belong", "graph.as_default()"),
    "another dtype": (
        2,
        0,
        lambda: of("float16"),
        "tower 1: float32 (3,), tower 2: float16 (3,)",
        "cast",
    ),
    "another shape": (
        1,
        1,
        lambda: of("float32", [2, 3]),
        "tower 0: float32 (2, 2), tower 1: float32 (2, 3)",
    ),
    "a shape that would be broadcast": (
        3,
        0,
        lambda: of("float32", [1]),
        "tower 2: float32 (3,), tower 3: float32 (1,)",
    ),
    "another shape, known in part": (
        3,
        1,
        lambda: of("float32", [None, 5]),
        ", 5))",
        "build the same model",
    ),
    "missing": (1, 0, lambda: None, "None on towers [1]", "missing='zeros'"),
    "fewer indices than slices": (
        1,
        0,
        lambda: slices((3, 2), (2,)),
        "values of shape (3, 2) and indices of shape (2,)",
        "one index for",
    ),
    "slices that are scalars": (
        1,
        0,
        lambda: slices((), ()),
        "indices of shape ()",
        "one index for",
    ),
    "indices in an array": (
        1,
        0,
        lambda: tf.IndexedSlices(of("float32", [1, 2]), np.array([0])),
        "tf.IndexedSlices of tensors, not ndarray",
    ),
    "slices of another shape": (
        1,
        1,
        lambda: slices(shape=(1, 2)),
        "tower 0: float32 (2, 2), tower 1: float32 (1, 2)",
    ),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_an_error_names_the_tower_and_variable_of_a_wrong_gradient(graph, case):
    tower, variable, make, *words = GRADIENTS[case]
    matrix = rows()
    matrix[tower][variable] = make()
    place = f"tower {tower} (/cpu:{tower}), variable {variable}"
    raises([place, *words], allreduce_grads, matrix, gpus_or_cpus(4))


# devices, and words of the message
DEVICES = [
    ([0, 1, 2, 3], "tower 0: 0 is not a device; ", ONE_DEVICE),
    (list(np.arange(4) + 2), "is not a device; ", ONE_DEVICE),
    (["/cpu:0", "/cpu:1", "/cpu:2", True], "tower 3: True is not a device; ", ONE_DEVICE),
    (["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:-3"], "tower 3: '/cpu:-3' is not a device; ", ONE_DEVICE),
    (["/cpu:0", b"/cpu:1", "/cpu:2", "/cpu:3"], "tower 1: b'/cpu:1' is not a device"),
    (["/cpu:0", "nonsense", "/cpu:2", "/cpu:3"], "tower 1: 'nonsense' is not a device", ONE_DEVICE),
    (["/cpu:0", "/cpu:one", "/cpu:2", "/cpu:3"], "tower 1: '/cpu:one' is not a device"),
    ("/cpu:0", "devices must be a list with one device for each tower, not '/cpu:0'"),
    ({"/cpu:0"}, "devices must be a list with one device for each tower, not {'/cpu:0'}"),
    (None, "devices must be a list with one device for each tower, not None"),
    (np.int64(4), "devices must be a list with one device for each tower, not "),
    ([], "devices is empty"),
]


@pytest.mark.parametrize("number", range(len(DEVICES)))
def test_what_is_not_a_device_is_an_error(graph, number):
    devices, *words = DEVICES[number]
    raises(words, allreduce_grads, rows(), devices)


# options, and words of the message
OPTIONS: list = [
    (
        {"strategy": Strategy("hierarchical", groups=((0, 1), (2,)))},
        "groups=((0, 1), (2,))",
        "towers 0 to 3",
    ),
    ({"strategy": Strategy("flat", main=4)}, "main=4", "roots of flat: [0, 1, 2, 3]"),
    (
        {"strategy": Strategy(lambda devices, chunk: [])},
        "<lambda>(4, 0)",
        "in the end towers [0, 1, 2, 3] do not have the sum of all towers",
    ),
    ({"strategy": 5}, "algorithm=5", "expected one of auto, flat"),
    (
        {"cluster": "cluster.yaml", "error": ClusterError},
        "cluster='cluster.yaml'",
        "expected a hier_allreduce.Cluster",
    ),
]


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_a_wrong_option_is_an_error(graph, number):
    options, *words = OPTIONS[number]
    raises(words, allreduce_grads, rows(), gpus_or_cpus(4), **options)


@pytest.mark.parametrize("function", ["", "_and_vars", "_hierarchical"])
def test_an_unknown_option_is_pythons_own_error(graph, function):
    with pytest.raises(TypeError, match="strategi"):
        getattr(hier_allreduce, f"allreduce_grads{function}")(
            rows(), gpus_or_cpus(4), strategi="flat"
        )
    assert not [op for op in graph.get_operations() if "hier_allreduce" in op.name]


@pytest.mark.parametrize("average", ["sum", 2, None])
def test_average_is_true_or_false(graph, average):
    words = [f"average={average!r}: expected one of True, False"]
    raises(words, allreduce_grads, rows(), gpus_or_cpus(4), average=average)


@pytest.mark.tf2
def test_an_eager_tensor_is_neither_true_nor_false():
    with pytest.raises(HierAllreduceError, match="expected one of True, False"):
        allreduce_grads([[tf.ones(2)]], gpus_or_cpus(1), average=tf.constant(True))


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_integers_have_no_mean(graph, dtype):
    words = ["variable 0 ('v0_of_tower0')", f"{dtype} has no exact mean", "sums it"]
    raises(words, allreduce_grads, rows(dtype), gpus_or_cpus(4), True)


@pytest.mark.tf2
def test_a_tensor_of_another_function_is_an_error():
    kept = []

    @tf.function
    def backward(grad):
        kept.append([tf.identity(grad)])
        return grad

    @tf.function
    def reduce():
        return allreduce_grads([kept[0], kept[0]], ["/cpu:0", "/cpu:1"])

    backward(tf.ones([3]))
    words = r"tower 0 \(/cpu:0\), variable 0.*does not belong"
    with pytest.raises(HierAllreduceError, match=words):
        reduce()


@pytest.mark.tf2
def test_a_function_reads_tensors_that_have_values_and_those_around_it():
    outside = tf.ones([3])

    @tf.function
    def reduce(grad):
        def within():
            (row, _) = allreduce_grads([[grad, outside]] * 2, ["/cpu:0", "/cpu:1"])
            return row

        return tf.cond(grad[0] > 0, within, lambda: [grad, outside])

    assert [total.numpy().tolist() for total in reduce(tf.ones([3]))] == [[2, 2, 2]] * 2


def test_slices_without_a_shape_cannot_be_made_dense(graph):
    words = ["tower 0 (/cpu:0), variable 0", "no dense_shape", "give one"]
    raises(
        words,
        allreduce_grads,
        [[slices(shape=None)] for _ in range(2)],
        gpus_or_cpus(2),
        strategy=Strategy(sparse="dense"),
    )


@pytest.mark.tf2
def test_eagerly_the_checks_are_the_same():
    two = [[tf.zeros([3])], [tf.zeros([4])]]
    with pytest.raises(
        HierAllreduceError, match=r"tower \d \(/.pu:\d\), variable 0 .*the dtype or shape differs"
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
    absent = [gpu_or_cpu(0), "/gpu:99"]
    for call in (
        lambda: allreduce_grads(two, absent),
        lambda: tf.function(allreduce_grads)(two, absent),
    ):
        with pytest.raises(
            HierAllreduceError, match=r"tower 1: /gpu:99 does not exist. There are /cpu:0, "
        ):
            call()
    with tf.Graph().as_default(), pytest.raises(
        HierAllreduceError, match=r"tower 1 .*variable 0 .*does not belong"
    ):
        allreduce_grads([[of("float32")], two[0]], gpus_or_cpus(2))
    with pytest.raises(
        HierAllreduceError, match=r"tower \d \(/.pu:\d\), variable 0 .*the dtype or shape differs"
    ):
        tf.function(
            lambda: allreduce_grads(two, gpus_or_cpus(2))
        )()  # translated by autograph, which wraps other errors


# ---- pairs ---------------------------------------------------------------------------------------


def named(names, made_in_order_of=list):
    """Rows of (gradient, variable) for variables of these names; one name is one variable.

    Each tower makes its variables in an order of the names of its row.
    """
    made = {}
    for row in names:
        for name in made_in_order_of(row):
            if name not in made:
                made[name] = tf1.get_variable(name, [2], use_resource=True)
    return for_each(lambda name: (tf.identity(made[name]), made[name]), names)


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
    # layers of one kind, without scopes
    [["dense/k", "dense_1/k", "dense_2/k"], ["dense_5/k", "dense_4/k", "dense_3/k"]],
    [["dense/k", "dense_2/k", "dense_8/k"], ["dense_13/k", "dense_11/k", "dense_12/k"]],
    [["net/fc/k", "net/fc_1/k"], ["net_1/fc_1/k", "net_1/fc/k"]],
    [["a/k", "a_1/k", "w", "w_1"], ["a_3/k", "a_2/k", "w_2", "w_1_1"]],
    [["conv2d/k", "conv2d_1/k", "conv2d_2/k"], ["conv2d_5/k", "conv2d_3/k", "conv2d_4/k"]],
    [["fc6/k", "fc6_1/k"], ["fc6_3/k", "fc6_2/k"]],
    [["tower0/conv1d/k", "tower0/conv1d_1/k"], ["tower1/conv1d_3/k", "tower1/conv1d_2/k"]],
    [["res2net/k", "res2net_1/k", "shared"], ["res2net_3/k", "res2net_2/k", "shared"]],
    [["tower0/w_2", "tower0/w_1_1"], ["tower1/w_1_1", "tower1/w_2"]],
]


@pytest.mark.parametrize("names", ORDERS)
def test_variables_in_another_order_on_a_tower_are_an_error(graph, names):
    pairs = named(names, made_in_order_of=sorted)
    raises(
        ["tower 1 (/cpu:1), variable 0", "tower 0 has ", IN_ORDER],
        allreduce_grads_and_vars,
        pairs,
        gpus_or_cpus(2),
    )
    in_one_order = [sorted(row, key=lambda pair: pair[1].name) for row in pairs]
    assert len(allreduce_grads_and_vars(in_one_order, gpus_or_cpus(2))) == 2


def test_the_order_beside_a_variable_of_all_towers_counts(graph):
    shared = tf1.get_variable("shared", [2], use_resource=True)
    rows = []
    # Each tower lists its own variables as it has made them.
    for tower, names in enumerate((("a", "b"), ("b", "a"))):
        with tf1.variable_scope(f"tower{tower}"):
            own = [tf1.get_variable(name, [2], use_resource=True) for name in names]
        rows.append([(tf.zeros([2]), var) for var in (shared, *own)])
    with pytest.raises(HierAllreduceError, match=f"variable 1 .'b'.*{IN_ORDER}"):
        allreduce_grads_and_vars(rows, gpus_or_cpus(2))


def test_the_order_counts_inside_a_branch(graph):
    names = [["dense/k", "dense_1/k"], ["dense_3/k", "dense_2/k"]]
    pairs = named(names, made_in_order_of=sorted)

    def branch():
        words = ["tower 1 (/cpu:1), variable 0 ('dense_3/k')", IN_ORDER]
        raises(words, allreduce_grads_and_vars, pairs, gpus_or_cpus(2))
        return tf.constant(0)

    tf.cond(tf1.placeholder_with_default(True, []), branch, lambda: tf.constant(1))


@pytest.mark.tf2
@pytest.mark.parametrize("names, are_shared", [("wb", False), ("ww", False), ("ww", True)])
def test_the_order_of_eager_variables_counts(names, are_shared):
    def reduce(order):
        rows = [[(tf.zeros([2]), towers[0][n]) for n in (0, 1)]]
        rows.append([(tf.zeros([2]), towers[1][n]) for n in order])
        return allreduce_grads_and_vars(rows, gpus_or_cpus(2))[0][0][0]

    towers = []
    for number in range(2):
        towers.append([tf.Variable(tf.zeros([2]), name=f"{name}{number}") for name in names])
    towers = [towers[0]] * 2 if are_shared else towers
    for call in (reduce, tf.function(reduce, autograph=False)):
        assert call((0, 1)).shape == [2]
        with pytest.raises(HierAllreduceError, match=f"tower 1 .*, variable 0 .*{IN_ORDER}"):
            call((1, 0))


@pytest.mark.parametrize("names", [[["t0/a", "t0/b"], ["t1/a", "t1/a"]], [["a", "b"], ["c", "c"]]])
def test_a_variable_in_the_place_of_another_one_is_an_error(graph, names):
    words = ["tower 1 (/cpu:1), variable 1", "tower 0 has 'b' there", IN_ORDER]
    raises(words, allreduce_grads_and_vars, named(names), gpus_or_cpus(2))


def test_the_first_variable_in_another_order_is_named(graph):
    of_towers = [["dense/k", "dense_1/k", "dense_2/k"], ["dense_3/k", "dense_5/k", "dense_4/k"]]
    pairs = named(of_towers, made_in_order_of=sorted)
    words = ["variable 1 ('dense_5/k')", "tower 0 has 'dense_1/k' there"]
    raises(words, allreduce_grads_and_vars, pairs, gpus_or_cpus(2))


NAMES = [
    ([["layer/w", "layer/b"], ["tower1/layer/w", "tower1/layer/b"]], ["w", "b"]),
    ([["tower0/layer/w", "tower0/b"], ["tower1/layer/w", "tower1/b"]], ["layer/w", "b"]),
    ([["model_0/t1/w", "model_0/t1/b"], ["model_1/t1/w", "model_1/t1/b"]], ["w", "b"]),
    ([["tower0/w", "all/shared"], ["tower1/w", "all/shared"]], ["w", "all/shared"]),
    ([["w", "t1/b"]], ["w", "t1/b"]),
    (
        [["conv/w", "conv_1/w", "out/w"], ["conv_2/w", "conv_3/w", "out_1/w"]],
        ["conv/w", "conv_1/w", "out/w"],
    ),
    # the model's own numbers; TensorFlow adds others to them if it has to
    ([["w", "w_1"], ["w_2", "w_1_1"]], ["w", "w_1"]),
    ([["w1", "w2"], ["w1_1", "w2_1"]], ["w1", "w2"]),
    ([["w", "w_1"], ["w_9", "w_10"]], ["w", "w_1"]),
    ([["b1/w2", "b2/w1"], ["b1_1/w2", "b2_1/w1"]], ["b1/w2", "b2/w1"]),
    (
        [["fc/k", "fc_2/k", "fc_10/k"], ["fc_1/k", "fc_3/k", "fc_11/k"]],
        ["fc/k", "fc_2/k", "fc_10/k"],
    ),
    # in an order of the user, which is one on both towers; and beside a variable of all towers
    ([["b/k", "a/k"], ["b_1/k", "a_1/k"]], ["b/k", "a/k"]),
    ([["a", "shared", "a_1"], ["a_2", "shared", "a_3"]], ["a", "shared", "a_1"]),
]


@pytest.mark.parametrize("names, shown", NAMES)
def test_variables_are_called_by_their_names_in_the_model(graph, names, shown):
    assert variable_names(list(map(variables_in, named(names))), gpus_or_cpus(len(names))) == shown
    assert len(allreduce_grads_and_vars(named_again(names), gpus_or_cpus(len(names)))) == len(names)


@pytest.mark.parametrize("order, is_right", [((0, 1, 2), True), ((0, 2, 1), False)])
def test_variables_of_keras_3_are_called_by_their_paths(graph, order, is_right):
    """There the name of every layer's kernel is "kernel"."""
    pairs = named([["a", "b", "c"], ["d", "e", "f"]])
    for row, model in zip(pairs, ("model", "model_1")):
        for n, path in zip((0, 1, 2) if row is pairs[0] else order, ("first", "second", "bias")):
            row[n] = row[n][0], KerasVariable(row[n][1], f"{model}/{path}/kernel")
    if is_right:
        assert variable_names(list(map(variables_in, pairs)), gpus_or_cpus(2))[0] == "first/kernel"
        assert len(allreduce_grads_and_vars(pairs, gpus_or_cpus(2))) == 2
    else:
        words = ["variable 1 ('bias/kernel')", "tower 0 has 'second/kernel' there", IN_ORDER]
        raises(words, allreduce_grads_and_vars, pairs, gpus_or_cpus(2))


class KerasVariable:
    """What is read of a variable of Keras 3."""

    def __init__(self, value, path):
        self.value = value
        self.path = path
        self.name = path.split("/")[-1]


def named_again(names):
    with tf1.variable_scope(tf1.get_variable_scope(), reuse=True):
        return named(names)


def test_variables_that_a_tower_lacks_are_an_error(graph):
    rows = named([["m_0/w"], ["m_1/w", "m_1/b"]])
    words = ["tower 0 (/cpu:0) has 1, tower 1 (/cpu:1) has 2", "var_list="]
    raises(words, allreduce_grads_and_vars, rows, gpus_or_cpus(2))


@pytest.mark.parametrize("mixed_up", [lambda pairs: list(zip(*pairs)), lambda pairs: pairs[::-1]])
@pytest.mark.parametrize("count", [2, 3])
def test_rows_of_variables_or_of_other_towers_are_an_error(graph, mixed_up, count):
    """As many towers as variables: N rows of K would be added up in silence."""

    def row_of(tower):
        (row,) = named([[f"tower{tower}/{name}" for name in "wbc"[:count]]])
        return row

    pairs = on_towers(gpus_or_cpus(count), row_of)
    words = [" (/cpu:", "the variable is on", "rows[tower][variable]"]
    raises(words, allreduce_grads_and_vars, mixed_up(pairs), gpus_or_cpus(count))


def test_variables_that_towers_share_may_be_anywhere(graph):
    first, second = on_towers(gpus_or_cpus(2), lambda tower: named([[f"shared{tower}"]])[0][0])
    assert len(allreduce_grads_and_vars([[second, first]] * 2, gpus_or_cpus(2))) == 2


# a function that makes what stands for a pair, and words of the message
PAIRS: dict = {
    "no variable": (lambda grad, var: (grad, None), "expected a (gradient, variable) pair"),
    "a bool": (lambda grad, var: (tf.cast(grad, tf.bool), var), "('b')", "bool has no sum"),
    "a gradient": (lambda grad, var: grad, "expected a (gradient, variable) pair"),
    "a tuple of one": (lambda grad, var: (grad,), "expected a (gradient, variable) pair"),
}


def test_the_pairs_of_one_tower_are_no_rows(graph):
    pairs = named([["w", "b"]])[0]
    words = ["tower 0 (/cpu:0), variable 0: expected a (gradient, variable) pair"]
    raises(words, allreduce_grads_and_vars, pairs, gpus_or_cpus(2))
    # Two gradients are no pair, although a tensor has a name, too.
    grads = [[grad for grad, _ in pairs]] * 2
    raises(words, allreduce_grads_and_vars, grads, gpus_or_cpus(2))


@pytest.mark.parametrize("case", PAIRS)
def test_an_error_names_the_place_of_a_wrong_pair(graph, case):
    make, *words = PAIRS[case]
    pairs = named([["w", "b"], ["tower1/w", "tower1/b"]])
    pairs[1][1] = make(*pairs[1][1])
    raises(
        ["tower 1 (/cpu:1), variable 1", *words], allreduce_grads_and_vars, pairs, gpus_or_cpus(2)
    )


def test_several_towers_with_reference_variables_get_a_warning(graph):
    pairs = []
    for tower in range(2):
        resource = tf1.get_variable(f"resource{tower}", [2], use_resource=True)
        reference = tf1.get_variable(f"reference{tower}", [2], use_resource=False)
        pairs.append([(tf.zeros([2]), resource), (tf.zeros([2]), reference)])
    with pytest.warns(
        UserWarning, match="1 of 2 .* 'reference0'.*enable_resource_variables.*--use_resource_vars"
    ) as seen:
        allreduce_grads_and_vars(pairs, gpus_or_cpus(2))
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allreduce_grads_and_vars(pairs[:1], gpus_or_cpus(1))
        allreduce_grads_and_vars([row[:1] for row in pairs], gpus_or_cpus(2))
        built = len(graph.get_operations())
        with pytest.raises(UserWarning):
            allreduce_grads_and_vars(pairs, gpus_or_cpus(2))
        assert len(graph.get_operations()) == built


def test_slices_take_the_shape_of_their_variable(graph):
    """TensorFlow's updates of slices ignore ``dense_shape``, and so some programs write any."""
    pairs = []
    for tower in range(2):
        with tf1.device(gpu_or_cpu(tower)):
            table = tf1.get_variable(f"tower{tower}/w", [3], use_resource=True)
            grad = tf.IndexedSlices(tf.constant([1.0]), tf.constant([2]), tf.constant([2]))
            pairs.append([(grad, table)])
    rows = allreduce_grads_and_vars(pairs, gpus_or_cpus(2), strategy=Strategy(sparse="dense"))
    sums = evaluate([grad for ((grad, _),) in rows])
    assert [list(total) for total in sums] == [[0, 0, 2]] * 2
