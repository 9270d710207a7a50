"""When each copy and each sum of a step happened: from a ``RunMetadata`` with a full trace to the bars of a trace.

What TensorFlow records differs:

======================  ==================================================  ===========================================
                        GPUs                                                CPU devices
======================  ==================================================  ===========================================
a copy                  ``…GPU:0/memcpy``: its start and end                nothing. It begins when the op that made the
                                                                            value ends, and is there at the latest when
                                                                            the op that reads it is scheduled
a sum                   ``…GPU:0/stream:all``: the kernel of the op         the op
======================  ==================================================  ===========================================

The records of GPUs are read as TensorFlow's sources write them (``device_tracer.cc``, ``xplane_to_step_stats.cc``): in
1.15 a copy has the name of its edge, in 2 only bytes, sender and receiver, so that equal copies are taken in order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..errors import AuditError, HierAllreduceError
from ..graph import Emitted, all_on_cpu, device_numbers
from ..topology import Topology, subset
from .bars import COPY, EXECUTED, SUM, Bar, Interval, Run
from .executed import DeviceFinder, chunk_copies, chunk_finder, planned_copies
from .partitions import Edge, edges_between, inputs_of, tensor_bytes
from .trace import Trace, chunk_name, predicted_run

# ops that compute nothing, or only name what is there
_IDLE = {"Const", "Identity", "NoOp", "PlaceholderWithDefault", "ReadVariableOp", "Reshape", "Shape", "VarHandleOp"}
_IDLE |= {"_Send", "_Recv", "_HostSend", "_HostRecv", "_Retval", "_Arg", "Assert"}
_GPU_RECORD = re.compile(r"/device:GPU:(\d+)/(memcpy|stream:all)$")
_GPU = re.compile(r"device:GPU:(\d+)$")
_SIZE, _DESTINATION = re.compile(r"\b(?:size|bytes):(\d+)"), re.compile(r"\b(?:dest|to device):(\d+)")
_ON_CPUS = "CPU devices share one memory: a copy there is only what TensorFlow takes from one op to the next"


class _Times(NamedTuple):
    """When an op was scheduled, started and ended, in seconds."""

    scheduled: float
    start: float
    end: float


class _Memcpy(NamedTuple):
    """A copy that a GPU recorded: the edge's name or the kind of copy, bytes, the receiving GPU, and its times."""

    name: str
    size: Optional[int]
    destination: Optional[int]
    start: float
    end: float


