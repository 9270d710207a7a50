"""A process that copies between pairs of devices, and prints a line of JSON for each pair.

::

    {"first": "/gpu:0", "pairs": [["/gpu:0", "/gpu:1"], …], "start": 180, "limit": 10}
        ─►  {}                                     TensorFlow has the first device
            {"differ": 0, "rate": 2.2e10}          bytes that arrive changed; bytes/s
            {"fault": "out of memory: …"}         a device has too little memory left
            …

A pair that takes longer than its limit ends the process: broken copies hang, and TensorFlow cannot
end them. TensorFlow waits 10 seconds for memory, as long as a copy may take, and so the memory is
tried before the copies.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import sys
import time
from statistics import median
from typing import Any, Dict, List, Sequence

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
SMALL = 4  # bytes
BIG = 32 << 20  # bytes
NEEDED = 2 * BIG  # bytes of a device's memory: a value, and the variable that keeps it
_WARM_UP = 2
_REPEATS = 7


@functools.lru_cache(maxsize=None)
def lack_of_memory(device: str) -> str:
    """Return the fault of a device with too little memory for a copy; empty if it has enough."""
    with tf.Graph().as_default():
        with tf.device(device):
            end = tf.ones([NEEDED // 4])[0]
        try:
            with _session([device]) as session:
                session.run(end)
        except tf.errors.ResourceExhaustedError:
            return f"out of memory: {device} has no {NEEDED >> 20} MiB for TensorFlow"
    return ""


def bytes_that_differ(src: str, dst: str) -> int:
    """Return how many of 32 MiB of random bytes arrive changed after one copy."""
    sent = np.random.RandomState(0).randint(0, 256, BIG).astype(np.uint8).view(np.float32)
    with tf.Graph().as_default():
        with tf.device(src):
            fed = tf1.placeholder(tf.float32, sent.shape)
            source = tf.identity(fed)
        with tf.device(dst):
            arrived = tf.identity(source)
        with _session([src, dst]) as session:
            received = session.run(arrived, {fed: sent})
    # Bytes are compared, because random floats have NaNs, which differ from themselves.
    return int(np.count_nonzero(received.view(np.uint8) != sent.view(np.uint8)))


def seconds_of(src: str, dst: str, size: int) -> float:
    """Return the seconds of a step with a copy of ``size`` bytes: the median of 7 steps."""
    with tf.Graph().as_default():
        with tf.device(src):
            tensor = tf1.Variable(tf.ones([size // 4]), use_resource=True).read_value()
        with tf.device(dst):
            # One element of the copy is fetched, so that the step ends after the copy.
            end = tf.identity(tensor)[0]
        with _session([src, dst]) as session:
            session.run(tf1.global_variables_initializer())
            times: List[float] = []
            for _ in range(_WARM_UP + _REPEATS):
                begun = time.perf_counter()
                session.run(end)
                times.append(time.perf_counter() - begun)
    # The first steps are left out, because they allocate memory.
    return median(times[_WARM_UP:])


def rate_of(src: str, dst: str) -> float:
    """Return the bytes/s of a copy of 32 MiB; 0 if it takes no longer than one of 4 bytes."""
    # The small copy costs what every step costs, so that the difference is the copy's own time.
    seconds = seconds_of(src, dst, BIG) - seconds_of(src, dst, SMALL)
    return BIG / seconds if seconds > 0 else 0.0


def _session(devices: Sequence[str]) -> Any:
    cpus = [int(device.rpartition(":")[2]) for device in devices if "cpu" in device]
    config = tf1.ConfigProto(device_count={"CPU": max(cpus, default=0) + 1})
    # Another program may use these GPUs, and without this TensorFlow would take all their memory.
    config.gpu_options.allow_growth = True
    # An optimizer of graphs would remove the copies, because the values stay the same.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    return tf1.Session(config=config)


def main(request: str) -> None:
    """Print ``{}`` when TensorFlow has the first device, and then a line for each pair."""
    todo = json.loads(request)
    faulthandler.dump_traceback_later(todo["start"], exit=True)
    tf1.disable_eager_execution()
    seconds_of(todo["first"], todo["first"], SMALL)
    print("{}", flush=True)
    for src, dst in todo["pairs"]:
        # TensorFlow waits for memory as long as a copy may take, so that memory has a longer limit.
        faulthandler.dump_traceback_later(todo["start"], exit=True)
        fault = lack_of_memory(src) or lack_of_memory(dst)
        # A copy that hangs cannot be ended, so that this process ends with it.
        faulthandler.dump_traceback_later(todo["limit"], exit=True)
        answer: Dict[str, Any] = {"fault": fault}
        if not fault:
            answer = {"differ": bytes_that_differ(src, dst), "rate": rate_of(src, dst)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
