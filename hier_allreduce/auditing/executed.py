"""Executed copies in the terms of a plan.

A plan has towers where TensorFlow has devices, and recorded tensors where it has ops.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

import tensorflow as tf

from ..errors import AuditError
from ..graph.devices import device_fields, devices_match
from ..graph.record import AllReduce, SentTensor, recorded_in
from .partitions import crossings

OTHER_HOSTS = "other hosts"
_COLLECTIVE = "CollectiveReduce"  # and CollectiveReduceV2, in TensorFlow 2
# Grappler neither folds nor merges these
_FED = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")
_UPDATE = re.compile(r"(Resource)?(Sparse)?Apply|(Resource)?Scatter|Assign")

# the first tower on a device; the name of a device that belongs to no tower; or OTHER_HOSTS
Place = Union[int, str]
Pair = Tuple[Place, Place]


class Traffic:
    """The copies of one sent tensor in one step.

    Attributes:
        all_reduce: the tensor's.
        tensor: as recorded.
        planned: the number of copies by pair of places; at most 1 where towers share devices.
        executed: the same.
        unneeded: the missing copies that nobody needs, once :meth:`ExecutedStep.find_unneeded` has
            run.
        dtypes: of the executed copies, by pair.
        sources: by pair, the ops whose results were copied.
        ran: whether an op of the tensor was executed.
    """

    def __init__(self, all_reduce: AllReduce, tensor: SentTensor):
        self.all_reduce = all_reduce
        self.tensor = tensor
        self.planned: Counter = Counter()
        self.executed: Counter = Counter()
        self.unneeded: Counter = Counter()
        self.dtypes: Dict[Pair, str] = {}
        self.sources: Dict[Pair, Set[str]] = defaultdict(set)
        self.ran = False
        self._fields = [device_fields(device) for device in all_reduce.devices]
        self._first_there = [self._fields.index(fields) for fields in self._fields]
        for step in tensor.schedule:
            for src in step.srcs:
                self.add(self.planned, (self._first_there[src], self._first_there[step.dst]))

    def add(self, copies: Counter, pair: Pair) -> None:
        """Count a copy in ``planned`` or ``executed``."""
        if pair[0] == pair[1]:  # towers may share a device, and GPUs copy to host memory
            return
        share_devices = len(set(self._first_there)) < len(self._first_there)
        # how often a tensor crosses to a device with two towers depends on pruning
        copies[pair] = 1 if share_devices else copies[pair] + 1

    def place(self, device: str) -> Place:
        """Return the tower whose device is the executed ``device``; itself if there is none.

        Of several devices that may be meant, such as ``""`` and ``"/cpu:1"``, this takes the one
        that says most.
        """
        place: Place = device
        most = -1
        for tower in sorted(set(self._first_there)):
            said = sum(field is not None for field in self._fields[tower])
            if said > most and devices_match(device, self.all_reduce.devices[tower]):
                place = tower
                most = said
        return place

    def bytes_by_dtype(self) -> Counter:
        """Return the bytes of the executed copies by dtype; none where the size is not known."""
        found: Counter = Counter()
        if self.tensor.elements is not None:
            for pair, times in self.executed.items():
                dtype = self.dtypes[pair]
                found[dtype] += times * self.tensor.elements * tf.as_dtype(dtype).size
        return found


class ExecutedStep:
    """The traffic of a graph's recorded tensors in one step.

    Args:
        graph: as it was built.
        partitions: of the executed step.
        prefix: with which all names in the partitions begin.
    """

    def __init__(self, graph: Any, partitions: Sequence[Any], prefix: str):
        self._graph = graph
        self._prefix = prefix
        self._nodes = [node for part in partitions for node in part.node]
        self.traffics: List[Traffic] = []
        for all_reduce in recorded_in(graph):
            check_devices(all_reduce)
            self.traffics += [Traffic(all_reduce, tensor) for tensor in all_reduce.tensors]
        self._by_scope = {f"{prefix}{t.all_reduce.scope}{t.tensor.name}": t for t in self.traffics}
        self._count_copies(partitions)
        self._count_collectives()

    def _owner(self, op: str) -> Optional[Traffic]:
        """Return the traffic of the tensor to which an op belongs by its name; None for others."""
        while "/" in op:
            op = op.rpartition("/")[0]
            if op in self._by_scope:
                return self._by_scope[op]
        return None

    def _count_copies(self, partitions: Sequence[Any]) -> None:
        copied: Dict[str, Set[Traffic]] = defaultdict(set)  # values without a sum, by their op
        for traffic in self.traffics:
            copied[self._prefix + traffic.tensor.copied].add(traffic)
        passing: List[Tuple[Traffic, Pair]] = []
        for crossing in crossings(partitions):
            reading = set(filter(None, map(self._owner, crossing.readers)))
            sending = set(filter(None, [self._owner(crossing.op)])) | copied[crossing.op]
            for traffic in reading | sending:
                pair = traffic.place(crossing.src), traffic.place(crossing.dst)
                traffic.sources[pair].add(crossing.op)
                traffic.dtypes[pair] = crossing.dtype
                if traffic in reading:
                    traffic.add(traffic.executed, pair)
                else:
                    passing.append((traffic, pair))
        # If nothing on the destination reads the copy under our name, TensorFlow has pruned our
        # identity and sent the tensor straight to its reader. That is the planned copy if it is
        # missing so far. Otherwise somebody reads a result on another device.
        for traffic, pair in passing:
            if traffic.planned[pair] and not traffic.executed[pair]:
                traffic.add(traffic.executed, pair)

    def _count_collectives(self) -> None:
        for node in self._nodes:
            traffic = self._owner(node.name)
            if traffic is None:
                continue
            traffic.ran = True
            if node.op.startswith(_COLLECTIVE):
                pair = (traffic.place(node.device), OTHER_HOSTS)
                traffic.add(traffic.executed, pair)
                traffic.dtypes[pair] = tf.as_dtype(node.attr["T"].type).name
        for op in self._graph.get_operations():
            traffic = self._owner(self._prefix + op.name)
            if traffic is not None and op.type.startswith(_COLLECTIVE):
                traffic.add(traffic.planned, (traffic.place(op.device), OTHER_HOSTS))

    def idle(self, all_reduce: AllReduce) -> List[str]:
        """Return the devices of an all-reduce on which no op ran."""
        used = {node.device for node in self._nodes}

        def is_idle(device: Any) -> bool:
            return not any(devices_match(other, device) for other in used)

        return list(filter(is_idle, all_reduce.devices))

    def is_constant(self, all_reduce: AllReduce) -> bool:
        """Return whether all ops of an all-reduce compute constants, so that no step needs them."""
        numbers, constants = _computations(self._graph)
        for op in self._graph.get_operations():
            owner = self._owner(self._prefix + op.name)
            is_its_op = owner is not None and owner.all_reduce is all_reduce
            if is_its_op and numbers[op.name] not in constants:
                return False
        return True

    def moved_updates(self, all_reduce: AllReduce) -> Iterator[str]:
        """Yield a line for each update of a variable that ran elsewhere than on its tower."""
        built = {self._prefix + op.name: op for op in self._graph.get_operations()}
        for node in self._nodes:
            op = built.get(node.name)
            if op is None or not op.device or not _UPDATE.match(op.type):
                continue
            for tower, device in enumerate(all_reduce.devices):
                if devices_match(op.device, device) and not devices_match(node.device, device):
                    yield f"tower {tower} ({device}): {op.name!r} ({op.type}) ran on {node.device}"
                    break

    def find_unneeded(self) -> None:
        """Note the missing copies that nobody needs.

        These are copies of constants, which Grappler folds; and of values that another copy has
        brought, because Grappler merges ops that compute the same, as in a sum and a mean of the
        same gradients.
        """
        numbers, constants = _computations(self._graph)
        read = self._values_read(numbers)
        brought: Set[Any] = set()
        for (traffic, pair), values in read.items():
            if 0 < traffic.planned[pair] <= traffic.executed[pair]:
                brought |= values
        for (traffic, pair), values in read.items():
            needed = [value for value in values - brought if value[0] not in constants]
            if len(needed) <= traffic.executed[pair]:
                missing = traffic.planned[pair] - traffic.executed[pair]
                traffic.unneeded[pair] = max(0, missing)

    def _values_read(self, numbers: Dict[str, int]) -> Dict[Tuple[Traffic, Pair], Set[Any]]:
        """Return by tensor and pair the values that its ops read over that pair, as built."""
        read: Dict[Tuple[Traffic, Pair], Set[Any]] = defaultdict(set)
        for op in self._graph.get_operations():
            traffic = self._owner(self._prefix + op.name)
            if traffic is None:
                continue
            for tensor in op.inputs:
                pair = traffic.place(tensor.device), traffic.place(op.device)
                devices = traffic.all_reduce.devices
                value = numbers[tensor.op.name], tensor.value_index, pair, devices
                read[traffic, pair].add(value)
        return read


def check_devices(all_reduce: AllReduce) -> None:
    """Raise an AuditError if a tower's device has no name to compare."""
    for tower, device in enumerate(all_reduce.devices):
        if callable(device):
            raise AuditError(
                f"tower {tower}: its device is a function; an audit needs devices by name"
            )


