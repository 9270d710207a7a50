"""Each GPU cut into K logical GPUs, so that one GPU runs what K towers run: ``bench --split-gpu K``.

::

    one GPU of 80 GB  ── split_gpu(8) ──►  /gpu:0 … /gpu:7, each with its own memory and streams

TensorFlow holds the division for the process, but a session with a ``ConfigProto`` knows nothing of it.
"""

from __future__ import annotations

from typing import Any, List, Optional

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import process_gpu_options
from ..topology import free_gpu_memory
from .lanes import MIB


def split_gpu(parts: int, memory_limit: Optional[int] = None) -> List[str]:
    """Cut each GPU into ``parts`` logical GPUs of equal memory, before TensorFlow starts; return their names.

    Args:
        parts: K, the logical GPUs of each GPU.
        memory_limit: the bytes of each; by default, of what is free on the fullest GPU, K equal shares of K + 1. The
            last one is left to CUDA.

    Raises:
        HierAllreduceError: there is no GPU, or nvidia-smi does not tell how much memory is free.
    """
    settings = tf.config.experimental
    gpus, free = settings.get_visible_devices("GPU"), free_gpu_memory()
    if not gpus:
        built = "" if tf.test.is_built_with_cuda() else ", and is not built for GPUs: see tensorflow.org/install"
        raise HierAllreduceError(f"--split-gpu {parts}: TensorFlow {tf.__version__} finds no GPU here{built}")
    if not (memory_limit or free):
        raise HierAllreduceError(f"--split-gpu {parts}: nvidia-smi does not tell how much memory of the GPU is free")
    memory = memory_limit or min(free) // (parts + 1)
    for gpu in gpus:
        limit = settings.VirtualDeviceConfiguration(memory_limit=memory // MIB)
        settings.set_virtual_device_configuration(gpu, [limit] * parts)
    return [f"/gpu:{number}" for number in range(parts * len(gpus))]


def with_logical_gpus(config: Any) -> Any:
    """Give a session's configuration this process's logical GPUs, if it has none of its own; return it."""
    options, own = process_gpu_options(), config.gpu_options.experimental.virtual_devices
    if not own and any(gpu.memory_limit_mb for gpu in options.experimental.virtual_devices):
        config.gpu_options.MergeFrom(options)
        config.gpu_options.per_process_gpu_memory_fraction = 0  # which TensorFlow refuses together with them
    return config
