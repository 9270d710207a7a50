"""tensorpack's replicated training with this package's all-reduce, on any devices.

::

    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    launch_train_with_config(config, HierarchicalTrainer(8))                       # GPUs 0 to 7
    launch_train_with_config(config, HierarchicalTrainer(["/cpu:0", "/cpu:1"]))    # any devices
    launch_train_with_config(config, HierarchicalTrainer.from_config("chainer"))   # all choices from a file

Importing this module imports tensorpack, which sets environment variables and patches TensorFlow.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import warnings
from functools import lru_cache
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np
import tensorflow as tf
from tensorpack.callbacks import Callback, PeriodicTrigger, RunOp
from tensorpack.graph_builder.training import DataParallelBuilder, SyncMultiGPUReplicatedBuilder
from tensorpack.graph_builder.utils import override_to_local_variable
from tensorpack.input_source import FeedfreeInput, FeedInput, QueueInput, StagingInput
from tensorpack.tfutils.gradproc import FilterNoneGrad
from tensorpack.tfutils.optimizer import AccumGradOptimizer, PostProcessOptimizer, ProxyOptimizer
from tensorpack.tfutils.sesscreate import NewSessionCreator, SessionCreatorAdapter
from tensorpack.train import SingleCostTrainer
from tensorpack.utils import logger

from .. import presets
from ..errors import DeviceError, GradientError, StrategyError, VariableError
from ..graph import (
    allreduce_grads,
    allreduce_grads_and_vars,
    device_fields,
    device_strings,
    fits,
    is_resource,
    is_sparse,
    pairs_of,
    tf1,
    where,
)
from ..planning import Strategy, strategy_from
from ..training import (
    Replicas,
    UpdateOptions,
    all_variables,
    differences,
    drift,
    find_replicas,
    held_by,
    match_created,
    parse_slot_name,
    refuse_unfit,
    sum_advice,
    update_at_mains,
    update_replicated,
)

__all__ = ["HierarchicalTrainer"]

_TRAINER_FIELDS = {
    "devices": presets.Field(required="how many GPUs, or a list of devices"),
    **dict.fromkeys(["average", "strategy", "update", "broadcast_every", "check_replicas_every"], presets.Field()),
}

Pairs = List[Tuple[Any, Any]]  # N (gradient, variable) pairs of one tower


class HierarchicalTrainer(SingleCostTrainer):
    """tensorpack's ``SyncMultiGPUTrainerReplicated`` with the hierarchical all-reduce, for any K ≥ 1 devices.

    Every device holds a whole copy of the model: a *tower*. Names are tensorpack's own, so that checkpoints go from
    either trainer to the other: tower 0's variables have no prefix and are the ones saved, the others are called
    ``towerK/…`` and are local.

    ::

        tower 0 on devices[0]        tower 1 on devices[1]
        loss → gradients g0          loss → gradients g1
              └───────── all-reduce ─────────┘
        optimizer (g0+g1)/2 → W      optimizer (g0+g1)/2 → tower1/W

    It differs from tensorpack's where that goes wrong:

    - K towers share one optimizer, whose once-a-step work (Adam: advancing its beta powers) is done once a step, not
      K times, so that Adam is Adam and the towers stay equal.
    - ``AccumGradOptimizer`` applies its sum at exactly every k-th step, in all towers.
    - Gradient processors that match variables by name, and what ``PostProcessOptimizer`` calls, see tower 0's names
      in every tower: what ``ScaleGradient(("hidden/.*", 0.))`` freezes is frozen in all. What they keep in a variable
      of their own, called like the one that they were given, all towers would share and change; that is refused, and
      ``update="main"``, which calls them once, is the way.
    - Sparse gradients (embeddings) stay sparse, with a row for each time that one was looked up: what clips or measures
      gradients sees these rows before they are added up, unless the strategy is ``Strategy(sparse="dense")``.
    - The session gets a thread for every tower, because tensorpack's staging of inputs blocks that many.

    Models should use resource variables: a reference variable, TensorFlow 1.15's default, can be updated while a
    gradient still reads it. Where several towers train one, a warning says so; ``update="main"`` refuses them.

    Attributes:
        devices: K strings, the device of each tower.
        grads: K×N (gradient, variable) pairs once the graph is set up, after the all-reduce; before it if
            ``update="main"``, where no tower but the main has the reduced gradient.
        BROADCAST_EVERY_EPOCH: copy tower 0's variables (optimizer slots too) to the other towers at the end of
            every epoch, and not only before training. Needed where towers have variables that are not trained, as
            batch normalisation's moving averages.
    """

    BROADCAST_EVERY_EPOCH = True
    cluster: Any = None  # of several hosts: see integrations.cluster

    def __init__(
        self,
        devices: Any,
        average: bool = True,
        algorithm: Optional[str] = None,
        groups: Optional[Sequence[Sequence[int]]] = None,
        strategy: Union[str, Strategy, None] = None,
        update: str = "replicated",
        broadcast_every: int = 0,
        check_replicas_every: int = 0,
    ):
        """Check the choices; nothing is built yet.

        Args:
            devices: how many GPUs, or a list of GPU ids or TensorFlow device strings, one for each tower.
                CPU devices are created as needed, so ``["/cpu:0", …, "/cpu:7"]`` works on any machine.
            average: the mean of the gradients, or their sum (with a warning on what to change in the optimizer).
            algorithm: as in :func:`hier_allreduce.allreduce_grads`; ``"hierarchical"`` if nothing is said.
            groups: as in :func:`hier_allreduce.allreduce_grads`.
            strategy: all choices in one, instead of ``algorithm`` and ``groups``.
            update: ``"replicated"``: every tower updates its variables; ``"main"``: each variable's main does, once,
                and copies the new value to the others: optimizer slots exist once. Checkpoints are the same.
            broadcast_every: copy tower 0's variables to the others every so many steps, besides every epoch; 0: not;
                -1: never, not before training either.
            check_replicas_every: look for differences between towers every so many steps, and report the largest as
                ``replica_drift`` to the monitors, the variable to the log; 0: never. What is trained and its optimizer
                slots are compared; moving averages are not, which tensorpack updates on tower 0 only.

        Raises:
            DeviceError: ``devices`` cannot be read. A device that does not exist is refused when training starts,
                before its session does.
            StrategyError: a choice that does not exist, or ``groups`` that miss or repeat a tower.
            GradientError: ``average`` is not a bool.
        """
        self.devices = tower_devices(devices)
        if strategy is None and algorithm is None:
            algorithm = "hierarchical"  # what the trainer's name says, on CPU devices too
        self._average = average
        self._strategy = strategy_from(strategy, algorithm=algorithm, groups=groups)
        options = UpdateOptions(average, self._strategy, update, broadcast_every, check_replicas_every)
        self._update, self._broadcast_every, self._check_every = update, broadcast_every, check_replicas_every
        del options
        with tf.Graph().as_default():  # a dry run, so that a wrong choice is refused here, where it is made
            allreduce_grads([[tf.constant(0.0)]] * len(self.devices), self.devices, average, strategy=self._strategy)
        super().__init__()

    @classmethod
    def from_config(cls, name_or_path: str) -> HierarchicalTrainer:
        """The trainer that ``configs/trainers/NAME.yaml`` or the YAML file at a path describes.

        Its keys are the arguments of the constructor; ``strategy`` is a name, a path, or the strategy's own keys.

        Raises:
            StrategyError: no such file or name, or a key that is no argument (with the nearest).
            DeviceError: ``devices`` cannot be read.
        """
        path, values = presets.load("trainers", name_or_path, _TRAINER_FIELDS, StrategyError)
        if isinstance(values.get("strategy"), dict):
            values["strategy"] = Strategy.from_values(values["strategy"], str(path))
        return cls(**values)

    def setup_graph(self, input_signature: Any, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]) -> None:
        """tensorpack's: build everything. Several towers take a ``FeedInput``'s batches from a queue, each its own.

        Raises:
            StrategyError: an input that gives every tower the same batch, or waits for ever.
            VariableError: an ``AccumGradOptimizer`` inside another wrapper, which cannot be replaced, or an optimizer
                that is made for ``tf.distribute``.
            GradientError: a gradient processor cannot take sparse gradients.
        """
        if isinstance(input, StagingInput) and input._nr_stage > 1:
            raise StrategyError(
                f"StagingInput({type(input._input).__name__}, nr_stage={input._nr_stage}): tensorpack's holds one"
                " element for each tower, and would wait for ever for room for the second; nr_stage=1 works"
            )
        if len(self.devices) > 1 and isinstance(input, FeedInput):
            input = QueueInput(input.ds)
        super().setup_graph(input_signature, input, get_cost_fn, get_opt_fn)

    def _setup_graph(self, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]) -> List[Callback]:
        """tensorpack's hook: build the towers, the all-reduce and the updates; return the callbacks needed."""
        if len(self.devices) > 1 and not isinstance(input, FeedfreeInput):
            raise StrategyError(
                f"{type(input).__name__} would give every tower the same batch; use QueueInput, TensorInput, or another"
                " FeedfreeInput, which each tower takes its own batch from"
            )
        towers = range(len(self.devices))
        rows = DataParallelBuilder.call_for_each_tower(
            list(towers),
            self._make_get_grad_fn(input, get_cost_fn, get_opt_fn),
            devices=self.devices,
            use_vs=[tower > 0 for tower in towers],
        )
        if len(rows) > 1:
            refuse_towers_names([var for _, var in rows[0]])
        rows = with_missing(rows)
        optimizer = with_ordered_accumulation(get_opt_fn())
        refuse_unfit(optimizer)
        summed = len(self.devices) * self._hosts
        if not self._average and summed > 1:
            warnings.warn(sum_advice(optimizer, summed), stacklevel=2)
        self.train_op, alike = self._updated(optimizer, rows)
        return self._keep_equal(rows, alike) if len(self.devices) > 1 else []

    @property
    def _hosts(self) -> int:
        return self.cluster.size if self.cluster else 1

    def _updated(self, optimizer: Any, rows: Sequence[Pairs]) -> Tuple[Any, List[List[Any]]]:
        """The train op, with tensorpack's names around either update, and what each tower's update made for itself."""
        strategy = self._strategy.for_optimizers(self._hosts)
        if self._update == "main":
            self.grads = [list(row) for row in pairs_of(rows, tuple(self.devices))]
            # this scope is in the names of saved variables
            with tf1.name_scope("apply_gradients"), by_tower_0s_names(optimizer, self.grads, self.devices):
                updates = update_at_mains(
                    optimizer,
                    self.grads,
                    self.devices,
                    self._average,
                    strategy,
                    [optimizer, *(proxy._opt for proxy in proxies(optimizer))][-1],  # which they pass everything on to
                    self.cluster,
                )
                return tf.group(*updates.ops, name="train_op"), []
        if len(rows) > 1:
            warn_of_references([var for _, var in rows[0]])
        self.grads = allreduce_grads_and_vars(
            rows, self.devices, self._average, strategy=strategy, cluster=self.cluster
        )
        with tf1.name_scope("apply_gradients"), by_tower_0s_names(optimizer, self.grads, self.devices):
            updates = update_replicated(
                optimizer,
                self.grads,
                self.devices,
                # slots that are created here belong to the tower: local, and so not saved, for all but the first
                lambda tower: override_to_local_variable(enable=tower > 0),
            )
            return tf.group(*updates.ops, name="train_op"), match_created(updates.created)

    def _keep_equal(self, rows: Sequence[Pairs], alike: Sequence[Sequence[Any]]) -> List[Callback]:
        """The callbacks that copy tower 0's variables to the others, and look for differences."""
        callbacks: List[Callback] = []
        if self._broadcast_every >= 0:
            with tf1.name_scope("sync_variables"):
                # tensorpack finds copies by the tower's name; counters of AccumGradOptimizer do not have it
                counters = [var.assign(first.read_value()) for row in alike[1:] for var, first in zip(row, alike[0])]
                sync = tf.group(SyncMultiGPUReplicatedBuilder.get_post_init_ops(), *counters)
            callbacks.append(RunOp(sync, run_before=True, run_as_trigger=self.BROADCAST_EVERY_EPOCH, verbose=True))
            callbacks[0].name_scope = "SyncVariables"
        if self._broadcast_every > 0:
            callbacks.append(PeriodicTrigger(RunOp(sync, run_before=False), every_k_steps=self._broadcast_every))
        if self._check_every > 0:
            trained = {var.op.name for row in rows for _, var in row}
            variables = [var for var in all_variables() if parse_slot_name(var.op.name, trained)]
            callbacks.append(
                PeriodicTrigger(CheckReplicas(find_replicas(rows, variables)), every_k_steps=self._check_every)
            )
        return callbacks

    def initialize(self, session_creator: Any, session_init: Any) -> None:
        """tensorpack's hook: create the session, and look whether it has the devices.

        A ``NewSessionCreator``, also in a ``SessionCreatorAdapter``, is given CPU devices and threads as needed. The
        sessions of other creators must have them: more than K threads for K towers, and ``use_per_session_threads``.

        Raises:
            DeviceError: a tower's device does not exist; the message names those that do.
        """
        session_creator = with_room(session_creator, self.devices)
        if isinstance(session_creator, NewSessionCreator):
            # Soft placement would quietly move a tower elsewhere, so the devices are looked up in an empty session of
            # the same configuration.
            with tf1.Session(session_creator.target, tf.Graph(), session_creator.config) as probe:
                refuse_missing(self.devices, probe.list_devices())
        else:
            session_creator = _Looking(session_creator, self.devices)
        super().initialize(session_creator, session_init)


