"""Optimizers as users write them: with state beside slots, wrapped, clipping, choosing by name."""

import functools
import re
import sys

import tensorflow as tf

tf1 = tf.compat.v1
train = tf1.train
SGD = train.GradientDescentOptimizer


# ---- with more state than slots ------------------------------------------------------------------


def with_gradients(grads_and_vars):
    """Return the pairs that have a gradient, as TensorFlow's optimizers choose them."""
    return [(grad, var) for grad, var in grads_and_vars if grad is not None]


class CountingSinceInit(tf.compat.v1.train.GradientDescentOptimizer):
    """A learning rate that falls with a count of steps. The constructor makes its variable."""

    def __init__(self):
        super().__init__(0.1)
        self.steps = tf1.get_variable(
            "own_steps", initializer=0.0, trainable=False, use_resource=True
        )

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
            clipped = [
                var.assign(tf.clip_by_value(var, -1.1, 1.1)) for var in self.variables_to_clip
            ]
        return tf.group(*clipped, name=name_scope)


class Kept:
    """Where nobody looks: not an attribute of the optimizer."""

    loss: object = None


class Polyak(tf.compat.v1.train.GradientDescentOptimizer):
    """Scales gradients by the loss, which compute_gradients keeps somewhere.

    With ``"mean"`` it is that of all towers. With ``"nothing"`` it is kept, and not used.
    """

    def __init__(self, where):
        super().__init__(0.1)
        self.where, self.losses, self.calls = where, [], 0
        if where == "variable":
            self.variable = tf1.get_variable(
                "kept", initializer=0.0, trainable=False, use_resource=True
            )

    def compute_gradients(self, loss, *args, **kwargs):
        pairs = super().compute_gradients(loss, *args, **kwargs)
        self.losses.append(loss)
        self.calls += 1
        Kept.loss = loss
        tf1.add_to_collection("kept", loss)
        if self.where == "variable":
            with tf.control_dependencies([self.variable.assign(loss)]):
                pairs = [(tf.identity(grad), var) for grad, var in pairs]
        if self.where == "slot":
            slot = self._get_or_make_slot(pairs[0][1], tf.zeros([]), "kept", "kept")
            with tf.control_dependencies([slot.assign(loss)]):
                pairs = [(tf.identity(grad), var) for grad, var in pairs]
        return pairs

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads_and_vars = list(grads_and_vars)
        factor = {
            "slot": lambda: self.get_slot(grads_and_vars[0][1], "kept").read_value(),
            "attribute": lambda: self.losses[-1],
            "object": lambda: Kept.loss,
            "collection": lambda: tf1.get_collection("kept")[-1],
            "variable": lambda: self.variable.read_value(),
            "mean": lambda: tf.add_n(self.losses) / len(self.losses),
            "nothing": lambda: 1.0,
        }[self.where]()
        pairs = [(grad * factor, var) for grad, var in grads_and_vars]
        return super().apply_gradients(pairs, global_step, name)


class KeepingFunctions(tf.compat.v1.train.AdamOptimizer):
    """Keeps a method of its own, a partial and a lambda of it, which all belong to this object."""

    def __init__(self):
        super().__init__(0.1)
        self.rate, self.method = 0.5, self.scaled
        self.partial, self.function = (
            functools.partial(self.scaled, by=2.0),
            lambda grad: grad * self.rate,
        )

    def scaled(self, grad, by=1.0):
        return grad * by * self.rate

    def _resource_apply_dense(self, grad, var):
        return super()._resource_apply_dense(self.method(self.partial(self.function(grad))), var)


class Noisy(tf.compat.v1.train.GradientDescentOptimizer):
    """Adds noise in the update."""

    def _resource_apply_dense(self, grad, var):
        return super()._resource_apply_dense(grad + 0.0 * tf1.random_normal(grad.shape), var)


class BeginsAtRandom(tf.compat.v1.train.GradientDescentOptimizer):
    """Pulls each variable to a state that the update makes, with a random initial value."""

    def _resource_apply_dense(self, grad, var):
        start = tf1.random_normal(var.shape, seed=1)
        state = tf1.Variable(start, trainable=False, name="state", use_resource=True)
        pull = 0.1 * (var.read_value() - state.read_value())
        return super()._resource_apply_dense(grad + pull, var)


class LooksUp(tf.compat.v1.train.GradientDescentOptimizer):
    """Takes a factor of each gradient from a hash table that the update makes."""

    def _resource_apply_dense(self, grad, var):
        rates = tf.lookup.KeyValueTensorInitializer(["w", "b"], [0.5, 2.0])
        table = tf.lookup.StaticHashTable(rates, 0.0)
        factor = table.lookup(tf.constant(var.op.name.split("/")[-1]))
        return super()._resource_apply_dense(grad * factor, var)


