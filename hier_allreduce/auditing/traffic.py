"""The copies of a step in the terms of a plan: those that were planned, and those that ran.

::

    planned    {("v0", 1, 0): 1, ("v0", 0, 1): 1}    from the moves of each tensor
    executed   {("v0", 1, 0): 1, ("v0", 0, 1): 1}    from the partition graphs

A plan has towers where TensorFlow has devices, and recorded tensors where it has ops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple, Union

import tensorflow as tf

from ..errors import AuditError
from ..formatting import count
from ..graph.devices import device_fields, tower_at
from ..graph.op_names import is_of_gradient
from ..graph.record import AllReduce, all_reduces
from ..graphs import needed_by
from .partitions import Crossing, crossings

OTHER_HOSTS = "other hosts"
_COLLECTIVE = "CollectiveReduce"  # and CollectiveReduceV2, in TensorFlow 2

# The first tower on a device; the name of a device that belongs to no tower; or OTHER_HOSTS
Place = Union[int, str]
Copy = Tuple[str, Place, Place]  # the name of a sent tensor, from where, and to where


class Audited:
    """One all-reduce of a step: its copies as they were planned, and as they ran.

    Attributes:
        all_reduce: as it was built: its scope, algorithm, devices and tensors.
        planned: ``{(name, i, j): count}``: how often a tensor of ``all_reduce``, by its name, goes
            from tower i's device to tower j's. Towers that share a device are counted as one.
        executed: the same of the copies that ran.
        edges: the number of control edges that TensorFlow kept, of those in ``all_reduce.edges``.
    """

    def __init__(self, all_reduce: AllReduce):
        self.all_reduce = all_reduce
        self.planned: Counter = Counter()
        self.executed: Counter = Counter()
        self.edges = 0
        self.dtype_of: Dict[Copy, str] = {}  # in which a copy was made
        self.sources: Dict[Copy, Set[str]] = defaultdict(set)  # the ops whose results were copied
        self.ran_at: Set[Place] = set()  # where an op of a tensor ran
        self.strayed: List[str] = []  # lines about gradients that cross before they are cut
        # Towers on one device, however it is spelled, have one place. A name without a replica or a
        # task means the first one.
        first = device_fields("/replica:0/task:0")
        full = [first.make_merged_spec(device_fields(device)) for device in all_reduce.devices]
        self._places = places = list(map(full.index, full))
        self._share_devices = sorted(set(places)) != places
        for tensor in all_reduce.tensors:
            for move in tensor.schedule:
                for src in move.srcs:
                    self.add(self.planned, (tensor.name, places[src], places[move.dst]))

    def add(self, copies: Counter, copy: Copy) -> None:
        """Count a copy in ``planned`` or ``executed``."""
        _, src, dst = copy
        if src == dst:  # towers may share a device, and GPUs copy to main memory
            return
        # Copies to a device with two towers count once, because pruning decides how many there are.
        copies[copy] = 1 if self._share_devices else copies[copy] + 1

    def place(self, device: str) -> Place:
        """Return the first tower on an executed device; the device itself if there is none."""
        tower = tower_at(device, self.all_reduce.devices)
        return device if tower is None else self._places[tower]

    @property
    def copies(self) -> Counter:
        """``{(i, j): count}``, the number of tensors that tower i's device sent to tower j's."""
        copies: Counter = Counter()
        for (_, src, dst), times in self.executed.items():
            if dst != OTHER_HOSTS:
                copies[src, dst] += times
        return copies

    @property
    def collectives(self) -> int:
        """The number of tensors that crossed between hosts, each counted once."""
        return sum(times for (_, _, dst), times in self.executed.items() if dst == OTHER_HOSTS)

    @property
    def left_out(self) -> int:
        """The number of planned copies that did not run.

        Nobody reads the value, or it is a constant, or it was copied for another all-reduce.
        TensorFlow runs nothing else.
        """
        return sum((self.planned - self.executed).values())

    @property
    def dtypes(self) -> List[str]:
        """The dtypes in which tensors crossed: ``["float16"]``."""
        return sorted({self.dtype_of[copy] for copy in self.executed})

    def __str__(self) -> str:
        built = self.all_reduce
        left_out = f" and {self.left_out} left out" if self.left_out else ""
        findings = [built.algorithm, count(len(built.tensors), "chunk")]
        in_dtypes = f" in {', '.join(self.dtypes)}" if self.dtypes else ""
        findings.append(f"{sum(self.copies.values())} copies{in_dtypes}{left_out}")
        if self.collectives:
            findings.append(f"{count(self.collectives, 'collective')} over {built.hosts} hosts")
        if built.edges:
            findings.append(f"{self.edges} of {count(len(built.edges), 'control edge')}")
        return f"{built.scope}: {', '.join(findings)}, planned = executed by pair of towers"


# Sent tensors, each with its all-reduce, by the scope of their ops.
Tensors = Dict[str, Tuple[Audited, str]]


def executed_in(graph: Any, partitions: Sequence[Any], prefix: str) -> List[Audited]:
    """Return what was built in a graph, with the copies of one step.

    ``partitions`` are the executed ones; all names there begin with ``prefix``.

    Raises:
        AuditError: a tower's device has no name that tells it from all others.
    """
    calls: List[Audited] = []
    tensors: Tensors = {}
    for all_reduce in all_reduces(graph):
        check_devices(all_reduce)
        calls.append(Audited(all_reduce))
        for tensor in all_reduce.tensors:
            tensors[f"{prefix}{all_reduce.scope}{tensor.name}"] = (calls[-1], tensor.name)
    nodes = [node for partition in partitions for node in partition.node]
    _count_copies(calls, tensors, partitions, prefix)
    _note_ops(tensors, graph, nodes, prefix)
    _count_edges(calls, nodes, prefix)
    return calls


def _tensor_of(op: str, tensors: Tensors) -> Optional[Tuple[Audited, str]]:
    """Return the tensor to which an op belongs by its name; None for others."""
    # The longest scope counts, because the name of a tensor may begin with that of another.
    while "/" in op:
        op = op.rpartition("/")[0]
        if op in tensors:
            return tensors[op]
    return None


def _count_copies(
    calls: Sequence[Audited], tensors: Tensors, partitions: Sequence[Any], prefix: str
) -> None:
    """Count what crossed between devices."""
    # Values without a sum are copied as they are, so that the op has no name of ours.
    copied_by_op: Dict[str, Set[Tuple[Audited, str]]] = defaultdict(set)
    for call in calls:
        for tensor in call.all_reduce.tensors:
            copied_by_op[prefix + tensor.copied].add((call, tensor.name))
    passing: List[Tuple[Audited, Copy]] = []
    for crossing in crossings(partitions):
        reading = set(filter(None, (_tensor_of(op, tensors) for op in crossing.readers)))
        sending = set(filter(None, [_tensor_of(crossing.op, tensors)]))
        for known in reading | sending | copied_by_op[crossing.op]:
            call, name = known
            copy = (name, call.place(crossing.src), call.place(crossing.dst))
            call.sources[copy].add(crossing.op)
            call.dtype_of[copy] = crossing.dtype
            if known in reading:
                call.add(call.executed, copy)
            else:
                passing.append((call, copy))
        for call in calls:
            _note_strayed(call, crossing, prefix)
    # If nothing on the destination reads the copy under our name, TensorFlow has pruned our
    # identity and sent the tensor straight to its reader. That is the planned copy if it is
    # missing so far. Otherwise somebody reads a result on another device.
    for call, copy in passing:
        if call.planned[copy] and not call.executed[copy]:
            call.add(call.executed, copy)


def _note_strayed(call: Audited, crossing: Crossing, prefix: str) -> None:
    """Note a gradient that is cut elsewhere than where it was computed.

    It is whole, so that it belongs to no chunk yet, and no plan has its copy.
    """
    scope = prefix + call.all_reduce.scope
    ours = [reader[len(scope) :] for reader in crossing.readers if reader.startswith(scope)]
    if any(map(is_of_gradient, ours)):
        pair = f"{call.place(crossing.src)}→{call.place(crossing.dst)}"
        call.strayed.append(f"{crossing.op!r}: not planned {pair}, before it is cut")


def _note_ops(tensors: Tensors, graph: Any, nodes: Sequence[Any], prefix: str) -> None:
    """Count the sums over hosts, and note where ops ran.

    Such sums are apart from copies, because no partition shows what crosses there.
    """
    for node in nodes:
        known = _tensor_of(node.name, tensors)
        if known is None:
            continue
        call, name = known
        place = call.place(node.device)
        call.ran_at.add(place)
        if node.op.startswith(_COLLECTIVE):
            copy = (name, place, OTHER_HOSTS)
            call.add(call.executed, copy)
            call.dtype_of[copy] = tf.as_dtype(node.attr["T"].type).name
    for op in graph.get_operations():
        known = _tensor_of(prefix + op.name, tensors)
        if known is not None and op.type.startswith(_COLLECTIVE):
            call, name = known
            call.add(call.planned, (name, call.place(op.device), OTHER_HOSTS))


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


def check_devices(all_reduce: AllReduce) -> None:
    """Raise an AuditError if a tower's device has no name that tells it from all others."""
    needs_number = len(all_reduce.devices) > 1
    for tower, device in enumerate(all_reduce.devices):
        if callable(device) or (needs_number and device_fields(device).device_index is None):
            raise AuditError(
                f"{all_reduce.scope}: tower {tower} is on {device!r}, and copies to it cannot be"
                " told from others; an audit needs devices by type and number, such as '/gpu:0'"
            )
