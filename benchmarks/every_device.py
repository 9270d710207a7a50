"""``hier-allreduce bench hosts`` with MultiWorkerMirroredStrategy on each logical CPU device of a host.

    python benchmarks/every_device.py --hosts 2 --devices 4 --rounds 15

Without a GPU the strategy has one replica on each host, and TensorFlow has no public option for more. This program
replaces the private method that lists a host's devices. Nothing in the package does, so the patch lives here.
"""

import argparse
import os
import sys
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from hier_allreduce.bench import measure_hosts
from hier_allreduce.cli import main


def every_device(self, resolver, worker):
    """Return all logical CPU devices of this host, and their type: what the private method returns for GPUs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    count = len(tf.config.get_logical_device_configuration(cpu))
    return tuple(f"{worker}/device:CPU:{number}" for number in range(count)), "CPU"


def run_host(arguments):
    """Run one of the hosts, a ``bench hosts … --peers …``; return its exit status."""
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    with mock.patch.object(CollectiveAllReduceExtended, "_initialize_local_devices", every_device):
        return main(arguments)


def run(arguments):
    """Start the hosts, print their measurements and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", metavar="H", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--devices", metavar="K", type=int, default=4, help="of each host (default: 4)")
    parser.add_argument("--rounds", metavar="N", type=int, default=15, help="timed steps of each (default: 15)")
    args = parser.parse_args(arguments)
    command = [sys.executable, __file__]
    status, text = measure_hosts(args.hosts, args.devices, args.rounds, sys.stderr.write, command)
    if text:
        print(text)
    return status


if __name__ == "__main__":
    is_host = sys.argv[1:2] == ["bench"]
    sys.exit(run_host(sys.argv[1:]) if is_host else run(sys.argv[1:]))
