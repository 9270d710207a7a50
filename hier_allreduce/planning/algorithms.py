"""Algorithms: functions from a number of devices and a chunk's number to the steps of that chunk.

::

    def flat(devices, chunk):                              flat(3, chunk=0)
        root = chunk % devices                             Reduce(0, (1, 2), 0)      0 ← 0 + 1 + 2
        …                                                  Copy(0, 0, 1)             1 ← 0
        return [Reduce(chunk, …), Copy(chunk, …), …]       Copy(0, 0, 2)             2 ← 0

The chunk's number rotates the work: chunks 0, 1, 2 … have their sums on different devices. A function with an argument
``topology`` gets the machine too. Functions that a user writes are used in the same way: see :class:`.Strategy`.
"""

from __future__ import annotations

import inspect
import threading
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import islice
from operator import index
from queue import Empty, Queue
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from ..errors import HierAllreduceError
from ..topology import Topology
from .plan import ChunkCheck, Copy, Plan, Reduce, Step
from .rings import groups, ring_of
from .spanning_trees import Packing, centers, rooted

Groups = Tuple[Tuple[int, ...], ...]
Hop = Tuple[Tuple[int, ...], int]  # (srcs, dst): dst ← dst + srcs
Algorithm = Callable[..., Iterable[Step]]

_PATIENCE = 10.0  # seconds for the steps of one chunk


def there_and_back(chunk: int, hops: Sequence[Hop], back: Optional[Sequence[Hop]] = None) -> List[Step]:
    """Return sums along ``hops``, and copies along the reverse of ``back`` (default: of the same hops)."""
    copies = [(dst, src) for srcs, dst in reversed(hops if back is None else back) for src in srcs]
    return [*(Reduce(chunk, srcs, dst) for srcs, dst in hops), *(Copy(chunk, src, dst) for src, dst in copies)]


# ---- functions of users ------------------------------------------------------------------------------


def name_of(algorithm: Union[str, Algorithm]) -> str:
    """Return the name of an algorithm: its own, or that of its function or class."""
    function = getattr(algorithm, "func", algorithm)  # of a partial
    return algorithm if isinstance(algorithm, str) else getattr(function, "__name__", type(function).__name__)


def checked(algorithm: Algorithm, topology: Optional[Topology] = None) -> Algorithm:
    """Return a user's function as one of two arguments, whose steps are checked at each call.

    It raises an error that names the function and the chunk if the function raises an error, does not end in time,
    returns something else than steps of that chunk, other steps when it is called again, or steps that :func:`.verify`
    refuses.

    Raises:
        HierAllreduceError: the function needs a topology, and there is none.
    """
    try:
        asks = inspect.signature(algorithm).parameters.get("topology")
    except ValueError:  # a function without a signature
        asks = None
    if asks and asks.default is asks.empty and topology is None:
        raise HierAllreduceError(f"algorithm {name_of(algorithm)} has an argument 'topology': give topology= too")
    asked = partial(algorithm, topology=topology) if asks and topology else algorithm

    @lru_cache(maxsize=None)
    def steps_of(devices: int, chunk: int) -> Sequence[Step]:
        where = f"{name_of(algorithm)}({devices}, {chunk})"
        try:
            steps, again = (_in_time(lambda: _read(asked(devices, chunk), devices, chunk)) for _ in range(2))
        except Exception as cause:  # whatever the function does
            raise HierAllreduceError(f"{where}: {type(cause).__name__}: {cause}") from cause
        if steps != again:
            raise HierAllreduceError(
                f"{where} returns other steps when called again; they must depend on its arguments only"
            )
        try:
            ChunkCheck(Plan(devices, 0, ()), chunk, steps).run()
        except HierAllreduceError as error:
            raise HierAllreduceError(f"{where}: {error}") from None
        return steps

    return steps_of


