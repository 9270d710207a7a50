"""Wrong input is refused while the graph is built, in words that say where and what, before the first op is added."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import cpus, gradients_on, on_towers, tf1

from hier_allreduce import (
    ClusterError,
    HierAllreduceError,
    Strategy,
    allreduce_grads,
    allreduce_grads_and_vars,
    allreduce_grads_hierarchical,
)
from hier_allreduce.graph.devices import devices_match
from hier_allreduce.graph.names import variable_names


def four_by_two(dtype=np.float32):
    """Gradients ``v0`` and ``v1`` of shapes [3] and [2, 2] on four towers."""
    return [
        [tf1.placeholder(dtype, shape, name=f"v{v}_of_tower{tower}") for v, shape in enumerate([[3], [2, 2]])]
        for tower in range(4)
    ]


def with_entry(tower, variable, entry):
    rows = four_by_two()
    rows[tower][variable] = entry
    return rows


def of_dtype(dtype, shape=(3,)):
    return tf1.placeholder(dtype, shape)


def of_another_graph():
    with tf.Graph().as_default():
        return tf.constant([[1.0, 2.0], [3.0, 4.0]])


def a_variable():
    return tf1.get_variable("a_variable", [3], use_resource=True)


# what is given for all_grads, and what the message must say
MATRICES = {
    "too_few_rows": (lambda: four_by_two()[:3], ["3 rows of gradients for 4 devices", "one row for each device"]),
    "one_row": (lambda: four_by_two()[:1], ["1 row of gradients for 4 devices"]),
    "too_many_rows": (lambda: four_by_two() + four_by_two()[:1], ["5 rows of gradients for 4 devices"]),
    "no_rows": (list, ["0 rows of gradients for 4 devices"]),
    "rows_from_a_generator": (lambda: (row for row in four_by_two()[:3]), ["3 rows of gradients for 4 devices"]),
    "n_by_k": (lambda: list(zip(*four_by_two())), ["2 rows of gradients for 4 devices", "zip(*all_grads)"]),
    "one_tensor": (lambda: tf.zeros([4, 2]), ["all_grads[tower][variable]", "a single tensor was given"]),
    "none": (lambda: None, ["all_grads[tower][variable]", "NoneType was given"]),
    "flat_list": (lambda: [row[0] for row in four_by_two()], ["tower 0 (/cpu:0): its row is one", "Tensor"]),
    "row_of_none": (lambda: [*four_by_two()[:3], None], ["tower 3 (/cpu:3): its row is one NoneType"]),
    "row_by_number": (lambda: dict(enumerate(four_by_two())), ["tower 0 (/cpu:0): its row is one int"]),
    "shorter_row": (
        lambda: [row[: 1 + (tower != 2)] for tower, row in enumerate(four_by_two())],
        ["tower 1 (/cpu:1) has 2", "tower 2 (/cpu:2) has 1", "same number of gradients"],
    ),
    "shorter_generator": (
        lambda: [(g for g in row[tower // 3 :]) for tower, row in enumerate(four_by_two())],
        ["tower 2 (/cpu:2) has 2", "tower 3 (/cpu:3) has 1"],
    ),
    "pairs": (
        lambda: [[(grad, "its variable") for grad in row] for row in four_by_two()],
        ["tower 0 (/cpu:0), variable 0", "a tuple was given", "(gradient, variable) pairs", "allreduce_grads_and_vars"],
    ),
    "nested_list": (lambda: with_entry(2, 1, [1.0, 2.0]), ["tower 2 (/cpu:2), variable 1", "a list was given"]),
    "array": (
        lambda: with_entry(3, 0, np.zeros(3, np.float32)),
        ["tower 3 (/cpu:3), variable 0 ('v0_of_tower0')", "not ndarray", "tf.convert_to_tensor"],
    ),
    "number": (lambda: with_entry(1, 0, 1.0), ["tower 1 (/cpu:1), variable 0", "not float", "tf.convert_to_tensor"]),
    "variable": (lambda: with_entry(1, 0, a_variable()), ["tower 1 (/cpu:1), variable 0", "expected a tf.Tensor"]),
    "sparse_tensor": (
        lambda: with_entry(1, 0, tf.SparseTensor([[0]], [1.0], [3])),
        ["tower 1 (/cpu:1), variable 0", "not SparseTensor"],
    ),
    "bool": (
        lambda: with_entry(2, 0, of_dtype(tf.bool)),
        ["tower 2 (/cpu:2), variable 0 ('v0_of_tower0')", "bool has no sum", "cast it to a number"],
    ),
    "indices that are none": (
        lambda: with_entry(1, 0, tf.IndexedSlices(tf.zeros([1, 2]), np.array([0]), tf.constant([3, 2]))),
        ["tower 1 (/cpu:1), variable 0", "of tensors, not with indices that are ndarray"],
    ),
    "more indices than rows": (
        lambda: with_entry(1, 0, tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0, 1]), tf.constant([3, 2]))),
        ["tower 1 (/cpu:1), variable 0", "values of shape (1, 2)", "indices of shape (2,)", "one index for each row"],
    ),
    "string": (lambda: with_entry(0, 0, of_dtype(tf.string)), ["tower 0 (/cpu:0), variable 0", "string has no sum"]),
    "another_graph": (
        lambda: with_entry(3, 1, of_another_graph()),
        ["tower 3 (/cpu:3), variable 1 ('v1_of_tower0')", "does not belong to the graph", "graph.as_default()"],
    ),
    "dtype": (
        lambda: with_entry(2, 0, of_dtype(tf.float16)),
        [
            "tower 2 (/cpu:2), variable 0 ('v0_of_tower0')",
            "the dtype differs",
            "tower 1: float32, tower 2: float16",
            "cast",
        ],
    ),
    "shape": (
        lambda: with_entry(1, 1, of_dtype(tf.float32, [2, 3])),
        [
            "tower 1 (/cpu:1), variable 1 ('v1_of_tower0')",
            "the shape differs",
            "tower 0: (2, 2), tower 1: (2, 3)",
            "no order of the variables makes the towers equal: build the same model",
        ],
    ),
    "broadcastable_shape": (
        lambda: with_entry(3, 0, of_dtype(tf.float32, [1])),
        ["tower 3 (/cpu:3), variable 0", "tower 2: (3,), tower 3: (1,)"],
    ),
    "partly_known_shape": (
        lambda: with_entry(3, 1, of_dtype(tf.float32, [None, 5])),
        ["tower 3 (/cpu:3), variable 1", ", 5)); no order"],
    ),
    "rank": (lambda: with_entry(3, 0, of_dtype(tf.float32, [])), ["tower 3 (/cpu:3), variable 0", "tower 3: ()"]),
    "another_order": (
        lambda: [row[:: 1 - 2 * (tower == 2)] for tower, row in enumerate(four_by_two())],
        ["tower 2 (/cpu:2), variable 0 ('v0_of_tower0')", "in one order on every tower"],
    ),
}


def refused(error, message, function, *args, **kwargs):
    """``function`` raises ``error`` with every part of ``message``, and leaves the graph as it was."""
    before = len(tf1.get_default_graph().get_operations())
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    for part in message:
        assert part in str(caught.value)
    assert len(tf1.get_default_graph().get_operations()) == before


@pytest.mark.parametrize("function", [allreduce_grads, allreduce_grads_hierarchical])
@pytest.mark.parametrize("case", MATRICES)
def test_a_matrix_that_cannot_be_reduced(graph, case, function):
    given, message = MATRICES[case]
    refused(HierAllreduceError, message, function, given(), cpus(4))


@pytest.mark.parametrize("average", ["sum", "mean", 1, 0, None, np.float32(1)])
def test_average_is_true_or_false(graph, average):
    message = [f"average={average!r}", "True for the mean, False for the sum"]
    refused(HierAllreduceError, message, allreduce_grads, four_by_two(), cpus(4), average)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_integers_have_no_mean(graph, dtype):
    message = ["variable 0 ('v0_of_tower0')", f"{dtype} has no exact mean", "average=False sums it", "cast"]
    refused(HierAllreduceError, message, allreduce_grads, four_by_two(dtype), cpus(4), average=True)


ONE_DEVICE = ["'/gpu:0'", "tf.DeviceSpec"]


@pytest.mark.parametrize(
    "devices, message",
    [
        ([0, 1, 2, 3], ["tower 0: 0 is not a device", "did you mean '/gpu:0'?", *ONE_DEVICE]),
        (["/cpu:0", "/cpu:1", 2, "/cpu:3"], ["tower 2: 2 is not a device", "did you mean '/gpu:2'?"]),
        (["/cpu:0", "/cpu:1", "/cpu:2", True], ["tower 3: True is not a device", *ONE_DEVICE]),
        (["/cpu:0", 1.5, "/cpu:2", "/cpu:3"], ["tower 1: 1.5 is not a device", *ONE_DEVICE]),
        (["/cpu:0", b"/cpu:1", "/cpu:2", "/cpu:3"], ["tower 1: b'/cpu:1' is not a device", *ONE_DEVICE]),
        (["/cpu:0", ("/cpu:1",), "/cpu:2", "/cpu:3"], ["tower 1: ('/cpu:1',) is not a device", *ONE_DEVICE]),
        (["/cpu:0", "nonsense", "/cpu:2", "/cpu:3"], ["tower 1: 'nonsense' cannot be read as a device", *ONE_DEVICE]),
        (["/cpu:0", "/cpu:one", "/cpu:2", "/cpu:3"], ["tower 1: '/cpu:one' cannot be read as a device"]),
        (["/cpu:0", "/cpu:-1", "/cpu:2", "/cpu:3"], ["tower 1: '/cpu:-1' has a number below 0", *ONE_DEVICE]),
        ("/cpu:0", ["devices must be a list with one device for each tower, not '/cpu:0'"]),
        (4, ["devices must be a list with one device for each tower, not 4"]),
        ({"/cpu:0"}, ["devices must be a list with one device for each tower, not {'/cpu:0'}"]),
        (None, ["devices must be a list with one device for each tower, not None"]),
        ([], ["devices is empty"]),
    ],
)
def test_devices_that_are_none(graph, devices, message):
    refused(HierAllreduceError, message, allreduce_grads, four_by_two(), devices)


@pytest.mark.tf2
def test_a_physical_device_is_no_place_for_ops(graph):
    devices = tf.config.list_physical_devices("CPU") * 4
    message = ["tower 0: PhysicalDevice", "tf.config.list_logical_devices()"]
    refused(HierAllreduceError, message, allreduce_grads, four_by_two(), devices)


@pytest.mark.parametrize(
    "groups, message",
    [
        (((0, 1), (2,)), ["missing [3]", "groups=((0, 1), (2, 3))"]),
        ([[0, 1], [2, 4]], ["unknown [4]", "missing [3]"]),
        ([[0, 1, 2, 3], []], ["an empty group"]),
    ],
)
def test_groups_that_do_not_fit_the_towers(graph, groups, message):
    refused(HierAllreduceError, message, allreduce_grads, four_by_two(), cpus(4), strategy=Strategy(groups=groups))


@pytest.mark.tf2
def test_values_do_not_belong_into_a_graph():
    eager = tf.constant([1.0, 2.0, 3.0])
    with tf.Graph().as_default():
        message = ["tower 1 (/cpu:1), variable 0", "does not belong to the graph"]
        refused(HierAllreduceError, message, allreduce_grads, with_entry(1, 0, eager), cpus(4))


@pytest.mark.tf2
def test_eagerly_the_checks_are_the_same():
    grads = [[tf.zeros([3])], [tf.zeros([4])]]
    with pytest.raises(
        HierAllreduceError, match=r"tower \d \(/cpu:\d\), variable 0 .*the shape differs between towers"
    ):
        allreduce_grads(grads, cpus(2))
    with pytest.raises(HierAllreduceError, match=r"tower 1: <function .* is not a device"):
        allreduce_grads([[tf.zeros([3])]] * 2, ["/cpu:0", lambda op: "/cpu:1"])
    with tf.Graph().as_default():
        symbolic = tf.zeros([3])
    with pytest.raises(HierAllreduceError, match=r"tower 1 \(/cpu:1\), variable 0"):
        allreduce_grads([[tf.zeros([3])], [symbolic]], cpus(2))


# ---- pairs -----------------------------------------------------------------------------------------


def pairs(orders, prefix="tower{}/"):
    """Rows of (gradient, variable); ``orders[tower]`` names the tower's variables."""
    rows = []
    for tower, names in enumerate(orders):
        grads = gradients_on(cpus(4)[tower : tower + 1], [[np.zeros(2, np.float32)] * len(names)])[0]
        mine = [tf1.get_variable(prefix.format(tower) + name, [2], use_resource=True) for name in names]
        rows.append(list(zip(grads, mine)))
    return rows


