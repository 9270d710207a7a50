"""Plans with one fault each: `verify` must refuse every harmful one, and the audit must notice that it was executed.

::

    plan ─► fault ─┬─► verify ────────────────────────────┐
                   ├─► counting with NumPy, without verify ├─► refused, or harmless
                   └─► (a sample) TensorFlow ops ─► audit ─┘    anything else is a finding

A fault is a step that is dropped, doubled, moved, sent elsewhere, takes another value, or is of another chunk.

::

    python -m trust.mutants_of_plans --seconds 300 --seed 1
"""

import random
import sys
import time
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np

from hier_allreduce.errors import AuditError, PlanError
from hier_allreduce.planning import ALGORITHMS, BY_ROOT, Copy, Reduce, choose, verify
from hier_allreduce.topology import load, subset

from .reporting import Finding, Work, in_processes, parse, report, until

_MACHINES = ("dgx-1v", "dgx-a100", "nvlink-bridges", "pcie-sockets")


# ---- plans -----------------------------------------------------------------------------------------


def some_plan(rng):
    """Return the plan of a random algorithm or machine, for 2 to 16 devices."""
    if rng.random() < 0.25:
        machine = load(rng.choice(_MACHINES))
        devices = sorted(rng.sample(range(len(machine)), rng.randint(2, len(machine))))
        topology = subset(machine, devices) if len(devices) < len(machine) else machine
        return choose(topology, 10 ** rng.randint(3, 8)).recipe.plan()
    devices, algorithm = rng.randint(2, 16), rng.choice(sorted(ALGORITHMS))
    turns = [rng.randrange(devices) for _ in range(rng.randint(1, 4))]
    return rng.choice((ALGORITHMS, BY_ROOT))[algorithm](devices, turns)


# ---- faults ----------------------------------------------------------------------------------------


def _dropped(steps, at, plan, rng):
    del steps[at]


def _doubled(steps, at, plan, rng):
    steps.insert(rng.randint(at, len(steps)), steps[at])


def _moved(steps, at, plan, rng):
    steps.insert(rng.randint(0, len(steps)), steps.pop(at))


def _elsewhere(steps, at, plan, rng):
    steps[at] = steps[at]._replace(dst=rng.randrange(plan.devices))


def _from_elsewhere(steps, at, plan, rng):
    step = steps[at]
    if isinstance(step, Copy):
        steps[at] = step._replace(src=rng.randrange(plan.devices))
        return
    sources = list(step.srcs)
    sources[rng.randrange(len(sources))] = rng.randrange(plan.devices)
    steps[at] = step._replace(srcs=tuple(sources))


def _other_chunk(steps, at, plan, rng):
    steps[at] = steps[at]._replace(chunk=rng.randint(0, plan.chunks))


def _other_kind(steps, at, plan, rng):
    step = steps[at]
    if isinstance(step, Copy):
        steps[at] = Reduce(step.chunk, (step.src,), step.dst)
    else:
        steps[at] = Copy(step.chunk, step.srcs[0], step.dst)


def _fewer_sources(steps, at, plan, rng):
    step = steps[at]
    if isinstance(step, Reduce):
        steps[at] = step._replace(srcs=step.srcs[1:])
    else:
        _dropped(steps, at, plan, rng)


def _twice_the_source(steps, at, plan, rng):
    step = steps[at]
    if isinstance(step, Reduce):
        steps[at] = step._replace(srcs=(*step.srcs, step.srcs[0]))
    else:
        _doubled(steps, at, plan, rng)


FAULTS = {
    "dropped": _dropped,
    "doubled": _doubled,
    "moved": _moved,
    "sent elsewhere": _elsewhere,
    "taken from elsewhere": _from_elsewhere,
    "of another chunk": _other_chunk,
    "of the other kind": _other_kind,
    "one source less": _fewer_sources,
    "one source twice": _twice_the_source,
}


def mutant(plan, rng):
    """Return the name of a fault and the plan with it; None if the fault changed nothing."""
    name = rng.choice(sorted(FAULTS))
    steps = list(plan.steps)
    FAULTS[name](steps, rng.randrange(len(steps)), plan, rng)
    broken = replace(plan, steps=tuple(steps))
    return None if broken.steps == plan.steps else (name, broken)


# ---- judges ----------------------------------------------------------------------------------------


def is_harmless(plan):
    """Return whether every device ends with each contribution once, counted by matrices and not by ``planning.run``.

    Devices and chunks that do not exist make it harmful.
    """
    held = np.zeros((plan.chunks, plan.devices, plan.devices), np.int64)  # of each chunk: device × contribution
    held[:] = np.eye(plan.devices, dtype=np.int64)
    for step in plan.steps:
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        if not 0 <= step.chunk < plan.chunks or not {*sources, step.dst} <= set(range(plan.devices)):
            return False
        chunk = held[step.chunk]
        arriving = sum(chunk[src] for src in sources)
        chunk[step.dst] = chunk[step.dst] + arriving if isinstance(step, Reduce) else arriving
    return bool((held == 1).all())


def is_refused(plan):
    """Return whether ``verify`` refuses a plan."""
    try:
        verify(plan)
    except PlanError:
        return True
    return False


# ---- faults that TensorFlow executes ---------------------------------------------------------------


