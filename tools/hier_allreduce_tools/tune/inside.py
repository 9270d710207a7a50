"""Inside the user's program: another all-reduce, and a line in the journal at each step.

``tune`` copies this file as ``sitecustomize.py`` into a folder on the program's PYTHONPATH, so that
Python runs it first. It needs nothing but hier_allreduce and wrapt, which TensorFlow brings::

    {"run": 3, "sum": "71-4096", "built": {"bytes": 4096, "towers": 8, …}}    a sum is built
    {"run": 3, "sum": "71-4096", "time": 1795629992.339589}                   it has run in a step
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, Callable, Dict, Optional, Sequence

VARIABLE = "HIER_ALLREDUCE_TUNE"
Rows = Sequence[Sequence[Any]]  # K×N gradients


class MeasuredProgram:
    """A program with a candidate's all-reduce, whose sums are counted and timed."""

    def __init__(self, request: Dict[str, Any]):
        self._run: int = request["run"]
        self._journal: str = request["journal"]
        self._candidate: str = request["candidate"]
        self._changes: Dict[str, Any] = request["changes"]

    def begin(self, tensorflow: Any) -> None:
        """Substitute all-reduces from now on; TensorFlow is imported."""
        with suppress(ImportError):
            import hier_allreduce

            hier_allreduce.substitute(self.choose)

    def choose(self, call: Any) -> Any:
        """Return what is built in the place of an all-reduce.

        Raises:
            ClusterError: there are several hosts.
        """
        import hier_allreduce

        if call.hosts > 1:
            fault = f"tune measures one host, and this program has {call.hosts}"
            raise hier_allreduce.ClusterError(f"{fault}: run it without a cluster")
        strategy = replace(call.strategy, **self._changes)
        choices = {}
        for field in fields(strategy):
            value = getattr(strategy, field.name)
            if value != field.default:
                choices[field.name] = value
        size = max(sum(map(_bytes_of, row)) for row in call.rows)
        built = {
            "bytes": size,
            "front_end": call.front_end,
            "update": call.update,
            "towers": len(call.devices),
            "gpus": any("gpu:" in str(device).lower() for device in call.devices),
            "strategy": choices,
        }
        reduce = _reduction(self._candidate, call)
        return hier_allreduce.Substitute(strategy, reduce, lambda rows: self._timed(rows, built))

    def _timed(self, rows: Rows, built: Dict[str, Any]) -> Rows:
        """Return K rows of N reduced gradients, one of which waits for the line of its step."""
        import tensorflow as tf

        changed = [list(row) for row in rows]
        for row in changed:
            columns = [column for column, grad in enumerate(row) if grad is not None]
            if columns:
                # A step may be built in several graphs, and eagerly each is a call.
                sum_name = f"{os.getpid()}-{built['bytes']}"
                line = {"run": self._run, "sum": sum_name, "built": built}
                with open(self._journal, "a", encoding="utf-8") as journal:
                    # JSON has no word for a function of the program.
                    journal.write(json.dumps(line, default=str) + "\n")
                # The first part of a sparse gradient are its values.
                first, *others = tf.nest.flatten(row[columns[0]], expand_composites=True)
                parts = [self._after_line(first, sum_name), *others]
                timed = tf.nest.pack_sequence_as(row[columns[0]], parts, expand_composites=True)
                row[columns[0]] = timed
                return changed
        return rows

    def _after_line(self, tensor: Any, sum_name: str) -> Any:
        """Return a copy of a tensor, after a line with the time is in the journal."""
        import tensorflow as tf

        with tf.device("/cpu:0"), tf.control_dependencies([tensor]):
            # It is an op, because a Python function would wait for the program's threads.
            moment = tf.strings.as_string(tf.timestamp(), precision=6)
            before = f'{{"run": {self._run}, "sum": "{sum_name}", "time": '
            line = tf.strings.join([before, moment, "}"])
            printed = tf.print(line, output_stream=f"file://{self._journal}")
        with tf.device(tensor.device), tf.control_dependencies([printed]):
            return tf.identity(tensor)


def _bytes_of(grad: Any) -> int:
    """Return the size of a gradient, of a sparse one that of its values; 0 if it is unknown."""
    import tensorflow as tf

    if grad is None:
        return 0
    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return (values.shape.num_elements() or 0) * values.dtype.size


def _reduction(candidate: str, call: Any) -> Optional[Callable[[Rows], Rows]]:
    """Return the function that adds up K×N gradients as a baseline does; None for our sums."""
    import tensorflow as tf

    if call.front_end == "tensorpack" and candidate.startswith("tensorpack-"):
        mode = candidate.split("-")[1]
        return lambda rows: _reduced_by_tensorpack(mode, rows, call.devices, call.average)
    by_tensorflow = getattr(tf.distribute, candidate, None)
    if call.front_end != "keras" or by_tensorflow is None:
        return None

    def reduce(rows: Rows) -> Rows:
        # TensorFlow's all-reduces take its own values instead of rows.
        reduced = by_tensorflow().batch_reduce(*call.arguments)
        return list(zip(*(mirrored.values for mirrored in reduced)))

    return reduce


def _reduced_by_tensorpack(mode: str, rows: Rows, devices: Sequence[Any], average: bool) -> Any:
    """Return K×N gradients, reduced as ``SyncMultiGPUReplicatedBuilder(mode=…)`` does."""
    from tensorpack.graph_builder import utils

    grads = [list(row) for row in rows]
    if mode == "nccl":
        return utils.allreduce_grads(grads, average=average)
    if mode != "hierarchical":
        adders = ["/cpu:0"] if mode == "cpu" else list(devices)
        sums = utils.allreduce_grads_naive(grads, devices=adders, average=average)
        return [sums] * len(devices)
    # What tensorpack cannot pack travels as it is.
    packer = utils.GradientPacker(len(devices))
    if not packer.compute_strategy(grads[0]):
        return utils.allreduce_grads_hierarchical(grads, devices, average=average)
    packed = packer.pack_all(grads, devices)
    reduced = utils.allreduce_grads_hierarchical(packed, devices, average=average)
    return packer.unpack_all(reduced, devices)


def _run_hidden_module() -> None:
    """Run the ``sitecustomize`` of the machine, which this file hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    _run_hidden_module()
    # Another Python of the program may have no wrapt: then it has no TensorFlow either.
    with suppress(ImportError, KeyError):
        from wrapt import register_post_import_hook

        request = json.loads(os.environ[VARIABLE])
        register_post_import_hook(MeasuredProgram(request).begin, "tensorflow")
