"""Inside the user's program: another all-reduce, and a line in the journal at each step.

``tune`` copies this file as ``sitecustomize.py`` into a folder on the program's PYTHONPATH, so that
Python runs it first. It needs nothing but hier_allreduce, once the program has TensorFlow::

    {"run": 3, "python": "3.11.7"}                               Python has begun
    {"run": 3, "tensorflow": "2.15.1"}                           TensorFlow is imported
    {"run": 3, "sum": "71-1", "built": {"bytes": 4096, "plan": …}}    an all-reduce is built
    {"run": 3, "sum": "71-1", "time": 1795629992.339589}              it has run, once a step
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import platform
import sys
from dataclasses import fields, replace
from typing import Any, Callable, Dict, List, Optional, Sequence

VARIABLE = "HIER_ALLREDUCE_TUNE"
STAGES = ("started", "python", "tensorflow", "built")  # of a run, as its lines tell them
Rows = Sequence[Sequence[Any]]  # K×N gradients


class MeasuredProgram:
    """A program with a candidate's all-reduce, whose sums are counted and timed."""

    def __init__(self, setting: str):
        request = json.loads(setting)
        self._run = int(request["run"])
        self._journal = str(request["journal"])
        self._baseline = str(request["baseline"])
        self._changes: Dict[str, Any] = request["changes"]
        self._sums = 0
        self._name_by_bytes: Dict[int, str] = {}  # of sums that run eagerly
        self.tell(python=platform.python_version())

    def tell(self, **facts: Any) -> None:
        """Write a line into the journal."""
        with open(self._journal, "a", encoding="utf-8") as journal:
            journal.write(json.dumps({"run": self._run, **facts}) + "\n")

    def begin(self) -> None:
        """Substitute all-reduces from now on; TensorFlow is imported."""
        self.tell(tensorflow=sys.modules["tensorflow"].__version__)
        if importlib.util.find_spec("hier_allreduce") is not None:
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
        choices = {
            field.name: getattr(strategy, field.name)
            for field in fields(strategy)
            if getattr(strategy, field.name) != field.default
        }
        # JSON has no word for a function, and None is no algorithm's name.
        if callable(strategy.algorithm):
            choices["algorithm"] = None
        built = {
            "front_end": call.front_end,
            "update": call.update,
            "towers": len(call.devices),
            "gpus": any("gpu:" in str(device).lower() for device in call.devices),
            "strategy": choices,
        }
        reduce = _reduction(self._baseline, call)

        def then(rows: Rows) -> Rows:
            # A baseline leaves no record, and eagerly there is none.
            if reduce is None and hier_allreduce.all_reduces():
                built["plan"] = hier_allreduce.all_reduces()[-1].plan
            return self._timed(rows, built)

        return hier_allreduce.Substitute(strategy, reduce, then)

    def _timed(self, rows: Rows, built: Dict[str, Any]) -> Rows:
        """Return K rows of N reduced gradients, one of which waits for the line of its step."""
        import tensorflow as tf

        tower_by_column: Dict[int, int] = {}
        for tower, row in enumerate(rows):
            for column, grad in enumerate(row):
                if grad is not None:
                    tower_by_column.setdefault(column, tower)
        if not tower_by_column:
            return rows
        size = sum(_bytes_of(rows[tower][column]) for column, tower in tower_by_column.items())

        # Eagerly each step is a call, and calls of equal size are those of one all-reduce.
        is_eager = tf.executing_eagerly()
        sum_name = self._name_by_bytes.get(size, "") if is_eager else ""
        if not sum_name:
            self._sums += 1
            sum_name = f"{os.getpid()}-{self._sums}"
            self.tell(sum=sum_name, built={**built, "bytes": size})
        if is_eager:
            self._name_by_bytes[size] = sum_name

        column, tower = next(iter(tower_by_column.items()))
        grad = rows[tower][column]
        if isinstance(grad, tf.IndexedSlices):
            values = self._after_line(grad.values, sum_name)
            timed: Any = tf.IndexedSlices(values, grad.indices, grad.dense_shape)
        else:
            timed = self._after_line(grad, sum_name)
        changed = [list(row) for row in rows]
        changed[tower][column] = timed
        return [tuple(row) for row in changed]

    def _after_line(self, tensor: Any, sum_name: str) -> Any:
        """Return a copy of a tensor, after a line with the time is in the journal."""
        import tensorflow as tf

        with tf.device("/cpu:0"), tf.control_dependencies([tensor]):
            # It is an op, because a Python function would wait for the program's threads.
            moment = tf.strings.as_string(tf.timestamp(), precision=6)
            before = f'{{"run": {self._run}, "sum": "{sum_name}", "time": '
            line = tf.strings.join([before, moment, "}"])
            printed = tf.print(line, output_stream=f"file://{self._journal}")
        # Eagerly there is no op to wait for, because the line is written by now.
        waited = [] if printed is None else [printed]
        with tf.device(tensor.device), tf.control_dependencies(waited):
            return tf.identity(tensor)


