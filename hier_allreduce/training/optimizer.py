"""An optimizer for tower code: all-reduce, update and broadcast, without tensorpack."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Union

import tensorflow as tf

from ..compat import (
    builds_for_session,
    forget_colocation,
    in_current_graph,
    outer_graph,
    outside_control_flow,
    tensor_of,
    tf1,
    without_autograph,
)
from ..errors import HierAllreduceError
from ..graph import device_strings
from ..graph.names import check_scope
from ..planning.strategy import Strategy
from .copies import CopyCheckHook
from .equality import Drift, PeriodicComparison, broadcast, comparison, watch
from .options import Transform, checked_options
from .replicas import (
    WITHOUT_COPIES,
    Belongings,
    belongings,
    columns_elsewhere,
    columns_of,
    distinct,
    kept,
    names_of,
)
from .towers import Column, Pairs, Towers
from .update import check_optimizer, update_towers

if TYPE_CHECKING:
    from ..cluster import Cluster


class TowerOptimizer:
    """One optimizer for K towers, each with a copy of the model.

    ::

        devices = ["/gpu:0", "/gpu:1"]
        adam = tf.compat.v1.train.AdamOptimizer(1e-3)
        optimizer = hier_allreduce.TowerOptimizer(adam, devices)
        rows = []
        for k, device in enumerate(devices):
            with tf.device(device), tf.compat.v1.variable_scope(f"tower{k}"):
                loss = model(batches[k])
                rows.append(optimizer.compute_gradients(loss, var_list=…))
        train_op = optimizer.apply_gradients(rows)

        session.run(tf.compat.v1.global_variables_initializer())   # or restore a checkpoint
        session.run(optimizer.init_op)

    On one host, ``MonitoredTrainingSession(hooks=[optimizer.hook()])`` runs ``init_op`` by itself.
    With several losses, call ``apply_gradients`` for each, of another optimizer if it has work once
    a step, such as Adam. Run two train ops for the same variables in different steps.

    ``init_op`` covers the variables of all calls in the graph, their slots, and the rest of the
    model, as its documentation says. Read it when all of these exist.

    Attributes:
        devices: the K devices.
    """

    def __init__(
        self,
        optimizer: Any,
        devices: Sequence[Any],
        average: bool = True,
        strategy: Union[str, Strategy, None] = None,
        update: str = "replicated",
        transform: Optional[Transform] = None,
        broadcast_every: int = 0,
        check_replicas_every: Optional[int] = None,
        cluster: Optional[Cluster] = None,
        scopes: Optional[Sequence[str]] = None,
    ):
        """The constructor checks the options, and adds no ops.

        Args:
            optimizer: a ``tf.compat.v1.train.Optimizer``.
            devices: K devices, as in :func:`hier_allreduce.allreduce_grads`.
            average: True for the mean of the gradients over all towers, False for their sum. If the
                optimizer was tuned for the mean, divide its learning rate by K, or multiply the
                epsilon of Adam, Adagrad or RMSProp by K.
            strategy: how to reduce, as in :func:`hier_allreduce.allreduce_grads`.
            update: ``"replicated"``: every tower updates its variables. ``"once"``: the optimizer
                is called once, on tower 0 with all its arguments, as on one device, and the new
                values are copied to the other towers; all its state is on tower 0. ``"sharded"``:
                each variable is updated on one tower and copied, so that slots exist once, spread
                over the devices. An optimizer that is not TensorFlow's own runs ``"once"``,
                whatever is asked. Slots have the names of one device's, and checkpoints restore
                on any number of towers.
            transform: a function from a list of N reduced gradients to N gradients, called for
                each tower before its update, such as ``lambda grads:
                tf.clip_by_global_norm(grads, 1.0)[0]``. It must do the same in each call. One that
                writes variables, such as a moving norm, needs ``update="once"``.
            broadcast_every: the number of steps after which the hook runs ``init_op`` again; 0:
                only at the start.
            check_replicas_every: the number of steps between the hook's comparisons of the towers;
                0: never; None: in steps 1, 2, 4, 8, … and each 1000. A step of the hook is a call
                of the session's ``run``. In as many steps of a train op its copies are compared, as
                :func:`hier_allreduce.copy_check` does.
            cluster: the :class:`hier_allreduce.Cluster` of several hosts with K towers each. The
                gradients of all of them are reduced. Run
                ``cluster.broadcast(tf.compat.v1.global_variables())`` on all hosts before
                ``init_op``, which copies inside this host only.
            scopes: the K towers' scopes, such as ``["tower0", "tower1"]``; "" for none. Two
                variables are copies if their names differ by these only. By default the scopes are
                the levels in which the names of the trained variables differ.

        Raises:
            HierAllreduceError: a device or another option is invalid, or ``optimizer`` is not a v1
                optimizer.
        """
        if not isinstance(optimizer, tf1.train.Optimizer):
            raise HierAllreduceError(
                f"optimizer={optimizer!r}: expected a tf.compat.v1.train.Optimizer, such as"
                " tf.compat.v1.train.AdamOptimizer(1e-3)"
            )
        self.devices = device_strings(devices)
        if scopes is not None and len(scopes) != len(self.devices):
            raise HierAllreduceError(f"scopes={scopes!r}: expected {len(self.devices)} names")
        self._options = checked_options(
            *(average, strategy, update, transform, broadcast_every, check_replicas_every),
            *(cluster, scopes),
        )
        check_optimizer(optimizer)
        self._optimizer = optimizer
        self._graph: Any = None
        self._updated: List[Column] = []  # in this graph
        self._ops: Dict[Any, Any] = {}  # for the replicas that existed when they were built

    @without_autograph
    def compute_gradients(self, *args: Any, **kwargs: Any) -> List[Any]:
        """Return one tower's N (gradient, variable) pairs, which the optimizer computes."""
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    @without_autograph
    def apply_gradients(
        self,
        tower_grads_and_vars: Sequence[Pairs],
        global_step: Any = None,
        name: Optional[str] = None,
        **arguments: Any,
    ) -> Any:
        """Build the train op: reduce, update every tower, count the step.

        Args:
            tower_grads_and_vars: K×N (gradient, variable) pairs, each tower with its variables. A
                variable without a gradient on any tower is left alone.
            global_step: a variable to add 1 to, once a step.
            name: the name of the op.
            arguments: other arguments of the optimizer's ``apply_gradients``, such as
                ``decay_var_list`` of contrib's ``AdamWOptimizer``. Variables of any tower stand for
                those of tower 0.

        Raises:
            HierAllreduceError: an invalid global step or name, or an argument that the optimizer
                does not have; or the rows, or their variables and gradients, do not match the
                devices or each other; or the optimizer has state of an earlier update that this
                one cannot use; or the update uses what the gradients of some towers only need, or
                writes what they only read and has no copy; or an optimizer that is called once, on
                tower 0, uses a variable of another tower; or the transform does not return N
                gradients, or has state and is called for each tower; or there is no graph to build
                in.
            ValueError: from TensorFlow: no variable has a gradient.
        """
        if not builds_for_session():
            raise HierAllreduceError(
                "a TowerOptimizer builds the train op of a graph: call"
                " tf.compat.v1.disable_eager_execution() first, or build inside `with"
                " tf.Graph().as_default():`; eagerly and in a tf.function, use"
                " hier_allreduce.allreduce_grads"
            )
        check_scope(name or "train_op")
        if not isinstance(global_step, (tf.Variable, type(None))):
            raise HierAllreduceError(
                f"global_step={global_step!r}: expected a variable, such as"
                " tf.compat.v1.train.get_or_create_global_step()"
            )
        if global_step is not None and not in_current_graph(tensor_of(global_step)):
            raise HierAllreduceError(
                f"global_step={global_step.name!r} does not belong to the graph that is being"
                " built; create it inside `with graph.as_default():`, where the towers are"
            )
        given = dict(arguments)
        if global_step is not None:
            given["global_step"] = global_step
        self._check_arguments(given)
        # Replicas are those of one graph, because each graph has its own variables.
        graph = outer_graph()  # apply_gradients may be called in a tf.cond
        earlier = self._updated if graph is self._graph else []
        towers = Towers(tower_grads_and_vars, self.devices, self._options)
        name = name or "train_op"
        op, columns = update_towers(self._optimizer, towers, given, earlier, name)
        if graph is not self._graph:
            self._graph = graph
            self._ops = {}
        # Several calls may update one variable, whose copies count once.
        self._updated = distinct([*earlier, *columns])
        return op

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise a HierAllreduceError if the optimizer cannot be called with the arguments."""
        signature = inspect.signature(self._optimizer.apply_gradients)
        # TensorFlow would not name the arguments that the optimizer has.
        try:
            signature.bind([], **arguments)
        except TypeError as error:
            raise HierAllreduceError(
                f"{type(self._optimizer).__name__}.apply_gradients: {error}; it has"
                f" {', '.join(signature.parameters)}"
            ) from None

    @property
    def init_op(self) -> Any:
        """Copies tower 0's variables to the other towers; no step trains before it has run.

        Run it once the variables have their values, in each session, and again after a restore, an
        initializer, or a step that failed: until then the next step ends with a ``NotFoundError``
        that names ``init_op``, and trains nothing. It copies what updates write; variables in the
        collections ``TRAINABLE_VARIABLES``, ``MODEL_VARIABLES`` and ``MOVING_AVERAGE_VARIABLES``;
        and averages of layers (``moving_mean``, ``moving_variance``, ``ExponentialMovingAverage``).
        What the program computes anew is each tower's own. What gradients only read has to be equal
        when this runs; else it ends with an error that lists it.

        Raises:
            HierAllreduceError: ``apply_gradients`` was not called; or a variable of the model has
                another dtype or shape than its copy on tower 0, or no known copy; or this would add
                ops to a finalized graph.
        """
        found = self._belongings()
        if found.alone:
            raise HierAllreduceError(
                f"{found.alone[0]!r} belongs to the model, and some towers' gradients read it, but"
                f" not all; {WITHOUT_COPIES}"
            )
        return self._op(broadcast, found.model, found.unsaid)

    def check_replicas(self, session: Any) -> Drift:
        """Compare this host's towers to the bit: the variables that updates write.

        Returns a :class:`Drift`, which prints as a sentence.

        Raises:
            HierAllreduceError: ``apply_gradients`` was not called, or this would add ops to a
                finalized graph.
        """
        drift: Drift = self._op(comparison, self._known())(session)
        # What is not compared is named, because the user may count on it.
        own = tuple(column[0].op.name for column in self._belongings().own)
        return drift._replace(own=own)

    def hook(self) -> Any:
        """Return a ``SessionRunHook`` that runs ``init_op``, broadcasts again, and compares towers.

        It ends the training with a ``HierAllreduceError`` if towers differ, which names the
        variables and the step, or if a copy has other bits than its source, which names the link.
        With a cluster of several hosts it also compares these, and raises a ``ClusterError`` if
        they differ, or for a session that is not the cluster's.
        """
        return _Hook(self)

    def scaffold(self, **options: Any) -> Any:
        """Return a ``Scaffold`` that saves tower 0 only, for any number of towers to restore.

        ::

            scaffold, hook = optimizer.scaffold(), optimizer.hook()
            MonitoredTrainingSession(checkpoint_dir=…, scaffold=scaffold, hooks=[hook])

        Variables of the other towers get initial values in every new session, and tower 0's by the
        hook.
        """
        known = self._known()
        with self._graph.as_default():
            # Other towers' variables start anew in each session, because a checkpoint lacks them.
            # Those of another optimizer's towers do, too, because one scaffold is for all.
            columns = [
                *columns_of(known, self.devices, self._options.scopes),
                *columns_elsewhere(self.devices),
            ]
            on_others = list(chain(*(column[1:] for column in columns)))
            copied = set(map(id, on_others))
            saved = [var for var in tf1.global_variables() if id(var) not in copied]
            # Tables and iterators are no variables, and TensorFlow saves them by default, too.
            saved += tf1.get_collection(tf1.GraphKeys.SAVEABLE_OBJECTS)
            if "saver" not in options:
                options["saver"] = tf1.train.Saver(saved, sharded=True, save_relative_paths=True)
            local = options.get("local_init_op")
            if local is None:
                local = tf1.train.Scaffold.default_local_init_op()
            # By default a session waits for all global variables before it runs local_init_op.
            options.setdefault("ready_for_local_init_op", tf.constant([], tf.string))
            options["local_init_op"] = tf.group(local, tf1.variables_initializer(on_others))
            watch()  # the saver may be newer than init_op
            return tf1.train.Scaffold(**options)

    def _known(self) -> List[Column]:
        """Return the columns that updates write; there are some once ``apply_gradients`` ran."""
        if not self._updated:
            raise HierAllreduceError(
                "call apply_gradients first: which variables to initialize and compare is known"
                " only afterwards"
            )
        return self._updated

    def _belongings(self) -> Belongings:
        known = self._known()
        with self._graph.as_default():
            return belongings(known, self.devices, self._options.scopes)

    def _op(self, build: Any, *columns: Sequence[Column]) -> Any:
        """Return what ``build`` makes of columns; it is built once."""
        # The names are in the key, because variables may be created after the op was built; the
        # flags are, because another update of these towers may have its own.
        with self._graph.as_default():
            flags = tuple(kept().flags)
        key = build, flags, tuple(tuple(names_of(some)) for some in columns)
        if key not in self._ops:
            if self._graph.finalized:
                raise HierAllreduceError(
                    "the graph is finalized, and copying or comparing the towers' variables needs"
                    " new ops; read init_op and call check_replicas once before, when all"
                    " variables exist, or use TowerOptimizer.hook()"
                )
            with self._graph.as_default(), outside_control_flow(), forget_colocation():
                self._ops[key] = build(columns[0], self.devices, *columns[1:])
        return self._ops[key]


class _Hook(CopyCheckHook):
    def __init__(self, owner: TowerOptimizer):
        super().__init__(owner._options)
        self._owner = owner
        self._options = owner._options

    # Ops are added here, because a session finalizes its graph.
    def begin(self) -> None:
        super().begin()
        owner = self._owner
        self._start = owner.init_op
        compare = owner._op(comparison, owner._known())
        self._comparison = PeriodicComparison(compare, self._options)

    def after_create_session(self, session: Any, coord: Any) -> None:
        cluster = self._options.cluster
        if cluster:
            cluster.check_session(session)
        session.run(self._start)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        super().after_run(run_context, run_values)
        session = run_context.session
        every = self._options.broadcast_every
        self._comparison.after_step(session)
        if every and self._comparison.steps % every == 0:
            session.run(self._start)
