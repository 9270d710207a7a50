"""A process that copies between two devices with TensorFlow, and prints a line of JSON for each figure.

::

    python -m hier_allreduce.measure.copies '{"first": "/gpu:0", "big": 33554432, "tasks": [task, …]}'

    [[src, dst]]           ─►  {"differ": bytes, "rate": [bytes/s, again], "start": [seconds, again]}
    [[src, dst], …]        ─►  {"rate": […]}, of all these copies at once
    []                     ─►  {"start": […]}, of an op

The caller stops it when a line takes too long: broken copies hang, and nothing inside the process can end them.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
HOPS = 32  # of a small tensor, there and back
OPS = 400  # in a row, to see the host's time for one of them
REPEATS = 7
SMALL = 4  # bytes

Pair = Tuple[str, str]


def bits_differ(src: str, dst: str, size: int) -> int:
    """Return how many of ``size`` random bytes arrive changed after a copy from ``src`` to ``dst``."""
    sent = np.random.RandomState(0).randint(0, 256, size).astype(np.uint8).view(np.float32)
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
        ends = []
        for number, (src, dst) in enumerate(pairs):
            with tf.device(src):
                value = tf1.get_variable(
                    f"v{number}", [size // 4], tf.float32, tf1.ones_initializer(), use_resource=True
                )
                tensor = value.read_value()
            for hop in range(hops):
                with tf.device(src if hop % 2 else dst):
                    tensor = tf.identity(tensor)
            with tf.device(src if hops % 2 == 0 else dst):
                ends.append(tensor[0])  # it is fetched, so that the step ends after the copy
        with _session([device for pair in pairs for device in pair]) as session:
            session.run(tf1.global_variables_initializer())
            return _median(lambda: session.run(ends))


def seconds_of_ops(device: str, ops: int) -> float:
    """Return the seconds of a step with ``ops`` small ops in a row on a device."""
    with tf.Graph().as_default(), tf.device(device):
        tensor = tf1.placeholder_with_default([1.0], [1])
        for _ in range(ops):
            tensor = tf.negative(tensor)
        with _session((device,)) as session:
            return _median(lambda: session.run(tensor))


def figures(src: str, dst: str, big: int) -> Dict[str, Any]:
    """Return the bytes that differ, and twice the bytes/s and the seconds to start a copy, from ``src`` to ``dst``."""
    return {
        "differ": bits_differ(src, dst, big),
        "rate": [speed([(src, dst)], big) for _ in range(2)],
        "start": [
            (seconds_of([(src, dst)], SMALL, HOPS + 2) - seconds_of([(src, dst)], SMALL, 2)) / HOPS for _ in "12"
        ],
    }


def speed(pairs: Sequence[Pair], size: int) -> float:
    """Return the bytes/s of copies of ``size`` bytes for every pair, all at once."""
    # the rest of the step, without bytes, is subtracted
    taken = seconds_of(pairs, size) - seconds_of(pairs, SMALL)
    return len(pairs) * size / taken if taken > 0 else 0.0


def _median(step: Callable[[], Any]) -> float:
    times: List[float] = []
    for _ in range(REPEATS + 2):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return median(times[2:])  # the first ones allocate memory


def _session(devices: Sequence[str]) -> Any:
    numbers = [int(device.rpartition(":")[2]) for device in devices if "cpu" in device.lower()]
    config = tf1.ConfigProto(device_count={"CPU": max(numbers, default=0) + 1})
    config.gpu_options.allow_growth = True
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # it would remove the copies
    config.graph_options.optimizer_options.opt_level = -1
    return tf1.Session(config=config)


def main(text: str) -> None:
    """Print ``{}`` when TensorFlow has the devices, and then a line for every task."""
    todo = json.loads(text)
    first, big = todo["first"], todo["big"]
    tf1.disable_eager_execution()
    seconds_of([(first, first)], SMALL)
    print("{}", flush=True)
    for pairs in todo["tasks"]:
        if not pairs:
            spans = [seconds_of_ops(first, OPS + 50) - seconds_of_ops(first, 50) for _ in range(2)]
            answer: Dict[str, Any] = {"start": [span / OPS for span in spans]}
        else:
            (src, dst), *others = pairs
            answer = figures(src, dst, big) if not others else {"rate": [speed(pairs, big) for _ in range(2)]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
