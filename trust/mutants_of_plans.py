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

from hier_allreduce.errors import AuditError, HierAllreduceError
from hier_allreduce.planning import IDLE, Copy, Reduce, best_plan, verify
from hier_allreduce.planning.algorithms import BY_NAME, plan_of
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
        return best_plan(topology, 10 ** rng.randint(3, 8), rng.choice((IDLE, None))).plan
    devices, algorithm = rng.randint(2, 16), rng.choice(sorted(BY_NAME))
    turns = [rng.randrange(devices) for _ in range(rng.randint(1, 4))]
    return plan_of(BY_NAME[algorithm], devices, turns)


# ---- faults ----------------------------------------------------------------------------------------


def _from_elsewhere(step, plan, rng):
    if isinstance(step, Copy):
        return [step._replace(src=rng.randrange(plan.devices))]
    sources = list(step.srcs)
    sources[rng.randrange(len(sources))] = rng.randrange(plan.devices)
    return [step._replace(srcs=tuple(sources))]


def _other_kind(step, plan, rng):
    if isinstance(step, Copy):
        return [Reduce(step.chunk, (step.src,), step.dst)]
    return [Copy(step.chunk, step.srcs[0], step.dst)]


OF_STEPS = {  # functions from a step to the steps instead of it
    "dropped": lambda step, plan, rng: [],
    "sent elsewhere": lambda step, plan, rng: [step._replace(dst=rng.randrange(plan.devices))],
    "taken from elsewhere": _from_elsewhere,
    "of another chunk": lambda step, plan, rng: [step._replace(chunk=rng.randint(0, plan.chunks))],
    "of the other kind": _other_kind,
}
OF_SUMS = {  # the same, for steps that add
    "one source less": lambda step, plan, rng: [step._replace(srcs=step.srcs[1:])],
    "one source twice": lambda step, plan, rng: [step._replace(srcs=(*step.srcs, step.srcs[0]))],
}
FAULTS = ("moved", "doubled", *OF_STEPS, *OF_SUMS)


def mutant(plan, rng):
    """Return the name of a fault and the plan with it; None if the fault changed nothing."""
    at, steps = rng.randrange(len(plan.steps)), list(plan.steps)
    changes = {**OF_STEPS, **(OF_SUMS if isinstance(steps[at], Reduce) else {})}
    name = rng.choice(["moved", "doubled", *changes])
    if name == "moved":
        steps.insert(rng.randrange(len(steps)), steps.pop(at))
    elif name == "doubled":
        steps.insert(rng.randint(at, len(steps)), steps[at])
    else:
        steps[at : at + 1] = changes[name](steps[at], plan, rng)
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
    except HierAllreduceError:
        return True
    return False


# ---- faults that TensorFlow executes ---------------------------------------------------------------


def executed(rng):
    """Run an all-reduce whose ops have a fault that its plan has not.

    Returns:
        The fault's name, the plan, the plan with the fault, the audit's error or "", and whether the sums are right.
    """
    from helpers.graphs import cpus, gradients_on, session, tf, tf1

    import hier_allreduce
    from hier_allreduce.graph import allreduce

    real, made = allreduce.emit, []
    towers, variables = rng.randint(2, 8), rng.randint(1, 3)

    def emit(layout, *rest):
        while not made:
            changed = mutant(layout.plan, rng)
            if changed and _is_possible(changed[1]) and not is_harmless(changed[1]):
                made.append((changed[0], layout.plan, changed[1]))
        return real(layout._replace(plan=made[0][2]), *rest)

    values = np.random.RandomState(rng.randrange(2**32)).randint(1, 1 << 16, (towers, variables, 3))
    with tf.Graph().as_default() as graph:
        rows = gradients_on(cpus(towers), values.astype(np.float32))
        rows = [[rng.choice((grad, grad.op.inputs[0])) for grad in row] for row in rows]  # or their constants
        with mock.patch.object(allreduce, "emit", emit):
            results = hier_allreduce.allreduce_grads(rows, cpus(towers), strategy=_strategy(rng))
        asked, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
        with session(intra_op_parallelism_threads=1) as running:
            got = np.asarray(running.run(results, options=asked, run_metadata=seen))
        try:
            hier_allreduce.audit(seen, graph)
            error = ""
        except AuditError as refused:
            error = str(refused)
    return (*made[0], error, all(np.array_equal(row, values.sum(0)) for row in got))


def _strategy(rng):
    from hier_allreduce import Strategy

    if rng.random() < 0.2:
        return Strategy(topology=rng.choice(("dgx-1v", "dgx-a100")), backward=rng.choice((None, 0)))
    return Strategy(algorithm=rng.choice(sorted(BY_NAME)), mains="rotate", pack_below=0)


def _is_possible(plan):
    """Return whether a plan can be executed: its devices and chunks exist, and its copies go somewhere."""
    for step in plan.steps:
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        if not sources or step.dst in sources or step.chunk >= plan.chunks:
            return False
    return True


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
    counts, findings = Counter(), []
    for number in until(seconds):
        fault, plan, broken, error, is_right = executed(random.Random(f"{seed} {number} executed"))
        counts["faults executed by TensorFlow"] += 1
        counts["  noticed by the audit"] += bool(error)
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
