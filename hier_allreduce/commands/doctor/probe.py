"""A process that prints TensorFlow's version and GPUs as a line of JSON.

It is a process of its own because TensorFlow may end it, by a signal on a processor that it was not
built for.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List

import tensorflow as tf
from tensorflow.python.client import device_lib


def probe() -> Dict[str, Any]:
    """Return the version, whether it was built with CUDA, and the fields of each GPU."""
    devices = device_lib.list_local_devices()
    gpus = [_fields(device) for device in devices if device.device_type == "GPU"]
    return {"version": tf.__version__, "cuda": tf.test.is_built_with_cuda(), "gpus": gpus}


def _fields(gpu: Any) -> List[Any]:
    """Return a GPU's name, model, bytes, and the numbers of the GPUs that it reaches directly."""
    model = re.search(r"name: ([^,]+)", gpu.physical_device_desc)
    peers = {link.device_id for link in gpu.locality.links.link}
    return [gpu.name, model.group(1) if model else "", gpu.memory_limit, sorted(peers)]


if __name__ == "__main__":
    print(json.dumps(probe()), flush=True)
