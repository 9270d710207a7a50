"""A process that prints TensorFlow's version and GPUs as a line of JSON.

It is a process of its own because TensorFlow may end it: by a signal on a processor that it was not built for.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict

import tensorflow as tf
from tensorflow.python.client import device_lib


def probe() -> Dict[str, Any]:
    """Return the version, whether it was built with CUDA, and each GPU with the peers that it can reach."""
    gpus = []
    for gpu in device_lib.list_local_devices():
        if gpu.device_type == "GPU":
            model = re.search(r"name: ([^,]+)", gpu.physical_device_desc)
            gpus.append(
                {
                    "name": gpu.name,
                    "model": model.group(1) if model else "",
                    "bytes": gpu.memory_limit,
                    "peers": sorted({link.device_id for link in gpu.locality.links.link}),
                }
            )
    return {"version": tf.__version__, "cuda": tf.test.is_built_with_cuda(), "gpus": gpus}


if __name__ == "__main__":
    print(json.dumps(probe()), flush=True)
