"""What TensorFlow executed, in the terms of a plan: towers instead of devices, chunks instead of ops.

The audit counts these copies; the trace shows when they happened.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

from ..errors import AuditError
from ..graph import Emitted, device_fields, devices_match
from .partitions import Edge

Place = Union[int, str]  # the first tower on a device; or the device's name if it belongs to no tower
Pair = Tuple[Place, Place]
ChunkOf = Callable[[str], Any]  # an op's name → its chunk, or None
_FETCHED = "_retval_"  # so begins the name of what brings an op's result to the client


class DeviceFinder:
    """The towers by their devices, compared by what a tower's device says: it may be only ``/gpu:0``."""

    def __init__(self, devices: Sequence[Any]):
        for tower, device in enumerate(devices):
            if callable(device):
                raise AuditError(f"tower {tower}: its device is a function; an audit needs devices by name")
        self._devices = devices
        self._fields = [device_fields(device) for device in devices]

    def first_tower(self, tower: int) -> int:
        """Return the first tower that has ``tower``'s device."""
        return self._fields.index(self._fields[tower])

    def find(self, device: str) -> Place:
        """Return the tower whose device fits an executed ``device`` and says most of it; else ``device`` itself."""
        fitting = [
            (len([field for field in fields if field is not None]), -tower)
            for tower, fields in enumerate(self._fields)
            if devices_match(device, self._devices[tower])
        ]
        return -max(fitting)[1] if fitting else device


def chunk_finder(call: Emitted) -> ChunkOf:
    """Return a function from an op's name, as built or as executed, to the chunk in whose scope it is, or None."""
    scopes = {call.scope + name: chunk for chunk, name in enumerate(call.names)}

    def chunk_of(op: str) -> Optional[int]:
        op = op[len(_FETCHED) :] if op.startswith(_FETCHED) else op
        while "/" in op:
            op = op.rpartition("/")[0]
            if op in scopes:
                return scopes[op]
        return None

    return chunk_of


def planned_copies(call: Emitted, places: DeviceFinder) -> List[Counter]:
    """Return for each chunk the pairs of places between which the plan moves it."""
    steps: List[List[Any]] = [[] for _ in range(call.plan.chunks)]
    for step in call.plan.steps:
        steps[step.chunk].append(step)
    planned = []
    for chunk_steps in steps:
        pairs: Counter = Counter()
        for (src, dst), times in replace(call.plan, steps=tuple(chunk_steps)).transfers().items():
            pair = places.first_tower(src), places.first_tower(dst)
            if pair[0] != pair[1]:
                pairs[pair] += times
        planned.append(pairs)
    return planned


def chunk_copies(
    chunk_of: ChunkOf, graph: Any, edges: Sequence[Edge], places: DeviceFinder, planned: Sequence[Counter]
) -> List[Tuple[int, Pair, Edge]]:
    """Return the executed copies of a call: the chunk, the pair of places, and the tensor that crossed.

    Args:
        chunk_of: see :func:`chunk_finder`.
        graph: the graph in which the call was built.
        edges: all tensors that crossed between devices.
        places: the call's towers.
        planned: for each chunk the pairs of places between which the plan moves it.
    """
    crossed = list(crossing(chunk_of, graph, edges, places))
    executed = [(chunk, pair, edge) for chunk, pair, edge, is_read in crossed if is_read]
    found = {(chunk, pair) for chunk, pair, _ in executed}
    # A copy's own op may be pruned where its reader is on the same device; the tensor then goes straight to the
    # reader. Anything else that leaves is a result being read elsewhere.
    for chunk, pair, edge, _ in crossed:
        if planned[chunk][pair] and (chunk, pair) not in found:
            found.add((chunk, pair))
            executed.append((chunk, pair, edge))
    return executed


def crossing(
    chunk_of: ChunkOf, graph: Any, edges: Sequence[Edge], places: DeviceFinder
) -> Iterator[Tuple[int, Pair, Edge, bool]]:
    """Yield the tensors that crossed and that a call's ops read, have made, or copy as they were built.

    As the chunk, the pair of places, the tensor, and whether an op of the chunk reads it.
    """
    copied = _copied(graph, chunk_of)
    for edge in edges:
        pair = places.find(edge.src), places.find(edge.dst)
        reading = {chunk_of(reader) for reader in edge.readers}
        for chunk in reading.union([chunk_of(edge.source)], copied.get(edge.source, ())) - {None}:
            yield chunk, pair, edge, chunk in reading


def _copied(graph: Any, chunk_of: ChunkOf) -> Dict[str, Set[int]]:
    """Return the ops whose results a call copies, as they were built: by name, with the chunks that copy them."""
    copied: Dict[str, Set[int]] = {}
    for op in graph.get_operations():
        chunk = chunk_of(op.name)
        if chunk is not None and op.type == "Identity":
            copied.setdefault(op.inputs[0].op.name, set()).add(chunk)
    return copied
