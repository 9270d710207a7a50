"""tensorpack's accumulation of gradients over several steps, with its counter read in order."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf
from tensorpack.tfutils.gradproc import FilterNoneGrad
from tensorpack.tfutils.optimizer import AccumGradOptimizer, ProxyOptimizer

from ...compat import tf1
from ...configs import whole_number
from ...graph.rows import grads_in, variables_in
from ...training.towers import Pairs


class OrderedAccumGrad(AccumGradOptimizer):
    """tensorpack's ``AccumGradOptimizer``, but reading its counter after it has counted the step.

    tensorpack's reads the counter while the same step advances it. Now and then it applies the sums
    a step too early, or skips a step. The variables and their names are the same. tensorpack's
    trainers count the global step themselves.
    """

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Add N gradients to their sums; each ``niter``-th step applies and clears the sums.

        Raises:
            HierAllreduceError: ``niter`` is no number of steps.
        """
        steps_of_sum = whole_number(self._niter, "niter", least=1)
        # A transform may leave out a gradient, so that its variable stays as it is.
        pairs = FilterNoneGrad().process(grads_and_vars)
        variables = variables_in(pairs)
        with tf.control_dependencies(None):
            sums = self._create_accum_slots(variables)
            with tf1.variable_scope(self._name), tf.device("/cpu:0"):
                counter = tf1.Variable(0, name="counter", trainable=False, use_resource=True)

        def apply_sums() -> Any:
            accumulated = [total.read_value() for total in sums]
            update = self._opt.apply_gradients(list(zip(accumulated, variables)))
            with tf.control_dependencies([update]):
                return tf.group(*[total.assign(tf.zeros_like(total)) for total in sums])

        with tf1.name_scope("AccumGradOptimizer"):
            added = [total.assign_add(grad) for total, grad in zip(sums, grads_in(pairs))]
            with tf.control_dependencies([*added, counter.assign_add(1)]):
                # The read comes after the step was counted, because nothing else orders the two.
                is_last = tf.equal(counter.read_value() % steps_of_sum, 0)
                applied = tf.cond(is_last, apply_sums, tf.no_op)
            return tf.group(applied, name=name)


def with_ordered_accumulation(optimizer: Any) -> Any:
    """Replace each ``AccumGradOptimizer`` in tensorpack's wrappers by :class:`OrderedAccumGrad`."""
    if isinstance(optimizer, ProxyOptimizer):
        optimizer._opt = with_ordered_accumulation(optimizer._opt)
    if type(optimizer) is AccumGradOptimizer:
        return OrderedAccumGrad(optimizer._opt, optimizer._niter)
    return optimizer
