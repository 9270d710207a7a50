"""Random all-reduces against float64, long training, calls in a loop, threads, and MirroredStrategy.

::

    python -m trust.soak --seconds 1800 --seed 1
    python -m trust.soak --case 1000000123        one case again, the number that a finding has printed
"""

import functools
import gc
import random
import sys
import threading
import time
import traceback
from collections import ChainMap, Counter

from .reporting import Finding, Work, in_processes, parse, report, until

_BATCH = 6  # cases that share a graph and a session
_AUDITED = 3  # one of this number of batches is audited: a tenth of all cases or less, since eager ones cannot be
_STEPS = 50_000
_STEPS_AT_ONCE = 500
_CALLS = 2_000
_THREADS = 8
_EAGERLY = threading.Lock()  # TensorFlow mixes up what threads compute eagerly: benchmarks/eager_threads.py
_MEBIBYTE = 1 << 20
_GROWTH = 24 * _MEBIBYTE  # resident memory may grow by this much after the first fifth of a run


def _resident():
    """Return the bytes of this process that are in memory (Linux)."""
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def _start():
    """Import TensorFlow with 16 logical CPU devices, once in each process."""
    import logging

    import tensorflow as tf

    from hier_allreduce.graph.compat import make_logical_cpus

    tf.get_logger().setLevel(logging.ERROR)  # each tf.function here is new on purpose
    if not getattr(_start, "done", False):
        make_logical_cpus(16)
        _start.done = True
    return tf


