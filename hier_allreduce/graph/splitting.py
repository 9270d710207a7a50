"""Each GPU cut into K logical GPUs, so that one GPU runs what K towers run.

::

    one GPU of 80 GB  ── split_gpus(8) ──►  /gpu:0 … /gpu:7, each with its own memory and streams

TensorFlow holds the division for the process. Eager code, ``tf.function``, ``tf.distribute`` and sessions without a
configuration have these GPUs; a session with a ``ConfigProto`` has them after :func:`with_logical_gpus`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import DeviceError
from ..formatting import amount, count
from ..topology import free_gpu_memory
from .compat import process_gpu_options, tf1
from .logical_gpus import LEAST, MIB, RESERVED


@dataclass(frozen=True)
class SplitGpus:
    """The logical GPUs of this process.

    Attributes:
        devices: their names, for towers: ``/gpu:0``, ``/gpu:1``, …
        memory: the bytes of each.
    """

    devices: Tuple[str, ...]
    memory: int

    @property
    def config(self) -> Any:
        """A session's configuration, a new ``tf.compat.v1.ConfigProto``, with these GPUs."""
        return with_logical_gpus(tf1.ConfigProto())


def split_gpus(parts: int, memory_limit: Optional[int] = None) -> SplitGpus:
    """Cut each GPU that TensorFlow sees into ``parts`` logical GPUs of equal memory, before TensorFlow starts.

    ::

        split = hier_allreduce.split_gpus(8)
        # build the towers on split.devices
        session = tf.compat.v1.Session(config=split.config)

    A second call with the same numbers changes nothing. Logical GPUs of one GPU share its memory's speed and its
    multiprocessors: they show whether results, placement and copies are right, not how fast links are. The commands'
    option ``--split-gpu K`` calls this.

    Args:
        parts: K, the logical GPUs of each GPU; 1 and up.
        memory_limit: the bytes of each logical GPU; by default an equal share of what is free on the fullest GPU, less
            5 % for CUDA. nvidia-smi tells what is free.

    Returns:
        The devices of all logical GPUs, and a session's configuration.

    Raises:
        DeviceError: no GPU, too little memory, an invalid number, or TensorFlow has started; nothing is changed.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise DeviceError(f"split_gpus({parts!r}): expected the number of logical GPUs of each GPU, 1 or more")
    gpus = tf.config.experimental.get_visible_devices("GPU")
    if not gpus:
        built = "" if tf.test.is_built_with_cuda() else ", and is not built for GPUs (pip install tensorflow[and-cuda])"
        raise DeviceError(
            f"split_gpus({parts}): TensorFlow {tf.__version__} finds no GPU here{built}; without one use CPU devices:"
            ' ["/cpu:0", "/cpu:1", …]'
        )
    memory = _memory(parts, memory_limit)
    _divide(gpus, parts, memory)
    return SplitGpus(tuple(f"/gpu:{number}" for number in range(parts * len(gpus))), memory)


def _memory(parts: int, limit: Optional[int]) -> int:
    """Return the bytes of each logical GPU, whole MiB."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0):
        raise DeviceError(f"memory_limit={limit!r}: expected the bytes of each logical GPU, a number above 0")
    everywhere = free_gpu_memory()
    if limit is None and not everywhere:
        raise DeviceError("nvidia-smi does not say how much memory is free; give memory_limit=, in bytes")
    room = int(min(everywhere) * (1 - RESERVED)) if everywhere else None
    share = int(limit) if limit is not None else (room or 0) // parts
    if share < LEAST or (room is not None and share * parts > room):
        free = f"{amount(min(everywhere), binary=True)} are free on the fullest GPU" if everywhere else "it is unknown"
        raise DeviceError(
            f"not enough memory for {count(parts, 'logical GPU')} of {amount(share, binary=True)}: {free}, of which"
            f" TensorFlow leaves {RESERVED:.0%} to CUDA, and each needs {amount(LEAST, binary=True)} or more; use"
            " fewer parts, or end other programs on the GPU"
        )
    return share // MIB * MIB


def _divide(gpus: Sequence[Any], parts: int, memory: int) -> None:
    settings = tf.config.experimental
    logical = [settings.VirtualDeviceConfiguration(memory_limit=memory // MIB) for _ in range(parts)]
    present = [settings.get_virtual_device_configuration(gpu) for gpu in gpus]
    other = next((found for found in present if found and len(found) != parts), None)
    if other:
        raise DeviceError(
            f"split_gpus({parts}): the GPUs are cut into {count(len(other), 'logical GPU')} already; one process has"
            " one division"
        )
    try:
        for gpu in [gpu for gpu, found in zip(gpus, present) if not found]:
            settings.set_virtual_device_configuration(gpu, logical)
    except RuntimeError as error:
        raise DeviceError(
            f"split_gpus({parts}): TensorFlow has started ({error}); call it before the first op or session"
        ) from None


def gpu_count() -> int:
    """Return the number of GPUs that programs see: logical ones where a GPU is cut into several."""
    divided = tf.config.experimental.get_virtual_device_configuration
    return sum(len(divided(gpu) or [gpu]) for gpu in tf.config.experimental.get_visible_devices("GPU"))


def with_logical_gpus(config: Any) -> Any:
    """Return a session's configuration with this process's logical GPUs; as it is, where there are none.

    The result is a copy without ``per_process_gpu_memory_fraction``, which TensorFlow does not take together with
    logical GPUs. A configuration that has logical GPUs of its own is returned as it is.
    """
    ours, theirs = process_gpu_options(), config.gpu_options.experimental.virtual_devices
    divided: List[Any] = [gpu for gpu in ours.experimental.virtual_devices if gpu.memory_limit_mb]
    if not divided or theirs:
        return config
    changed = type(config)()
    changed.CopyFrom(config)
    changed.gpu_options.per_process_gpu_memory_fraction = 0
    changed.gpu_options.visible_device_list = ours.visible_device_list
    changed.gpu_options.experimental.virtual_devices.extend(ours.experimental.virtual_devices)
    return changed
