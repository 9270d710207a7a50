"""Each kernel of the emulated GPU gives what TensorFlow's CPU kernel gives, for each dtype."""

import inspect
from typing import Callable, Dict

import numpy as np
import pytest
import tensorflow as tf
from emulated_gpu import registrations
from helpers.real_gpus import ARE_EMULATED

if not ARE_EMULATED:
    pytest.skip("needs emulated GPUs: pytest --devices gpu", allow_module_level=True)

TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "complex64": 2e-6}
"""How far two kernels may differ, relatively. Others: 1e-12 for 64-bit floats, 0 for integers."""


NOT_COMPARED = {
    ("Inv", "int64"): "the CPU has no such kernel",
    ("Reciprocal", "int64"): "the CPU has no such kernel",
    ("Round", "int32"): "the CPU's kernel gives zeros",
    ("Round", "int64"): "the CPU's kernel gives zeros",
    ("AssignVariableOp", "int32"): "GPUs have no variables of int32",
    ("AssignAddVariableOp", "int32"): "GPUs have no variables of int32",
    ("AssignSubVariableOp", "int32"): "GPUs have no variables of int32",
}


def some(dtype, *shape, above=None):
    """Small numbers of this dtype, with fractions and signs if it has them, and above ``above``."""
    dtype = tf.as_dtype(dtype)
    numbers = np.random.RandomState(0).randint(-8, 9, shape or (2, 3)).astype("float64")
    if above is not None:
        numbers = np.abs(numbers) + above + 1
    elif dtype.is_unsigned:
        numbers = np.abs(numbers)
    if dtype.is_floating or dtype.is_complex:
        numbers = numbers / 4
    if dtype.is_complex:
        numbers = numbers + 1j * numbers[..., ::-1]
    return numbers.astype(dtype.as_numpy_dtype)


class Case:
    """An op's inputs in order, and its attributes. ``variables``: so many inputs are variables."""

    def __init__(self, *inputs, variables=0, **attributes):
        self.inputs = inputs
        self.variables = variables
        self.attributes = attributes

    def run(self, op, device):
        """The outputs, and the variables' values after the op."""
        function = getattr(tf.raw_ops, op)
        names = list(inspect.signature(function).parameters)
        with tf.device(device):
            variables = [tf.Variable(value) for value in self.inputs[: self.variables]]
            handles = [variable.handle for variable in variables]
            inputs = [*handles, *self.inputs[self.variables :]]
            result = function(**dict(zip(names, inputs)), **self.attributes)
            outputs = [] if result is None or isinstance(result, tf.Operation) else result
            return [*as_arrays(outputs), *as_arrays(variables)]


def as_arrays(values):
    return [value.numpy() for value in tf.nest.flatten(values)]


# ---- The cases: a function of the dtypes by attribute for each op ----
CASES: Dict[str, Callable[[Dict[str, str]], "Case"]] = {}


def case(*ops):
    """Let the function give the case of these ops."""

    def add(function):
        CASES.update(dict.fromkeys(" ".join(ops).split(), function))
        return function

    return add


@case("Abs Ceil Cos Elu Erf Exp Expm1 Floor IsFinite IsInf IsNan Neg OnesLike Relu Relu6 Round")
@case("Sigmoid Sign Sin Snapshot Softplus Square Tanh ZerosLike L2Loss LogSoftmax Softmax")
def unary(t):
    return Case(some(t["T"]))


@case("Inv Log Log1p Reciprocal Rsqrt Sqrt")
def unary_of_positive(t):
    return Case(some(t["T"], above=0))


@case("LogicalNot")
def logical_not(t):
    return Case([True, False])


@case("Add AddV2 Equal Greater GreaterEqual Less LessEqual Maximum Minimum Mul NotEqual")
@case("SquaredDifference Sub")
def binary(t):
    return Case(some(t["T"], 4, 3), some(t["T"], 3))


@case("Div DivNoNan FloorDiv FloorMod RealDiv Xdivy")
def division(t):
    return Case(some(t["T"], 4, 3), some(t["T"], 3, above=0))


@case("Pow")
def power(t):
    return Case(some(t["T"], 4, 3, above=0) % 3, some(t["T"], 3, above=0) % 3)


