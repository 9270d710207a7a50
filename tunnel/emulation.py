"""Plans run by TensorFlow's executor on an emulated machine; see README.md.

::

    plan ─► emit: the product's own ops on K logical CPU devices ─► session.run ─► seconds of the emulated machine
                     │ each copy between devices, each sum
                     ▼
            tunnel.cc: streams, latency, links, ports, uplinks and buses of the topology
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sysconfig
from functools import lru_cache
from pathlib import Path

import numpy as np

from hier_allreduce.planning import IDLE, issued_before, run
from hier_allreduce.planning.plan import operands
from hier_allreduce.planning.simulator import ready_times
from hier_allreduce.topology import with_lanes

_SOURCE = Path(__file__).with_name("tunnel.cc")
_FIRST_SIZE = 8  # kFirstSize in tunnel.cc: chunk c travels as so many elements and c


class CannotBuild(Exception):
    """What the tunnel needs is not on this machine."""


def compiler():
    """The C++ compiler.

    Raises:
        CannotBuild: there is none, or TensorFlow is too old for it.
    """
    import tensorflow as tf

    found = shutil.which(os.environ.get("CXX", "g++"))
    if not found:
        raise CannotBuild("no C++ compiler (g++): install one, or name it in CXX")
    if tf.__version__ < "2":
        raise CannotBuild("the tunnel is for TensorFlow 2")
    return found


@lru_cache(maxsize=None)
def library():
    """The ops and the C interface, compiled if the source has changed since the last time."""
    import tensorflow as tf

    folder = Path(os.environ.get("TUNNEL_OUT", Path.home() / ".cache" / "hier_allreduce" / "tunnel"))
    folder.mkdir(parents=True, exist_ok=True)
    tag = hashlib.sha256(_SOURCE.read_bytes() + tf.__version__.encode()).hexdigest()[:16]
    built = folder / f"tunnel-{tag}{sysconfig.get_config_var('SHLIB_SUFFIX')}"
    if not built.exists():
        partial = built.with_suffix(f".{os.getpid()}")
        flags = [*tf.sysconfig.get_compile_flags(), "-w", "-shared", "-fPIC", "-O2", "-std=c++17"]
        command = [compiler(), *flags, str(_SOURCE), "-o", str(partial), *tf.sysconfig.get_link_flags()]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise CannotBuild(f"{command[0]} failed:\n{done.stdout[-2000:]}")
        partial.replace(built)
    ops = tf.load_op_library(str(built))  # first: it tells which ops a library brings when it is loaded
    functions = ctypes.CDLL(str(built))
    functions.tunnel_seconds.restype = ctypes.c_double
    return ops, functions


def _ints(values):
    return np.ascontiguousarray(values, np.int32)


def _floats(values):
    return np.ascontiguousarray(values, np.float64)


def _pointer(array):
    kind = ctypes.c_int if array.dtype == np.int32 else ctypes.c_double
    return array.ctypes.data_as(ctypes.POINTER(kind))


def set_machine(topology):
    """Make the tunnel's links those of ``topology``."""
    from hier_allreduce.topology import resources

    count = len(topology)
    paths = resources(topology).paths
    limits, first, shared, speed = np.ones(count * count), [0], [], {}
    for src in range(count):
        for dst in range(count):
            if src != dst:
                (_, per_byte), *others = paths[src, dst]
                limits[src * count + dst] = 1 / per_byte
                shared += [resource for resource, _ in others]
                speed.update((resource, 1 / cost) for resource, cost in others)
            first.append(len(shared))
    speeds = _floats([speed.get(resource, 1.0) for resource in range(max(speed, default=0) + 1)])
    seconds = [getattr(topology.speeds, name) for name in ("copy_latency", "arrival", "dispatch")]
    arrays = [_floats(limits), _ints(first), _ints(shared or [0])]
    library()[1].tunnel_machine(
        count, *map(ctypes.c_double, seconds), *map(_pointer, arrays), len(speeds), _pointer(speeds)
    )


def set_pass(plan, sizes, backward):
    """Make a backward pass go on during the next runs, in which each tower's bucket is a gradient."""
    by_bucket = dict(zip(plan.buckets, ready_times(plan.buckets, sizes, backward)))
    ready = [by_bucket[bucket] for bucket in sorted(by_bucket)] * plan.towers
    library()[1].tunnel_pass(
        plan.towers,
        ctypes.c_double(backward.seconds),
        ctypes.c_double(backward.backlog),
        len(ready),
        _pointer(_floats(ready)),
    )


class Copies:
    """The copies of a plan in its order, and which copies' ends each copy, and each sum, waits for.

    Each tower's bucket is one more event that they wait for, numbered after the copies.
    """

    def __init__(self, plan, gates):
        self.ends, sums = [], []  # (src, dst, chunk)
        waits, buckets = [], 1 + max(plan.buckets)
        first = plan.copies
        arrived = {
            (tower, chunk): {first + tower * buckets + bucket}
            for tower in range(plan.towers)
            for chunk, bucket in enumerate(plan.buckets)
        }
        gated = {}  # for each copy the copies' ends that its gate waits for, directly or not
        for step, added in zip(plan.steps, operands(plan)):
            before = len(self.ends)
            for src in getattr(step, "srcs", None) or (step.src,):
                number = len(self.ends)
                needs = set(arrived.get((src, step.chunk), ()))
                for other in gates[number]:
                    needs |= gated[other]
                gated[number] = needs
                waits.append(needs)
                self.ends.append((src, step.dst, step.chunk))
            arrived.setdefault((step.dst, step.chunk), set()).update(range(before, len(self.ends)))
            if added > 1:
                sums.append(set(arrived[step.dst, step.chunk]))
        waits += sums
        self.sums = len(sums)
        self.missing = [len(needs) for needs in waits]
        self.dependents = [[] for _ in range(first + plan.towers * buckets)]
        for number, needs in enumerate(waits):
            for copy in needs:
                self.dependents[copy].append(number)