def _bytes_of(grad: Any) -> int:
    """Return the size of a gradient, of a sparse one that of its values; 0 if it is unknown."""
    import tensorflow as tf

    values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
    return (values.shape.num_elements() or 0) * values.dtype.size


def _reduction(baseline: str, call: Any) -> Optional[Callable[[Rows], Rows]]:
    """Return the function that adds up K×N gradients as a baseline does; None for our sums."""
    front_end = "tensorpack" if baseline.startswith("tensorpack-") else "keras"
    if not baseline or call.front_end != front_end or call.update in ("once", "sharded"):
        return None
    if front_end == "tensorpack":
        mode = baseline.split("-")[1]
        return lambda rows: _reduced_by_tensorpack(mode, rows, call.devices, call.average)

    def by_tensorflow(rows: Rows) -> Rows:
        import tensorflow as tf

        # TensorFlow's all-reduces take its own values instead of rows.
        reduced = getattr(tf.distribute, baseline)().batch_reduce(*call.arguments)
        return list(zip(*(mirrored.values for mirrored in reduced)))

    return by_tensorflow


def _reduced_by_tensorpack(mode: str, rows: Rows, devices: Sequence[Any], average: bool) -> Rows:
    """Return K×N gradients, reduced as ``SyncMultiGPUReplicatedBuilder(mode=…)`` does."""
    from tensorpack.graph_builder import utils

    grads = [list(row) for row in rows]
    if mode == "nccl":
        reduced: Rows = utils.allreduce_grads(grads, average=average)
        return reduced
    if mode != "hierarchical":
        adders = ["/cpu:0"] if mode == "cpu" else list(devices)
        sums: List[Any] = utils.allreduce_grads_naive(grads, devices=adders, average=average)
        return [sums] * len(devices)
    # What tensorpack cannot pack travels as it is.
    packer = utils.GradientPacker(len(devices))
    if not packer.compute_strategy(grads[0]):
        reduced = utils.allreduce_grads_hierarchical(grads, devices, average=average)
        return reduced
    packed = packer.pack_all(grads, devices)
    packed = utils.allreduce_grads_hierarchical(packed, devices, average=average)
    reduced = packer.unpack_all(packed, devices)
    return reduced


class _AfterTensorFlow:
    """An entry of ``sys.meta_path`` that calls a function once TensorFlow is imported."""

    def __init__(self, function: Callable[[], None]):
        self._function = function

    def find_spec(self, fullname: str, *_: Any) -> Optional[Any]:
        """Find TensorFlow, and nothing else; its loader calls the function afterwards."""
        if fullname != "tensorflow":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec: Any = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._function()

            spec.loader.exec_module = exec_module
        return spec


def _run_hidden_module() -> None:
    """Run the ``sitecustomize`` of the machine, which this file hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    _run_hidden_module()
    if VARIABLE in os.environ:
        after_tensorflow: Any = _AfterTensorFlow(MeasuredProgram(os.environ[VARIABLE]).begin)
        sys.meta_path.insert(0, after_tensorflow)