def _session(tf, optimizes=True):
    tf1 = tf.compat.v1
    config = tf1.ConfigProto(device_count={"CPU": 16}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    config.graph_options.rewrite_options.disable_meta_optimizer = not optimizes
    return tf1.Session(config=config)


# ---- random cases ----------------------------------------------------------------------------------


def cases(seed, seconds):
    """Random cases, several in a graph; some batches are audited."""
    _start()
    counts, findings = Counter(), []
    for number in until(seconds):
        first = (seed * 1_000_003 + number) * _BATCH
        found = batch(range(first, first + _BATCH), number % _AUDITED == 0, counts)
        findings += [Finding("cases", case, text) for case, text in found]
    return counts, findings


def batch(seeds, audited, counts):
    """Run the cases of some seeds, those in graph mode together; return ``[(seed, what is wrong)]``."""
    from . import cases as drawn

    found, together = [], []
    for seed in seeds:
        case = drawn.draw(seed)
        counts["random cases"] += 1
        counts[f"  {case.mode}"] += 1
        if case.mode == "graph":
            together.append(case)
        else:
            found += _guarded(case, functools.partial(_alone, case, counts))
    for is_audited in (True, False):
        group = [case for case in together if (audited and drawn.is_auditable(case)) == is_audited]
        if group:
            found += _in_graph(group, is_audited, counts)
    return found


def _guarded(case, function):
    """Return the faults that ``function`` returns, an exception being one."""
    try:
        fault = function()
    except Exception:
        fault = traceback.format_exc()
    return [(case.seed, f"{fault}\n{case}")] if fault else []


def _alone(case, counts):
    """Run a case eagerly or in a tf.function; return what is wrong."""
    import tensorflow as tf

    from . import cases as drawn

    def held(array, is_static):
        return tf.constant(array)

    with _EAGERLY:
        rows = drawn.tensors(case, held)
        if case.spoilt:
            return _refusal(case, rows, counts)
        if case.mode == "eager":
            return drawn.check(case, [[_array(value) for value in row] for row in drawn.reduce_case(case, rows)])
    present = [value for row in rows for value in row if value is not None]

    @tf.function(autograph=False)
    def reduce(given):
        tensors = iter(given)
        return drawn.reduce_case(case, [[value if value is None else next(tensors) for value in row] for row in rows])

    return drawn.check(case, [[_array(value) for value in row] for row in reduce(present)])


def _array(value):
    import tensorflow as tf

    from .cases import Rows

    if isinstance(value, tf.IndexedSlices):
        return Rows(value.values.numpy(), value.indices.numpy(), None)
    return None if value is None else value.numpy()


def _refusal(case, rows, counts, operations=lambda: 0):
    from . import cases as drawn

    if not drawn.can_spoil(case):
        return ""
    before = operations()
    error = drawn.refused(case, rows)
    counts["  refused, as they must be"] += 1
    if isinstance(error, str):
        return error
    return "" if operations() <= before + 1 else f"{operations() - before} ops were added before {error}"


def _in_graph(together, audited, counts):
    """Build cases in one graph and run them in two steps, the first audited or not; return what is wrong."""
    import tensorflow as tf

    import hier_allreduce

    from . import cases as drawn

    tf1, built, found = tf.compat.v1, [], []
    asked, seen = tf1.RunOptions(output_partition_graphs=audited), tf1.RunMetadata()

    def build(case):
        rows = drawn.tensors(case, drawn.placeholder)
        if case.spoilt:
            return _refusal(case, rows, counts, lambda: len(graph.get_operations()))
        built.append((case, rows, drawn.reduce_case(case, rows, f"case{case.seed}")))
        return _misplaced(case, built[-1][2])

    def run():
        fetches = [[[() if value is None else value for value in row] for row in result] for _, _, result in built]
        before, later = [case for case, _, _ in built], [drawn.grown(case) for case, _, _ in built]
        feeds = [drawn.fed(case, rows) for case, (_, rows, _) in zip(later, built)]
        with _session(tf, optimizes=audited or together[0].seed % 4 == 0) as session:
            results = session.run(fetches, options=asked, run_metadata=seen) + session.run(fetches, ChainMap(*feeds))
        for case, rows in zip(before + later, results):
            got = [[None if type(value) is tuple else value for value in row] for row in rows]
            found.extend(_guarded(case, functools.partial(drawn.check, case, got)))

    def audit():
        counts["  audited"] += len(built)
        counts["  copies compared by the audit"] += sum(hier_allreduce.audit(seen, graph).copies.values())

    with tf.Graph().as_default() as graph:
        for case in together:
            found += _guarded(case, functools.partial(build, case))
        graph.get_operations() or tf1.no_op()
        failed = _guarded(together[0], run)
        if audited and not failed and any(_moves(case) for case, _, _ in built):
            failed = _guarded(together[0], audit)
    return found + failed


def _moves(case):
    return len(case.devices) > 1 and any(grad is not None for column in case.columns for grad in column.grads)


def _misplaced(case, result):
    """Return which result is on another device than its tower's."""
    import tensorflow as tf

    for device, row in zip(case.devices, result):
        wanted = tf.DeviceSpec.from_string(device).device_index
        for variable, value in enumerate(row):
            if value is not None and tf.DeviceSpec.from_string(value.device).device_index != wanted:
                return f"variable {variable} of the tower on {device} is on {value.device}"
    return ""


# ---- long training ---------------------------------------------------------------------------------


def training(seed, seconds):
    """Train on 8 devices with both updates and three train ops: replicas stay bit-identical, memory stays flat."""
    counts, findings = Counter(), []
    for update in ("replicated", "main"):
        findings += _trained(update, seed, seconds / 2, counts)
    return counts, findings


def _trained(update, seed, seconds, counts):
    import numpy as np

    tf = _start()
    import hier_allreduce

    tf1, devices, rows = tf.compat.v1, [f"/cpu:{k}" for k in range(8)], []
    with tf.Graph().as_default():
        tf1.set_random_seed(seed)
        inner = tf1.train.AdamOptimizer(0.01), tf1.train.MomentumOptimizer(0.01, 0.5)
        adam, momentum = (hier_allreduce.TowerOptimizer(i, devices, update=update, broadcast=7) for i in inner)
        for k, device in enumerate(devices):
            with tf.device(device), tf1.variable_scope(f"tower{k}"):
                w = tf1.get_variable("w", [6, 4], use_resource=True)
                b, c = (tf1.get_variable(name, [4], use_resource=True) for name in "bc")
                x = tf1.random_normal([5, 6], seed=k)
                loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b * c - tf.reduce_sum(x, 1, keepdims=True)))
                rows.append(adam.compute_gradients(loss, [w, b, c]))
        by_column = zip((adam, momentum, momentum), zip(*rows))  # the updates of one step race, but share nothing
        train_ops = [optimizer.apply_gradients([[pair] for pair in column]) for optimizer, column in by_column]
        with _session(tf) as session:
            session.run(tf1.global_variables_initializer())
            session.run(momentum.init_op)
            train = session.make_callable(train_ops)
            memory, steps = [], 0
            for _ in until(seconds):
                for _ in range(_STEPS_AT_ONCE):
                    train()
                steps += _STEPS_AT_ONCE
                memory.append(_resident())
                if steps >= _STEPS:
                    break
            values = session.run([[variable for _, variable in row] for row in rows])
    counts[f"training steps, 8 devices, {update}"] += steps
    found = _growth("training", seed, memory, counts, f"  KiB more in memory, {update}")
    if any(value.tobytes() != first.tobytes() for row in values for value, first in zip(row, values[0])):
        found.append(Finding("training", seed, f"{update}: after {steps} steps the towers differ"))
    if not all(np.isfinite(value).all() for value in values[0]):
        found.append(Finding("training", seed, f"{update}: after {steps} steps the weights are not finite"))
    return found