def _in_time(call: Callable[[], List[Step]]) -> List[Step]:
    """Return what ``call`` returns, or raise what it raises. If it takes too long it is left to itself."""
    done: Queue[Tuple[List[Step], Optional[Exception]]] = Queue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:
            done.put(([], error))

    threading.Thread(target=run, daemon=True).start()
    try:
        steps, error = done.get(timeout=_PATIENCE)
    except Empty:
        raise TimeoutError(f"no steps after {_PATIENCE:g} s; a plan needs those of hundreds of chunks") from None
    if error is not None:
        raise error
    return steps


def _read(steps: Iterable[Any], devices: int, chunk: int) -> List[Step]:
    """Return steps with plain whole numbers."""
    most = 2 * devices**2  # no device needs more than one sum and one copy from each other one
    read: List[Step] = []
    for step in islice(steps, most + 1):
        if not isinstance(step, (Reduce, Copy)):
            raise TypeError(f"step {len(read) + 1} is {step!r}: expected a Reduce or a Copy")
        if step.chunk != chunk:
            raise ValueError(f"step {len(read) + 1} is {step}: expected steps of chunk {chunk}")
        try:
            sources: Any = tuple(map(index, step.srcs)) if isinstance(step, Reduce) else index(step.src)
            read.append(type(step)(chunk, sources, index(step.dst)))
        except TypeError:
            raise TypeError(f"step {len(read) + 1} is {step}: expected numbers of devices, in srcs a tuple") from None
    if len(read) > most:
        raise ValueError(f"more than {most} steps; a sum over {devices} devices needs at most {2 * devices - 2}")
    return read


# ---- by the number of devices alone ------------------------------------------------------------------


def flat(devices: int, chunk: int) -> List[Step]:
    """Add up everything on one main, device ``chunk mod K``. At chunk 0 this is caffe2 muji's fallback."""
    root = chunk % devices
    others = tuple(device for device in range(devices) if device != root)
    return there_and_back(chunk, [(others, root)] if others else [])


def tree(devices: int, chunk: int) -> List[Step]:
    """Add up neighbours in pairs, then pairs of pairs: a binomial tree with root ``chunk mod K``.

    At chunk 0 and K = 2, 4, 8 these are caffe2 muji's schedules.
    """
    root = chunk % devices
    power_of_two = devices & (devices - 1) == 0
    # Exclusive or maps pairs to pairs and quads to quads; it needs a power of two. Other K are shifted.
    label = [device ^ root if power_of_two else (device + root) % devices for device in range(devices)]
    hops: List[Hop] = []
    stride = 1
    while stride < devices:
        hops += [((label[d + stride],), label[d]) for d in range(0, devices - stride, 2 * stride)]
        stride *= 2
    return there_and_back(chunk, hops)


def two_group(devices: int, chunk: int) -> List[Step]:
    """Add up inside the halves ⌈K/2⌉ and ⌊K/2⌋, then across; the sum is on device ``chunk + ⌈K/2⌉ mod K``.

    Source of the schedule: tensorpack's ``allreduce_grads_hierarchical``, which has K = 8.
    """
    return list(in_groups(halves(devices))(devices, chunk))


def check_groups(groups: Sequence[Sequence[int]], devices: int) -> None:
    """Check that groups hold each of K towers once.

    Raises:
        HierAllreduceError: they miss or repeat a tower, or name an unknown one.
    """
    example = f"for {devices} devices, for instance groups={halves(devices)}"
    try:
        checked = tuple(tuple(group) for group in groups)
    except TypeError:
        raise HierAllreduceError(f"groups must be tuples of tower numbers ({example}), not {groups!r}") from None
    towers = [tower for group in checked for tower in group]
    unknown = [t for t in towers if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < devices]
    known = [t for t in towers if t not in unknown]
    missing = sorted(set(range(devices)) - set(known))
    repeated = sorted({t for t in known if known.count(t) > 1})
    lists = {"unknown": unknown, "missing": missing, "repeated": repeated}
    faults = [f"{fault} {numbers}" for fault, numbers in lists.items() if numbers]
    if () in checked:
        faults.append("an empty group")
    if faults:
        raise HierAllreduceError(f"groups={checked} must hold each tower number once: {', '.join(faults)}. {example}")


