"""Algorithms from the literature, and one more, as functions that run like the built-in ones.

    pip install .                 # in a checkout, beside your TensorFlow
    python examples/algorithms.py --devices 8

A function gets the number of devices and a chunk's number. It returns that chunk's moves, which are
sums that bring everything to one device, then copies back. ``Reduce((1, 2), 0)`` is 0 ← 0 + 1 + 2,
``Copy(0, 1)`` is 1 ← 0. The moves are checked before they run.
"""

import argparse
import os

from hier_allreduce import Copy, Reduce


def two_quads(devices, chunk):
    """Add up inside two halves, then across.

    Source: tensorpack's ``allreduce_grads_hierarchical``, for 8 devices.
    """
    if devices % 2:
        raise ValueError("two quads need an even number of devices")
    half = devices // 2
    root = (chunk + half) % devices
    other = (root + half) % devices
    for main in (root, other):
        quad = range(main // half * half, main // half * half + half)
        if half > 1:
            yield Reduce(tuple(device for device in quad if device != main), main)
    yield Reduce((other,), root)
    yield Copy(root, other)
    for device in range(devices):
        if device not in (root, other):
            yield Copy(root if device // half == root // half else other, device)


def halving_and_doubling(devices, chunk):
    """Exchange halves with partners that are nearer each time, and back.

    Chunk c ends on device c mod P, where P is the largest power of two. Devices from P on first
    send their values to a partner. Source: Thakur, Rabenseifner, Gropp: Optimization of Collective
    Communication Operations in MPICH, 2005.
    """
    power = 1 << (devices.bit_length() - 1)
    root = chunk % power
    hops = [(device, device - power) for device in range(power, devices)]
    distance = power // 2
    while distance:
        same_half = [device for device in range(power) if (device ^ root) < 2 * distance]
        hops += [(device, device ^ distance) for device in same_half if (device ^ root) & distance]
        distance //= 2
    return [Reduce((a,), b) for a, b in hops] + [Copy(b, a) for a, b in reversed(hops)]


def double_binary_trees(devices, chunk):
    """Add up in one of two binary trees; a device that adds in one of them is a leaf of the other.

    Numbered from 1, a device's height in a tree is that of its lowest bit. Source: Sanders, Speck,
    Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009; the second
    tree is as in NCCL 2.4.
    """

    def parent(node):
        bit = node & -node
        above = (node ^ bit) | (bit << 1)
        return above if above <= devices else parent(above)

    def device(node):
        mirrored = devices - node if devices % 2 == 0 else node % devices
        return mirrored if chunk % 2 else node - 1

    root = 1 << (devices.bit_length() - 1)
    leaves_first = sorted(set(range(1, devices + 1)) - {root}, key=lambda node: node & -node)
    hops = [(device(node), device(parent(node))) for node in leaves_first]
    return [Reduce((a,), b) for a, b in hops] + [Copy(b, a) for a, b in reversed(hops)]


def rows_then_columns(devices, chunk):
    """Add up along the rows of a grid, then along one column: rings in two dimensions.

    Source: Mikami et al.: Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash, 2018
    (2D-Torus).
    """
    rows = max(
        count
        for count in range(1, devices + 1)
        if devices % count == 0 and count * count <= devices
    )
    columns = devices // rows
    last_row, last = divmod(chunk % devices, columns)
    path = [(last + step) % columns for step in range(1, columns + 1)]  # ends in column `last`
    hops = [
        (row * columns + a, row * columns + b)
        for a, b in zip(path, path[1:])
        for row in range(rows)
    ]
    path = [(last_row + step) % rows for step in range(1, rows + 1)]
    hops += [(a * columns + last, b * columns + last) for a, b in zip(path, path[1:])]
    return [Reduce((a,), b) for a, b in hops] + [Copy(b, a) for a, b in reversed(hops)]


def flat_tree(devices, chunk):
    """Add up everything on one device, and copy back along a binomial tree.

    The root waits once for all gradients, and copies leave several devices at the same time.
    """
    root = chunk % devices
    at = [(root + place) % devices for place in range(devices)]  # the device at each place
    if devices > 1:
        yield Reduce(tuple(at[1:]), root)
    distance = 1 << (devices - 1).bit_length()
    while distance > 1:
        distance //= 2
        for place in range(0, devices - distance, 2 * distance):
            yield Copy(at[place], at[place + distance])


ALGORITHMS = (
    two_quads,
    halving_and_doubling,
    double_binary_trees,
    rows_then_columns,
    flat_tree,
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        help="how many logical CPU devices (two_quads: an even number)",
    )
    devices = [f"/cpu:{k}" for k in range(parser.parse_args().devices)]

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # without the lines of its start
    import tensorflow as tf  # here, because its start takes seconds

    from hier_allreduce import Strategy, allreduce_grads

    tf1 = tf.compat.v1
    tf1.disable_eager_execution()
    for algorithm in ALGORITHMS:
        strategy = Strategy(algorithm=algorithm, chunk_bytes=0)
        with tf.Graph().as_default(), tf1.Session(
            config=tf1.ConfigProto(device_count={"CPU": len(devices)})
        ) as session:
            grads = []
            for k, device in enumerate(devices):
                with tf.device(device):
                    grads.append([tf.fill([4], 2.0**k) for _ in devices])
            sums = session.run(allreduce_grads(grads, devices, strategy=strategy))
        right = all((total == 2.0 ** len(devices) - 1).all() for row in sums for total in row)
        print(f"{algorithm.__name__}: {'all towers have the sum' if right else 'wrong'}")


if __name__ == "__main__":
    main()