class Run:
    """A session that executes one plan, again and again.

    Args:
        plan: the plan.
        topology: the machine.
        sizes: bytes of each chunk.
        ordered: with the control edges that keep each sender's copies in the plan's order, or without.
        backward: the backward pass that goes on meanwhile.
    """

    def __init__(self, plan, topology, sizes, ordered=True, backward=IDLE):
        import tensorflow as tf

        self.plan, self.topology, self.sizes, self.backward = plan, topology, sizes, backward
        self._tf1 = tf.compat.v1
        self._ops, self._functions = library()
        count = sum(len(getattr(step, "srcs", (0,))) for step in plan.steps)
        self.copies = Copies(plan, issued_before(plan) if ordered else [()] * count)
        self._elements = [_FIRST_SIZE + chunk for chunk in range(plan.chunks)]
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._results = self._build(tf, ordered)
        config = self._tf1.ConfigProto(
            device_count={"CPU": plan.devices}, inter_op_parallelism_threads=1, intra_op_parallelism_threads=1
        )
        self._session = self._tf1.Session(graph=self._graph, config=config)

    def _value(self, device):
        return ((device + 1) * (1 + np.arange(sum(self._elements)) % 97)).astype(np.float32)

    def _build(self, tf, ordered):
        rows = []
        devices = [f"/cpu:{device}" for device in range(self.plan.towers)]
        by_bucket = [
            [size for size, own in zip(self._elements, self.plan.buckets) if own == bucket]
            for bucket in range(1 + max(self.plan.buckets))
        ]
        for number, device in enumerate(devices):
            with self._tf1.device(device):
                value = self._value(number)
                whole = self._ops.tunnel_keep(self._tf1.placeholder_with_default(value, value.shape))
                row = []
                for bucket, part in enumerate(_split(tf, whole, [sum(own) for own in by_bucket])):
                    gradient = self._ops.tunnel_gradient(part, number=number * len(by_bucket) + bucket)
                    row += _split(tf, gradient, by_bucket[bucket])
                rows.append(row)
        reduced = run(self.plan, rows, _timed(self, ordered))
        results = []
        for row, device in zip(reduced, devices):
            with self._tf1.device(device):
                results.append(self._ops.tunnel_keep(tf.concat(row, 0) if len(row) > 1 else row[0]))
        return results

    def seconds(self):
        """Run once: the emulated machine's seconds.

        Raises:
            AssertionError: a device has something else than the sum.
        """
        set_machine(with_lanes(self.topology, self.plan.lanes))
        set_pass(self.plan, self.sizes, self.backward)
        copies = self.copies
        first = np.cumsum([0, *map(len, copies.dependents)])
        arrays = [
            _ints(copies.ends or [(0, 0, 0)]),
            _floats([self.sizes[chunk] for _, _, chunk in copies.ends]),
            _ints(copies.missing),
            _ints(first),
            _ints([number for own in copies.dependents for number in own] or [0]),
        ]
        self._functions.tunnel_run(len(copies.ends), copies.sums, *map(_pointer, arrays))
        results = self._session.run(self._results)
        total = sum(self._value(device) for device in range(self.plan.towers))
        assert all(np.array_equal(result, total) for result in results), self.plan
        return float(self._functions.tunnel_seconds())

    def before_its_turn(self):
        """How many copies the last run dispatched before one that they should follow."""
        numbers = np.zeros(len(self.copies.ends), np.int32)
        count = self._functions.tunnel_order(_pointer(numbers), len(numbers))
        place = {number: place for place, number in enumerate(numbers[:count].tolist())}
        before = issued_before(self.plan)
        return sum(any(place[other] > place[copy] for other in others) for copy, others in enumerate(before))

    def close(self):
        """Close the session."""
        self._session.close()


def _split(tf, value, sizes):
    return tf.split(value, sizes) if len(sizes) > 1 else [value]


def _timed(emulated, ordered):
    """The product's own sums, each followed by the time that it takes, in the plan's order or in TensorFlow's."""
    from hier_allreduce.graph.copy_order import CopyOrder
    from hier_allreduce.graph.devices import Lane, Places
    from hier_allreduce.graph.hosts import CrossHostReduce
    from hier_allreduce.graph.reductions import Context, Dense

    plan, speeds = emulated.plan, emulated.topology.speeds
    names = tuple(f"/cpu:{device}" for device in range(plan.devices))
    lanes = tuple(Lane(name, plan.tower(device)) for device, name in enumerate(names) if device >= plan.towers)
    order = CopyOrder(plan, names) if ordered else None
    chunks = [(f"c{chunk}",) for chunk in range(plan.chunks)]
    context = Context(Places(names[: plan.towers], lanes), False, CrossHostReduce(), chunks, order)

    class Timed(Dense):
        def reduce(self, step, own, others):
            total = super().reduce(step, own, others)
            added = len(step.srcs) + (own is not None)
            if added == 1:
                return total
            seconds = speeds.kernel + (added + 1) * emulated.sizes[step.chunk] / speeds.memory
            with emulated._tf1.device(self.devices[step.dst]):
                return emulated._ops.tunnel_sum(total, device_number=step.dst, seconds=seconds)

    return Timed(context)
