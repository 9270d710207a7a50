r"""tf_cnn_benchmarks with our all-reduce, without a change of its files.

    git clone https://github.com/tensorflow/benchmarks
    python examples/tf_cnn_benchmarks.py benchmarks/scripts/tf_cnn_benchmarks \
        --model=resnet20 --data_name=cifar10 --num_gpus=4 --device=cpu \
        --local_parameter_device=cpu --data_format=NHWC --batch_size=4 --num_batches=5 \
        --variable_update=replicated --use_resource_vars=True

The first argument is the folder of tf_cnn_benchmarks; all others are its own. Its reference
variables (``--use_resource_vars=False``, its default) train wrong now and then, with its own
all-reduce too, because an update may overwrite a variable while a gradient still reads it.
"""

import os
import sys
from typing import Any

# before TensorFlow is imported, because it reads this once: no lines of its start
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hier_allreduce


def use_our_allreduce(batch_allreduce):
    """Make ``batch_allreduce`` of tf_cnn_benchmarks use our all-reduce, whatever its flags say."""
    base: Any = batch_allreduce.BatchAllReduceAlgorithm

    class HierarchicalAlgorithm(base):
        """Sums K rows of gradients, each row on its own device."""

        def _do_batch_all_reduce(self, all_device_tensors):
            devices = [tensors[0].device for tensors in all_device_tensors]
            return hier_allreduce.allreduce_grads(all_device_tensors, devices)

    batch_allreduce.algorithm_from_params = lambda params: HierarchicalAlgorithm()


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.path.insert(0, sys.argv.pop(1))
    import batch_allreduce

    use_our_allreduce(batch_allreduce)
    import runpy

    runpy.run_module("tf_cnn_benchmarks", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