def _computations(graph: Any) -> Tuple[Dict[str, int], Set[int]]:
    """Return a number for each op, and the numbers of constants.

    Ops that compute the same have the same number.
    """
    numbers: Dict[str, int] = {}
    known: Dict[Any, int] = {}
    constants: Set[int] = set()
    for op in graph.get_operations():  # an op comes after its inputs' ops, but in loops
        is_single = op.op_def.is_stateful or op.type in _FED
        key = op.name if is_single else _computation(op, numbers)
        numbers[op.name] = known.setdefault(key, len(known))
        # zeros are dropped, whatever their shape
        inputs = op.inputs[1:] if op.type == "Fill" else op.inputs
        if not is_single and all(numbers.get(tensor.op.name) in constants for tensor in inputs):
            constants.add(numbers[op.name])
    return numbers, constants


def _computation(op: Any, numbers: Dict[str, int]) -> Any:
    """Return a key that ops have in common if they compute the same from the same inputs."""
    definition = op.node_def
    definition.ClearField("name")
    definition.ClearField("input")
    definition.attr.pop("_class", None)  # the ops that share its device
    inputs = tuple(
        (numbers.get(tensor.op.name, tensor.name), tensor.value_index) for tensor in op.inputs
    )
    return definition.SerializeToString(deterministic=True), inputs