class _Looking(tf1.train.SessionCreator):
    """Creates another creator's session, and looks whether it has the towers' devices."""

    def __init__(self, creator: Any, devices: Sequence[Any]):
        self._creator, self._devices = creator, devices

    def create_session(self) -> Any:
        session = self._creator.create_session()
        refuse_missing(self._devices, session.list_devices())
        return session


# ---- devices -----------------------------------------------------------------------------------------


def tower_devices(devices: Any) -> List[Any]:
    """``devices`` as a list for ``tf.device``; GPU ids become ``/gpu:id``.

    Raises:
        DeviceError: no devices, or something that is none.
    """
    count = _number(devices)
    if count is not None:
        if count < 1:
            raise DeviceError(f"devices={devices}: training needs at least one GPU; or give a list of devices")
        devices = range(count)
    if isinstance(devices, Iterable) and not isinstance(devices, (str, bytes, set, frozenset)):
        numbers = [(device, _number(device)) for device in devices]
        devices = [device if number is None else _gpu(tower, number) for tower, (device, number) in enumerate(numbers)]
    try:
        return list(device_strings(devices))
    except DeviceError as error:
        raise DeviceError(f"{error}; or give the number of GPUs, or a list of ids such as [0, 1]") from None


def _number(device: Any) -> Optional[int]:
    """``device`` if it is a whole number, also one of NumPy's; else None."""
    if isinstance(device, (bool, np.bool_)):
        return None
    try:
        return operator.index(device)
    except TypeError:
        return None