@pytest.mark.parametrize("prefix", ["tower{}/", "gpu_{}/", "replica_{}/", "m{}/", "model_{}/", "net/tower{}/"])
def test_towers_that_list_their_variables_in_another_order(graph, prefix):
    rows = pairs(["wbc", "wbc", "bwc"], prefix)
    message = ["tower 2 (/cpu:2), variable 0 ('b')", "tower 0 has 'w' there", "in one order on every tower"]
    refused(HierAllreduceError, message, allreduce_grads_and_vars, rows, cpus(3))


def test_a_mistake_in_the_order_is_seen_without_scopes_too(graph):
    """TensorFlow numbers the copies of a layer, and so do people."""
    for names in ([["w/k", "v/k"], ["v_1/k", "w_1/k"]], [["w0", "v0"], ["v1", "w1"]]):
        message = ["tower 1 (/cpu:1), variable 0", f"tower 0 has {names[0][0]!r} there", "in one order on every tower"]
        refused(HierAllreduceError, message, allreduce_grads_and_vars, named(names), cpus(2))


def test_numbered_layers_of_a_model_are_no_mistake(graph):
    rows = named([["conv/w", "conv_1/w", "conv_2/w", "out/w"], ["conv_3/w", "conv_4/w", "conv_5/w", "out_1/w"]])
    assert len(allreduce_grads_and_vars(rows, cpus(2))) == 2


