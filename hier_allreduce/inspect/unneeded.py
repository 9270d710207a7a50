"""Planned copies that TensorFlow rightly leaves out: of constants, and of what another chunk copies too.

Grappler folds what is constant, and merges ops that compute the same, as in a sum and a mean of the same gradients::

    gradient ─┬─► a/sum ─► …            gradient ─► a/sum ─┬─► …
              └─► b/sum ─► b/mean                          └─► b/mean
        as it was built                     as it was executed

Ops compute the same if they have one type, the same attributes and device, and read the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, DefaultDict, Dict, FrozenSet, Iterator, List, Sequence, Set, Tuple

from ..graph import Emitted
from .executed import DeviceFinder, Pair, chunk_finder, crossing
from .partitions import Edge

Chunk = Tuple[int, int]  # the number of a call, and that of its chunk
Copy = Tuple[Pair, int, int]  # as it was built: a pair of places, the number of an op's value, and which output it is

_FED = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")  # Grappler neither folds nor merges them


def copies_done(calls: Sequence[Emitted], graph: Any, edges: Sequence[Edge]) -> List[List[Counter]]:
    """Return for each call and chunk the copies in its graph, as it was built, that were made or are not needed.

    Args:
        calls: the all-reduces of the run.
        graph: the graph in which they were built.
        edges: all tensors that crossed between devices.

    Returns:
        The number of different values by pair of places: constants; and those of a chunk, if as many tensors have
        crossed there for it and for all that copy something that it copies too, as they have values together.
    """
    numbers, constants = _values(graph)
    built: DefaultDict[Chunk, Set[Copy]] = defaultdict(set)
    crossed: DefaultDict[Chunk, Set[Tuple[Pair, Edge]]] = defaultdict(set)
    copying: DefaultDict[Tuple[Tuple[Any, ...], Copy], Set[Chunk]] = defaultdict(set)  # places are numbers of devices
    for number, call in enumerate(calls):
        places, chunk_of = DeviceFinder(call.devices), chunk_finder(call)
        for chunk, pair, edge, _ in crossing(chunk_of, graph, edges, places):
            crossed[number, chunk].add((pair, edge))
        for op in graph.get_operations():
            for copy in _built_copies(op, numbers, places) if chunk_of(op.name) is not None else ():
                built[number, chunk_of(op.name)].add(copy)
                copying[call.devices, copy].add((number, chunk_of(op.name)))
    done: List[List[Counter]] = [[Counter() for _ in call.names] for call in calls]
    for (number, chunk), copies in built.items():
        alike = set().union(*(copying[calls[number].devices, copy] for copy in copies))
        values = set().union(*(built[other] for other in alike))
        needed = Counter(pair for pair, *_ in values)
        made = Counter(pair for pair, _ in set().union(*(crossed[other] for other in alike)))
        for pair, value, _ in copies:
            done[number][chunk][pair] += value in constants or made[pair] >= needed[pair]
    return done


def _built_copies(op: Any, numbers: Dict[str, int], places: DeviceFinder) -> Iterator[Copy]:
    """Yield what an op reads from another device."""
    for tensor in op.inputs:
        pair = places.find(tensor.device), places.find(op.device)
        if pair[0] != pair[1]:
            yield pair, numbers[tensor.op.name], tensor.value_index


def _values(graph: Any) -> Tuple[Dict[str, int], FrozenSet[int]]:
    """Return a number for each op, by name, the same for ops that compute the same; and the numbers of constants."""
    numbers: Dict[str, int] = {}
    known: Dict[Any, int] = {}
    constants = set()
    for op in graph.get_operations():  # each after those whose results it reads, but in loops
        is_own = op.op_def.is_stateful or op.type in _FED
        number = numbers[op.name] = known.setdefault(op.name if is_own else _computation(op, numbers), len(known))
        read = op.inputs[1:] if op.type == "Fill" else op.inputs  # zeros are dropped, whatever their shape
        if not is_own and all(numbers.get(tensor.op.name) in constants for tensor in read):
            constants.add(number)
    return numbers, frozenset(constants)


def _computation(op: Any, numbers: Dict[str, int]) -> Tuple[Any, ...]:
    """Return what an op has in common with those that compute the same."""
    definition = op.node_def
    definition.ClearField("name")
    definition.ClearField("input")
    if "_class" in definition.attr:  # the ops that share its device
        del definition.attr["_class"]
    read = [(numbers.get(tensor.op.name, tensor.name), tensor.value_index) for tensor in op.inputs]
    return definition.SerializeToString(deterministic=True), tuple(read)
