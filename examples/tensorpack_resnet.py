"""tensorpack: a ResNet for 32×32 images, as for CIFAR-10, on generated images.

    pip install ".[tensorpack]"                   # in a checkout, beside your TensorFlow
    pip install --no-deps "tf_keras==2.21.*"      # TensorFlow 2.16 or later: of its version
    python examples/tensorpack_resnet.py --devices 4 --steps 50

The line that matters is the trainer. tensorpack's layers need Keras 2, with any trainer. For real
images, replace ``Images`` with ``tensorpack.dataflow.dataset.Cifar10("train")``. TensorFlow 1.15
and 2.
"""

import argparse
import os

# before TensorFlow is imported, because it reads this once: no lines of its start
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1
if not hasattr(tf, "layers"):
    tf1.disable_v2_behavior()

import tensorpack as tp  # noqa: E402

from hier_allreduce.integrations.tensorpack import HierarchicalTrainer  # noqa: E402


class Images(tp.RNGDataFlow):
    """Noise with a bright square, whose quadrant is the class."""

    def __iter__(self):
        while True:
            label = self.rng.randint(4)
            image = self.rng.rand(32, 32, 3).astype(np.float32)
            row, column = divmod(label, 2)
            image[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += 1
            yield [image, label]


class ResNet(tp.ModelDesc):
    """A ResNet with ``blocks`` blocks in each of three stages; 3 blocks are ResNet-20."""

    def __init__(self, blocks, channels):
        super().__init__()
        self.blocks, self.channels = blocks, channels

    def inputs(self):
        return [
            tf.TensorSpec((None, 32, 32, 3), tf.float32, "image"),
            tf.TensorSpec((None,), tf.int32, "label"),
        ]

    def build_graph(self, image, label):
        with tp.argscope(tp.Conv2D, kernel_size=3, activation=tf.identity, use_bias=False):
            x = tp.BNReLU("bn0", tp.Conv2D("conv0", image, self.channels))
            for stage in range(3):
                for block in range(self.blocks):
                    strides = 2 if stage and not block else 1
                    x = self.residual(
                        f"stage{stage}block{block}", x, self.channels << stage, strides
                    )
        logits = tp.FullyConnected("linear", tp.GlobalAvgPooling("pool", x), 4)
        cost = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=label), name="cost"
        )
        tp.summary.add_moving_summary(cost)
        return cost

    def residual(self, name, x, channels, strides):
        with tf1.variable_scope(name):
            short = (
                x
                if strides == 1
                else tp.Conv2D("short", x, channels, kernel_size=1, strides=strides)
            )
            x = tp.BNReLU("bn1", tp.Conv2D("conv1", x, channels, strides=strides))
            return tf.nn.relu(tp.BatchNorm("bn2", tp.Conv2D("conv2", x, channels)) + short)

    def optimizer(self):
        return tf1.train.MomentumOptimizer(0.1, 0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4, help="how many towers")
    parser.add_argument(
        "--gpus", action="store_true", help="towers on GPUs instead of logical CPU devices"
    )
    parser.add_argument("--steps", type=int, default=50, help="steps of an epoch")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32, help="images of each tower")
    args = parser.parse_args()

    tf1.enable_resource_variables()
    tp.logger.set_logger_dir("train_log/tensorpack_resnet", action="d")
    config = tp.TrainConfig(
        model=ResNet(args.blocks, args.channels),
        data=tp.QueueInput(tp.BatchData(Images(), args.batch)),
        callbacks=[],
        steps_per_epoch=args.steps,
        max_epoch=1,
    )
    devices = args.devices if args.gpus else [f"/cpu:{k}" for k in range(args.devices)]
    # instead of SyncMultiGPUTrainerReplicated(args.devices)
    trainer = HierarchicalTrainer(devices, check_replicas_every=args.steps)
    tp.launch_train_with_config(config, trainer)


if __name__ == "__main__":
    main()