def _gpu(tower: int, number: int) -> str:
    if number < 0:
        raise DeviceError(f"tower {tower}: GPU {number} cannot exist, GPUs count from 0; give ids such as [0, 1]")
    return f"/gpu:{number}"


def with_room(creator: Any, devices: Sequence[Any]) -> Any:
    """``creator``, or a copy of it that gives its sessions what the towers need, where it tells its configuration."""
    if not isinstance(creator, (NewSessionCreator, SessionCreatorAdapter)):
        return creator
    creator = copy.copy(creator)
    if isinstance(creator, NewSessionCreator):
        creator.config = make_room(creator.config, devices)
    else:
        creator._creator = with_room(creator._creator, devices)
    return creator


def make_room(config: Any, devices: Sequence[Any]) -> Any:
    """A copy of a session's configuration with the CPU devices and the threads that the towers need.

    CPU devices are only names for the one processor, so they are created as asked for, unless ``config`` says how many
    there are. tensorpack stages the input of every tower with an op that blocks its thread until the tower has
    taken what was staged before; with too few threads all of them wait for ever.
    """
    roomy = type(config)()
    roomy.CopyFrom(config)
    named = [device_fields(device) for device in devices if isinstance(device, str)]
    cpus = [index or 0 for *_, kind, index in named if kind == "CPU"]
    if cpus and "CPU" not in roomy.device_count:
        roomy.device_count["CPU"] = max(cpus) + 1
    if len(devices) > 1:
        enough = len(devices) + max(2, os.cpu_count() or 1)
        roomy.inter_op_parallelism_threads = max(roomy.inter_op_parallelism_threads, enough)
        # otherwise the first session of the process has fixed the number for all later ones, whatever this one asks for
        roomy.use_per_session_threads = True
    return roomy