@case("LogicalAnd LogicalOr")
def logical(t):
    return Case([True, True, False, False], [True, False, True, False])


@case("EluGrad InvGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SigmoidGrad SoftplusGrad")
@case("SqrtGrad TanhGrad")
def gradient(t):
    return Case(some(t["T"], above=0), some(t["T"]))


@case("AddN")
def add_n(t):
    return Case([some(t["T"]), some(t["T"]) * 2, some(t["T"])])


@case("Cast")
def cast(t):
    return Case(some(t["SrcT"]), DstT=tf.as_dtype(t["DstT"]))


@case("ClipByValue")
def clip(t):
    bounds = [np.asarray(number, some(t["T"]).dtype) for number in (1, 2)]
    return Case(some(t["T"]), *bounds)


@case("Select SelectV2")
def select(t):
    return Case(some("int32") > 0, some(t["T"]), some(t["T"])[::-1])


@case("Max Mean Min Prod Sum")
def reduction(t):
    return Case(some(t["T"], 2, 3, 2), some(t["Tidx"], 1) * 0 + 1)


@case("All Any")
def reduction_of_bool(t):
    return Case(some("int32", 4, 3) > 0, some(t["Tidx"], 1) * 0 + 1, keep_dims=True)


@case("ArgMax ArgMin")
def arg_best(t):
    return Case(some(t["T"], 2, 5, 2), 1, output_type=tf.as_dtype(t["output_type"]))


@case("MatMul")
def mat_mul(t):
    return Case(some(t["T"], 4, 3), some(t["T"], 5, 4), transpose_a=True, transpose_b=True)


@case("BatchMatMul BatchMatMulV2")
def batch_mat_mul(t):
    return Case(some(t["T"], 2, 3, 4), some(t["T"], 2, 4, 5))


@case("BiasAdd")
def bias_add(t):
    return Case(some(t["T"], 4, 3), some(t["T"], 3))


@case("BiasAddGrad")
def bias_add_grad(t):
    return Case(some(t["T"], 2, 4, 3))


@case("SoftmaxCrossEntropyWithLogits")
def cross_entropy(t):
    return Case(some(t["T"], 4, 3), some(t["T"], 4, 3, above=0))


