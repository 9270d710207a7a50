"""Optimizers with more state than slots, as users write them, and the outcome of their training on K towers.

A separate optimizer for each tower would train most of these wrong in silence.
"""

import functools

import tensorflow as tf

tf1 = tf.compat.v1
train = tf1.train
SGD = train.GradientDescentOptimizer


class CountingSinceInit(tf.compat.v1.train.GradientDescentOptimizer):
    """A learning rate that falls with a count of steps, whose variable is made by the constructor."""

    def __init__(self):
        super().__init__(0.1)
        self.steps = tf1.get_variable("own_steps", initializer=0.0, trainable=False, use_resource=True)

    def _prepare(self):
        self._learning_rate_tensor = 0.1 / self.steps.assign_add(1.0)


class Counting(tf.compat.v1.train.GradientDescentOptimizer):
    """A learning rate that falls with the optimizer's count of steps."""

    def _create_slots(self, var_list):
        self.steps = self._create_non_slot_variable(0.0, "steps", colocate_with=var_list[0])

    def _prepare(self):
        self._learning_rate_tensor = 0.1 / self.steps.assign_add(1.0)


class CountingInACondition(Counting):
    """The same in a tf.cond."""

    def _prepare(self):
        add = lambda: self.steps.assign_add(1.0, read_value=True)  # noqa: E731
        self._learning_rate_tensor = 0.1 / tf.cond(self.steps > -1.0, add, lambda: self.steps + 0.0)


class Clipping(tf.compat.v1.train.AdamOptimizer):
    """Adam that clips its variables after all updates."""

    def _create_slots(self, var_list):
        super()._create_slots(var_list)
        self.variables_to_clip = list(var_list)

    def _finish(self, update_ops, name_scope):
        with tf.control_dependencies([super()._finish(update_ops, None)]):
            clipped = [var.assign(tf.clip_by_value(var, -1.1, 1.1)) for var in self.variables_to_clip]
        return tf.group(*clipped, name=name_scope)


class SetByComputeGradients(tf.compat.v1.train.GradientDescentOptimizer):
    """A learning rate that compute_gradients sets."""

    def compute_gradients(self, *args, **kwargs):
        self._learning_rate = 0.05
        return super().compute_gradients(*args, **kwargs)


class KeepingFunctions(tf.compat.v1.train.AdamOptimizer):
    """Keeps a method of its own, a partial and a lambda of it, which all belong to this object."""

    def __init__(self):
        super().__init__(0.1)
        self.rate, self.method = 0.5, self.scaled
        self.partial, self.function = functools.partial(self.scaled, by=2.0), lambda grad: grad * self.rate

    def scaled(self, grad, by=1.0):
        return grad * by * self.rate

    def _resource_apply_dense(self, grad, var):
        return super()._resource_apply_dense(self.method(self.partial(self.function(grad))), var)


class Noisy(tf.compat.v1.train.GradientDescentOptimizer):
    """Adds noise in the update."""

    def _resource_apply_dense(self, grad, var):
        return super()._resource_apply_dense(grad + 0.0 * tf1.random_normal(grad.shape), var)


class CallingPython(tf.compat.v1.train.GradientDescentOptimizer):
    """Calls a function in Python in the update, inside a condition."""

    def _resource_apply_dense(self, grad, var):
        changed = lambda: tf1.py_func(lambda g: g * 0.5, [grad], tf.float32)  # noqa: E731
        return super()._resource_apply_dense(
            tf.reshape(tf.cond(tf.size(grad) > 0, changed, lambda: grad), grad.shape), var
        )


class Wrapper(tf.compat.v1.train.Optimizer):
    """Changes gradients before another optimizer gets them."""

    def __init__(self, inside, change=lambda grad: grad):
        super().__init__(False, "Wrapper")
        self.inside, self.change, self._loss_scale = [inside], change, 8.0

    def compute_gradients(self, *args, **kwargs):
        return self.inside[0].compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = [(g if g is None else self.change(g), v) for g, v in grads_and_vars]
        return self.inside[0].apply_gradients(pairs, global_step, name)


class Velocity(tf.compat.v1.train.Optimizer):
    """Momentum whose slots all have the same name, in all towers."""

    def __init__(self):
        super().__init__(False, "Velocity")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        done = []
        for grad, var in grads_and_vars:
            velocity = tf1.Variable(tf.zeros(var.shape), trainable=False, name="velocity", use_resource=True)
            done.append(var.assign_sub(0.1 * velocity.assign(0.9 * velocity + grad)).op)
        return tf.group(*done, name=name)


def averaging():
    """Return a wrapper that counts in a variable, as a processor of gradients might."""

    def change(grad):
        with tf1.variable_scope("averaging", reuse=tf1.AUTO_REUSE):
            seen = tf1.get_variable("seen", [], initializer=tf1.zeros_initializer(), trainable=False, use_resource=True)
        return grad / seen.assign_add(1.0)

    return Wrapper(SGD(0.1), change)


def patched_outside():
    """Return an optimizer of which one object has another update than its class."""
    optimizer = train.MomentumOptimizer(0.1, 0.9)
    inside = optimizer._resource_apply_dense
    optimizer._resource_apply_dense = lambda grad, var: inside(grad * 0.5, var)
    return optimizer


def changed_later():
    """Return an optimizer with another learning rate than it was constructed with."""
    optimizer = SGD(0.1)
    optimizer._learning_rate = 0.02
    return optimizer


TRAINS = ""
MORE = "does more than update each variable in place"
TWICE = "both write"
# of each: a function that makes it, and the words of the error, or "", with update="replicated" and update="main"
CASES = {
    "sgd": (lambda: SGD(0.1), TRAINS, TRAINS),
    "momentum": (lambda: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True), TRAINS, TRAINS),
    "adam": (lambda: train.AdamOptimizer(0.1), TRAINS, TRAINS),
    "rmsprop": (lambda: train.RMSPropOptimizer(0.01, centered=True), TRAINS, TRAINS),
    "adagrad": (lambda: train.AdagradOptimizer(0.1), TRAINS, TRAINS),
    "adagrad DA": (lambda: train.AdagradDAOptimizer(0.1, tf.constant(1, tf.int64)), TRAINS, TRAINS),
    "adadelta": (lambda: train.AdadeltaOptimizer(0.5), TRAINS, TRAINS),
    "ftrl": (lambda: train.FtrlOptimizer(0.1), TRAINS, TRAINS),
    "proximal": (lambda: train.ProximalAdagradOptimizer(0.1), TRAINS, TRAINS),
    "counter in the constructor": (CountingSinceInit, TWICE, TRAINS),
    "counter": (lambda: Counting(0.1), TWICE, TRAINS),
    "counter in a condition": (lambda: CountingInACondition(0.1), TWICE, TRAINS),
    "clips at the end": (lambda: Clipping(0.1), "its _finish() is called once a step", TRAINS),
    "set by compute_gradients": (lambda: SetByComputeGradients(0.1), TRAINS, TRAINS),
    "changed later": (changed_later, TRAINS, TRAINS),
    "keeps functions": (KeepingFunctions, TRAINS, TRAINS),
    "patched from outside": (patched_outside, TRAINS, TRAINS),
    "noise": (lambda: Noisy(0.1), "draws random numbers", TRAINS),
    "Python": (lambda: CallingPython(0.1), "calls a function in Python", TRAINS),
    "wrapped": (lambda: Wrapper(Wrapper(train.AdamOptimizer(0.1)), lambda grad: grad * 0.5), TRAINS, MORE),
    "wrapper with a variable": (averaging, TWICE, MORE),
    "free names of slots": (Velocity, TRAINS, MORE),
}