def test_several_towers_with_reference_variables_get_a_warning(graph):
    def made(tower, resource):
        return tf1.get_variable(f"{resource}{tower}", [2], use_resource=resource)

    rows = [[(tf.zeros([2]), made(tower, resource)) for resource in (True, False)] for tower in range(2)]
    with pytest.warns(UserWarning, match="1 of 2 .* 'False0'.*enable_resource_variables.*--use_resource_vars") as seen:
        allreduce_grads_and_vars(rows, cpus(2))
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allreduce_grads_and_vars(rows[:1], cpus(1))
        allreduce_grads_and_vars([row[:1] for row in rows], cpus(2))


def named(rows):
    """Rows of (gradient, variable) for variables of these names; one name is one variable."""
    names = {name for row in rows for name in row}
    made = {name: tf1.get_variable(name, [2], use_resource=True) for name in sorted(names)}
    return [[(tf.identity(made[name]), made[name]) for name in row] for row in rows]


@pytest.mark.parametrize(
    "rows",
    [
        [["s1/w", "s2/w"], ["tower1/s2/w", "tower1/s1/w"]],
        [["t1/w", "t2/w"], ["tower1/t2/w", "tower1/t1/w"]],
        [["t1/v", "t1/w"], ["tower1/t1/w", "tower1/t1/v"]],
        [["gpu_0/t1/w", "gpu_0/t2/w"], ["gpu_1/t2/w", "gpu_1/t1/w"]],
        [["t1/w", "t2/w"], ["t2/w", "t1/w"]],
        [["tower0/t1/w", "shared", "tower0/t2/w"], ["tower1/t2/w", "shared", "tower1/t1/w"]],
        [["tower0/v", "tower0/w", "all/shared"], ["tower1/w", "tower1/v", "all/shared"]],
    ],
)
def test_a_models_own_scopes_are_no_towers(graph, rows):
    """Stripped like a tower's, they would make t1/w and t2/w the same name, and their gradients be added up."""
    message = ["tower 1 (/cpu:1), variable 0", "tower 0 has ", "in one order on every tower"]
    mixed_up = named(rows)
    refused(HierAllreduceError, message, allreduce_grads_and_vars, mixed_up, cpus(2))
    in_order = [sorted(row, key=lambda pair: pair[1].name) for row in mixed_up]
    assert len(allreduce_grads_and_vars(in_order, cpus(2))) == 2


