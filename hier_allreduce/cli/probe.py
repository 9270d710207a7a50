"""``python -m hier_allreduce.cli.probe``: what TensorFlow sees, as JSON. ``doctor`` runs it in a process of its own.

A TensorFlow that does not fit the processor or the driver ends its process. ``doctor`` must survive that.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict


def probe() -> Dict[str, Any]:
    """Return TensorFlow's version, how it was built, and its GPUs with the peers that each can reach."""
    import tensorflow as tf
    from tensorflow.python.client import device_lib

    gpus = [device for device in device_lib.list_local_devices() if device.device_type == "GPU"]
    return {
        "version": tf.__version__,
        "cuda": tf.test.is_built_with_cuda(),
        "gpus": [_described(gpu) for gpu in gpus],
    }


def _described(gpu: Any) -> Dict[str, Any]:
    name = re.search(r"name: ([^,]+)", gpu.physical_device_desc)
    peers = sorted({link.device_id for link in gpu.locality.links.link})
    return {"name": gpu.name, "model": name.group(1) if name else "", "bytes": gpu.memory_limit, "peers": peers}


if __name__ == "__main__":
    print(json.dumps(probe()))
