"""Copies that arrive: each chunk's bits on its root, and on every tower after the copy.

::

    tower 0    sum ───────────► Fingerprint ─┐
    tower 1     └──► copy ────► Fingerprint ─┼─► an int64 for each tower; a step that does not fetch
    tower 2     └──► copy ────► Fingerprint ─┘   it computes none of this
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..cluster.session import fetched_ops
from ..compat import forget_colocation, tf1
from ..errors import HierAllreduceError
from ..formatting import count
from ..graphs import needed_by
from ..planning.plan import copies
from .names import where
from .record import AllReduce, SentTensor, all_reduces

_SCOPE = "hier_allreduce_copy_check"
_ADVICE = (
    "A link, a memory or a GPU changes bits: run `hier-allreduce doctor --copies`, put the GPU into"
    " another slot, or avoid the link with Strategy(groups=…)"
)


class CopyCheck:
    """The fingerprints of what one step sends, from :func:`copy_check`, and their comparison.

    ::

        _, bits = session.run([train_op, check.fingerprints])
        check.compare(bits, step)

    Attributes:
        fingerprints: tensors of K int64, one for each tensor that the step sends; fetch them
            together with the step.
    """

    def __init__(self, sent: Sequence[Tuple[AllReduce, SentTensor]]):
        self._sent = sent
        self._equal = 0  # the comparisons so far that found no difference
        self._graph = tf1.get_default_graph()
        self._constants: Dict[Any, Any] = {}  # by device; chunks share them, because they are many
        self.fingerprints = [self._of(built, tensor) for built, tensor in sent]

    def compare(self, fingerprints: Any, step: int, session: Any = None) -> None:
        """Compare the values that a step gave for :attr:`fingerprints`.

        Args:
            fingerprints: the values.
            step: the number of the step, for the error.
            session: the session. With it hosts are compared, too, if the step has sums over them;
                all of them have to call this in the same steps.

        Raises:
            HierAllreduceError: a copy has other bits than its source, or hosts have other sums of
                one chunk. The message names the step, the chunk, its variables, and the towers.
        """
        own = np.concatenate(list(map(np.array, fingerprints)))
        has_hosts = any(built.hosts > 1 for built, _ in self._sent)
        of_hosts = session.table(own) if session is not None and has_hosts else [own]
        ends = np.cumsum([len(built.devices) for built, _ in self._sent])[:-1]
        tables = [np.split(line, ends) for line in of_hosts]  # M × K of each host
        faults = list(self._faults(tables))
        if faults:
            more = f", and {count(len(faults) - 1, 'more difference')}" if faults[1:] else ""
            raise HierAllreduceError(
                f"step {step}: {faults[0]}{more}; {count(self._equal, 'checked step')} before had"
                f" no difference. {_ADVICE}"
            )
        self._equal += 1

    def _faults(self, tables: Sequence[Any]) -> Iterator[str]:
        """Yield a line for each copy, and each sum of several hosts, that has other bits."""
        for (built, sent), *of_hosts in zip(self._sent, *tables):
            chunk = f"{built.scope}{sent}"
            for host, bits in enumerate(of_hosts):
                on_host = f" on host {host}" if tables[1:] else ""
                moves = copies(sent.schedule)
                for src, dst in (move for move in moves if bits[move.src] != bits[move.dst]):
                    link = f"{where(src, built.devices)} to {where(dst, built.devices)}{on_host}"
                    yield f"the copy from {link} has other bits: {chunk}"
                if built.hosts > 1 and bits[sent.root] != of_hosts[0][sent.root]:
                    yield f"hosts 0 and {host} have other bits of one sum: {chunk}"

    def _of(self, built: AllReduce, sent: SentTensor) -> Any:
        """Return K int64 of a sent tensor, 0 where it is not; what the graph has already stays."""
        name = f"{_SCOPE}/{built.scope}{sent.name}"
        with contextlib.suppress(KeyError):
            return self._graph.get_tensor_by_name(f"{name}/of_towers:0")
        if self._graph.finalized:
            raise HierAllreduceError(
                "the graph is finalized, and comparing copies needs new ops: call copy_check before"
            )
        with forget_colocation(), tf1.control_dependencies(None), tf1.name_scope(f"{name}/"):
            eight_bytes = [self._of_tower(*at) for at in zip(built.devices, sent.held)]
            with tf1.device("/cpu:0"):
                return tf.bitcast(tf.concat(eight_bytes, 0), tf.int64, name="of_towers")

    def _of_tower(self, device: Any, held: str) -> Any:
        if not held:
            return self._constant("/cpu:0", [[0] * 8], tf.uint8)
        # What the tower got is read there. Grappler may prune the copy, which is an identity, and
        # would then let a reader elsewhere have the source. A shape that it cannot read stays.
        shape = self._constant(device, [1, -1], tf.int32)
        method = self._constant("/cpu:0", "farmhash64", tf.string)
        with tf1.device(device):
            row = tf.reshape(self._graph.get_tensor_by_name(held), shape)
        with tf1.device("/cpu:0"):
            return tf.raw_ops.Fingerprint(data=row, method=method)

    def _constant(self, device: Any, value: Any, dtype: Any) -> Any:
        key = device, dtype
        if key not in self._constants:
            with tf1.device(device):
                constant = tf.constant(value, dtype)
                self._constants[key] = tf1.placeholder_with_default(constant, constant.shape)
        return self._constants[key]


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
        HierAllreduceError: nothing that the step runs is copied from tower to tower; or the graph
            is finalized, and has no ops for this yet.
    """
    check = CopyCheck(sent_by(fetches))
    if not check.fingerprints:
        raise HierAllreduceError(
            "copy_check: no all-reduce that these fetches need was built in the current graph; call"
            " it after allreduce_grads or apply_gradients, with the op that the step runs"
        )
    return check


def sent_by(fetches: Any) -> List[Tuple[AllReduce, SentTensor]]:
    """Return what is copied, or added up over hosts, by a step; None stands for any step."""
    graph = tf1.get_default_graph()
    needed = None if fetches is None else needed_by(fetched_ops(graph, fetches))
    sent = []
    for built in all_reduces(graph):
        for tensor in built.tensors:
            ops = [graph.get_tensor_by_name(name).op for name in filter(None, tensor.held)]
            # A step that leaves out some copies runs on without them, and so this tensor is too.
            is_whole = needed is None or needed.issuperset(ops)
            is_sent = copies(tensor.schedule) or built.hosts > 1
            in_flow = any(op._get_control_flow_context() for op in ops)
            if ops and is_sent and is_whole and not in_flow:
                sent.append((built, tensor))
    return sent
