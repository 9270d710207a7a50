"""How often TensorFlow's own ops, called eagerly from several threads, get the operands of another thread's call.

    python benchmarks/eager_threads.py               about 2 of 1,000 calls fail with TensorFlow 2.21; some never return
    python benchmarks/eager_threads.py --function    none in a tf.function
    python benchmarks/eager_threads.py --own         none if each thread has a device of its own

Nothing of hier_allreduce is used. Eight threads split vectors on 16 logical CPU devices.
"""

import argparse
import os
import sys
import threading
import time
from collections import Counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

_DEVICES, _THREADS = 16, 8
_GRACE = 20  # seconds after which a call hangs


def split(device, sizes, value):
    """Split a vector of equal values into parts of ``sizes`` on a device."""
    with tf.device(f"/cpu:{device}"):
        return tf.split(tf.fill([sum(sizes)], value), sizes)


def work(thread, end, function, own, outcomes):
    """Split vectors until ``end``; count what came out."""
    number = thread
    while time.monotonic() < end:
        number += 1
        sizes, value = tuple(1 + (number + part) % 3 for part in range(2 + number % 7)), float(number % 5)
        try:
            parts = function(thread if own else number % _DEVICES, sizes, value)
            is_right = [part.numpy().tolist() for part in parts] == [[value] * size for size in sizes]
            outcomes["right" if is_right else "wrong values, without an error"] += 1
        except tf.errors.OpError as error:
            outcomes[f"{type(error).__name__}: {error.message.partition('}} ')[2]}"] += 1


def main():
    """Run the threads, and print what came out by its frequency."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="default: %(default)s")
    parser.add_argument("--function", action="store_true", help="call the ops in a tf.function")
    parser.add_argument("--own", action="store_true", help="give each thread a device of its own")
    args = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * _DEVICES)
    function = tf.function(split) if args.function else split
    outcomes, end = [Counter() for _ in range(_THREADS)], time.monotonic() + args.seconds
    threads = [
        threading.Thread(target=work, args=(number, end, function, args.own, mine), daemon=True)
        for number, mine in enumerate(outcomes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, end + _GRACE - time.monotonic()))
    for outcome, count in sum(outcomes, Counter()).most_common():
        print(count, outcome)
    print(sum(thread.is_alive() for thread in threads), "calls that hang")
    sys.stdout.flush()
    os._exit(0)  # a call that hangs would keep the interpreter


if __name__ == "__main__":
    main()