@case("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(t):
    return Case(some(t["T"], 4, 3), np.asarray([0, 2, 1, 2], t["Tlabels"]))


@case("BroadcastTo")
def broadcast_to(t):
    return Case(some(t["T"], 3, 1), [2, 3, 4])


@case("Concat")
def concat(t):
    return Case(1, [some(t["T"], 2, 3), some(t["T"], 2, 1)])


@case("ConcatV2")
def concat_v2(t):
    return Case([some(t["T"], 2, 3), some(t["T"], 2, 1)], -1)


@case("Empty")
def empty(t):
    return Case([2, 3], dtype=tf.as_dtype(t["dtype"]), init=True)


@case("Fill")
def fill(t):
    return Case(np.asarray([2, 3], t["index_type"]), some(t["T"])[0, 0])


@case("OneHot")
def one_hot(t):
    on, off = some(t["T"], 2)
    return Case(np.asarray([0, 2, 1], t["TI"]), 4, on, off, axis=0)


@case("Pack")
def pack(t):
    return Case([some(t["T"]), some(t["T"])], axis=1)


@case("Unpack")
def unpack(t):
    return Case(some(t["T"]), num=3, axis=1)


@case("Pad")
def pad(t):
    return Case(some(t["T"]), np.asarray([[1, 0], [2, 1]], t["Tpaddings"]))


@case("PadV2")
def pad_v2(t):
    return Case(some(t["T"]), np.asarray([[1, 0], [2, 1]], t["Tpaddings"]), some(t["T"])[0, 0])


@case("Range")
def numbers_in_range(t):
    return Case(*np.asarray([1, 9, 2]).astype(some(t["Tidx"]).dtype))


@case("ReverseV2")
def reverse(t):
    return Case(some(t["T"], 2, 3, 2), np.asarray([0, -1], t["Tidx"]))


@case("Slice")
def slice_of(t):
    return Case(some(t["T"], 4, 3), [1, 0], [2, -1])


@case("Split")
def split(t):
    return Case(1, some(t["T"], 2, 6), num_split=3)


@case("SplitV")
def split_v(t):
    return Case(some(t["T"], 2, 6), np.asarray([1, -1, 2], t["Tlen"]), 1, num_split=3)


MASKS = {"begin_mask": 1, "end_mask": 0, "ellipsis_mask": 2, "new_axis_mask": 4}
SLICES = {**MASKS, "shrink_axis_mask": 16}


@case("StridedSlice")
def strided_slice(t):  # [:3:2, ..., newaxis, -1:0:-1, 1]
    return Case(
        some(t["T"], 4, 3, 5, 2), [0, 0, 0, -1, 1], [3, 0, 0, 0, 2], [2, 1, 1, -1, 1], **SLICES
    )


@case("StridedSliceGrad")
def strided_slice_grad(t):
    indices = [[0, 0, 0, -1, 1], [3, 0, 0, 0, 2], [2, 1, 1, -1, 1]]
    return Case([4, 3, 5, 2], *indices, some(t["T"], 2, 3, 1, 4), **SLICES)


@case("Tile")
def tile(t):
    return Case(some(t["T"], 2, 3), np.asarray([2, 3], t["Tmultiples"]))


@case("Transpose")
def transpose(t):
    return Case(some(t["T"], 2, 3, 4), [2, 0, 1])


@case("Gather")
def gather(t):
    return Case(some(t["Tparams"], 4, 3), np.asarray([[3, 0], [1, 1]], t["Tindices"]))


@case("GatherV2")
def gather_v2(t):
    return Case(some(t["Tparams"], 2, 4, 3), np.asarray([3, 0, 1], t["Tindices"]), 1)


@case("Unique")
def unique(t):
    return Case(some(t["T"], 20), out_idx=tf.as_dtype(t["out_idx"]))


@case("Where")
def where(t):
    return Case(some(t["T"], 5, 4) * some(t["T"], 5, 4).astype("bool"))


@case("UnsortedSegmentSum")
def segment_sum(t):
    return Case(some(t["T"], 4, 3), np.asarray([2, 0, 2, -1], t["Tindices"]), 3)


@case("RandomStandardNormal RandomUniform TruncatedNormal")
def random(t):
    return Case([50, 3], dtype=tf.as_dtype(t["dtype"]), seed=3, seed2=5)


@case("RandomUniformInt")
def random_integers(t):
    least, limit = np.asarray([-5, 20], t["Tout"])
    return Case([50], least, limit, seed=3, seed2=5)


@case("StatelessRandomNormal StatelessRandomUniform StatelessTruncatedNormal")
def stateless(t):
    return Case([50, 3], [7, 9], dtype=tf.as_dtype(t["dtype"]))


PHILOX = [np.asarray([5], "uint64"), np.asarray([7, 2], "uint64"), 1]


@case("StatelessRandomNormalV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2")
def stateless_v2(t):
    return Case([50, 3], *PHILOX, dtype=tf.as_dtype(t["dtype"]))


@case("StatelessRandomUniformIntV2")
def stateless_integers(t):
    return Case([50], *PHILOX, *np.asarray([-5, 20], t["dtype"]))


@case("StatelessRandomGetKeyCounter")
def key_and_counter(t):
    return Case([7, 9])


# ---- Variables ----


@case("AssignAddVariableOp AssignSubVariableOp AssignVariableOp")
def assign(t):
    return Case(some(t["dtype"]), some(t["dtype"])[::-1], variables=1)


@case("ResourceGather")
def resource_gather(t):
    indices = np.asarray([[3, 0], [1, 1]], t["Tindices"])
    return Case(some(t["dtype"], 4, 3), indices, variables=1, dtype=tf.as_dtype(t["dtype"]))


@case("ResourceScatterAdd ResourceScatterMul ResourceScatterSub")
def scatter(t):
    rows = some(t["dtype"], 3, 2)
    return Case(some(t["dtype"], 4, 2), np.asarray([3, 0, 3], t["Tindices"]), rows, variables=1)


@case("ResourceScatterUpdate")
def scatter_update(t):
    rows = some(t["dtype"], 2, 2)
    return Case(some(t["dtype"], 4, 2), np.asarray([3, 0], t["Tindices"]), rows, variables=1)


def optimizer(slots, before, after, is_sparse=False, **attributes):
    """A case with ``slots`` variables, scalars before the gradient, and scalars after it."""

    def update(t):
        def scalars(numbers):
            return [np.asarray(number, some(t["T"]).dtype) for number in numbers]

        rows = 2 if is_sparse else 4
        inputs = [some(t["T"], 4, 3, above=0) for _ in range(slots)]
        inputs += [*scalars(before), some(t["T"], rows, 3)]
        if is_sparse:
            inputs.append(np.asarray([3, 1], t["Tindices"]))
        return Case(*inputs, *scalars(after), variables=slots, **attributes)

    return update


ADAM = [0.75, 0.5, 0.125, 0.5, 0.25, 0.5]
CASES.update(
    ResourceApplyAdaMax=optimizer(3, [0.75, 0.125, 0.5, 0.25, 0.5], []),
    ResourceApplyAdadelta=optimizer(3, [0.125, 0.5, 0.25], []),
    ResourceApplyAdagrad=optimizer(2, [0.125], []),
    ResourceApplyAdagradV2=optimizer(2, [0.125, 0.25], []),
    ResourceApplyAdam=optimizer(3, ADAM, [], use_nesterov=True),
    ResourceApplyAdamWithAmsgrad=optimizer(4, ADAM, []),
    ResourceApplyCenteredRMSProp=optimizer(4, [0.125, 0.5, 0.25, 64], []),
    ResourceApplyFtrl=optimizer(3, [], [0.125, 0.25, 0.5, -0.5]),
    ResourceApplyFtrlV2=optimizer(3, [], [0.125, 0.25, 0.5, 0.25, -0.5]),
    ResourceApplyGradientDescent=optimizer(1, [0.125], []),
    ResourceApplyKerasMomentum=optimizer(2, [0.125], [0.5], use_nesterov=True),
    ResourceApplyMomentum=optimizer(2, [0.125], [0.5], use_nesterov=True),
    ResourceApplyRMSProp=optimizer(3, [0.125, 0.5, 0.25, 0.5], []),
    ResourceSparseApplyAdadelta=optimizer(3, [0.125, 0.5, 0.25], [], is_sparse=True),
    ResourceSparseApplyAdagrad=optimizer(2, [0.125], [], is_sparse=True),
    ResourceSparseApplyAdagradV2=optimizer(2, [0.125, 0.25], [], is_sparse=True),
    ResourceSparseApplyFtrl=optimizer(3, [], [0.125, 0.25, 0.5, -0.5], is_sparse=True),
    ResourceSparseApplyKerasMomentum=optimizer(2, [0.125], [0.5], is_sparse=True),
)


# ---- The tests ----


@pytest.mark.parametrize("op", registrations.ops_in_file())
def test_kernel_gives_what_the_cpu_gives(op):
    for kernel in sorted(registrations.kernels_of(op)):
        if any((op, dtype) in NOT_COMPARED for _, dtype in kernel.dtypes):
            continue
        on_both = CASES[op](dict(kernel.dtypes))
        for found, wanted in zip(on_both.run(op, "/gpu:0"), on_both.run(op, "/cpu:0")):
            dtype = tf.as_dtype(found.dtype)
            tolerance = TOLERANCE.get(dtype.name, 0 if dtype.is_integer or dtype.is_bool else 1e-12)
            wide = "complex128" if dtype.is_complex else "float64"
            np.testing.assert_allclose(
                found.astype(wide), wanted.astype(wide), tolerance, tolerance, err_msg=str(kernel)
            )


def test_registrations_are_those_of_tensorflow_with_cuda():
    """In this process TensorFlow has the plug-in's kernels, and its own for all devices."""
    lines = []
    for op in registrations.ops_in_file():
        lines += registrations.as_lines(op, registrations.kernels_of(op))
    with open(registrations.FILE, encoding="utf-8") as file:
        assert file.read() == registrations.HEADER + "\n".join(lines) + "\n"
