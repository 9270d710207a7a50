"""What differs between TensorFlow 1.15 and 2, and what neither makes public: graphs, variables."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Iterator, List, Tuple, TypeVar, cast

import tensorflow as tf

tf1 = tf.compat.v1
IS_TF2 = tf.__version__ >= "2"
F = TypeVar("F", bound=Callable[..., Any])

# Collectives add these dtypes on CPU devices and GPUs: 1.15 has no kernel for float16, and no
# version adds int32 or bfloat16 on GPUs.
COLLECTIVE_DTYPES = (*(("float16",) if IS_TF2 else ()), "float32", "float64", "int64")


def without_autograph(function: F) -> F:
    """Return ``function`` such that a ``tf.function`` calls it without translating it."""
    # The autograph of 1.15 cannot translate all of this package.
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def forget_colocation() -> ContextManager:
    """Return a scope in which an outer ``colocate_with`` no longer places ops."""
    # Leaving a colocation also leaves the device scopes around it. So without a colocation this
    # does nothing, and an outer tf.device("/job:worker/task:1") still completes "/gpu:0".
    graph = tf1.get_default_graph()
    if not list(graph._colocation_stack.peek_objs()):
        return contextlib.nullcontext()
    return graph.colocate_with(None, ignore_existing=True)


@contextlib.contextmanager
def outside_control_flow() -> Iterator[None]:
    """Open a scope whose ops are outside of any ``tf.cond`` or loop, and wait for nothing.

    It is for graphs only.
    """
    with tf.init_scope():
        outermost_is_graph = not tf.executing_eagerly()
    # If it is not, the graph of a tf.function is the outermost one.
    with tf.init_scope() if outermost_is_graph else contextlib.nullcontext():
        yield


def outer_graph() -> Any:
    """Return the graph that is being built, also from inside a ``tf.cond``."""
    with outside_control_flow():
        return tf1.get_default_graph()


def in_current_graph(tensor: Any) -> bool:
    """Return whether ops added now can read ``tensor``.

    They can if it is in the same graph. A function can also capture a tensor that has a value, or
    one of a graph around it.
    """
    if tf.executing_eagerly():
        return is_eager(tensor)
    graph = tf1.get_default_graph()
    if is_eager(tensor):
        return is_of_function(graph)
    while graph not in (None, tensor.graph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def builds_for_session() -> bool:
    """Return whether ops added now are for a session: neither eager nor in a ``tf.function``."""
    return not getattr(tf1, "executing_eagerly_outside_functions", tf.executing_eagerly)()


def devices_of_eager_calls() -> List[str]:
    """Return the names of the devices on which ops that are added now can run.

    There are none if the ops are for a session, which may be anywhere.
    """
    if builds_for_session():
        return []
    return [str(device.name) for device in tf.config.experimental.list_logical_devices()]


def hidden(constant: Any) -> Any:
    """Return a constant such that Grappler does not use its value. It is for graphs only."""
    # XLA would compile it in a cluster with ops of other devices, and then fail.
    not_compiled = {"_XlaCompile": tf1.AttrValue(b=False)}
    with tf1.get_default_graph()._attr_scope(not_compiled):
        return tf1.placeholder_with_default(constant, constant.shape, "hidden")


def is_of_function(graph: Any) -> bool:
    """Return whether a graph is that of a function, such as a ``tf.function``."""
    return hasattr(graph, "capture")


def orders_effects(graph: Any) -> bool:
    """Return whether TensorFlow will let ops of a graph that have an effect wait for each other.

    It does so in functions, and where autograph has the feature ``AUTO_CONTROL_DEPS``.
    """
    return is_of_function(graph) or graph._add_control_dependencies


def add_control_edge(before: Any, after: Any) -> None:
    """Let an op that exists wait for another one of its graph."""
    after._add_control_input(before)


def is_eager(tensor: Any) -> bool:
    """Return whether ``tensor`` has a value, or is None, and belongs to no graph."""
    return not hasattr(tensor, "graph")


def replica_values(distributed: Any) -> Tuple[Any, ...]:
    """Return the values that ``tf.distribute`` holds for replicas; for others the value itself."""
    if hasattr(tf.distribute, "DistributedValues"):
        has_values = isinstance(distributed, tf.distribute.DistributedValues)
    else:
        # In TensorFlow 1.15 an object with a device map but no values is only a destination.
        has_values = hasattr(distributed, "device_map") and hasattr(distributed, "values")
    return tuple(distributed.values) if has_values else (distributed,)


def mirrored_like(example: Any, tensors: Tuple[Any, ...]) -> Any:
    """Return a ``Mirrored`` like ``example`` of K tensors, one for each device."""
    device_map = [example.device_map] if hasattr(example, "device_map") else []  # TensorFlow 1.15
    mirrored: Any = type(example)
    return mirrored(*device_map, tensors)


def is_resource(variable: Any) -> bool:
    """Return whether ``variable`` is a resource variable: its reads do not race with updates."""
    return hasattr(variable, "handle") and variable.handle.dtype == tf.resource


def tensor_of(variable: Any) -> Any:
    """Return the tensor that stands for a variable in its graph: its handle, or its reference."""
    return variable.handle if is_resource(variable) else variable.op.outputs[0]


def number_of(variable: Any) -> int:
    """Return a number that is higher for a variable that was made later in a graph, or eagerly."""
    tensor = tensor_of(variable)
    return int(tensor._id if is_eager(tensor) else tensor.op._id)


@contextlib.contextmanager
def collected_graphs() -> Iterator[List[Any]]:
    """Collect the partition graphs of the functions that run for the first time in this context.

    They are in the list once the context is left.
    """
    # The public function for this, tf.summary.trace_export, writes them into a file.
    from tensorflow.python.eager import context

    collected: List[Any] = []
    context.context().enable_graph_collection()
    try:
        yield collected
        collected += context.context().export_run_metadata().function_graphs
    finally:
        context.context().disable_graph_collection()


@contextlib.contextmanager
def slots_in_any_scope() -> Iterator[None]:
    """Open a context in which a variable scope that is set to reuse does not forbid new slots."""
    scope = tf1.get_variable_scope()
    reuse = scope._reuse
    scope._reuse = tf1.AUTO_REUSE if reuse is True else reuse
    try:
        yield
    finally:
        scope._reuse = reuse