class _Step:
    """The executed ops of a step: when they ran, what they waited for, and what crossed between devices."""

    def __init__(self, run_metadata: Any):
        if not any(device.node_stats for device in run_metadata.step_stats.dev_stats):
            raise AuditError(
                "the RunMetadata has no times; run the step with options=tf.compat.v1.RunOptions(trace_level="
                "tf.compat.v1.RunOptions.FULL_TRACE, output_partition_graphs=True), run_metadata=…"
            )
        partitions = list(run_metadata.partition_graphs)
        self.nodes = {node.name: node for part in partitions for node in part.node}
        self.edges = edges_between(partitions)
        self.inputs = inputs_of(partitions)
        self._sizes = tensor_bytes(run_metadata)
        self.times: Dict[str, _Times] = {}
        self.memcpys: Dict[int, List[_Memcpy]] = defaultdict(list)
        kernels: Dict[str, Interval] = {}
        for device in run_metadata.step_stats.dev_stats:
            record = _GPU_RECORD.search(device.device)
            for stats in device.node_stats:
                times = _times(stats)
                name = stats.node_name.split(":")[0]
                if record and record.group(2) == "memcpy":
                    self.memcpys[int(record.group(1))].append(_memcpy(stats, times))
                elif record:
                    start, end = kernels.get(name, (times.start, times.end))
                    kernels[name] = min(start, times.start), max(end, times.end)
                elif name in self.nodes:
                    self.times[name] = times
        for name, (start, end) in kernels.items():
            if name in self.times:
                self.times[name] = self.times[name]._replace(start=start, end=end)
        for records in self.memcpys.values():
            records.sort(key=lambda record: record.start)

    def ended(self, op: str) -> float:
        """Return when an op ended; the beginning of time for one that has no record."""
        return self.times[op].end if op in self.times else float("-inf")

    def size(self, edge: Edge) -> int:
        """Return the bytes that crossed."""
        op, _, slot = edge.tensor.partition(":")
        return self._sizes.get((edge.src, op, int(slot or 0)), 0)

    def copy(self, edge: Edge, name: str, src: int, dst: int) -> Optional[Bar]:
        """Return the bar of a copy, or None if the trace has no time for it."""
        source = edge.tensor.partition(":")[0]
        size, ready = self.size(edge), self.ended(source)
        recorded = self._recorded(edge, size)
        if recorded:
            start, end, exact = recorded.start, recorded.end, True
        else:
            readers = [reader for reader in edge.readers if reader in self.times]
            if not readers or source not in self.times:
                return None
            reader = min(readers, key=lambda reader: self.times[reader].scheduled)
            others = [self.ended(other) for other in self.inputs[reader] if other not in (source, edge.source)]
            start, end = ready, max(ready, self.times[reader].scheduled)
            exact = ready >= max(others, default=ready)
        return Bar(COPY, name, src, dst, min(ready, start), start, end, size, exact, edge.source)

    def _recorded(self, edge: Edge, size: int) -> Optional[_Memcpy]:
        """Return the GPU's record of a copy, and take it: another copy has another one."""
        sender, receiver = _GPU.search(edge.src), _GPU.search(edge.dst)
        if not sender or not receiver:
            return None
        records = self.memcpys[int(sender.group(1))]
        wanted = (size, int(receiver.group(1)))
        found = next((record for record in records if edge.name in record.name), None) or next(
            (record for record in records if (record.size, record.destination) == wanted), None
        )
        if found:
            records.remove(found)
        return found

    def computation(self, op: str, name: str, place: int) -> Optional[Bar]:
        """Return the bar of an op that computes something, or None for any other."""
        if op not in self.times or self.nodes[op].op in _IDLE:
            return None
        scheduled, start, end = self.times[op]
        return Bar(SUM, name, place, place, min(scheduled, start), start, end, 0.0, True, op)


def _times(stats: Any) -> _Times:
    if stats.all_start_nanos:
        begin = stats.all_start_nanos
        scheduled = stats.scheduled_nanos or begin
        return _Times(scheduled / 1e9, (begin + stats.op_start_rel_nanos) / 1e9, (begin + stats.op_end_rel_nanos) / 1e9)
    begin = stats.all_start_micros  # what GPUs record has microseconds only
    scheduled = stats.scheduled_micros or begin
    return _Times(scheduled / 1e6, (begin + stats.op_start_rel_micros) / 1e6, (begin + stats.op_end_rel_micros) / 1e6)


def _memcpy(stats: Any, times: _Times) -> _Memcpy:
    size, destination = _SIZE.search(stats.timeline_label), _DESTINATION.search(stats.timeline_label)
    return _Memcpy(
        stats.node_name,
        int(size.group(1)) if size else None,
        int(destination.group(1)) if destination else None,
        times.start,
        times.end,
    )


# ---- all-reduces of this package ---------------------------------------------------------------------


def trace_calls(run_metadata: Any, graph: Any, calls: Sequence[Emitted], topology: Optional[Topology] = None) -> Trace:
    """Return the executed run of some all-reduces, and the predicted one if the machine's links are known.

    Args:
        run_metadata: of a step with ``FULL_TRACE`` and ``output_partition_graphs=True``.
        graph: the graph that was run.
        calls: the all-reduces, as they were built.
        topology: the machine whose links the prediction takes; None predicts nothing.

    Raises:
        AuditError: the metadata have no times.
        HierAllreduceError: the machine lacks some of the devices.
    """
    step = _Step(run_metadata)
    devices = list(dict.fromkeys(device for call in calls for device in call.devices))
    bars: List[Bar] = []
    predictions: List[Run] = []
    last_gradient = 0.0
    for call in calls:
        prefix = call.scope if len(calls) > 1 else ""
        own, sizes = _bars_of(step, graph, call, devices, prefix)
        bars += own
        last_gradient = max(last_gradient, _last_gradient(step, call))
        machine = _machine(topology or call.machine, call)
        if machine is not None and own and tuple(devices) == call.devices:
            names = [prefix + name for name in _names(call)]
            predicted = predicted_run(call.plan, machine, sizes, names, tuple(map(str, devices)))
            predictions.append(predicted.moved(min(bar.ready for bar in own)))
    bound = predictions[0].bound if len(predictions) == len(calls) == 1 else None
    executed = Run(EXECUTED, tuple(map(str, devices)), tuple(bars), last_gradient, bound)
    if not predictions:
        return Trace((executed,), _notes(devices))
    predicted_bars = tuple(bar for run in predictions for bar in run.bars)
    return Trace((executed, replace(predictions[0], bars=predicted_bars, bound=bound)), _notes(devices))


