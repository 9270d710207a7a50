"""A process that copies between pairs of devices, and prints a line of JSON for each pair.

::

    [[["/gpu:0", "/gpu:1"], …], 30]
        ─►  [0, 2.2e10]          bytes that arrive changed; bytes/s, or 0 if too short to be timed
            …

A pair that takes longer than its limit ends the process: broken copies hang, and TensorFlow cannot
end them.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from statistics import median
from typing import Any, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
SMALL = 4  # bytes
BIG = 32 << 20  # bytes
_START = 180.0  # seconds until TensorFlow has the first device
_WARM_UP = 2
_REPEATS = 7


def copied(src: str, dst: str, size: int) -> Tuple[int, float]:
    """Copy ``size`` random bytes again and again.

    Returns:
        how many bytes arrive changed, and the seconds of a step: the median of 7 steps.
    """
    sent = np.random.RandomState(0).randint(0, 256, size).astype(np.uint8).view(np.float32)
    with tf.Graph().as_default():
        with tf.device(src):
            fed = tf1.placeholder(tf.float32, sent.shape)
            tensor = tf1.Variable(fed, use_resource=True).read_value()
        with tf.device(dst):
            arrived = tf.identity(tensor)
            # One element of the copy is fetched, so that the step ends after the copy.
            end = arrived[0]
        with _session([src, dst]) as session:
            session.run(tf1.global_variables_initializer(), {fed: sent})
            received = session.run(arrived)
            times: List[float] = []
            for _ in range(_WARM_UP + _REPEATS):
                begun = time.perf_counter()
                session.run(end)
                times.append(time.perf_counter() - begun)
    # Bytes are compared, because random floats have NaNs, which differ from themselves.
    differ = int(np.count_nonzero(received.view(np.uint8) != sent.view(np.uint8)))
    # The first steps are left out, because they allocate memory.
    return differ, median(times[_WARM_UP:])


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
    """Print a line for each pair."""
    pairs, limit = json.loads(request)
    faulthandler.dump_traceback_later(_START, exit=True)
    tf1.disable_eager_execution()
    copied(pairs[0][0], pairs[0][0], SMALL)
    for src, dst in pairs:
        # A copy that hangs cannot be ended, so that this process ends with it.
        faulthandler.dump_traceback_later(limit, exit=True)
        differ, seconds = copied(src, dst, BIG)
        # The small copy costs what every step costs: the difference is the copy's own time.
        seconds -= copied(src, dst, SMALL)[1]
        rate = BIG / seconds if seconds > 0 else 0.0
        print(json.dumps([differ, rate]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
