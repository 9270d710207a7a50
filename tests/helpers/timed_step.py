"""A training step on emulated GPUs in timed mode, traced in a process of its own.

Its pass is a chain of kernels of known length; that of the late tower is twice as long. What is
planted in it, ``cost`` should find.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List, Tuple

import tensorflow as tf
from emulated_gpu import plugin
from emulated_gpu.trace import Span, add_streams, spans_in

from hier_allreduce import Copy, Reduce, Strategy, allreduce_grads

tf1 = tf.compat.v1
raw = tf.raw_ops
TOWERS = 4
VARIABLES = 12
ELEMENTS = 1 << 20  # of each variable: 4 MiB
KERNEL_US = 2000  # of each of the 2 × VARIABLES kernels of a tower's pass
SCALE = 5.0  # by which all times are stretched
GBS = 10.0  # of each link


def to_tower_0(towers: int, chunk: int) -> List[Any]:
    """All sums on tower 0."""
    others = tuple(range(1, towers))
    return [Reduce(others, 0), *(Copy(0, tower) for tower in others)]


def rotating(towers: int, chunk: int) -> List[Any]:
    """The sum of chunk c on tower c mod K."""
    root = chunk % towers
    others = tuple(tower for tower in range(towers) if tower != root)
    return [Reduce(others, root), *(Copy(root, tower) for tower in others)]


ALGORITHMS = {"to_tower_0": to_tower_0, "rotating": rotating}


def build(algorithm: str, late: int = -1) -> Tuple[Any, Any]:
    """Add the step to the current graph, and return the op that fills its variables, and it."""
    devices = [f"/gpu:{tower}" for tower in range(TOWERS)]
    fills: List[Any] = []
    rows = []
    for tower, device in enumerate(devices):
        with tf.device(device), tf.name_scope(f"tower{tower}"):
            value, one = (_variable(f"{name}{tower}", [], fills)[1] for name in ("value", "one"))
            grads = []
            micros = 2 * KERNEL_US if tower == late else KERNEL_US
            for number in range(VARIABLES):
                value = tf.maximum(value, one, name=f"forward{number}_burn_{micros}")
            for number in range(VARIABLES):
                value = tf.maximum(value, one, name=f"backward{number}_burn_{micros}")
                grads.append(tf.fill([ELEMENTS], value, name=f"grad{number}_burn_1"))
            rows.append(grads[::-1])
    strategy = Strategy(ALGORITHMS[algorithm], chunk_bytes=0)
    updates = []
    for tower, row in enumerate(allreduce_grads(rows, devices, strategy=strategy)):
        with tf.device(devices[tower]):
            for number, grad in enumerate(row):
                handle = _variable(f"variable{number}_of_tower{tower}", [ELEMENTS], fills)[0]
                updates.append(raw.ResourceApplyGradientDescent(var=handle, alpha=0.1, delta=grad))
    return tf.group(*fills), tf.group(*updates)


def _variable(name: str, shape: List[int], fills: List[Any]) -> Tuple[Any, Any]:
    handle = raw.VarHandleOp(dtype=tf.float32, shape=shape, shared_name=name)
    fills.append(raw.AssignVariableOp(resource=handle, value=tf.ones(shape)))
    value = raw.ReadVariableOp(resource=handle, dtype=tf.float32)
    value.set_shape(shape)
    return handle, value


def links(slow: Tuple[int, int] = (-1, -1), slow_gbs: float = GBS) -> str:
    """Return the file of a machine whose links are alike, but for a slow one."""
    lines = []
    for src in range(TOWERS):
        for dst in range(TOWERS):
            if src != dst:
                gbs = slow_gbs if (src, dst) == slow else GBS
                lines.append(f"{src} {dst} {gbs}e9 1e-05 0\n")
    return "".join(lines)


def run(
    folder: Path, algorithm: str, machine: str, host_us: float = 0, late: int = -1
) -> Tuple[Any, List[Span]]:
    """Run the step with a trace, and return its RunMetadata with streams, and all spans.

    Times are stretched by ``SCALE``.
    """
    (folder / "links").write_text(machine)
    options = plugin.environment(
        count=TOWERS,
        memory_mb=2000,
        timing=SCALE,
        machine=str(folder / "links"),
        host_us=host_us,
        trace=str(folder / "trace"),
    )
    paths = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, __file__, str(folder), algorithm, str(late)],
        env={**os.environ, **options, "PYTHONPATH": paths},
        check=True,
        timeout=280,
    )
    metadata = tf1.RunMetadata()
    metadata.ParseFromString((folder / "metadata").read_bytes())
    spans = spans_in(folder / "trace")
    add_streams(metadata, spans, json.loads((folder / "ahead").read_text()))
    return metadata, spans


def main(folder: Path, algorithm: str, late: int) -> None:
    """Run the third step with a trace."""
    tf1.disable_eager_execution()
    fill, step = build(algorithm, late)
    metadata = tf1.RunMetadata()
    traced = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True)
    config = tf1.ConfigProto(inter_op_parallelism_threads=3 * TOWERS)
    with tf1.Session(config=config) as session:
        session.run(fill)
        for _ in range(2):
            session.run(step)
        session.run(step, options=traced, run_metadata=metadata)
    (folder / "metadata").write_bytes(metadata.SerializeToString())
    (folder / "ahead").write_text(json.dumps(time.time() - time.monotonic()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