def refuse_missing(devices: Sequence[Any], existing: Sequence[Any]) -> None:
    """Check that each tower's device is in ``existing``, as ``session.list_devices()`` gives them.

    Raises:
        DeviceError: it is not; the message names the towers, and the devices there are.
    """
    there = [device.name for device in existing]
    # device functions and None are left to TensorFlow
    named = [(tower, device) for tower, device in enumerate(devices) if isinstance(device, str)]
    missing = [(tower, device) for tower, device in named if not any(fits(name, device) for name in there)]
    if not missing:
        return
    gpus = sum(_kind(name) == "GPU" for name in there)
    hint = f" TensorFlow finds {gpus} GPUs here." if any(_kind(device) == "GPU" for _, device in missing) else ""
    towers = ", ".join(f"tower {tower}: {device}" for tower, device in missing)
    shown = ", ".join(_short(name) for name in there if not _kind(name).startswith("XLA_"))
    raise DeviceError(
        f"these devices do not exist: {towers}.{hint} There are {shown};"
        ' without GPUs, devices=["/cpu:0", "/cpu:1", …] creates as many as are named'
    )


def _kind(device: str) -> str:
    return device_fields(device)[3] or ""


def _short(device: str) -> str:
    job, *_, index = device_fields(device)
    return f"/{_kind(device).lower()}:{index}" if job in (None, "localhost") else device