def executed(rng):
    """Run an all-reduce whose ops have a fault that its plan has not.

    Returns:
        The fault's name, the plan, the plan with the fault, the audit's error or "", and whether the sums are right.
    """
    import tensorflow as tf

    import hier_allreduce
    from hier_allreduce.graph import allreduce

    tf1, real, made = tf.compat.v1, allreduce.emit, []
    towers, variables = rng.randint(2, 8), rng.randint(1, 3)

    def emit(plan, *rest, **how):
        while not made:
            changed = mutant(plan, rng)
            if changed and _is_possible(changed[1]) and not is_harmless(changed[1]):
                made.append((changed[0], plan, changed[1]))
        return real(made[0][2], *rest, **how)

    values = np.random.RandomState(rng.randrange(2**32)).randint(1, 1 << 16, (towers, variables, 3))
    with tf.Graph().as_default() as graph:
        rows = []
        for tower, row in enumerate(values.astype(np.float32)):
            with tf.device(f"/cpu:{tower}"):
                rows.append([tf1.placeholder_with_default(value, value.shape) for value in row])
        with mock.patch.object(allreduce, "emit", emit):
            devices = [f"/cpu:{tower}" for tower in range(towers)]
            results = hier_allreduce.allreduce_grads(rows, devices, strategy=_strategy(rng))
        asked, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
        config = tf1.ConfigProto(device_count={"CPU": 16}, intra_op_parallelism_threads=1)
        with tf1.Session(config=config) as session:
            got = np.asarray(session.run(results, options=asked, run_metadata=seen))
        try:
            hier_allreduce.audit(seen, graph)
            error = ""
        except AuditError as refused:
            error = str(refused)
    return (*made[0], error, all(np.array_equal(row, values.sum(0)) for row in got))


def _strategy(rng):
    from hier_allreduce import Strategy

    if rng.random() < 0.2:
        return Strategy(topology=rng.choice(("dgx-1v", "dgx-a100")), whole=rng.choice((True, False)))
    return Strategy(algorithm=rng.choice(sorted(ALGORITHMS)), mains="rotate", pack_below=0)


def _is_possible(plan):
    """Return whether a plan can be executed: its devices and chunks exist, and its copies go somewhere."""
    for step in plan.steps:
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        if not sources or step.dst in sources or step.chunk >= plan.chunks:
            return False
    return True


def moves_the_same(plan, other):
    """Return whether two plans move the same chunks between the same pairs of devices.

    TensorFlow sends a tensor once to a device, however often it is read there, so a pair counts once.
    """
    return [_pairs(plan, chunk) for chunk in range(plan.chunks)] == [
        _pairs(other, chunk) for chunk in range(plan.chunks)
    ]


def _pairs(plan, chunk):
    return set(replace(plan, steps=tuple(step for step in plan.steps if step.chunk == chunk)).transfers())


# ---- the search ------------------------------------------------------------------------------------


def plans(seed, seconds):
    """Plans with one fault: `verify` against counting with NumPy."""
    counts, findings = Counter(), []
    for number in until(seconds):
        rng = random.Random(f"{seed} {number}")
        plan = some_plan(rng)
        if not is_harmless(plan) or is_refused(plan):
            findings.append(Finding("plans", f"{seed} {number}", f"a plan without a fault is wrong\n{plan}"))
        for _ in range(200):
            changed = mutant(plan, rng)
            if not changed:
                continue
            fault, broken = changed
            counts["faults in plans"] += 1
            refused, harmless = is_refused(broken), is_harmless(broken)
            counts["  refused by verify"] += refused
            counts["  not refused, and harmless by exact count"] += harmless and not refused
            counts["  refused, though harmless by exact count"] += harmless and refused
            if not refused and not harmless:
                findings.append(Finding("plans", f"{seed} {number}", f"{fault}: not refused\n{plan}\n→\n{broken}"))
    return counts, findings


def ops(seed, seconds):
    """Graphs whose ops have a fault that the plan has not: the audit."""
    from hier_allreduce.graph import make_logical_cpus

    make_logical_cpus(16)
    counts, findings = Counter(), []
    for number in until(seconds):
        fault, plan, broken, error, is_right = executed(random.Random(f"{seed} {number} executed"))
        counts["faults executed by TensorFlow"] += 1
        counts["  noticed by the audit"] += bool(error)
        counts["  with the same copies as planned, noticed by counting sums"] += moves_the_same(plan, broken) and bool(
            error
        )
        counts["  wrong sums"] += not is_right
        if not error:
            findings.append(Finding("ops", f"{seed} {number}", f"{fault}: not noticed\n{plan}\n→\n{broken}"))
    return counts, findings


def main(argv=None):
    """Search, and print the table."""
    args = parse(__doc__, argv, 600)
    began, share = time.monotonic(), 0.5 if args.processes == 1 else 1.0
    works = [
        Work(plans, args.seed, args.seconds * share, {}),
        Work(ops, args.seed, args.seconds * share, {}),
    ]
    counts, findings = in_processes([works] if args.processes == 1 else [[work] for work in works])
    rows = [*counts.items(), ("findings", len(findings))]
    return report(args, began, rows, findings, lambda finding: f"python -m trust.mutants_of_plans --seed {args.seed}")


if __name__ == "__main__":
    sys.exit(main())
