"""The copies of a step in the terms of a plan: those that were planned, and those that ran.

A plan has towers where TensorFlow has devices, and recorded tensors where it has ops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

import tensorflow as tf

from ..errors import AuditError
from ..graph.devices import device_fields, devices_match, tower_at
from ..graph.op_names import is_of_gradient
from ..graph.record import AllReduce, SentTensor, all_reduces
from ..graphs import needed_by, writes
from .partitions import Crossing, crossings

OTHER_HOSTS = "other hosts"
_COLLECTIVE = "CollectiveReduce"  # and CollectiveReduceV2, in TensorFlow 2

# The first tower on a device; the name of a device that belongs to no tower; or OTHER_HOSTS
Place = Union[int, str]
Pair = Tuple[Place, Place]


class Traffic:
    """The copies of one sent tensor in one step, by pair of places."""

    def __init__(self, all_reduce: AllReduce, tensor: SentTensor):
        self.all_reduce = all_reduce
        self.tensor = tensor
        self.planned: Counter = Counter()  # at most 1 for each pair where towers share devices
        self.executed: Counter = Counter()
        self.dtypes: Dict[Pair, str] = {}  # of the executed copies
        self.sources: Dict[Pair, Set[str]] = defaultdict(set)  # the ops whose results were copied
        self.ran_at: Set[Place] = set()  # where an op of the tensor ran
        fields_of_towers = [device_fields(device) for device in all_reduce.devices]
        self._first_on_device = [fields_of_towers.index(fields) for fields in fields_of_towers]
        for move in tensor.schedule:
            for src in move.srcs:
                pair = self._first_on_device[src], self._first_on_device[move.dst]
                self.add(self.planned, pair)

    def add(self, copies: Counter, pair: Pair) -> None:
        """Count a copy in ``planned`` or ``executed``."""
        if pair[0] == pair[1]:  # towers may share a device, and GPUs copy to main memory
            return
        share_devices = len(set(self._first_on_device)) < len(self._first_on_device)
        # Copies to a device with two towers count once, because pruning decides how many there are.
        copies[pair] = 1 if share_devices else copies[pair] + 1

    def place(self, device: str) -> Place:
        """Return the tower whose device is the executed ``device``; itself if there is none."""
        return _place(device, self.all_reduce.devices)

    def bytes_by_dtype(self, elements: int) -> Counter:
        """Return the bytes of the executed copies of a tensor of some elements, by dtype."""
        bytes_by_dtype: Counter = Counter()
        for pair, times in self.executed.items():
            dtype = self.dtypes[pair]
            bytes_by_dtype[dtype] += times * elements * tf.as_dtype(dtype).size
        return bytes_by_dtype


class ExecutedStep:
    """The traffic of a graph's recorded tensors in one step.

    ``partitions`` are the executed ones; all names there begin with ``prefix``.
    """

    def __init__(self, graph: Any, partitions: Sequence[Any], prefix: str):
        self._graph = graph
        self._prefix = prefix
        self._nodes = [node for partition in partitions for node in partition.node]
        self.traffics: List[Traffic] = []
        # By the scope of an all-reduce: lines about gradients that cross before they are cut.
        self.strayed: Dict[str, List[str]] = defaultdict(list)
        self._traffic_by_scope: Dict[str, Traffic] = {}
        for all_reduce in all_reduces(graph):
            check_devices(all_reduce)
            for tensor in all_reduce.tensors:
                traffic = Traffic(all_reduce, tensor)
                self.traffics.append(traffic)
                self._traffic_by_scope[f"{prefix}{all_reduce.scope}{tensor.name}"] = traffic
        self._count(partitions)

    def edges_kept(self, all_reduce: AllReduce) -> int:
        """Return how many of the ops that wait for a sum still came after it."""
        sources_by_name: Dict[str, List[str]] = {}
        for node in self._nodes:
            sources = [source.lstrip("^").partition(":")[0] for source in node.input]
            sources_by_name[node.name] = sources
        kept = 0
        for total, op in all_reduce.edges:
            # The call of a function is replaced by the function's ops.
            waiting = [self._prefix + op]
            if waiting[0] not in sources_by_name:
                waiting = [name for name in sources_by_name if name.startswith(f"{waiting[0]}/")]
            before = needed_by(waiting, sources_of=lambda name: sources_by_name.get(name, []))
            kept += self._prefix + total in before
        return kept

    def _traffic_of(self, op: str) -> Optional[Traffic]:
        """Return the traffic of the tensor to which an op belongs by its name; None for others."""
        # The longest scope counts, because the name of a tensor may begin with that of another.
        while "/" in op:
            op = op.rpartition("/")[0]
            if op in self._traffic_by_scope:
                return self._traffic_by_scope[op]
        return None

    def _count(self, partitions: Sequence[Any]) -> None:
        """Count the planned sums over hosts, and what crossed between devices and hosts."""
        # Values without a sum are copied as they are, so that the op has no name of ours.
        copied_by_op: Dict[str, Set[Traffic]] = defaultdict(set)
        for traffic in self.traffics:
            copied_by_op[self._prefix + traffic.tensor.copied].add(traffic)
        passing: List[Tuple[Traffic, Pair]] = []
        for crossing in crossings(partitions):
            reading = set(filter(None, map(self._traffic_of, crossing.readers)))
            sending = set(filter(None, [self._traffic_of(crossing.op)])) | copied_by_op[crossing.op]
            for traffic in reading | sending:
                pair = traffic.place(crossing.src), traffic.place(crossing.dst)
                traffic.sources[pair].add(crossing.op)
                traffic.dtypes[pair] = crossing.dtype
                if traffic in reading:
                    traffic.add(traffic.executed, pair)
                else:
                    passing.append((traffic, pair))
            self._note_strayed(crossing)
        # If nothing on the destination reads the copy under our name, TensorFlow has pruned our
        # identity and sent the tensor straight to its reader. That is the planned copy if it is
        # missing so far. Otherwise somebody reads a result on another device.
        for traffic, pair in passing:
            if traffic.planned[pair] and not traffic.executed[pair]:
                traffic.add(traffic.executed, pair)
        # Collectives count apart, because no partition shows what crosses between hosts.
        for node in self._nodes:
            known = self._traffic_of(node.name)
            if known is None:
                continue
            known.ran_at.add(known.place(node.device))
            if node.op.startswith(_COLLECTIVE):
                pair = (known.place(node.device), OTHER_HOSTS)
                known.add(known.executed, pair)
                known.dtypes[pair] = tf.as_dtype(node.attr["T"].type).name
        for op in self._graph.get_operations():
            known = self._traffic_of(self._prefix + op.name)
            if known is not None and op.type.startswith(_COLLECTIVE):
                known.add(known.planned, (known.place(op.device), OTHER_HOSTS))

    def _note_strayed(self, crossing: Crossing) -> None:
        """Note a gradient that is cut elsewhere than where it was computed.

        It is whole, so that it belongs to no chunk yet, and no plan has its copy.
        """
        for all_reduce in all_reduces(self._graph):
            scope = self._prefix + all_reduce.scope
            ours = [reader[len(scope) :] for reader in crossing.readers if reader.startswith(scope)]
            if any(map(is_of_gradient, ours)):
                src = _place(crossing.src, all_reduce.devices)
                dst = _place(crossing.dst, all_reduce.devices)
                line = f"{crossing.op!r}: not planned {src}→{dst}, before it is cut"
                self.strayed[all_reduce.scope].append(line)

    def moved_updates(self, all_reduce: AllReduce) -> Iterator[str]:
        """Yield a line for each update of a variable that ran elsewhere than on its tower."""
        built = {self._prefix + op.name: op for op in self._graph.get_operations()}
        for node in self._nodes:
            op = built.get(node.name)
            # An op without a device was built for none, so that it cannot have left it.
            if op is None or not op.device or not writes(op.type):
                continue
            for tower, device in enumerate(all_reduce.devices):
                if devices_match(op.device, device) and not devices_match(node.device, device):
                    yield f"tower {tower} ({device}): {op.name!r} ({op.type}) ran on {node.device}"
                    break


def _place(device: str, devices: Sequence[Any]) -> Place:
    """Return the first tower whose device is the executed ``device``; itself if there is none."""
    tower = tower_at(device, devices)
    return device if tower is None else tower


def check_devices(all_reduce: AllReduce) -> None:
    """Raise an AuditError if a tower's device has no name that tells it from all others."""
    if len(all_reduce.devices) == 1:
        return
    for tower, device in enumerate(all_reduce.devices):
        if callable(device) or device_fields(device).device_index is None:
            raise AuditError(
                f"{all_reduce.scope}: tower {tower} is on {device!r}, and copies to it cannot be"
                " told from others; an audit needs devices by type and number, such as '/gpu:0'"
            )