# ---- variables and gradients -------------------------------------------------------------------------


def refuse_towers_names(variables: Sequence[Any]) -> None:
    """Check that tower 0's variables have no such names as tensorpack gives to those of other towers.

    Raises:
        VariableError: one has; the message names it.
    """
    for var in variables:
        if var.op.name.startswith("tower"):
            raise VariableError(
                f"tower 0, {var.op.name!r}: tensorpack takes names that begin with 'tower' for other towers' copies,"
                " and could not copy this one to them; rename the scope"
            )


def with_missing(rows: Sequence[Pairs]) -> List[Pairs]:
    """``rows`` with (None, variable) for each trainable variable of a tower that other towers have a gradient for.

    tensorpack leaves out what has no gradient, tower by tower, so that the rows would not match each other.
    """
    heads = [f"tower{tower}/" if tower else "" for tower in range(len(rows))]
    found = [
        {var.op.name[len(head) if var.op.name.startswith(head) else 0 :]: (grad, var) for grad, var in row}
        for head, row in zip(heads, rows)
    ]
    if all(row.keys() == found[0].keys() for row in found):
        return list(rows)
    trainable = {var.op.name: (None, var) for var in tf1.trainable_variables()}
    names = list(dict.fromkeys(name for row in found for name in row))
    filled = [[row.get(name, trainable.get(head + name)) for name in names] for head, row in zip(heads, found)]
    return [[pair for pair in row if pair] for row in filled]


