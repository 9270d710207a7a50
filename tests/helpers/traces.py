"""Traced steps of 8 logical GPUs of one H100, cut down to what ``cost`` reads, and others by hand.

ResNet-50 in passes of about 94 ms, TensorFlow 2.21, CUPTI's streams. The host was far ahead of the
GPUs (``-0.0``), or busy for half of the time (``-0.5``). A file has columns instead of records,
which compress well.
"""

import json
import lzma
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from tensorflow.core.framework import step_stats_pb2

from hier_allreduce import AllReduce, Copy, Reduce, SentTensor

FOLDER = Path(__file__).parents[1] / "tools" / "cost" / "traces"
NAMES = sorted(path.name[: -len(".json.xz")] for path in FOLDER.glob("*.json.xz"))


class Row(NamedTuple):
    """A node that the host executed, or a kernel or copy in a stream. Times are µs."""

    device: str
    name: str
    label: str
    begin: int
    waited: int  # before its begin, after its inputs were there
    start: int  # after its begin
    end: int


def columns(name: str) -> Dict[str, Any]:
    """Return a file's columns."""
    return json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()).decode())


def rows(name: str) -> List[Row]:
    """Return all that ran."""
    found = []
    file = columns(name)
    keys = ("names", "labels", "steps", "waited", "starts", "ends")
    for device, *lists in zip(file["devices"], *(file[key] for key in keys)):
        names, labels, steps, waited, starts, ends = lists
        begin = 0
        for number, step in enumerate(steps):
            begin += step
            before = waited[number] if waited else 0
            start = starts[number] if starts else 0
            found.append(
                Row(device, names[number], labels[number], begin, before, start, ends[number])
            )
    return found


def step_stats(name: str) -> Any:
    """Return a trace as TensorFlow wrote it."""
    stats = step_stats_pb2.StepStats()
    parts: Dict[str, Any] = {}
    for row in rows(name):
        if row.device not in parts:
            parts[row.device] = stats.dev_stats.add(device=row.device)
        is_node = row.device.startswith("/job:")
        parts[row.device].node_stats.add(
            node_name=row.name,
            timeline_label=f"{row.name} = {row.label}" if is_node else row.label,
            all_start_micros=row.begin,
            scheduled_micros=row.begin - row.waited,
            op_start_rel_micros=row.start,
            op_end_rel_micros=row.end,
            all_end_rel_micros=row.end,
        )
    return stats


def step_of(
    nodes: Iterable[Tuple[str, str, float, float, float]],
    ran: Iterable[Tuple[str, str, str, float, float]],
) -> Any:
    """Return a trace that is written by hand, in ms.

    Args:
        nodes: device, label, and when the processor scheduled, began and ended it.
        ran: stream, name and label of a kernel or a copy, its begin and end.
    """
    start = 1_700_000_000_000_000  # µs
    written = step_stats_pb2.StepStats()
    for device, label, scheduled, begun, done in nodes:
        part = written.dev_stats.add(device=f"/job:localhost/replica:0/task:0/device:{device}")
        part.node_stats.add(
            node_name=label.split(" = ")[0].split("] ")[-1],
            timeline_label=label,
            scheduled_micros=start + round(1000 * scheduled),
            all_start_micros=start + round(1000 * begun),
            op_end_rel_micros=round(1000 * (done - begun)),
            all_end_rel_micros=round(1000 * (done - begun)),
        )
    for stream, name, label, begin, end in ran:
        part = written.dev_stats.add(device=f"/device:GPU:{stream}")
        part.node_stats.add(
            node_name=name,
            timeline_label=label,
            all_start_micros=start + round(1000 * begin),
            op_end_rel_micros=round(1000 * (end - begin)),
            all_end_rel_micros=round(1000 * (end - begin)),
        )
    return written


def all_reduces(name: str) -> List[AllReduce]:
    """Return the all-reduce of this package in a trace."""
    built = columns(name)["all_reduce"]
    tensors = []
    for tensor, steps, elements in built["tensors"]:
        schedule = [
            Reduce(tuple(srcs), dst) if kind == "Reduce" else Copy(srcs[0], dst)
            for kind, srcs, dst in steps
        ]
        tensors.append(sent(tensor, schedule, elements))
    return [built_as(built["scope"], built["devices"], tensors)]


def sent(name: str, schedule: Sequence[Any], elements: Optional[int]) -> SentTensor:
    """Return the record of a chunk in float32."""
    moves = tuple(schedule)
    return SentTensor(name, (name,), moves, elements, "float32", False, copied="", held={})


def built_as(scope: str, devices: Sequence[Any], tensors: Sequence[SentTensor]) -> AllReduce:
    """Return the record of an all-reduce, as far as a trace needs it."""
    return AllReduce(
        scope,
        algorithm="flat",
        devices=tuple(devices),
        hosts=1,
        tensors=tuple(tensors),
        description="",
        edges=(),
    )
