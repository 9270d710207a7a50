"""A process that prints TensorFlow's version and GPUs as JSON.

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
    """Return the version, whether it was built with CUDA, and the GPUs.

    Each GPU has its name, its model, its bytes, and the numbers of the GPUs that it reaches.
    """
    gpus: List[Any] = []
    for device in device_lib.list_local_devices():
        if device.device_type == "GPU":
            # The model stands in a sentence only, behind the device's number.
            model = re.search(r"name: ([^,]+)", device.physical_device_desc)
            peers = {link.device_id for link in device.locality.links.link}
            described = model.group(1) if model else ""
            gpus.append([device.name, described, device.memory_limit, sorted(peers)])
    return {"version": tf.__version__, "cuda": tf.test.is_built_with_cuda(), "gpus": gpus}


if __name__ == "__main__":
    print(json.dumps(probe()), flush=True)
