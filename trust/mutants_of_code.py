"""Modules with one fault each: do the tests notice?

::

    module ─► syntax tree ─► one change ─► a forked process with TensorFlow ─► the tests that run the changed line

A mutant that no test notices survives; each survivor is printed with its change, for people to judge: some changes
change nothing that anybody can see.

::

    python -m trust.mutants_of_code --seconds 1800 --seed 1
    python -m trust.mutants_of_code --quick            planning only, without TensorFlow
"""

import ast
import contextlib
import copy
import io
import itertools
import os
import random
import signal
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from importlib import machinery

from .reporting import TOP, Finding, parse, report

_PACKAGE = TOP / "hier_allreduce"
_PLANNING = ("planning/plan", "planning/algorithms", "planning/buckets")
_GRAPH = tuple(
    f"graph/{name}"
    for name in ("entries", "joining", "layout", "packing", "pieces", "reductions", "gather", "emit", "allreduce")
)
_PLANNING_TESTS = ("plan", "algorithms", "buckets", "lanes", "simulator", "strategy")
_GRAPH_TESTS = (
    "entries",
    "joining",
    "allreduce",
    "bad_input",
    "copy_order",
    "audit",
    "planned",
    "lanes",
    "gpu_kernels",
)
_TESTED = 60.0  # seconds of CPU time of the tests of one mutant; the fastest come first
_LIMIT = 240  # seconds for one mutant; one that runs longer is noticed by that
_GOAL = 0.9


# ---- changes ---------------------------------------------------------------------------------------

_COMPARED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def changes(node):
    """Yield what can be done to a node: (description, function that returns the changed node)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        other = _COMPARED[type(node.ops[0])]
        yield other.__name__, lambda n: ast.Compare(n.left, [other(), *n.ops[1:]], n.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        operator = _COMPUTED[type(node.op)]
        yield operator.__name__, lambda n: ast.BinOp(n.left, operator(), n.right)
    if isinstance(node, ast.BoolOp):
        both = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield both.__name__, lambda n: ast.BoolOp(both(), n.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", lambda n: n.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "other truth", lambda n: ast.Constant(not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "one more", lambda n: ast.Constant(n.value + 1)
    if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "returns None", lambda n: ast.Return(ast.Constant(None))
    if isinstance(node, (ast.If, ast.IfExp)):
        yield "other branch", _with_other_branch
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield, ast.YieldFrom))
    ):
        yield "deleted", lambda n: ast.Pass()
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "without its condition", lambda n: ast.comprehension(n.target, n.iter, [], n.is_async)


def _with_other_branch(node):
    changed = copy.copy(node)
    changed.test = ast.UnaryOp(ast.Not(), node.test)
    return changed


def _is_none(node):
    return isinstance(node, ast.Constant) and node.value is None


def places(tree):
    """Return the changeable nodes of a module's functions, without annotations, names of ops and texts of errors."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.JoinedStr):
            return
        inside = inside or isinstance(node, (ast.FunctionDef, ast.Lambda))
        if inside:
            found.extend((node, number) for number, _ in enumerate(changes(node)))
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_docstring(child):
                    visit(child, inside)

    visit(tree, False)
    return found


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Replace(ast.NodeTransformer):
    def __init__(self, old, new):
        self._old, self._new = old, new

    def visit(self, node):
        if node is self._old:
            return self._new
        return super().visit(node)


