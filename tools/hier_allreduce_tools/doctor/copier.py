"""A process that copies between pairs of devices, and prints a line for each pair.

::

    [[["/gpu:0", "/gpu:1"], …], 30]
        ─►  22.4        GB/s, or ? if the copy is too short to be timed
            DIFFER      other bits arrive
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
from typing import List, Tuple

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
SMALL = 4  # bytes
BIG = 32 << 20  # bytes
_START = 180.0  # seconds until TensorFlow has the first device
_WARM_UP = 2
_REPEATS = 7


def copied(src: str, dst: str, size: int) -> Tuple[bool, float]:
    """Copy ``size`` random bytes again and again.

    Returns:
        whether the same bits arrive, and the seconds of a step: the median of 7 steps.
    """
    sent = np.random.RandomState(0).randint(0, 256, size).astype(np.uint8).view(np.float32)
    config = tf1.ConfigProto()
    # Another program may use these GPUs, and without this TensorFlow would take all their memory.
    config.gpu_options.allow_growth = True
    # An optimizer of graphs would remove the copies, because the values stay the same.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    with tf.Graph().as_default():
        with tf.device(src):
            fed = tf1.placeholder(tf.float32, sent.shape)
            tensor = tf1.Variable(fed, use_resource=True).read_value()
        with tf.device(dst):
            arrived = tf.identity(tensor)
            # One element of the copy is fetched, so that the step ends after the copy.
            end = arrived[0]
        with tf1.Session(config=config) as session:
            session.run(tf1.global_variables_initializer(), {fed: sent})
            # Bytes are compared, because random floats have NaNs, which differ from themselves.
            is_equal = session.run(arrived).tobytes() == sent.tobytes()
            times: List[float] = []
            for _ in range(_WARM_UP + _REPEATS):
                begun = time.perf_counter()
                session.run(end)
                times.append(time.perf_counter() - begun)
    # The first steps are left out, because they allocate memory.
    return is_equal, median(times[_WARM_UP:])


def main(request: str) -> None:
    """Print a line for each pair."""
    pairs, limit = json.loads(request)
    faulthandler.dump_traceback_later(_START, exit=True)
    tf1.disable_eager_execution()
    copied(pairs[0][0], pairs[0][0], SMALL)
    for src, dst in pairs:
        # A copy that hangs cannot be ended, so that this process ends with it.
        faulthandler.dump_traceback_later(limit, exit=True)
        is_equal, seconds = copied(src, dst, BIG)
        # The small copy costs what every step costs: the difference is the copy's own time.
        seconds -= copied(src, dst, SMALL)[1]
        rate = f"{BIG / 1e9 / seconds:.1f}" if seconds > 0 else "?"
        print(rate if is_equal else "DIFFER", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
