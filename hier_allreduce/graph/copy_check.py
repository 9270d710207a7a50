"""Copies that arrive: each chunk's bits on its root, and on every tower after the copy.

::

    tower 0    sum ───────────► Fingerprint ─┐
    tower 1     └──► copy ────► Fingerprint ─┼─► an int64 for each tower; a step that does not fetch
    tower 2     └──► copy ────► Fingerprint ─┘   it computes none of this
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..cluster.session import fetched_ops
from ..compat import forget_colocation, hidden, tf1
from ..errors import HierAllreduceError
from ..formatting import count
from ..graphs import needed_by
from ..planning.plan import copies
from .names import where
from .record import AllReduce, SentTensor, all_reduces

_SCOPE = "hier_allreduce_copy_check"


class CopyCheck:
    """The fingerprints of what one step sends, from :func:`copy_check`, and their comparison.

    ::

        _, bits = session.run([train_op, check.fingerprints])
        check.compare(bits, step)

    Attributes:
        fingerprints: a tensor for each that the step sends, with an int64 for each tower that it
            goes to, at most K; fetch them together with the step.
    """

    def __init__(self, fetches: Any = None):
        self._sent = _sent_by(fetches)
        self._equal = 0  # the comparisons so far that found no difference
        constants: Dict[Any, Any] = {}
        self.fingerprints = [_fingerprints_of(*sent, constants) for sent in self._sent]

    def compare(self, fingerprints: Any, step: int, session: Any = None) -> None:
        """Compare the values that a step gave for :attr:`fingerprints`.

        Args:
            fingerprints: the values.
            step: the number of the step, for the error.
            session: a session of several hosts. With it their sums are compared, too, so that all
                hosts must call this after the same steps.

        Raises:
            HierAllreduceError: a copy has other bits than its source, or a host has another sum of
                a chunk. The message names the step, the towers, the chunk and its variables.
        """
        own = np.array(list(chain(*fingerprints)), np.int64)
        has_hosts = any(built.hosts > 1 for built, _ in self._sent)
        of_hosts = session.table(own) if session is not None and has_hosts else [own]
        ends = np.cumsum([len(sent.held) for _, sent in self._sent])[:-1]
        by_host = [np.split(bits, ends) for bits in of_hosts]
        for (built, sent), *bits_by_host in zip(self._sent, *by_host):
            fault = _fault(built, sent, [dict(zip(sent.held, bits)) for bits in bits_by_host])
            if fault:
                before = count(self._equal, "checked step")
                raise HierAllreduceError(
                    f"step {step}: {fault}: {built.scope}{sent}; {before} before had no difference."
                    " A link, a memory or a GPU changes bits: run `hier-allreduce doctor --copies`,"
                    " put the GPU into another slot, or avoid the link with Strategy(groups=…)"
                )
        self._equal += 1


def _fault(built: AllReduce, sent: SentTensor, bits_by_host: Sequence[Dict[int, Any]]) -> str:
    """Return which copy, or which host's sum, has other bits; "" if none has."""
    for host, bits in enumerate(bits_by_host):
        on_host = f" on host {host}" if built.hosts > 1 else ""
        for src, dst in copies(sent.schedule):
            if bits[src] != bits[dst]:
                link = f"{where(src, built.devices)} to {where(dst, built.devices)}{on_host}"
                return f"the copy from {link} has other bits"
        if built.hosts > 1 and bits[sent.root] != bits_by_host[0][sent.root]:
            return f"hosts 0 and {host} have other bits of one sum"
    return ""


def copy_check(fetches: Any = None) -> CopyCheck:
    """Build ops that take the fingerprint of each chunk on its root, and on every tower it goes to.

    ::

        check = hier_allreduce.copy_check(train_op)               # once, while the graph is built
        _, bits = session.run([train_op, check.fingerprints])     # now and then
        check.compare(bits, step)                                 # an error, if some differ

    The fingerprints are those of this very step, because they are fetched with it. A step that does
    not fetch them executes what it would without them. Equal bits are equal, also where they are no
    finite numbers. :meth:`TowerOptimizer.hook` does this by itself. An all-reduce inside a
    ``tf.cond`` or a loop is left out.

    Args:
        fetches: what the step runs; None for all that was built in the current graph, such as that
            of a ``tf.function``, which then returns ``fingerprints``.

    Raises:
        HierAllreduceError: nothing that the step runs is copied from tower to tower.
    """
    check = CopyCheck(fetches)
    if not check.fingerprints:
        raise HierAllreduceError(
            "copy_check: no all-reduce that these fetches need was built in the current graph; call"
            " it after allreduce_grads or apply_gradients, with the op that the step runs"
        )
    return check


def _sent_by(fetches: Any) -> List[Tuple[AllReduce, SentTensor]]:
    """Return what is copied, or added up over hosts, by a step; None stands for any step."""
    graph = tf1.get_default_graph()
    needed = None if fetches is None else needed_by(fetched_ops(graph, fetches))
    sent = []
    for built in all_reduces(graph):
        for tensor in built.tensors:
            ops = [graph.get_tensor_by_name(name).op for name in tensor.held.values()]
            # A step that leaves out some copies runs on without them, and so this tensor is too.
            is_whole = needed is None or needed.issuperset(ops)
            in_flow = any(op._get_control_flow_context() for op in ops)
            is_sent = copies(tensor.schedule) or built.hosts > 1
            if is_sent and is_whole and not in_flow:
                sent.append((built, tensor))
    return sent


def _fingerprints_of(built: AllReduce, sent: SentTensor, constants: Dict[Any, Any]) -> Any:
    """Return an int64 for each tower that has a sent tensor; what the graph has already stays."""
    graph = tf1.get_default_graph()
    name = f"{_SCOPE}/{built.scope}{sent.name}"
    with contextlib.suppress(KeyError):
        return graph.get_tensor_by_name(f"{name}/of_towers:0")

    def constant(device: Any, value: Any) -> Any:
        # Chunks share them, because there are many chunks.
        if (device, value) not in constants:
            with tf1.device(device):
                constants[device, value] = hidden(tf.constant(value))
        return constants[device, value]

    eight_bytes = []
    with forget_colocation(), tf1.control_dependencies(None), tf1.name_scope(f"{name}/"):
        for tower, held in sent.held.items():
            # What the tower got is read there. Grappler may prune the copy, which is an identity,
            # and would then let a reader elsewhere have the source. A shape that it cannot read
            # stays.
            shape = constant(built.devices[tower], (1, -1))
            method = constant("/cpu:0", "farmhash64")
            with tf1.device(built.devices[tower]):
                row = tf.reshape(graph.get_tensor_by_name(held), shape)
            with tf1.device("/cpu:0"):
                eight_bytes.append(tf.raw_ops.Fingerprint(data=row, method=method))
        with tf1.device("/cpu:0"):
            return tf.bitcast(tf.concat(eight_bytes, 0), tf.int64, name="of_towers")