@pytest.mark.parametrize(
    "rows, shown",
    [
        ([["layer/w", "layer/b"], ["tower1/layer/w", "tower1/layer/b"]], ["layer/w", "layer/b"]),
        ([["t1/w"], ["tower1/t1/w"]], ["t1/w"]),
        ([["tower0/layer/w", "tower0/b"], ["tower1/layer/w", "tower1/b"]], ["layer/w", "b"]),
        ([["model_0/t1/w", "model_0/t1/b"], ["model_1/t1/w", "model_1/t1/b"]], ["t1/w", "t1/b"]),
        ([["net/gpu_0/w", "net/gpu_0/b"], ["net/gpu_1/w", "net/gpu_1/b"]], ["w", "b"]),
        ([["w", "t1/b"], ["w", "t1/b"]], ["w", "t1/b"]),
        ([["tower0/w", "all/shared"], ["tower1/w", "all/shared"]], ["w", "all/shared"]),
        ([["tower0/w", "tower0/layer/b"]], ["w", "layer/b"]),
        ([["w", "t1/b"]], ["w", "t1/b"]),
    ],
)
def test_variables_are_called_by_their_names_in_the_model(graph, rows, shown):
    assert variable_names(named(rows), cpus(len(rows))) == shown


@pytest.mark.parametrize(
    "rows, some",
    [
        ([["t1/w", "t2/w", "b"], ["tower1/t1/w", "tower1/b"]], "t2/w"),
        ([["layer/w"], ["tower1/layer/w", "tower1/t2/w", "tower1/b"]], "b, t2/w"),
        ([["m_0/layer/w"], ["m_1/layer/w", "m_1/layer/b"]], "layer/b"),
        ([["all/w"], ["all/w", "tower1/only/b", "tower1/c"]], "c, only/b"),
    ],
)
def test_towers_with_more_or_fewer_variables(graph, rows, some):
    with pytest.raises(HierAllreduceError) as caught:
        allreduce_grads_and_vars(named(rows), cpus(2))
    assert str(caught.value).endswith(f"; not on every tower: {some}")


