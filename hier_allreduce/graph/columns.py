"""Sums on CPU devices, which Grappler would make slower."""

from __future__ import annotations

from typing import Any, Sequence

import tensorflow as tf

from ..compat import tf1
from .sums import Sum


class Columns(Sum):
    """The sum of one chunk's tensors on CPU devices.

    Grappler's memory optimizer expands an add_n of more than two inputs, one of them made on the same device, into one
    pass over memory for each input, where it knows their shape and finds the device's memory short: twice the time.
    Columns of a length that it cannot know prevent this (a vector's length it would find), and a reshape copies
    nothing. GPUs would pay for the further ops.
    """

    def add(self, values: Sequence[Any], towers: Sequence[int], dst: int) -> Any:
        are_known = all(value.shape.is_fully_defined() for value in values)
        if len(values) == 2 or not are_known or tf.executing_eagerly():
            return super().add(values, towers, dst)
        name, columns = f"{self.name}/sum", []
        for value, tower in zip(values, towers):
            column = self.shared.constant(tower, (-1, 1), is_hidden=True)
            with tf1.device(self.devices[tower]):
                columns.append(tf.reshape(value, column, name=f"{self.name}/column"))
        shape = self.shared.constant(dst, tuple(values[0].shape.as_list()))
        with tf1.device(self.devices[dst]):
            return tf.reshape(tf.add_n(columns, name=name), shape, name=name)