def halves(devices: int) -> Groups:
    """Return ``⌈K/2⌉`` and ``⌊K/2⌋`` neighbours: the quads of a DGX-1 at K = 8. One device is one group."""
    middle = (devices + 1) // 2
    return tuple(group for group in (tuple(range(middle)), tuple(range(middle, devices))) if group)


def in_groups(device_groups: Groups) -> Algorithm:
    """Return the algorithm that adds up inside each group on its main, then over the mains."""

    def hierarchical(devices: int, chunk: int) -> List[Step]:
        root = (chunk + (devices + 1) // 2) % devices
        last = next(number for number, group in enumerate(device_groups) if root in group)
        return there_and_back(chunk, over_mains(device_groups, device_groups[last].index(root), last))

    return hierarchical


def over_mains(device_groups: Groups, place: int, last: int) -> List[Hop]:
    """Return the sums inside the groups, then over their mains, on the main of group ``last``.

    The main of each group is its member at ``place``, modulo the group's size.
    """
    mains = [group[place % len(group)] for group in device_groups]
    hops = _inside(device_groups, mains)
    others = tuple(mains[last + 1 :] + mains[:last])
    return [*hops, (others, mains[last])] if others else hops


def _inside(device_groups: Groups, mains: Sequence[int]) -> List[Hop]:
    pairs = zip(device_groups, mains)
    return [(tuple(device for device in group if device != main), main) for group, main in pairs if len(group) > 1]


def one_by_one(hops: Iterable[Hop]) -> List[Hop]:
    """Return one hop for each source: more launches, but a sum starts with the first arrival."""
    return [((src,), dst) for srcs, dst in hops for src in sorted(srcs, key=lambda src: (src < dst, src))]


# ---- along the links of a machine --------------------------------------------------------------------


def ring(devices: int, chunk: int, topology: Optional[Topology] = None) -> List[Step]:
    """Add up along a ring through near devices, from another device for each chunk."""
    return around(devices, chunk, tuple((device,) for device in ring_of(topology or devices)))


def around(devices: int, chunk: int, device_groups: Groups, starts: Sequence[int] = ()) -> List[Step]:
    """Add up inside groups, then from group to group around a ring of them.

    Chunks begin at all groups, or at those in ``starts``, and at all members of a group in turn.
    """
    starts = starts or range(len(device_groups))
    members = max(map(len, device_groups))
    place, member = divmod(chunk % (len(starts) * members), members)
    path = device_groups[starts[place] :] + device_groups[: starts[place]]
    mains = [group[member % len(group)] for group in path]
    return there_and_back(chunk, [*one_by_one(_inside(path, mains)), *along(mains)])


def along(path: Sequence[int]) -> List[Hop]:
    """Return the sums along a path, on its last device."""
    return [((src,), dst) for src, dst in zip(path, path[1:])]


def weighted_paths(shares: Sequence[float], paths: Sequence[Sequence[int]], chunks: int) -> Algorithm:
    """Return the algorithm that adds up along paths through all devices, each for its share of the chunks."""
    order = spread(shares, chunks)

    def weighted(devices: int, chunk: int) -> List[Step]:
        number, _ = order[chunk % len(order)]
        return there_and_back(chunk, along(paths[number]))

    return weighted


def spread(shares: Sequence[float], chunks: int) -> List[Tuple[int, int]]:
    """Divide about ``chunks`` equal chunks by shares, evenly in their order: (number of the share, its part)."""
    counts = [round(share * chunks) for share in shares]
    places = [((part + 0.5) / count, number, part) for number, count in enumerate(counts) for part in range(count)]
    return [(number, part) for _, number, part in sorted(places)]


def exchange(devices: int, chunk: int, topology: Optional[Topology] = None) -> List[Step]:
    """Let each device add up its share of the bytes and send it to all: direct reduce-scatter and all-gather.

    Devices send to their neighbours on the ring first, so that no two copies meet at a receiver.
    """
    tour = ring_of(topology or devices)
    place = chunk % devices
    return there_and_back(chunk, [((tour[(place + shift) % devices],), tour[place]) for shift in range(1, devices)])


def link_groups(topology: Topology, parts: int, source_by_source: bool = False) -> Algorithm:
    """Return the hierarchical algorithm with ``parts`` groups of near devices, whose mains are partners."""
    device_groups = groups(topology, parts)

    def hierarchical(devices: int, chunk: int) -> List[Step]:
        last = (chunk + chunk // len(device_groups[0])) % parts
        hops = over_mains(device_groups, chunk, last)
        return there_and_back(chunk, one_by_one(hops) if source_by_source else hops)

    return hierarchical


def packed_trees(packing: Packing, chunks: int) -> Algorithm:
    """Return trees of a packing, each for as many of ``chunks`` chunks as its share of the bytes."""
    order = spread(packing.shares, chunks)

    def packed(devices: int, chunk: int) -> List[Step]:
        number, part = order[chunk % len(order)]
        roots = centers(packing.trees[number])
        return there_and_back(chunk, rooted(packing.trees[number], roots[part % len(roots)]))

    return packed


def soonest(topology: Topology, chunks: int) -> Algorithm:
    """Return trees for so few bytes that only the starts of copies count.

    Read backwards they are the best broadcast in the LogP model (Karp et al., SPAA 1993): each device that has the
    value sends it on, one copy every ``start`` seconds, the first ``pause`` seconds after the value arrived.
    """
    tour, speeds = ring_of(topology), topology.speeds

    def trees(devices: int, chunk: int) -> List[Step]:
        place = chunk % chunks * devices // chunks
        order = tour[place:] + tour[:place]
        there, back = (_soonest(order, speeds.copy_latency, pause) for pause in (speeds.kernel, 0.0))
        return there_and_back(chunk, there, back)

    return trees


@lru_cache(maxsize=256)
def _soonest(order: Tuple[int, ...], start: float, pause: float) -> List[Hop]:
    """Return the sums that give the first device of ``order`` the sum soonest; neighbours are joined first."""
    children: List[List[int]] = [[] for _ in order]
    turns = [(start + pause, 0)]  # when a copy ends, and its sender
    for place in range(1, len(order)):
        time, sender = heappop(turns)
        children[sender].append(place)
        heappush(turns, (time + start, sender))
        heappush(turns, (time + pause + start, place))
    sizes = [1] * len(order)
    for place in reversed(range(len(order))):
        sizes[place] += sum(sizes[child] for child in children[place])
    return _joined(0, order, children, sizes)


def _joined(place: int, devices: Sequence[int], children: Sequence[Sequence[int]], sizes: Sequence[int]) -> List[Hop]:
    """Return the sums of the subtree at ``place``; its first child has the last of its devices."""
    hops: List[Hop] = []
    mains: List[int] = []
    for child in children[place]:
        devices, below = devices[: -sizes[child]], devices[-sizes[child] :]
        hops += _joined(child, below, children, sizes)
        mains.append(below[0])
    return [*hops, (tuple(mains), devices[0])] if mains else hops


# ---- plans -------------------------------------------------------------------------------------------

# what the planner tries on every machine: the name by which users choose it, its own name, the function
OURS = (("flat", "flat", flat), ("tree", "tree", tree), ("hierarchical", "two-group", two_group))
BY_NAME = {**{family: function for family, _, function in OURS}, "ring": ring}  # what needs no topology


def plan_of(algorithm: Algorithm, devices: int, turns: Sequence[int], name: str = "") -> Plan:
    """Return a plan in which chunk ``c`` has the steps of the algorithm's chunk ``turns[c]``."""
    steps = [step._replace(chunk=chunk) for chunk, turn in enumerate(turns) for step in algorithm(devices, turn)]
    return Plan(devices, len(turns), tuple(steps), name or name_of(algorithm))


def distinct_turns(algorithm: Algorithm, devices: int) -> List[Tuple[int, int]]:
    """Return (root, turn) of the first K turns, in the order of the roots; those with equal steps once."""
    first: Dict[Tuple[Step, ...], int] = {}
    for turn in range(devices):
        first.setdefault(plan_of(algorithm, devices, [turn]).steps, turn)
    return sorted((Plan(devices, 1, steps).roots[0], turn) for steps, turn in first.items())
