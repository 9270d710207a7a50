"""A process that copies between devices with TensorFlow, and prints a line of JSON for every task.

::

    [[src, dst]]           ─►  {"differ": bytes, "rate": [bytes/s, again], "start": [seconds, again]}
    [[src, dst], …]        ─►  {"rate": […]}, of all these copies at once

With the same device twice, ``start`` is that of an op on it. A task that takes longer than its limit ends the process:
broken copies hang, and TensorFlow cannot end them.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from statistics import median
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
HOPS = 128  # copies of a small tensor in a row
REPEATS = 7
SMALL, BIG = 4, 32 << 20  # bytes

Pair = Tuple[str, str]


def bits_differ(src: str, dst: str) -> int:
    """Return how many of 32 MiB of random bytes arrive changed after a copy from ``src`` to ``dst``."""
    sent = np.random.RandomState(0).randint(0, 256, BIG).astype(np.uint8).view(np.float32)
    with tf.Graph().as_default():
        with tf.device(src):
            value = tf1.placeholder(tf.float32, sent.shape)
            source = tf.identity(value)
        with tf.device(dst):
            arrived = tf.identity(source)
        with _session((src, dst)) as session:
            received = session.run(arrived, {value: sent})
    return int(np.count_nonzero(received.view(np.uint8) != sent.view(np.uint8)))


def seconds_of(pairs: Sequence[Pair], size: int, hops: int = 1) -> float:
    """Return the seconds of a step with a copy of ``size`` bytes for every pair; of ``hops`` copies there and back."""
    with tf.Graph().as_default():
        ends: List[Any] = []
        for src, dst in pairs:
            with tf.device(src):
                tensor = tf1.Variable(tf.ones([size // 4]), use_resource=True).read_value()
            for hop in range(hops):
                with tf.device(src if hop % 2 else dst):
                    tensor = tf.negative(tensor) if src == dst else tf.identity(tensor)
            with tf.device(src if hops % 2 == 0 else dst):
                ends.append(tensor[0])  # it is fetched, so that the step ends after the copy
        with _session([device for pair in pairs for device in pair]) as session:
            session.run(tf1.global_variables_initializer())
            times: List[float] = []
            for _ in range(REPEATS + 2):
                begun = time.perf_counter()
                session.run(ends)
                times.append(time.perf_counter() - begun)
    return median(times[2:])  # the first ones allocate memory


def rate_of(pairs: Sequence[Pair]) -> float:
    """Return the bytes/s of copies of 32 MiB for every pair, all at once; 0 if they take no longer than small ones."""
    taken = seconds_of(pairs, BIG) - seconds_of(pairs, SMALL)
    return len(pairs) * BIG / taken if taken > 0 else 0.0


def start_of(pair: Pair) -> float:
    """Return the seconds to start a copy."""
    return (seconds_of([pair], SMALL, HOPS + 2) - seconds_of([pair], SMALL, 2)) / HOPS


def _session(devices: Sequence[str]) -> Any:
    numbers = [int(device.rpartition(":")[2]) for device in devices if "cpu" in device.lower()]
    config = tf1.ConfigProto(device_count={"CPU": max(numbers, default=0) + 1})
    config.gpu_options.allow_growth = True
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # it would remove the copies
    config.graph_options.optimizer_options.opt_level = -1
    return tf1.Session(config=config)


def main(text: str) -> None:
    """Print ``{}`` when TensorFlow has the first device, and then a line for every task."""
    todo = json.loads(text)
    first = todo["first"]
    faulthandler.dump_traceback_later(todo["start"], exit=True)
    tf1.disable_eager_execution()
    seconds_of([(first, first)], SMALL)
    print("{}", flush=True)
    for pairs in todo["tasks"]:
        faulthandler.dump_traceback_later(todo["limit"], exit=True)
        answer: Dict[str, Any] = {"rate": [rate_of(pairs) for _ in range(2)]}
        if len(pairs) == 1:
            answer.update(
                differ=bits_differ(*pairs[0]), start=[start_of(pairs[0]) for _ in range(2)]
            )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