# ---- updates -----------------------------------------------------------------------------------------


def warn_of_references(variables: Sequence[Any]) -> None:
    """Warn if there are reference variables among those that are trained."""
    references = [var.op.name for var in variables if not is_resource(var)]
    if references:
        logger.warning(
            f"{len(references)} of {len(variables)} trained variables are reference variables, the first is"
            f" {references[0]!r}: an update may overwrite one while a gradient still reads it, and training then goes"
            " wrong; call tf.compat.v1.enable_resource_variables() before the model is built, or create them with"
            " use_resource=True"
        )


class CheckReplicas(Callback):
    """Reports the largest difference between what tower 0 and the others have trained."""

    def __init__(self, found: Replicas):
        self._found, self._differences = found, differences(found)

    def _trigger(self) -> None:
        seen = drift(self._found, self.trainer.sess.run(self._differences))
        self.trainer.monitors.put_scalar("replica_drift", seen.difference)
        if seen.difference:
            logger.warning(str(seen))


def proxies(optimizer: Any) -> Iterator[Any]:
    """tensorpack's wrappers around an optimizer (gradient processors, AccumGrad), outermost first."""
    while isinstance(optimizer, ProxyOptimizer):
        yield optimizer
        optimizer = optimizer._opt


@contextlib.contextmanager
def by_tower_0s_names(optimizer: Any, rows: Sequence[Pairs], devices: Sequence[Any]) -> Iterator[None]:
    """While this lasts, what matches variables by name in tensorpack's wrappers sees tower 0's names in every tower.

    Gradient processors, and what ``PostProcessOptimizer`` calls, are given variables :func:`named_like` tower 0's. The
    optimizers that the gradients are passed on to get the towers' own, with slots of their own; asked for the slot of
    such a variable, which they look up by name, they give the tower's.

    Args:
        optimizer: perhaps wrapped.
        rows: K rows of N (gradient, variable) pairs.
        devices: K devices.
    """
    named: Dict[int, Any] = {}
    own: Dict[int, Any] = {}
    places: Dict[int, str] = {}  # where the variables are that the processors see
    names = [var.op.name for _, var in rows[0]]
    for tower, row in enumerate(rows):
        for n, ((_, var), (_, first)) in enumerate(zip(row, rows[0])):
            named[id(var)] = named_like(var, first) if tower else var
            own[id(named[id(var)])] = var
            places[id(named[id(var)])] = where(tower, devices, n, names)
    with contextlib.ExitStack() as then:
        for one in held_by(optimizer):
            one.get_slot = _with_others(one.get_slot, own)
            then.callback(delattr, one, "get_slot")  # the method of its class is there again
            if hasattr(one, "_gradprocs"):
                then.callback(setattr, one, "_gradprocs", one._gradprocs)
                processors = [_RefusesSparse(each, places) for each in one._gradprocs]
                one._gradprocs = [_Exchange(named), *processors, _Exchange(own)]
            if isinstance(one, PostProcessOptimizer):
                then.callback(setattr, one, "_func", one._func)
                one._func = _with_others(one._func, named)
        yield


def _with_others(function: Callable[..., Any], others: Dict[int, Any]) -> Callable[..., Any]:
    """``function``, whose first argument is a variable, called with ``others[id(variable)]``, where it is."""

    def called(var: Any, *args: Any, **kwargs: Any) -> Any:
        return function(others.get(id(var), var), *args, **kwargs)

    return called


