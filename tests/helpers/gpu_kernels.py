"""Which ops have kernels on GPUs, for which dtypes, and which of their operands are in host memory.

TensorFlow for CPUs does not have these registrations. So they are recorded in ``tests/graph/gpu_kernels_*.tsv``, from
the wheels tensorflow 2.21.0 and tensorflow-gpu 1.15.0. With a TensorFlow for GPUs, on a machine with or without one, ::

    python tests/helpers/gpu_kernels.py tests/graph/gpu_kernels_2.tsv Add AddN …     # writes the record of these ops

and the tests then read its own registry.
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels as registry

RECORD = Path(__file__).parents[1] / "graph" / f"gpu_kernels_{tf.__version__[0]}.tsv"
HAS_GPU_KERNELS = tf.test.is_built_with_cuda()


class Kernel(NamedTuple):
    """The dtypes of a kernel, ``{attribute: names}``, and its operands and results that are in host memory."""

    dtypes: dict
    host: frozenset


def live(op):
    """Return the kernels of one op that the installed TensorFlow may run on a GPU."""
    found = []
    for kernel in registry.get_registered_kernels_for_op(op).kernel:
        if kernel.device_type in ("GPU", "DEFAULT"):
            types = {c.name: {tf.as_dtype(t).name for t in c.allowed_values.list.type} for c in kernel.constraint}
            found.append(Kernel(types, frozenset(kernel.host_memory_arg)))
    return found


def recorded():
    """Return ``{op: kernels}`` from the file."""
    found: dict = {}
    for line in RECORD.read_text().splitlines():
        if not line.startswith("#"):
            op, types, host = line.split("\t")
            pairs = (part.split("=") for part in types.split())
            kernel = Kernel({name: set(names.split("|")) for name, names in pairs}, frozenset(host.split()))
            found.setdefault(op, []).append(kernel)
    return found


class Kernels:
    """The GPU kernels of the installed TensorFlow if it is one for GPUs, else the recorded ones."""

    def __init__(self):
        self._by_op = {} if HAS_GPU_KERNELS else recorded()

    def of(self, node, op_def):
        """Return the kernel that runs a node on a GPU, or None; nodes as in a ``GraphDef``."""
        if HAS_GPU_KERNELS and node.op not in self._by_op:
            self._by_op[node.op] = live(node.op)
        types = dict(_types_of(node, op_def))
        for kernel in self._by_op.get(node.op, ()):
            if all(types[name] <= names for name, names in kernel.dtypes.items()):
                return kernel
        return None


def _types_of(node, op_def):
    for attr in op_def.attr:
        if attr.type in ("type", "list(type)"):
            value = node.attr.get(attr.name, attr.default_value)
            yield attr.name, {tf.as_dtype(t).name for t in ([value.type] if attr.type == "type" else value.list.type)}


def not_placed(graph, kernels):
    """Return the ops of a graph that are placed on a GPU and have no kernel there: ``{"AddN T=uint8"}``."""
    missing = set()
    for op in graph.get_operations():
        if "GPU" in op.device.upper() and kernels.of(op.node_def, op.op_def) is None:
            types = " ".join(f"{name}={'|'.join(sorted(t))}" for name, t in sorted(_types_of(op.node_def, op.op_def)))
            missing.add(f"{op.type} {types}")
    return missing


def memory_changes(graph, kernels):
    """Return the tensors that a GPU's ops write in device memory and others read in host memory, or the other way."""
    changes = set()
    placed = [op for op in graph.get_operations() if "GPU" in op.device.upper()]
    on_gpu = {op: kernels.of(op.node_def, op.op_def) for op in placed}
    for op, kernel in on_gpu.items():
        for tensor, operand in zip(op.inputs, _arguments(op, op.op_def.input_arg)):
            if tensor.op.device == op.device and tensor.dtype != tf.resource:
                result = _arguments(tensor.op, tensor.op.op_def.output_arg)[tensor.value_index]
                written, read = result in on_gpu[tensor.op].host, operand in kernel.host
                if written != read:
                    changes.add(f"{tensor.op.type} → {op.type} {operand} ({tensor.dtype.name})")
    return changes


def _arguments(op, arguments):
    """Return the name of the argument for each operand (or result) of an op."""
    names = []
    for argument in arguments:
        count = op.get_attr(argument.number_attr) if argument.number_attr else 1
        count = len(op.get_attr(argument.type_list_attr)) if argument.type_list_attr else count
        names += [argument.name] * count
    return names


def _merged(kernels):
    """Return fewer kernels that say the same: those that differ in one attribute are one."""
    for name in sorted({name for kernel in kernels for name in kernel.dtypes}):
        groups: dict = {}
        for kernel in kernels:
            rest = tuple((n, frozenset(t)) for n, t in sorted(kernel.dtypes.items()) if n != name)
            groups.setdefault((rest, kernel.host, name in kernel.dtypes), set()).update(kernel.dtypes.get(name, ()))
        kernels = [
            Kernel({**dict(rest), **({name: types} if has else {})}, host)
            for (rest, host, has), types in groups.items()
        ]
    return kernels


def _line(op, kernel):
    types = " ".join(f"{name}={'|'.join(sorted(names))}" for name, names in sorted(kernel.dtypes.items()))
    return "\t".join([op, types, " ".join(sorted(kernel.host))])


def main(path, ops):
    """Write the record."""
    header = f"# GPU kernels of TensorFlow {tf.__version__}: op, dtypes, operands in host memory"
    lines = [[_line(op, kernel) for kernel in _merged(live(op))] for op in sorted(ops)]
    Path(path).write_text("\n".join([header, *itertools.chain(*map(sorted, lines))]) + "\n")


if __name__ == "__main__":
    if not HAS_GPU_KERNELS:
        sys.exit(f"TensorFlow {tf.__version__} here is not built for GPUs, it has no GPU kernels to record")
    main(sys.argv[1], sys.argv[2:])
