"""Inside the user's program: another all-reduce, and a line in the journal at each step.

Its folder is on the program's PYTHONPATH, so that Python runs it first. It needs nothing but
hier_allreduce and wrapt, which TensorFlow brings::

    {"sum": "71 4096 hier_allreduce/w:0", "built": {"bytes": 4096, "towers": 8, …}}   it is built
    {"sum": "71 4096 hier_allreduce/w:0", "time": 1795629992.339589}        it has run in a step
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

VARIABLE = "HIER_ALLREDUCE_TUNE"
Rows = Sequence[Sequence[Any]]  # K×N gradients


class MeasuredProgram(NamedTuple):
    """A program with a candidate's all-reduce, whose sums are counted and timed."""

    journal: str  # a path
    candidate: str
    changes: Dict[str, Any]  # of the program's strategy

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
            raise hier_allreduce.ClusterError(fault)
        strategy = replace(call.strategy, **self.changes)
        built = {
            "bytes": max(sum(map(_bytes_of, row)) for row in call.rows),
            "front_end": call.front_end,
            "update": call.update,
            "towers": len(call.devices),
            "strategy": vars(strategy),
        }
        reduce = _reduction(self.candidate, call)
        return hier_allreduce.Substitute(strategy, reduce, lambda rows: self._timed(rows, built))

    def _timed(self, rows: Rows, built: Dict[str, Any]) -> Rows:
        """Return K rows of N reduced gradients, one of which waits for the line of its step."""
        timed = [list(row) for row in rows]
        for row in timed:
            for column, grad in enumerate(row):
                if grad is not None:
                    row[column] = self._after_line(grad, built)
                    return timed
        return timed

    def _after_line(self, grad: Any, built: Dict[str, Any]) -> Any:
        """Return a copy of a gradient, after a line with the time is in the journal."""
        import tensorflow as tf

        # Two sums in a graph have two names, the same sum in several graphs has one; eagerly, where
        # each step is a call, there is none.
        name = f"{os.getpid()} {built['bytes']} {getattr(grad, 'name', '')}"
        with open(self.journal, "a", encoding="utf-8") as journal:
            # JSON has no word for a function of the program.
            journal.write(json.dumps({"sum": name, "built": built}, default=str) + "\n")
        with tf.device("/cpu:0"), tf.control_dependencies([grad]):
            # It is an op, because a Python function would wait for the program's threads.
            moment = tf.strings.as_string(tf.timestamp(), precision=6)
            line = tf.strings.join([f'{{"sum": "{name}", "time": ', moment, "}"])
            printed = tf.print(line, output_stream=f"file://{self.journal}")
        with tf.device(grad.device), tf.control_dependencies([printed]):
            # A sparse gradient stays one; TensorFlow 1.15's identity would make it dense.
            return tf.nest.map_structure(tf.identity, grad, expand_composites=True)


def _bytes_of(grad: Any) -> int:
    """Return the size of a gradient, of a sparse one that of its values; 0 if it is unknown."""
    if grad is None:
        return 0
    values = getattr(grad, "values", grad)
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


if __name__ == "sitecustomize":
    # The machine may have a module of this name, too, which this file hides.
    _elsewhere = [path for path in sys.path if path != os.path.dirname(__file__)]
    _hidden = PathFinder.find_spec("sitecustomize", _elsewhere)
    if _hidden is not None and _hidden.loader is not None:
        _hidden.loader.exec_module(module_from_spec(_hidden))
    # Another Python of the program may have no wrapt: then it has no TensorFlow either.
    with suppress(ImportError, KeyError):
        from wrapt import register_post_import_hook

        _program = MeasuredProgram(**json.loads(os.environ[VARIABLE]))
        register_post_import_hook(_program.begin, "tensorflow")
