"""Copies that arrive: each chunk's bits on its root, and on every tower after the copy.

::

    tower 0    sum ───────────► Fingerprint ─┐
    tower 1     └──► copy ────► Fingerprint ─┼─► an int64 for each tower; a step that does not fetch
    tower 2     └──► copy ────► Fingerprint ─┘   it computes none of this
"""

from __future__ import annotations

import contextlib
from typing import Any, List, Tuple

import tensorflow as tf

from ..cluster.collectives import fingerprint
from ..cluster.session import fetched_ops
from ..compat import forget_colocation, tf1
from ..errors import HierAllreduceError
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
        fingerprints: tensors of K int64, one for each tensor that the step sends; fetch them
            together with the step.
    """

    def __init__(self, fetches: Any = None):
        self._sent = _sent_by(fetches)
        self.fingerprints = [_fingerprints_of(built, sent) for built, sent in self._sent]

    def compare(self, fingerprints: Any, step: int) -> None:
        """Compare the values that a step gave for :attr:`fingerprints`.

        Args:
            fingerprints: the values.
            step: the number of the step, for the error.

        Raises:
            HierAllreduceError: a copy has other bits than its source. The message names the step,
                the towers, the chunk and its variables.
        """
        for (built, sent), bits in zip(self._sent, fingerprints):
            for src, dst in copies(sent.schedule):
                if bits[src] != bits[dst]:
                    link = f"{where(src, built.devices)} to {where(dst, built.devices)}"
                    raise HierAllreduceError(
                        f"step {step}: the copy from {link} has other bits: {built.scope}{sent}. A"
                        " link, a memory or a GPU changes bits: run `hier-allreduce doctor"
                        " --copies`, put the GPU into another slot, or avoid the link with"
                        " Strategy(groups=…)"
                    )


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
    """Return what is copied by a step; None stands for any step."""
    graph = tf1.get_default_graph()
    needed = None if fetches is None else needed_by(fetched_ops(graph, fetches))
    sent = []
    for built in all_reduces(graph):
        for tensor in built.tensors:
            ops = [graph.get_tensor_by_name(name).op for name in filter(None, tensor.held)]
            # A step that leaves out some copies runs on without them, and so this tensor is too.
            is_whole = needed is None or needed.issuperset(ops)
            in_flow = any(op._get_control_flow_context() for op in ops)
            if copies(tensor.schedule) and is_whole and not in_flow:
                sent.append((built, tensor))
    return sent


def _fingerprints_of(built: AllReduce, sent: SentTensor) -> Any:
    """Return K int64 of a sent tensor; what the graph has already stays."""
    graph = tf1.get_default_graph()
    name = f"{_SCOPE}/{built.scope}{sent.name}"
    with contextlib.suppress(KeyError):
        return graph.get_tensor_by_name(f"{name}/of_towers:0")
    of_towers = []
    with forget_colocation(), tf1.control_dependencies(None), tf1.name_scope(f"{name}/"):
        for device, held in zip(built.devices, sent.held):
            # What the tower got is read there, by an op that Grappler does not remove. It may prune
            # the copy, which is an identity, and would then let a reader elsewhere have the source.
            with tf1.device(device):
                got = tf.expand_dims(graph.get_tensor_by_name(held), 0) if held else tf.zeros([])
            of_towers.append(fingerprint(got))
        with tf1.device("/cpu:0"):
            return tf.stack(of_towers, name="of_towers")