def _notes(devices: Sequence[Any]) -> Tuple[str, ...]:
    return (_ON_CPUS,) if all_on_cpu(devices) else ()


def _machine(topology: Optional[Topology], call: Emitted) -> Optional[Topology]:
    """Return the topology of a call's towers; None if there is none, or lanes hide which GPUs they are."""
    if topology is None or len(topology) == call.plan.towers:
        return topology
    if call.plan.lanes:
        return None
    try:
        return subset(topology, device_numbers(call.devices))
    except HierAllreduceError as error:
        devices = list(map(str, call.devices))
        raise HierAllreduceError(f"{topology.name} does not fit devices {devices}: {error}") from None


def _names(call: Emitted) -> List[str]:
    """Return for each chunk its variables; of many, the first and their number."""
    return [
        name if len(variables) < 2 else f"{variables[0]} + {len(variables) - 1}"
        for name, variables in zip(call.names, call.variables)
    ]


def _bars_of(
    step: _Step, graph: Any, call: Emitted, devices: Sequence[Any], prefix: str
) -> Tuple[List[Bar], List[float]]:
    """Return the bars of one call, and the bytes of each chunk."""
    finder, chunk_of = DeviceFinder(call.devices), chunk_finder(call)
    numbers = [devices.index(device) for device in call.devices]
    names = [prefix + name for name in _names(call)]
    bars: List[Optional[Bar]] = []
    sizes = [0.0] * call.plan.chunks
    for chunk, (src, dst), edge in chunk_copies(chunk_of, graph, step.edges, finder, planned_copies(call, finder)):
        if isinstance(src, int) and isinstance(dst, int):
            name = f"{chunk_name(chunk, names)} {src}→{dst}"
            bars.append(step.copy(edge, name, numbers[src], numbers[dst]))
            sizes[chunk] = max(sizes[chunk], step.size(edge))
    for op, node in step.nodes.items():
        chunk, place = chunk_of(op), finder.find(node.device)
        if chunk is not None and isinstance(place, int):
            what = re.sub(r"_\d+$", "", op.rpartition("/")[2])
            bars.append(step.computation(op, f"{chunk_name(chunk, names)} {what} on {place}", numbers[place]))
    return [bar for bar in bars if bar is not None], sizes


def _last_gradient(step: _Step, call: Emitted) -> float:
    """Return when the last value that the call reads from outside was there."""
    read = {
        source
        for op in step.nodes
        if op.startswith(call.scope)
        for source in step.inputs[op]
        if not source.startswith(call.scope)
    }
    return max((step.times[source].end for source in read if source in step.times), default=0.0)


# ---- any step ----------------------------------------------------------------------------------------


def trace_step(run_metadata: Any, devices: Sequence[Any]) -> Trace:
    """Return every copy between ``devices`` and every computation on them, named by op, whoever built the graph.

    Raises:
        AuditError: the metadata have no times.
    """
    step, finder = _Step(run_metadata), DeviceFinder(devices)
    bars = tuple(bar for bar in _all_bars(step, finder) if bar is not None)
    return Trace((Run(EXECUTED, tuple(map(str, devices)), bars),), _notes(devices))


def _all_bars(step: _Step, finder: DeviceFinder) -> Iterator[Optional[Bar]]:
    for edge in step.edges:
        src, dst = finder.find(edge.src), finder.find(edge.dst)
        if isinstance(src, int) and isinstance(dst, int) and src != dst:
            yield step.copy(edge, f"{edge.source} {src}→{dst}", src, dst)
    for op, node in step.nodes.items():
        place = finder.find(node.device)
        if isinstance(place, int):
            yield step.computation(op, op, place)
