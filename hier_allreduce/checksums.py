"""Checksums by which towers, and hosts, compare variables to the bit."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def checksum_of(tensor: Any) -> Any:
    """Return two int64: the sum of a tensor's words, and the sum weighted by their places.

    Two words of one tensor that change places change the second sum. A single word that changes
    always changes both, because its weight is odd.
    """
    # TensorFlow cannot take the bits of a bool.
    if tensor.dtype.is_bool:
        tensor = tf.cast(tensor, tf.int8)
    word = {1: tf.int8, 2: tf.int16, 4: tf.int32}.get(tensor.dtype.size, tf.int64)
    words = tf.reshape(tf.cast(tf.bitcast(tensor, word), tf.int64), [-1])
    weights = 2 * tf.range(tf.size(words, out_type=tf.int64), dtype=tf.int64) + 1
    return tf.stack([tf.reduce_sum(words), tf.reduce_sum(words * weights)])
