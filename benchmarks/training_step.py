"""The graph of a training step, around any all-reduce.

::

    forward ─► kernel of the last layer ─► … ─► kernel of the first layer      on each of K GPUs
                      │ gradient                     │ gradient
                      └────────── all-reduce, K×N ───┘ ─► ResourceApplyGradientDescent

The kernels are those of a :class:`Tower`. On emulated GPUs a kernel computes nothing and takes as
long as its name says; its launch keeps the host busy. ``real_tower.py`` has those of real GPUs.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple
from unittest import mock

import tensorflow as tf
from baselines import Build, Matrix
from rounds import COMPARED, UNFLAGGED
from shapes import GradientShape, load_model

import hier_allreduce

tf1 = tf.compat.v1
raw = tf.raw_ops

FORWARD_KERNELS = 60
OF_PASSES = "resnet50"  # the model whose backward pass has a length; others' are as their bytes


class Pass(NamedTuple):
    """The computation of a training step: shapes of N gradients, and the backward pass in ms.

    Without a pass, 0 ms, all gradients are ready at once.
    """

    shapes: Sequence[GradientShape]
    backward_ms: float

    @property
    def kernels(self) -> int:
        """The kernels of the forward and the backward pass on one GPU."""
        return FORWARD_KERNELS + len(self.shapes) if self.backward_ms else 0

    @property
    def kernels_ms(self) -> float:
        """The time of these kernels; the forward pass takes half of the backward pass."""
        return 1.5 * self.backward_ms

    @property
    def forward(self) -> List[float]:
        """The microseconds of the forward pass's kernels."""
        return [500 * self.backward_ms / FORWARD_KERNELS] * FORWARD_KERNELS

    @property
    def backward(self) -> List[float]:
        """The microseconds of N kernels: half of the pass evenly, half by the gradients' bytes."""
        half = 500 * self.backward_ms
        total = sum(shape.bytes for shape in self.shapes)
        return [half / len(self.shapes) + half * shape.bytes / total for shape in self.shapes]


def load_pass(model: str, pass_ms: float, ids: int = 0) -> Pass:
    """Return the pass of a model, if ResNet-50's backward pass takes ``pass_ms``.

    A tower reads ``ids`` rows of each embedding; with 0 embeddings are left out.
    """
    shapes = load_model(model, ids)
    of_all = [sum(shape.bytes for shape in some) for some in (shapes, load_model(OF_PASSES))]
    return Pass(shapes, pass_ms * of_all[0] / of_all[1])


class Variable(NamedTuple):
    """A variable by its name; ``value`` fills it, or nothing does if that is None."""

    name: str
    shape: Tuple[int, ...]
    device: str
    value: Optional[float]

    def handle(self) -> Any:
        """Return the handle, on the device; a function captures it, as those of Keras do."""
        with tf.init_scope(), tf.device(self.device):
            return raw.VarHandleOp(dtype=tf.float32, shape=self.shape, shared_name=self.name)

    def read(self) -> Any:
        """Return the value, on the device."""
        handle = self.handle()
        with tf.device(self.device):
            value = raw.ReadVariableOp(resource=handle, dtype=tf.float32)
        value.set_shape(self.shape)
        return value

    def fill(self) -> Any:
        """Return the op that makes the variable."""
        handle = self.handle()
        with tf.device(self.device):
            if self.value is None:
                value = raw.Empty(shape=list(self.shape), dtype=tf.float32)
            else:
                value = tf.fill(self.shape, tf.constant(self.value))
            return raw.AssignVariableOp(resource=handle, value=value)


class Tower:
    """A chain of kernels on an emulated GPU. Each needs the one before."""

    def __init__(self, number: int, device: str):
        """Begin the chain at variables, since Grappler computes what it knows beforehand."""
        self.device = device
        self.variables = [Variable(f"{name}{number}", (), device, 1.0) for name in ("value", "one")]
        self._value, self._one = (variable.read() for variable in self.variables)

    def launch(self, name: str, microseconds: float) -> None:
        """Add the next kernel."""
        name = f"{name}_burn_{microseconds:.1f}"
        self._value = tf.maximum(self._value, self._one, name=name)

    def gradient(self, name: str, shape: Sequence[int]) -> Any:
        """Return a gradient that is ready when the last kernel has run."""
        return tf.fill(shape, self._value, name=f"{name}_burn_1")

    def rows(self, name: str, shape: Sequence[int], ids: int) -> Any:
        """Return a sparse gradient of a variable with this shape, of so many rows."""
        values = self.gradient(name, [ids, *shape[1:]])
        indices = tf.cast(self.gradient(f"{name}_ids", [ids]), tf.int64, name=f"{name}_int_burn_1")
        return tf.IndexedSlices(values, indices, tf.constant(list(shape), tf.int64))


NewTower = Callable[[int, str], Tower]


class TrainingStep(NamedTuple):
    """A graph, the op that runs a step, and those that fill the variables and copy them."""

    graph: Any
    step: Any
    fill: Any
    start: Any = None


def training_step(
    work: Pass,
    devices: List[str],
    reduce: Optional[Build],
    average: bool,
    new_tower: NewTower = Tower,
) -> TrainingStep:
    """Return the step with an all-reduce, or without one if ``reduce`` is None."""
    with tf.Graph().as_default() as graph:
        step, variables = add_step(work, devices, reduce, average, new_tower)
        return TrainingStep(graph, step, tf.group(*(variable.fill() for variable in variables)))


