"""tensorpack's accumulation of gradients over several steps, with a counter that is read in order."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf
from tensorpack.tfutils.gradproc import FilterNoneGrad
from tensorpack.tfutils.optimizer import AccumGradOptimizer, ProxyOptimizer

from ...compat import tf1
from ...training.update import Pairs


class OrderedAccumGrad(ProxyOptimizer):
    """tensorpack's ``AccumGradOptimizer``, which reads its counter only after it has counted the step.

    tensorpack's reads the counter while the same step advances it. Now and then it applies the sums a step too early,
    or skips a step. As each tower has a counter, the towers then diverge. The variables and their names are the same.

    Args:
        opt: the optimizer that gets the sums.
        niter: the number of steps in a sum.
    """

    def __init__(self, opt: Any, niter: int):
        super().__init__(opt, "AccumGrad")
        self._niter = int(niter)

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Add N gradients to their sums; in every ``niter``-th step apply the sums and clear them."""
        pairs = FilterNoneGrad().process(grads_and_vars)
        variables = [var for _, var in pairs]
        with tf.control_dependencies(None):
            sums = [self._zeros_slot(var, "accum", self._name) for var in variables]
            with tf1.variable_scope(self._name), tf.device("/cpu:0"):
                counter = tf1.Variable(
                    0, name="counter", trainable=False, dtype=tf.int32, use_resource=True
                )

        def apply_sums() -> Any:
            update = self._opt.apply_gradients(
                [(total.read_value(), var) for total, var in zip(sums, variables)]
            )
            with tf.control_dependencies([update]):
                return tf.group(*[tf1.assign(total, tf.zeros_like(total)) for total in sums])

        with tf1.name_scope("AccumGradOptimizer"):
            added = [total.assign_add(grad) for total, (grad, _) in zip(sums, pairs)]
            with tf.control_dependencies([*added, counter.assign_add(1)]):
                is_due = tf.equal(counter.read_value() % self._niter, 0)
                applied = tf.cond(is_due, apply_sums, tf.no_op)
            with tf.control_dependencies([applied]):
                return (
                    tf.no_op(name)
                    if global_step is None
                    else tf1.assign_add(global_step, 1, name=name).op
                )


def with_ordered_accumulation(optimizer: Any) -> Any:
    """Replace each ``AccumGradOptimizer`` in tensorpack's wrappers by :class:`OrderedAccumGrad`."""
    if isinstance(optimizer, ProxyOptimizer):
        optimizer._opt = with_ordered_accumulation(optimizer._opt)
    if type(optimizer) is AccumGradOptimizer:
        return OrderedAccumGrad(optimizer._opt, optimizer._niter)
    return optimizer