def _growth(part, seed, memory, counts, name):
    """Return a finding if memory grew from the first fifth of a run to its end."""
    settled = memory[len(memory) // 5]
    counts[name] += max(0, memory[-1] - settled) >> 10
    if memory[-1] - settled <= _GROWTH:
        return []
    grown = (memory[-1] - settled) / _MEBIBYTE
    return [Finding(part, seed, f"resident memory grew by {grown:.0f} MiB over {len(memory)} measurements")]


# ---- the same calls again and again ----------------------------------------------------------------


def calls(seed, seconds):
    """Call eagerly, in new tf.functions and in new graphs: graphs, records and caches do not pile up."""
    tf = _start()
    from hier_allreduce.graph import emit

    from . import cases as drawn

    counts, findings, memory, graphs = Counter(), [], [], []
    modes = drawn.MODES
    pool = {mode: [_small(seed * 1000 + n, mode) for n in range(12)] for mode in modes}
    for number in until(seconds):
        if number == _CALLS:
            break
        case = pool[modes[number % len(modes)]][number % 12]
        if case.mode == "graph":
            findings += [Finding("calls", *found) for found in _in_graph([case], False, Counter())]
        else:
            alone = functools.partial(_alone, case, Counter())
            findings += [Finding("calls", *found) for found in _guarded(case, alone)]
        if number % 100 == 99:
            memory.append(_resident())
            graphs.append((_alive(tf), len(emit._emitted)))
    counts[f"calls of {12 * len(modes)} cases in turn"] += number
    if len(graphs) > 4:
        settled, last = graphs[len(graphs) // 5], graphs[-1]
        counts["  graphs alive at the end"] += last[0]
        counts["  recorded graphs at the end"] += last[1]
        if last[0] > settled[0] + 50 or last[1] > settled[1] + 50:
            findings.append(Finding("calls", seed, f"graphs alive and recorded went from {settled} to {last}"))
        findings += _growth("calls", seed, memory, counts, "  KiB more in memory, calls")
    unbounded = [name for name, most in _caches() if most is None]
    counts["  caches, all bounded or without arguments"] += len(_caches())
    if unbounded:
        findings.append(Finding("calls", seed, f"caches without a bound: {unbounded}"))
    return counts, findings


def _small(seed, mode):
    """Return a valid case with a few variables, so that many calls take little time."""
    from . import cases as drawn

    case = drawn.draw(seed, mode)
    return case._replace(spoilt="", columns=case.columns[:4])


def _alive(tf):
    """Return the number of graphs, those of functions included, that are still alive."""
    gc.collect()
    return sum(isinstance(thing, tf.Graph) for thing in gc.get_objects())


def _caches():
    """Return the name and bound of each ``lru_cache`` of the package that is a function of something."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("hier_allreduce"):
            for attribute, thing in vars(module).items():
                if hasattr(thing, "cache_info") and thing.__wrapped__.__code__.co_argcount:
                    found[f"{name}.{attribute}"] = thing.cache_info().maxsize
    return sorted(found.items())


# ---- threads ---------------------------------------------------------------------------------------


def threads(seed, seconds):
    """Build and run graphs from 8 threads at once: the caches and records of the package are shared."""
    _start()
    counts, findings, lock = Counter(), [], threading.Lock()

    def work(thread):
        own = Counter()
        for number in until(seconds):
            first = ((seed + 17) * 1_000_003 + number * _THREADS + thread) * 2
            found = batch(range(first, first + 2), number % _AUDITED == 0, own)
            with lock:
                findings.extend(Finding("threads", case, text) for case, text in found)
        with lock:
            counts[f"random cases from {_THREADS} threads at once"] += own["random cases"]

    running = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(_THREADS)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(seconds + 100)
        if thread.is_alive():
            return counts, [*findings, Finding("threads", seed, "a thread hangs")]
    return counts, findings


# ---- what is no gradient ---------------------------------------------------------------------------


def mirrored(seed, seconds):
    """Reduce what is no gradient under MirroredStrategy: the sum is exact, or the strategy is refused."""
    tf = _start()
    from hier_allreduce import HierAllreduceError, Strategy
    from hier_allreduce.integrations.distribute import HierarchicalAllReduce

    from . import cases as drawn

    counts, findings, rng = Counter(), [], random.Random(seed)

    def replica(values):
        context = tf.distribute.get_replica_context()
        own = tf.cast(tf.gather(values, context.replica_id_in_sync_group), tf.float32)
        return own, context.all_reduce("SUM", own)

    for _ in until(seconds) if len(drawn.MODES) > 1 else ():  # TensorFlow 1.15 runs graphs only
        towers = rng.randint(2, 8)
        strategy = Strategy(**drawn.draw_choices(rng, towers))
        values = [rng.randrange(1 << 20) for _ in range(towers)]
        try:
            ops = HierarchicalAllReduce(strategy)
            mirrors = tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(towers)], ops)
            own, total = mirrors.run(replica, (values,))
            totals = {*map(float, mirrors.experimental_local_results(total)), float(mirrors.reduce("SUM", own, None))}
            fault = totals != {sum(values)} and f"{totals} of {values}"
        except HierAllreduceError:
            fault = not strategy.wire_dtype and traceback.format_exc()
        counts["values that are no gradients, under MirroredStrategy"] += 1
        if fault:
            findings.append(Finding("mirrored", seed, f"{fault}\n{strategy}"))
    return counts, findings


def _kind(finding):
    """Return what findings of one cause have in common: the last lines before the case."""
    return finding.part, finding.text.partition("\nseed ")[0][-300:]


def main(argv=None):
    """Run all parts and print the table."""
    args = parse(
        __doc__,
        argv,
        1800,
        lambda parser: parser.add_argument("--case", type=int, help="run this case only, and say what is wrong"),
    )
    if args.case is not None:
        _start()
        found = batch([args.case], True, Counter())
        print("\n".join(text for _, text in found) or "nothing is wrong with this case")
        return 1 if found else 0
    began, seconds, half = time.monotonic(), args.seconds, args.processes == 1
    others = [
        Work(training, args.seed, seconds * (0.15 if half else 0.35), {}),
        Work(calls, args.seed, seconds * (0.15 if half else 0.2), {}),
        Work(mirrored, args.seed, seconds * 0.05, {}),
        Work(threads, args.seed, seconds * (0.1 if half else 0.15), {}),
    ]
    rest = Work(cases, args.seed + 1, seconds * (0.55 if half else 0.25), {})
    queues = [[*others, rest]] if half else [[Work(cases, args.seed, seconds, {})], [*others, rest]]
    counts, findings = in_processes(queues)
    findings = list({_kind(finding): finding for finding in findings}.values())
    rows = [*counts.items(), ("findings", len(findings))]
    return report(args, began, rows, findings, lambda finding: f"python -m trust.soak --case {finding.seed}")


if __name__ == "__main__":
    sys.exit(main())