class _Exchange:
    """A gradient processor that puts other variables beside the gradients: ``others[id(variable)]``, where it is."""

    def __init__(self, others: Dict[int, Any]):
        self._others = others

    def process(self, pairs: Pairs) -> Pairs:
        return [(grad, self._others.get(id(var), var)) for grad, var in pairs]


class _RefusesSparse:
    """A gradient processor that says where and what to do, if the one that it holds cannot take sparse gradients.

    Args:
        processor: tensorpack's, or a user's.
        places: of each ``id(variable)``.
    """

    def __init__(self, processor: Any, places: Dict[int, str]):
        self._processor, self._places = processor, places

    def process(self, pairs: Pairs) -> Pairs:
        try:
            return list(self._processor.process(pairs))
        except (TypeError, ValueError, AttributeError) as error:
            sparse = [self._places.get(id(var), var.op.name) for grad, var in pairs if is_sparse(grad)]
            if not sparse:
                raise
            raise GradientError(
                f"{type(self._processor).__name__} fails where there are sparse gradients, at {'; '.join(sparse)}:"
                f' {error}. If it needs dense ones, use strategy=Strategy(sparse="dense")'
            ) from error


def named_like(var: Any, first: Any) -> Any:
    """The variable ``var``, to be read and assigned, with the ``name`` and ``op.name`` of ``first``."""
    view = object.__new__(_with_anothers_name(var.__class__))  # a variable's constructor would add one to the graph
    vars(view).update(vars(var), _named_like=first)
    return view


@lru_cache(maxsize=None)
def _with_anothers_name(kind: Any) -> Any:
    class Named(kind):
        op = property(lambda self: self._named_like.op)
        name = property(lambda self: self._named_like.name)

    return Named


def with_ordered_accumulation(optimizer: Any) -> Any:
    """``optimizer`` with every ``AccumGradOptimizer`` in its chain replaced by :class:`OrderedAccumGrad`."""
    if isinstance(optimizer, ProxyOptimizer):
        optimizer._opt = with_ordered_accumulation(optimizer._opt)
    if type(optimizer) is AccumGradOptimizer:
        return OrderedAccumGrad(optimizer._opt, optimizer._niter)
    return optimizer


class OrderedAccumGrad(ProxyOptimizer):
    """tensorpack's ``AccumGradOptimizer``, which looks at its counter only after it has counted.

    tensorpack's reads the counter while the same step advances it, so that now and then a step is applied too early,
    or one is skipped; with a counter for each tower the towers then part. The variables are the same, by name too.
    """

    def __init__(self, opt: Any, niter: int):
        super().__init__(opt, "AccumGrad")
        self._niter = int(niter)

    def apply_gradients(self, grads_and_vars: Pairs, global_step: Any = None, name: Optional[str] = None) -> Any:
        """Add the gradients to their sums; every ``niter``-th time apply the sums and clear them."""
        pairs = FilterNoneGrad().process(grads_and_vars)
        variables = [var for _, var in pairs]
        with tf.control_dependencies(None):
            sums = [self._zeros_slot(var, "accum", self._name) for var in variables]
            with tf1.variable_scope(self._name), tf.device("/cpu:0"):
                counter = tf1.Variable(0, name="counter", trainable=False, dtype=tf.int32, use_resource=True)

        def apply_sums() -> Any:
            update = self._opt.apply_gradients([(total.read_value(), var) for total, var in zip(sums, variables)])
            with tf.control_dependencies([update]):
                return tf.group(*[tf1.assign(total, tf.zeros_like(total)) for total in sums])

        with tf1.name_scope("AccumGradOptimizer"):
            added = [total.assign_add(grad) for total, (grad, _) in zip(sums, pairs)]
            with tf.control_dependencies([*added, counter.assign_add(1)]):
                now = tf.equal(counter.read_value() % self._niter, 0)
                applied = tf.cond(now, apply_sums, tf.no_op)
            with tf.control_dependencies([applied]):
                return tf.no_op(name) if global_step is None else tf1.assign_add(global_step, 1, name=name).op
