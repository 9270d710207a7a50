"""The kernels that TensorFlow with CUDA registers for GPUs, for the ops of the emulated GPU.

    pip install --no-deps --target build/tensorflow-cuda tensorflow==2.21.0
    PYTHONPATH=build/tensorflow-cuda python tests/emulated_gpu/registrations.py [OP …]

writes registrations.inc, which the plug-in includes, for the ops that the file has and those named
here. No GPU is needed. The plug-in leaves out kernels that TensorFlow registers without CUDA, too.
"""

import os
import re
import sys
from typing import Dict, FrozenSet, List, NamedTuple, Sequence, Set, Tuple

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "registrations.inc")
# Those that the plug-in's kernels compute. TensorFlow also has kernels for quantized dtypes, floats
# of 8 bits, integers of 4, strings and variants.
DTYPES = (
    *("half", "bfloat16", "float", "double"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "complex64", "complex128"),
)
HEADER = """\
// Written by registrations.py from the registry of kernels of tensorflow 2.21.0, built with CUDA.
// Op, arguments in host memory, and the dtypes of each attribute.
"""

Dtypes = Tuple[Tuple[str, str], ...]
"""A kernel's dtypes by attribute, such as ``(("T", "float"), ("Tidx", "int32"))``."""


class Kernel(NamedTuple):
    """A registration: for these dtypes, with these arguments in host memory."""

    dtypes: Dtypes
    host: FrozenSet[str]


def kernels_of(op: str) -> Set[Kernel]:
    """The kernels that a GPU has for ``op``, in the TensorFlow of this process."""
    from tensorflow.core.framework import types_pb2
    from tensorflow.python.framework import kernels

    found: Dict[str, Dict[Dtypes, Kernel]] = {"DEFAULT": {}, "GPU": {}}
    for entry in kernels.get_registered_kernels_for_op(op).kernel:
        if entry.device_type not in found:
            continue
        names = {}
        for constraint in entry.constraint:
            for dtype in constraint.allowed_values.list.type:
                names[constraint.name] = types_pb2.DataType.Name(dtype)[len("DT_") :].lower()
        dtypes = tuple(sorted(names.items()))
        kernel = Kernel(dtypes, frozenset(entry.host_memory_arg))
        if all(name in DTYPES for name in names.values()):
            found[entry.device_type][dtypes] = kernel
    # A kernel for GPUs goes before one for all devices.
    return set({**found["DEFAULT"], **found["GPU"]}.values())


def as_lines(op: str, kernels: Set[Kernel]) -> List[str]:
    """Lines of registrations.inc: each stands for all combinations of its dtypes."""
    lines = []
    groups: Dict[Tuple, Set[Dtypes]] = {}
    for kernel in kernels:
        attributes = tuple(name for name, _ in kernel.dtypes)
        groups.setdefault((attributes, kernel.host), set()).add(kernel.dtypes)
    for (attributes, host), combinations in groups.items():
        for product in products(combinations, attributes):
            lines.append(as_line(op, sorted(host), product))
    return sorted(lines)


def products(
    combinations: Set[Dtypes], attributes: Sequence[str]
) -> List[Dict[str, Tuple[str, ...]]]:
    """``combinations`` as products of lists of dtypes, one list for each attribute."""
    if not attributes:
        return [{}]
    first, rest = attributes[0], attributes[1:]
    rests: Dict[FrozenSet, List[str]] = {}  # the dtypes of `first` by what the others may be
    for dtype in DTYPES:
        others = frozenset(row[1:] for row in combinations if row[0] == (first, dtype))
        if others:
            rests.setdefault(others, []).append(dtype)
    found = []
    for others, dtypes in rests.items():
        for product in products(set(others), rest):
            found.append({first: tuple(dtypes), **product})
    return found


def as_line(op: str, host: Sequence[str], dtypes: Dict[str, Tuple[str, ...]]) -> str:
    def listed(words: Sequence[str]) -> str:
        return "{" + ", ".join(f'"{word}"' for word in words) + "}"

    lists = [f'{{"{attribute}", {listed(names)}}}' for attribute, names in dtypes.items()]
    return f'{{"{op}", {listed(host)}, {{{", ".join(lists)}}}}},'


def ops_in_file() -> List[str]:
    with open(FILE, encoding="utf-8") as file:
        return sorted(set(re.findall(r'^\{"(\w+)"', file.read(), re.MULTILINE)))


def main(ops: Sequence[str]) -> None:
    import tensorflow as tf

    if not tf.test.is_built_with_cuda():
        sys.exit(f"{sys.argv[0]}: TensorFlow {tf.__version__} in {tf.__file__} has no CUDA kernels")
    lines = []
    for op in sorted({*ops_in_file(), *ops}):
        kernels = kernels_of(op)
        if not kernels:
            sys.exit(f"{sys.argv[0]}: TensorFlow has no kernel of {op} for GPUs")
        lines += as_lines(op, kernels)
    with open(FILE, "w", encoding="utf-8") as file:
        file.write(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