def placed(count):
    """As many towers and variables, each tower's on its own device."""

    def row(tower):
        mine = [tf1.get_variable(f"tower{tower}/{name}", [2], use_resource=True) for name in "wbc"[:count]]
        return [(tf.identity(var), var) for var in mine]

    return on_towers(cpus(count), row)


@pytest.mark.parametrize(
    "device, wanted, expected",
    [
        ("/job:worker/replica:0/task:1/device:GPU:1", "/gpu:1", True),
        ("/device:GPU:1", "/job:worker/task:1/gpu:1", True),
        ("/job:worker/task:1/device:GPU:1", "/job:worker/task:0/gpu:1", False),
        ("/device:GPU:0", "/gpu:1", False),
        ("/device:CPU:1", "/gpu:1", False),
        ("/device:CPU:1", "/job:worker", True),
        ("/device:CPU:1", "", True),
        (None, "/cpu:1", True),
    ],
)
def test_two_names_of_a_device(device, wanted, expected):
    assert devices_match(device, wanted) == expected == devices_match(wanted, device)


@pytest.mark.parametrize("mixed_up", [lambda rows: list(zip(*rows)), lambda rows: rows[::-1]])
@pytest.mark.parametrize("count", [2, 3])
def test_rows_and_towers_mixed_up(graph, mixed_up, count):
    """As many towers as variables: N rows of K would be added up in silence."""
    message = [" (/cpu:", "the variable is on", "rows[tower][variable]"]
    refused(HierAllreduceError, message, allreduce_grads_and_vars, mixed_up(placed(count)), cpus(count))


