"""An optimizer for tower code: all-reduce, update and broadcast, without tensorpack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Union

import tensorflow as tf

from ..compat import (
    builds_for_session,
    forget_colocation,
    outer_graph,
    outside_control_flow,
    tf1,
    without_autograph,
)
from ..errors import HierAllreduceError
from ..graph import device_strings
from ..planning.strategy import Strategy
from .equality import broadcast, comparison, copied, watch
from .hook import TowersHook
from .options import Options, Transform, checked_options
from .replicas import belongings, by_names, kept, with_read_columns
from .towers import Pairs, Towers
from .update import update_towers

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
                the levels in which the names of the trained variables differ. Several levels may
                differ: ``["tower0/norm", "tower1/norm_1"]``, as Keras numbers a layer that has no
                trained weights.

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
        steps = broadcast_every, check_replicas_every
        chosen = Options(average, strategy, update, transform, *steps, cluster, scopes)
        self._options = checked_options(chosen)
        self._optimizer = optimizer
        self._graph: Any = None
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
        name: Optional[str] = "train_op",
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
            HierAllreduceError: the rows, or their variables and gradients, do not match the devices
                or each other; or an earlier update of the graph has other devices, or state that
                this one cannot use; or the update uses what the gradients of some towers only
                need, or a variable of another tower than 0 where it is called once; or it writes
                what some gradients only read, and has no copy; or the transform does not return N
                gradients, or has state and is called for each tower; or there is no graph to build
                in.
            TypeError: from Python: an argument that the optimizer does not have, or lacks.
            ValueError: from TensorFlow: no variable has a gradient, or what is given is of another
                graph.
        """
        if not builds_for_session():
            raise HierAllreduceError(
                "a TowerOptimizer builds the train op of a graph: call"
                " tf.compat.v1.disable_eager_execution() first, or build inside `with"
                " tf.Graph().as_default():`; eagerly and in a tf.function, use"
                " hier_allreduce.allreduce_grads"
            )
        if global_step is not None:
            arguments["global_step"] = global_step
        towers = Towers(tower_grads_and_vars, self.devices, self._options)
        op = update_towers(self._optimizer, towers, arguments, name)
        # Replicas are those of one graph, because each graph has its own variables.
        self._graph = outer_graph()  # apply_gradients may be called in a tf.cond
        self._ops = {}
        return op

    @property
    def init_op(self) -> Any:
        """Copies tower 0's variables to the other towers; no step trains before it has run.

        Run it once the variables have their values, in each session, and again after a restore, an
        initializer, or a step that failed: until then the next step ends with a ``NotFoundError``
        that names ``init_op``, and trains nothing. It copies what updates write; variables in the
        collections ``TRAINABLE_VARIABLES``, ``MODEL_VARIABLES`` and ``MOVING_AVERAGE_VARIABLES``;
        and averages of layers (``moving_mean``, ``moving_variance``, ``ExponentialMovingAverage``).
        What the program computes anew on all towers is each tower's own. What gradients only read
        has to be equal when this runs; else it ends with an error that lists it. Where names do not
        tell which variables are copies, those of one dtype and shape are compared in the order in
        which each tower made them, if all towers have as many.

        Raises:
            HierAllreduceError: ``apply_gradients`` was not called.
            RuntimeError: from TensorFlow: the graph is finalized, and this needs new ops.
        """
        return self._op(broadcast, belongings)

    def check_replicas(self, session: Any) -> None:
        """Compare this host's towers to the bit: the variables that updates write.

        Raises:
            HierAllreduceError: towers differ; it names the first one that does, and a variable. Or
                ``apply_gradients`` was not called.
            RuntimeError: from TensorFlow: the graph is finalized, and this needs new ops.
        """
        difference = self._comparison()(session)
        if difference:
            raise HierAllreduceError(difference)

    def hook(self) -> Any:
        """Return a ``SessionRunHook`` that makes towers equal, and compares them.

        It runs ``init_op`` before the first ``run`` of a session, and broadcasts again. It ends the
        training with a ``HierAllreduceError`` if towers differ, which names a variable and the
        step, or if a copy has other bits than its source, which names the link. With a cluster of
        several hosts it also compares these, and raises a ``ClusterError`` if they differ, or for a
        session that is not the cluster's.
        """
        return TowersHook(self._options, lambda: (self._comparison(), [self.init_op]))

    def scaffold(self, **options: Any) -> Any:
        """Return a ``Scaffold`` that saves tower 0 only, for any number of towers to restore.

        ::

            scaffold, hook = optimizer.scaffold(), optimizer.hook()
            MonitoredTrainingSession(checkpoint_dir=…, scaffold=scaffold, hooks=[hook])

        Its saver gives all towers what it restores: also what is each tower's own, because the file
        has tower 0's. ``options`` are those of a ``Scaffold``, without ``saver``.
        """
        with self._built().as_default(), outside_control_flow(), forget_colocation():
            columns = with_read_columns()
            copies = {id(var) for column in columns for var in column[1:]}
            variables = [var for var in tf1.global_variables() if id(var) not in copies]
            # Tables and iterators are no variables, and TensorFlow saves them by default, too.
            saved = [*variables, *tf1.get_collection(tf1.GraphKeys.SAVEABLE_OBJECTS)]
            saver = tf1.train.Saver(saved, sharded=True, save_relative_paths=True)
            restore = self._graph.get_operation_by_name(saver.saver_def.restore_op_name)
            in_file = set(map(id, variables))
            of_towers = [column for column in columns if id(column[0]) in in_file]
            with tf.control_dependencies([restore]):
                restored = tf.group(restore, *copied(of_towers), name="restore_towers")
            watch()
            saver.saver_def.restore_op_name = restored.name
            return tf1.train.Scaffold(saver=saver, **options)

    def _built(self) -> Any:
        """Return the graph in which ``apply_gradients`` was called."""
        if self._graph is None:
            raise HierAllreduceError(
                "call apply_gradients first: which variables to initialize and compare is known"
                " only afterwards"
            )
        return self._graph

    def _comparison(self) -> Any:
        return self._op(comparison, lambda: [list(kept().columns.values())])

    def _op(self, build: Any, find: Any) -> Any:
        """Return what ``build`` makes of the columns that are found; it is built once."""
        with self._built().as_default(), outside_control_flow(), forget_colocation():
            columns = find()
            # The names are in the key, because variables may be created after the op was built; the
            # flags are, because another update of these towers may have its own.
            key = build, tuple(kept().flags), tuple(tuple(by_names(some)) for some in columns)
            if key not in self._ops:
                self._ops[key] = build(*columns)
            return self._ops[key]
