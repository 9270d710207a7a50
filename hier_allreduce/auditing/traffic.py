"""The copies of a step in the terms of a plan: those that were planned, and those that ran.

::

    planned    {("v0", 1, 0): 1, ("v0", 0, 1): 1}    from the moves of each tensor
    executed   {("v0", 1, 0): 1, ("v0", 0, 1): 1}    from the partition graphs

A plan has towers where TensorFlow has devices, and recorded tensors where it has ops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Dict, Iterable, List, Sequence, Set, Tuple, Union

from ..errors import AuditError
from ..formatting import count
from ..graph.devices import device_fields
from ..graph.op_names import WHOLE
from ..graph.record import AllReduce, all_reduces
from ..graphs import needed_by
from .partitions import crossings

# The first tower on a device, or the name of a device that belongs to no tower.
Place = Union[int, str]
Copy = Tuple[str, Place, Place]  # the name of a sent tensor, from where, and to where


class Audited:
    """One all-reduce of a step: its copies as they were planned, and as they ran.

    Attributes:
        all_reduce: as it was built: its scope, algorithm, devices and tensors.
        planned: ``{(name, i, j): count}``: how often a tensor of ``all_reduce``, by its name, goes
            from tower i's device to tower j's. The first of the towers on a device stands for all.
        executed: the same of the copies that ran.
        edges: the number of control edges that TensorFlow kept, of those in ``all_reduce.edges``.

    Raises:
        AuditError: a tower's device has no name that tells it from all others.
    """

    def __init__(self, all_reduce: AllReduce):
        self.all_reduce = all_reduce
        self.planned: Counter = Counter()
        self.edges = 0
        self.sources: Dict[Copy, List[str]] = defaultdict(list)  # the op whose result each copy is
        self.ran_at: Set[Place] = set()  # where an op of a tensor ran
        # Towers on one device, however it is spelled, have one place. A name without a replica or a
        # task means the first one.
        first = device_fields("/replica:0/task:0")
        full = []
        for tower, device in enumerate(all_reduce.devices):
            if not isinstance(device, str) or device_fields(device).device_index is None:
                raise AuditError(
                    f"{all_reduce.scope}: tower {tower} is on {device!r}, and copies to it cannot"
                    " be told from others; an audit needs devices by type and number, such as"
                    " '/gpu:0'"
                )
            full.append(first.make_merged_spec(device_fields(device)))
        self._places = places = list(map(full.index, full))
        for tensor in all_reduce.tensors:
            hops = [
                (places[src], places[move.dst]) for move in tensor.schedule for src in move.srcs
            ]
            self.planned.update((tensor.name, src, dst) for src, dst in hops if src != dst)

    def place(self, device: str) -> Place:
        """Return the first tower on an executed device; the device itself if there is none."""
        tower = self.all_reduce.tower_at(device)
        return device if tower is None else self._places[tower]

    @property
    def executed(self) -> Counter:
        return Counter({copy: len(ops) for copy, ops in self.sources.items()})

    @property
    def copies(self) -> Counter:
        """``{(i, j): count}``, the number of tensors that tower i's device sent to tower j's."""
        copies: Counter = Counter()
        for (_, src, dst), times in self.executed.items():
            copies[src, dst] += times
        return copies

    @property
    def left_out(self) -> int:
        """The number of planned copies that did not run.

        Nobody reads the value, or it is a constant, or it was copied for another all-reduce or
        another tower on the same device. TensorFlow runs nothing else.
        """
        return sum((self.planned - self.executed).values())

    def __str__(self) -> str:
        built = self.all_reduce
        left_out = f" and {self.left_out} left out" if self.left_out else ""
        copies = f"{sum(self.executed.values())} copies{left_out}"
        findings = [built.algorithm, count(len(built.tensors), "chunk"), copies]
        if built.edges:
            findings.append(f"{self.edges} of {count(len(built.edges), 'control edge')}")
        return f"{built.scope}: {', '.join(findings)}, planned = executed by pair of towers"


Tensor = Tuple[Audited, str]  # a sent tensor with its all-reduce


def executed_in(graph: Any, partitions: Sequence[Any], prefix: str) -> List[Audited]:
    """Return what was built in a graph, with the copies of one step.

    ``partitions`` are the executed ones; all names there begin with ``prefix``.

    Raises: as :class:`Audited`.
    """
    calls = list(map(Audited, all_reduces(graph)))
    by_scope: Dict[str, Tensor] = {}
    # Values without a sum are copied as they are, so that the op has no name of ours.
    by_copied: Dict[str, Set[Tensor]] = defaultdict(set)
    for call in calls:
        scope = prefix + call.all_reduce.scope
        # No plan has the copy of a whole gradient, because it is in no tensor yet.
        by_scope[scope + WHOLE] = (call, "")
        for tensor in call.all_reduce.tensors:
            by_scope[scope + tensor.name] = (call, tensor.name)
            by_copied[prefix + tensor.copied].add((call, tensor.name))
    _count_copies(by_scope, by_copied, partitions)
    nodes = [node for partition in partitions for node in partition.node]
    for node in nodes:
        for call, name in _tensors_of([node.name], by_scope):
            if name:
                call.ran_at.add(call.place(node.device))
    _count_edges(calls, nodes, prefix)
    return calls


def _tensors_of(ops: Iterable[str], by_scope: Dict[str, Tensor]) -> Set[Tensor]:
    """Return the tensors to which ops belong by their names."""
    tensors = set()
    for op in ops:
        # The longest scope counts, because the name of a tensor may begin with that of another.
        while op and op not in by_scope:
            op = op.rpartition("/")[0]
        if op:
            tensors.add(by_scope[op])
    return tensors


def _count_copies(
    by_scope: Dict[str, Tensor], by_copied: Dict[str, Set[Tensor]], partitions: Sequence[Any]
) -> None:
    """Count what crossed between devices."""
    passing: List[Tuple[Audited, Copy, str]] = []
    for crossing in crossings(partitions):
        reading = _tensors_of(crossing.readers, by_scope)
        sending = _tensors_of([crossing.op], by_scope) | by_copied[crossing.op]
        for call, name in reading | sending:
            copy = (name, call.place(crossing.src), call.place(crossing.dst))
            # Towers may share a device, and GPUs copy to main memory.
            if copy[1] == copy[2]:
                continue
            if (call, name) in reading:
                call.sources[copy].append(crossing.op)
            else:
                passing.append((call, copy, crossing.op))
    # If nothing on the destination reads the copy under our name, TensorFlow has pruned our
    # identity and sent the tensor straight to its reader. That is the planned copy if it is
    # missing so far. Otherwise somebody reads a result on another device.
    for call, copy, op in passing:
        if call.planned[copy] and copy not in call.sources:
            call.sources[copy].append(op)


def _count_edges(calls: Sequence[Audited], nodes: Sequence[Any], prefix: str) -> None:
    """Count the ops that wait for a sum, and still came after it."""
    sources_by_name: Dict[str, List[str]] = {}
    for node in nodes:
        sources = [source.lstrip("^").partition(":")[0] for source in node.input]
        sources_by_name[node.name] = sources
    for call in calls:
        for total, op in call.all_reduce.edges:
            # The call of a function is replaced by the function's ops.
            waiting = [prefix + op]
            if waiting[0] not in sources_by_name:
                waiting = [name for name in sources_by_name if name.startswith(f"{waiting[0]}/")]
            before = needed_by(waiting, sources_of=lambda name: sources_by_name.get(name, []))
            call.edges += prefix + total in before
