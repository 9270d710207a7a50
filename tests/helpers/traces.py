"""Traced steps of 8 logical GPUs of one H100, cut down to what ``cost`` reads.

ResNet-50 in passes of about 94 ms, TensorFlow 2.21, CUPTI's streams. The host was far ahead of the
GPUs (``-0.0``), or busy for half of the time (``-0.5``). A file has columns instead of records,
which compress well.
"""

import json
import lzma
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

from tensorflow.core.framework import step_stats_pb2

from hier_allreduce import Copy, Reduce
from hier_allreduce.graph.record import AllReduce, SentTensor

FOLDER = Path(__file__).parents[1] / "audit" / "traces"
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


def all_reduces(name: str) -> List[AllReduce]:
    """Return the all-reduce of this package in a trace, if it has one."""
    built = columns(name).get("all_reduce")
    if built is None:
        return []
    tensors = []
    for tensor, steps, elements in built["tensors"]:
        schedule = [
            Reduce(tuple(srcs), dst) if kind == "Reduce" else Copy(srcs[0], dst)
            for kind, srcs, dst in steps
        ]
        tensors.append(SentTensor(tensor, (), tuple(schedule), elements, False, ""))
    return [
        AllReduce(built["scope"], built["algorithm"], tuple(built["devices"]), 1, tuple(tensors))
    ]
