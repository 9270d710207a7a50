"""Executed copies in the terms of a plan: towers instead of devices, recorded tensors instead of ops."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any, Dict, List, Sequence, Set, Tuple, Union

from ..errors import AuditError
from ..graph.devices import device_fields, devices_match
from ..graph.record import Call, Recorded, recorded_in
from .partitions import edges_in

OTHER_HOSTS = "other hosts"
_COLLECTIVE = "CollectiveReduce"  # and CollectiveReduceV2, in TensorFlow 2
_FED = (
    "Placeholder",
    "PlaceholderV2",
    "PlaceholderWithDefault",
)  # Grappler neither folds nor merges them

Spot = Union[
    int, str
]  # the first tower on a device; the device's name if it belongs to no tower; OTHER_HOSTS
Pair = Tuple[Spot, Spot]


class Traffic:
    """The copies of one recorded tensor in one step.

    Attributes:
        call: the all-reduce.
        tensor: as recorded.
        planned: the number of copies by pair of spots; between towers that share their devices at most 1.
        executed: the same.
        unneeded: the missing copies that nobody needs, once :meth:`Step.find_unneeded` has run.
        sources: by pair, the ops whose results were copied.
        ran: whether an op of the tensor was executed.
    """

    def __init__(self, call: Call, tensor: Recorded):
        for tower, device in enumerate(call.devices):
            if callable(device):
                raise AuditError(
                    f"tower {tower}: its device is a function; an audit needs devices by name"
                )
        self.call, self.tensor = call, tensor
        self.planned: Counter = Counter()
        self.executed: Counter = Counter()
        self.unneeded: Counter = Counter()
        self.sources: Dict[Pair, Set[str]] = {}
        self.ran = False
        self._fields = list(map(device_fields, call.devices))
        self._firsts = list(
            map(self._fields.index, self._fields)
        )  # of each tower, the first one on its device
        for step in tensor.schedule:
            for src in step.srcs:
                self.add(self.planned, (self._firsts[src], self._firsts[step.dst]))

    def add(self, copies: Counter, pair: Pair) -> None:
        """Count a copy in ``planned`` or ``executed``."""
        if pair[0] != pair[1]:  # towers may share a device, and GPUs copy to host memory
            # how often a tensor crosses to a device with two towers depends on pruning
            copies[pair] = copies[pair] + 1 if len(set(self._firsts)) == len(self._firsts) else 1

    def spot(self, device: str) -> Spot:
        """Return the tower whose device fits an executed ``device`` and says most of it; else ``device`` itself."""
        fitting = [
            (sum(field is not None for field in self._fields[tower]), -tower)
            for tower in set(self._firsts)
            if devices_match(device, self.call.devices[tower])
        ]
        return -max(fitting)[1] if fitting else device


class Step:
    """The traffic of a graph's recorded tensors in one step, in whose partitions all names begin with ``prefix``."""

    def __init__(self, graph: Any, partitions: Sequence[Any], prefix: str):
        self._graph, self._prefix = graph, prefix
        self.traffics = [
            Traffic(call, tensor) for call in recorded_in(graph) for tensor in call.tensors
        ]
        self._by_scope = {f"{prefix}{t.call.scope}{t.tensor.name}": t for t in self.traffics}
        self._count_copies(partitions)
        self._nodes = [node for part in partitions for node in part.node]
        for node in self._nodes:
            for traffic in self._of(node.name):
                traffic.ran = True
                if node.op.startswith(_COLLECTIVE):
                    traffic.add(traffic.executed, (traffic.spot(node.device), OTHER_HOSTS))
        for op in graph.get_operations():
            if op.type.startswith(_COLLECTIVE):
                for traffic in self._of(prefix + op.name):
                    traffic.add(traffic.planned, (traffic.spot(op.device), OTHER_HOSTS))

    def _of(self, op: str) -> List[Traffic]:
        """Return the traffic of the tensor to which an op belongs by its name, if it belongs to one."""
        while "/" in op:
            op = op.rpartition("/")[0]
            if op in self._by_scope:
                return [self._by_scope[op]]
        return []

    def _count_copies(self, partitions: Sequence[Any]) -> None:
        copied: Dict[str, List[Traffic]] = {}  # values that are only copied, by op
        for traffic in self.traffics:
            copied.setdefault(self._prefix + traffic.tensor.copied, []).append(traffic)
        passing = []
        for src, dst, source, readers in edges_in(partitions):
            reading = {traffic for reader in readers for traffic in self._of(reader)}
            for traffic in reading.union(self._of(source), copied.get(source, ())):
                pair = traffic.spot(src), traffic.spot(dst)
                traffic.sources.setdefault(pair, set()).add(source)
                if traffic in reading:
                    traffic.add(traffic.executed, pair)
                else:
                    passing.append((traffic, pair))
        # The op of a copy is pruned where its reader is on the same device: the tensor goes straight to the reader.
        # Anything else that leaves is a result being read elsewhere.
        for traffic, pair in passing:
            if traffic.planned[pair] and not traffic.executed[pair]:
                traffic.add(traffic.executed, pair)

    def idle(self, call: Call) -> List[str]:
        """Return the devices of a call on which no op ran."""
        used = {node.device for node in self._nodes}
        return [
            device
            for device in call.devices
            if not any(devices_match(other, device) for other in used)
        ]

    def find_unneeded(self) -> None:
        """Note the missing copies that nobody needs: of constants, and of values that another copy has brought.

        Grappler folds constants, and merges ops that compute the same, as in a sum and a mean of the same gradients.
        """
        numbers, constants = _computations(self._graph)
        built: Dict[Tuple[Traffic, Pair], Set[Any]] = {}
        for op in self._graph.get_operations():
            for traffic, read in product(self._of(self._prefix + op.name), op.inputs):
                pair = traffic.spot(read.device), traffic.spot(op.device)
                value = numbers[read.op.name], read.value_index, pair, traffic.call.devices
                built.setdefault((traffic, pair), set()).add(value)
        made = set()
        for (traffic, pair), values in built.items():
            if traffic.executed[pair] >= traffic.planned[pair] > 0:
                made |= values
        for (traffic, pair), values in built.items():
            needed = {value for value in values - made if value[0] not in constants}
            if len(needed) <= traffic.executed[pair]:
                traffic.unneeded[pair] = (traffic.planned - traffic.executed)[pair]


def _computations(graph: Any) -> Tuple[Dict[str, int], Set[int]]:
    """Return a number for each op, the same for ops that compute the same; and the numbers of constants."""
    numbers: Dict[str, int] = {}
    known: Dict[Any, int] = {}
    constants = set()
    for op in graph.get_operations():  # an op comes after its inputs' ops, but in loops
        definition, key = op.node_def, op.name
        is_single = op.op_def.is_stateful or op.type in _FED
        if not is_single:
            for field in ("name", "input"):
                definition.ClearField(field)
            definition.attr.pop("_class", None)  # the ops that share its device
            read = tuple(
                (numbers.get(tensor.op.name, tensor.name), tensor.value_index)
                for tensor in op.inputs
            )
            key = (definition.SerializeToString(deterministic=True), read)
        numbers[op.name] = known.setdefault(key, len(known))
        inputs = (
            op.inputs[1:] if op.type == "Fill" else op.inputs
        )  # zeros are dropped, whatever their shape
        if not is_single and all(numbers.get(tensor.op.name) in constants for tensor in inputs):
            constants.add(numbers[op.name])
    return numbers, constants