def add_step(
    work: Pass,
    devices: List[str],
    reduce: Optional[Build],
    average: bool,
    new_tower: NewTower = Tower,
) -> Tuple[Any, List[Variable]]:
    """Add a step to the current graph, and return its op and the variables to fill."""
    variables: List[Variable] = []
    rows: Matrix = [
        _gradients(work, number, new_tower(number, device), variables)
        for number, device in enumerate(devices)
    ]
    if reduce is not None:
        rows = reduce(rows, devices, average)
    updates = []
    for number, (device, row) in enumerate(zip(devices, rows)):
        for n, grad in enumerate(row):
            name = f"variable{n}_of_tower{number}"
            variable = Variable(name, work.shapes[n].shape, device, None)
            updates.append(_update(variable, grad, variables))
    return tf.group(*updates), variables


def updating_step(work: Pass, devices: List[str], kind: str) -> TrainingStep:
    """Return the step of a ``TowerOptimizer``, which copies variables.

    Args:
        kind: an update, and what it is without, or what is fetched with it.
    """
    tower_variables: List[Variable] = []
    rows = []
    update = kind.replace(UNFLAGGED, "").replace(COMPARED, "")
    with contextlib.ExitStack() as around, tf.Graph().as_default() as graph:
        if kind.endswith(UNFLAGGED):
            flags_of = "hier_allreduce.training.update.flags_of"
            around.enter_context(mock.patch(flags_of, lambda *_: []))
        sgd = tf1.train.GradientDescentOptimizer(0.1)
        optimizer = hier_allreduce.TowerOptimizer(sgd, devices, average=True, update=update)
        for number, device in enumerate(devices):
            grads = _gradients(work, number, Tower(number, device), tower_variables)
            with tf.device(device), tf1.variable_scope(f"tower{number}", use_resource=True):
                own = [
                    tf1.get_variable(f"variable{n}", shape.shape, initializer=_empty)
                    for n, shape in enumerate(work.shapes)
                ]
            rows.append(list(zip(grads, own)))
        step = optimizer.apply_gradients(rows)
        made = [variable.fill() for variable in tower_variables]
        fill = tf.group(tf1.global_variables_initializer(), *made)
        if kind.endswith(COMPARED):
            step = [step, hier_allreduce.copy_check(step).fingerprints]
        return TrainingStep(graph, step, fill, optimizer.init_op)


def _empty(shape: Any, dtype: Any = tf.float32, partition_info: Any = None) -> Any:
    return raw.Empty(shape=list(shape), dtype=dtype)


def _gradients(work: Pass, number: int, tower: Tower, variables: List[Variable]) -> List[Any]:
    """Return the N gradients of a tower; the last one is ready first."""
    grads: List[Any] = []
    with tf.device(tower.device), tf.name_scope(f"tower{number}"):
        for n, microseconds in enumerate(work.forward if work.kernels else []):
            tower.launch(f"forward{n}", microseconds)
        for n, microseconds in reversed(list(enumerate(work.backward))):
            if work.kernels:
                tower.launch(f"backward{n}", microseconds)
            of_variable = work.shapes[n]
            if of_variable.ids:
                grads.append(tower.rows(f"grad{n}", of_variable.shape, of_variable.ids))
            else:
                grads.append(tower.gradient(f"grad{n}", of_variable.shape))
    variables += tower.variables
    return grads[::-1]


def _update(variable: Variable, grad: Any, variables: List[Variable]) -> Any:
    """Return the update of a variable, which is added to ``variables``: SGD, of rows Adagrad."""
    variables.append(variable)
    handle = variable.handle()
    if not isinstance(grad, tf.IndexedSlices):
        with tf.device(variable.device):
            return raw.ResourceApplyGradientDescent(var=handle, alpha=0.1, delta=grad)
    squares = variable._replace(name=f"squares_of_{variable.name}")
    variables.append(squares)
    accumulator = squares.handle()
    with tf.device(variable.device):
        # TensorFlow's optimizers add up rows of equal index, whether there are any or not
        indices, places = tf.unique(grad.indices)
        rows = tf.math.unsorted_segment_sum(grad.values, places, tf.size(indices))
        return raw.ResourceSparseApplyAdagrad(
            var=handle, accum=accumulator, lr=0.1, grad=rows, indices=indices
        )


def chains(devices: List[str], length: int) -> TrainingStep:
    """Return a step of a chain of ``length`` kernels without time on each device."""
    variables: List[Variable] = []
    ends = []
    with tf.Graph().as_default() as graph:
        for number, device in enumerate(devices):
            with tf.device(device):
                tower = Tower(number, device)
                variables += tower.variables
                value, one = (variable.read() for variable in tower.variables)
                for place in range(length):
                    value = tf.minimum(value, one, name=f"chain{place}_burn_0")
                # else Grappler would drop the chain
                end = Variable(f"end_of_tower{number}", (), device, None)
                ends.append(_update(end, value, variables))
        fill = tf.group(*(variable.fill() for variable in variables))
        return TrainingStep(graph, tf.group(*ends), fill)