class Mutant:
    """A module with its nth change."""

    def __init__(self, module, number):
        self.module, self.number = module, number
        tree = ast.parse((_PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
        node, change = places(tree)[number]
        self.line, before = getattr(node, "lineno", getattr(getattr(node, "target", None), "lineno", 0)), _text(node)
        self.what, make = list(changes(node))[change]
        new = make(node)
        self.source = ast.unparse(ast.fix_missing_locations(_Replace(node, new).visit(tree)))
        self.text = f"{module}.py:{self.line}: {self.what}: {before} → {_text(new)}"


def _text(node):
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split("\n")[0][:90]


# ---- forked processes with pytest --------------------------------------------------------------------


def forked(function, limit):
    """Return what ``function()`` returns in a forked process: its text; None if it takes longer or dies."""
    mine, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(mine)
        try:
            os.setsid()  # so that processes of the tests end with it
            with os.fdopen(theirs, "w", encoding="utf-8") as line:
                line.write(function())
        finally:
            os._exit(0)
    os.close(theirs)
    end, text = time.monotonic() + limit, b""
    os.set_blocking(mine, False)
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            part = os.read(mine, 1 << 20)
            if not part:
                break
            text += part
            continue
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(mine)
    return text.decode() if text else None


def pytest_status(tests, plugins=(), mutant=None):
    """Run tests in this process, which must be a forked one; return pytest's exit status."""
    import pytest

    os.chdir(str(TOP))
    sys.path[:0] = [str(TOP / "tests"), str(TOP)]
    sys.dont_write_bytecode = True
    if mutant:
        _install(mutant)
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main([*(options if mutant else options[1:]), *tests], plugins=list(plugins)))


def _install(mutant):
    """Let the import of the mutant's module compile its source."""
    name = "hier_allreduce." + mutant.module.replace("/", ".")
    real = machinery.SourceFileLoader.get_code

    def get_code(loader, fullname):
        if fullname == name:
            return compile(mutant.source, loader.path, "exec")
        return real(loader, fullname)

    machinery.SourceFileLoader.get_code = get_code


class Coverage:
    """A pytest plugin: which tests run which lines of the modules, and the seconds of each test."""

    def __init__(self, modules):
        self._paths = {str(_PACKAGE / f"{module}.py"): module for module in modules}
        self.lines, self.seconds = defaultdict(set), {}

    def hooks(self):
        """Return the plugin object."""
        import pytest

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_protocol(item, nextitem):
            _forget()
            began, seen = time.process_time(), set()
            sys.settrace(lambda frame, event, argument: self._local(frame, seen))
            yield
            sys.settrace(None)
            self.seconds[item.nodeid] = time.process_time() - began
            for place in seen:
                self.lines[place].add(item.nodeid)

        return types.SimpleNamespace(pytest_runtest_protocol=pytest_runtest_protocol)

    def _local(self, frame, seen):
        module = self._paths.get(frame.f_code.co_filename)
        if module is None:
            return None

        def trace(inner, event, argument):
            seen.add((module, inner.f_lineno))
            return trace

        return trace(frame, None, None)


def _forget():
    """Clear the package's caches, so that a test runs the lines whose results an earlier one has left there."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hier_allreduce"):
            for thing in list(vars(module).values()):
                if hasattr(thing, "cache_clear"):
                    thing.cache_clear()


def covered(modules, tests):
    """Return ``{(module, line): [tests, the fastest first]}`` from one run of the tests."""
    import json

    def run():
        coverage = Coverage(modules)
        status = pytest_status(tests, [coverage.hooks()])
        found = [[module, line, sorted(names)] for (module, line), names in coverage.lines.items()]
        return json.dumps({"status": status, "lines": found, "seconds": coverage.seconds})

    text = forked(run, 1500)
    result = json.loads(text) if text else {"status": "none"}
    if result["status"] != 0:
        raise SystemExit(f"the tests fail without any change (pytest's status {result['status']})")
    seconds, lines = result["seconds"], {}
    for module, line, names in result["lines"]:
        fastest = sorted(names, key=seconds.get)
        total = list(itertools.accumulate(map(seconds.get, fastest)))
        lines[module, line] = fastest[: max(1, sum(until_here <= _TESTED for until_here in total))]
    return lines


def main(argv=None):
    """Try mutants until the time is over, and print the survivors."""

    def add(parser):
        parser.add_argument("--quick", action="store_true", help="planning only, without TensorFlow")
        parser.add_argument("--modules", nargs="+", metavar="MODULE", help="such as planning/plan")
        parser.add_argument("--tests", nargs="+", metavar="FILE", help="such as tests/graph/test_entries.py")

    args = parse(__doc__, argv, 1800, add)
    began, rng = time.monotonic(), random.Random(args.seed)
    modules = args.modules or (_PLANNING if args.quick else _PLANNING + _GRAPH)
    tests = [TOP / "tests" / "planning" / f"test_{name}.py" for name in _PLANNING_TESTS]
    if not args.quick:
        tests += [TOP / "tests" / "graph" / f"test_{name}.py" for name in _GRAPH_TESTS]
    if not args.quick:
        import tensorflow  # noqa: F401  once, for all forked processes
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        lines = covered(modules, args.tests or [str(test.relative_to(TOP)) for test in tests if test.exists()])
        counts, findings = tried(modules, lines, rng, time.monotonic() + args.seconds)
    killed, total = counts["  noticed"], counts["  noticed"] + counts["  survived"]
    share = f"{killed / total:.1%}" if total else "none"
    print("\n".join(f"SURVIVED {finding.text}" for finding in findings))
    rows = [*sorted(counts.items()), ("noticed, of those tried", share)]
    missed = [Finding("mutants", args.seed, f"only {share} are noticed")] if total and killed / total < _GOAL else []
    return report(args, began, rows, missed, lambda finding: f"python -m trust.mutants_of_code --seed {finding.seed}")


def _is_noticed(mutant, tests):
    """Return whether a test fails, or does not end, with a mutant."""
    if not tests:
        return False
    status = forked(lambda: str(pytest_status(tests, mutant=mutant)), _LIMIT)
    if status in ("4", "5"):  # the names of tests have changed with it, or no test can be imported
        files = sorted({test.split("::")[0] for test in tests})
        status = forked(lambda: str(pytest_status(files, mutant=mutant)), _LIMIT)
    return status != "0"


def tried(modules, lines, rng, end):
    """Try random mutants until the time is over; return counts and survivors."""
    numbers = [
        (module, number)
        for module in modules
        for number in range(len(places(ast.parse((_PACKAGE / f"{module}.py").read_text(encoding="utf-8")))))
    ]
    rng.shuffle(numbers)
    counts, findings = Counter({"mutants that exist": len(numbers)}), []
    for module, number in numbers:
        if time.monotonic() > end:
            break
        mutant = Mutant(module, number)
        tests = lines.get((module, mutant.line), [])
        counts["mutants tried"] += 1
        noticed = _is_noticed(mutant, tests)
        counts["  in lines that no test runs"] += not tests
        counts["  noticed" if noticed else "  survived"] += 1
        counts[f"  {module}.py"] += 1
        counts[f"  {module}.py noticed"] += noticed
        if not noticed:
            findings.append(Finding(module, number, mutant.text))
            print("survived so far:", mutant.text, file=sys.stderr, flush=True)
    return counts, findings


if __name__ == "__main__":
    sys.exit(main())