class Timed(tf.compat.v1.train.GradientDescentOptimizer):
    """Reads the clock in the update."""

    def _resource_apply_dense(self, grad, var):
        return super()._resource_apply_dense(grad + 0.0 * tf.cast(tf.timestamp(), tf.float32), var)


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


class WithoutState(tf.compat.v1.train.Optimizer):
    """A wrapper that does not call the constructor of its base, as contrib's moving averages."""

    def __init__(self, inside):
        self.inside = inside

    def compute_gradients(self, *args, **kwargs):
        return self.inside.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return self.inside.apply_gradients(grads_and_vars, global_step, name)


class Velocity(tf.compat.v1.train.Optimizer):
    """Momentum whose slots all have the same name, in all towers."""

    def __init__(self):
        super().__init__(False, "Velocity")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        done = []
        for grad, var in with_gradients(grads_and_vars):
            velocity = tf1.Variable(
                tf.zeros(var.shape), trainable=False, name="velocity", use_resource=True
            )
            done.append(var.assign_sub(0.1 * velocity.assign(0.9 * velocity + grad)).op)
        return tf.group(*done, name=name)


class Lamb(tf.compat.v1.train.GradientDescentOptimizer):
    """Counts steps in a variable of a fixed name, before the update."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        steps = tf1.get_variable("lamb/step", initializer=0.0, trainable=False, use_resource=True)
        self._learning_rate = 0.1 / steps.assign_add(1.0)
        return super().apply_gradients(grads_and_vars, global_step, name)


class Clipped(tf.compat.v1.train.MomentumOptimizer):
    """Clips the gradients by their global norm, as on one device: docs/how-to/towers.md."""

    def __init__(self, rate):
        super().__init__(rate, 0.9)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads, variables = zip(*grads_and_vars)
        pairs = zip(tf.clip_by_global_norm(grads, 0.01)[0], variables)
        return super().apply_gradients(pairs, global_step, name)


class AveragesTrainable(tf.compat.v1.train.GradientDescentOptimizer):
    """Reads the variables of the collection, not those that it gets."""

    def __init__(self):
        super().__init__(0.1)

    def _prepare(self):
        self._learning_rate = 0.1 + 0.0 * tf.reduce_sum(tf1.trainable_variables()[-1])
        super()._prepare()


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


# ---- choosing by names ---------------------------------------------------------------------------


class Chooses(tf.compat.v1.train.MomentumOptimizer):
    """Momentum that decays the variables of a choice, before the update."""

    def __init__(self, choice):
        super().__init__(0.1, 0.9)
        self.choice, self.chosen = choice, set()

    def apply_gradients(self, grads_and_vars, global_step=None, name=None, also=()):
        variables = [var for _, var in grads_and_vars]
        self.chosen = {id(var) for var in variables if self.choice(var) or var in also}
        return super().apply_gradients(grads_and_vars, global_step, name)

    def _resource_apply_dense(self, grad, var):
        rate = 0.5 if id(var) in self.chosen else 0.0
        with tf.control_dependencies([var.assign_sub(rate * var.read_value())]):
            return super()._resource_apply_dense(grad, var)


class OwnSlots(tf.compat.v1.train.Optimizer):
    """Momentum as BERT's AdamWeightDecayOptimizer is written: slots and exceptions by names."""

    def __init__(self, how):
        super().__init__(False, "OwnSlots")
        self.how = how

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        done = []
        for grad, var in with_gradients(grads_and_vars):
            own = re.sub(":\\d+$", "", var.name)
            velocity = self.how(own + "/velocity", var)
            decay = 0.0 if any(re.search(each, own) for each in ("norm", "bias")) else 0.5
            moved = velocity.assign(0.9 * velocity.read_value() + grad + decay * var.read_value())
            done.append(var.assign_sub(0.1 * moved).op)
        return tf.group(*done, name=name)


def by_get_variable(name, var):
    zeros = tf1.zeros_initializer()
    return tf1.get_variable(name, var.shape, initializer=zeros, trainable=False, use_resource=True)


def by_variable(name, var):
    return tf1.Variable(tf.zeros(var.shape), trainable=False, name=name, use_resource=True)


def by_slot_creator(name, var):
    return SLOTS.create_zeros_slot(var, "velocity")


SLOTS = sys.modules[tf1.train.Optimizer.__module__].slot_creator
FIRST = "^(tower0/)?"  # as the names of one device, or of tower 0
