"""Machines whose links are known, also as a calibration sees them: by the time that copies take."""

import random
from dataclasses import replace

from hier_allreduce.calibration.timer import Timer, Transfer
from hier_allreduce.planning import Copy, Plan, simulate
from hier_allreduce.topology.matrix import LinkMatrix
from hier_allreduce.topology.topology import from_matrix


class SimulatedTimer(Timer):
    """Copies on a ``Topology``, up to ``noise`` slower than they should be; ``runs`` counts them."""

    largest = 256 << 20

    def __init__(self, topology, noise=0.0):
        self.topology, self.noise, self.runs = topology, noise, 0
        self.devices, self.exact = len(topology), not noise
        self._draw = random.Random(0)

    def together(self, transfers):
        """All copies at once."""
        self.runs += 1
        plan = Plan(self.devices, len(transfers), tuple(Copy(n, t.src, t.dst) for n, t in enumerate(transfers)))
        timing = simulate(plan, self.topology, [transfer.size for transfer in transfers], ordered=False)
        ends = {span.step: span.end * (1 + self._draw.uniform(0, self.noise)) for span in timing.spans}
        return [ends[number] for number in range(len(transfers))]

    def trains(self, pairs, count, size):
        """One copy of each pair after another, or as fast as the host can."""
        copies = max(self.together([Transfer(*pair, size) for pair in pairs]))
        return count * max(copies, 2 * len(pairs) * self.topology.speeds.dispatch)

    def hops(self, count, size):
        """A copy takes as long as in a train, and the time of the host."""
        copies = [self.trains([(hop % self.devices, (hop + 1) % self.devices)], 1, size) for hop in range(count)]
        return sum(copies) + count * self.topology.speeds.arrival

    def sums(self, operands, count, size):
        """One sum after another."""
        speeds = self.topology.speeds
        noise = 1 + self._draw.uniform(0, self.noise)
        return noise * count * (speeds.kernel + (operands + 1) * size / speeds.memory)


def of_kinds(*rows, cpus=(), gpu="", given=None):
    """A machine from rows of kinds, such as ``"X NV2"``; by default without affinities and a model."""
    labels = tuple(f"GPU{i}" for i in range(len(rows)))
    kinds = tuple(tuple(row.split()) for row in rows)
    matrix = LinkMatrix(labels, kinds, tuple(cpus) or ("",) * len(rows), gpu, ())
    return from_matrix(matrix, "test", given)


def without_host(machine):
    """The machine with a host whose ops take no time."""
    return replace(machine, speeds=replace(machine.speeds, dispatch=0.0))


def in_buckets(plans, shares=()):
    """Plans of one bucket each as one plan; ``shares`` are those of the buckets, by default equal ones."""
    shares = shares or [1 / len(plans)] * len(plans)
    steps, buckets, of_chunks = [], [], []
    for bucket, (plan, share) in enumerate(zip(plans, shares)):
        steps += [step._replace(chunk=step.chunk + len(buckets)) for step in plan.steps]
        buckets += [bucket] * plan.chunks
        of_chunks += [share / plan.chunks] * plan.chunks
    return replace(plans[0], chunks=len(buckets), steps=tuple(steps), buckets=tuple(buckets), shares=tuple(of_chunks))
