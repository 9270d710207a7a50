"""What differs between TensorFlow 1.15 and 2.x, in one place; and some of what neither makes public."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, Iterator, Tuple, TypeVar, cast

import tensorflow as tf

tf1 = tf.compat.v1
IS_TF2 = tf.__version__ >= "2"
F = TypeVar("F", bound=Callable[..., Any])

_UNSIGNED = ("uint16", "uint32", "uint64") if IS_TF2 else ()  # 1.15 adds three of them, but not two
# the dtypes that can be added up, on CPU devices; float8 and the like only travel
SUMMABLE_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", *_UNSIGNED),
)
# the dtypes that collectives add up; 1.15 has no kernel for halves
COLLECTIVE_DTYPES = (*(("float16",) if IS_TF2 else ()), "float32", "float64", "int32", "int64")


def without_autograph(function: F) -> F:
    """``function``, which a ``tf.function`` is to call as it is: 1.15's autograph cannot translate all of ours."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def make_logical_cpus(count: int) -> None:
    """Make ``count`` logical CPU devices, before TensorFlow starts; on 1.15 each session makes its own.

    Raises:
        RuntimeError: it has started.
    """
    if hasattr(tf.config, "set_logical_device_configuration"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def forget_colocation() -> ContextManager:
    """A scope in which an outer ``colocate_with`` no longer decides where ops go.

    Leaving a colocation behind also leaves the device scopes around it, so this does nothing where there
    is no colocation: an outer ``tf.device("/job:worker/task:1")`` then still completes ``/gpu:0``.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    graph = tf1.get_default_graph()
    if not list(graph._colocation_stack.peek_objs()):
        return contextlib.nullcontext()
    return graph.colocate_with(None, ignore_existing=True)


@contextlib.contextmanager
def outside_control_flow() -> Iterator[None]:
    """A scope whose ops are outside of any ``tf.cond`` or loop around it, and wait for nothing; in graphs only."""
    with tf.init_scope():
        graph = not tf.executing_eagerly()  # else the graph is that of a tf.function, which is the outermost there is
    with tf.init_scope() if graph else contextlib.nullcontext():
        yield


def in_current_graph(tensor: Any) -> bool:
    """Whether ops added now can read ``tensor``: same graph, or one that a function captures from."""
    if tf.executing_eagerly():
        return is_eager(tensor)
    graph = tf1.get_default_graph()
    is_function = hasattr(graph, "capture")
    return is_function or (not is_eager(tensor) and tensor.graph is graph)


def builds_for_session() -> bool:
    """Whether ops added now are for a session, and not eager ones or a ``tf.function``'s."""
    return not getattr(tf1, "executing_eagerly_outside_functions", tf.executing_eagerly)()


def is_eager(tensor: Any) -> bool:
    """Whether ``tensor`` has a value already and belongs to no graph."""
    return not hasattr(tensor, "graph") or type(tensor).__name__ == "EagerTensor"


def per_replica(tensors: Any) -> Any:
    """K tensors, one on each device, as the value that ``tf.distribute``'s cross-device ops take."""
    from tensorflow.python.distribute import values

    if not hasattr(values, "ReplicaDeviceMap"):  # TensorFlow 2
        return values.PerReplica(tuple(tensors))
    return values.PerReplica(values.ReplicaDeviceMap([tensor.device for tensor in tensors]), tuple(tensors))


def replica_values(value: Any) -> Tuple[Any, ...]:
    """What ``tf.distribute`` holds for each replica; of anything else, that one thing."""
    if hasattr(tf.distribute, "DistributedValues"):
        distributed = isinstance(value, tf.distribute.DistributedValues)
    else:  # TensorFlow 1.15; what has a device map but no values is only a place
        distributed = hasattr(value, "device_map") and hasattr(value, "values")
    return tuple(value.values) if distributed else (value,)


def mirrored_factory(example: Any) -> Callable[[Tuple[Any, ...]], Any]:
    """What turns K tensors, one on each device, into such a ``Mirrored`` value as ``example``."""
    mirrored: Any = type(example)
    return functools.partial(mirrored, example.device_map) if hasattr(example, "device_map") else mirrored


def is_resource(variable: Any) -> bool:
    """Whether ``variable`` is a resource variable, whose reads do not race with its updates."""
    return hasattr(variable, "handle") and variable.handle.dtype == tf.resource