def test_variables_that_towers_share_may_be_anywhere(graph):
    (_, first), (second, _) = placed(2)
    rows = [[(tf.identity(var), var) for _, var in (second, first)] for _ in range(2)]  # on cpu:1, then cpu:0
    assert len(allreduce_grads_and_vars(rows, cpus(2))) == 2


def test_all_variables_may_be_on_one_device(graph):
    with tf.device("/cpu:0"):
        rows = pairs(["wb", "wb"])
    assert len(allreduce_grads_and_vars(rows, cpus(2))) == 2


def test_a_pair_without_a_variable(graph):
    rows = pairs(["wb", "wb"])
    rows[1][1] = (rows[1][1][0], None)
    message = ["tower 1 (/cpu:1), variable 1", "expected a variable after the gradient, not None"]
    refused(HierAllreduceError, message, allreduce_grads_and_vars, rows, cpus(2))


def test_pairs_of_which_one_tower_has_fewer(graph):
    message = ["tower 0 (/cpu:0) has 2", "tower 1 (/cpu:1) has 1"]
    refused(HierAllreduceError, message, allreduce_grads_and_vars, pairs(["wb", "w"]), cpus(2))


def test_messages_about_pairs_name_the_variable(graph):
    rows = pairs(["wb", "wb"])
    rows[1][1] = (tf.constant([True, False]), rows[1][1][1])
    message = ["tower 1 (/cpu:1), variable 1 ('b')", "bool has no sum"]
    refused(HierAllreduceError, message, allreduce_grads_and_vars, rows, cpus(2))


@pytest.mark.parametrize(
    "entry", [lambda grad: grad, lambda grad: (grad,), lambda grad: (grad, 0, 0), lambda grad: None]
)
def test_gradients_alone_are_no_pairs(graph, entry):
    rows = pairs(["wb", "wb"])
    rows[1][1] = entry(rows[1][1][0])
    message = ["tower 1 (/cpu:1), variable 1", "expected a (gradient, variable) pair"]
    refused(HierAllreduceError, message, allreduce_grads_and_vars, rows, cpus(2))


@pytest.mark.parametrize("rows", [None, [None, None], 3, [3, 3]])
def test_rows_of_pairs_that_are_no_rows(graph, rows):
    refused(HierAllreduceError, ["all_grads"], allreduce_grads_and_vars, rows, cpus(2))


def test_a_variable_is_no_row(graph):
    variable = tf.compat.v1.get_variable("w", [2], use_resource=True)
    message = ["tower 0 (/cpu:0): its row is one", "Variable"]
    refused(HierAllreduceError, message, allreduce_grads, [variable, variable], cpus(2))


@pytest.mark.parametrize("cluster", ["cluster.yaml", ["10.0.0.1:2222"]])
def test_a_cluster_must_be_one(graph, cluster):
    message = ["cluster=", "expected a hier_allreduce.Cluster (from a file: Cluster.load)"]
    refused(ClusterError, message, allreduce_grads, four_by_two(), cpus(4), cluster=cluster)
