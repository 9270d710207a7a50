"""Modules with one fault each: do the tests notice?

::

    tests/ ─► run once, with a mark at each statement ─► which tests run which statement; kept in build/mutants
                                                             │
    module ─► one change ─► functions with the new code ─► those tests, in a forked process: the first failure ends it

All processes are forked from one that has imported TensorFlow and has collected the tests. A mutant that no test
notices survives; each survivor is printed with its change, for people to judge: some changes change nothing that
anybody can see.

::

    python -m trust.mutants_of_code --seconds 1800 --seed 1
    python -m trust.mutants_of_code --quick                      planning only, without TensorFlow
    python -m trust.mutants_of_code --only graph/emit:12 planning/plan:3
    python -m trust.mutants_of_code --again graph/emit:12        one mutant, imported in a new process
"""

import ast
import builtins
import contextlib
import copy
import gc
import hashlib
import io
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from importlib import machinery

from .reporting import TOP, Finding, parse, report

_PACKAGE = TOP / "hier_allreduce"
_KEPT = TOP / "build" / "mutants"
_PLANNING = ("planning/plan", "planning/algorithms", "planning/buckets")
_GRAPH = tuple(
    f"graph/{name}"
    for name in (
        *("allreduce", "built_sums", "emit", "entries", "gather"),
        *("joining", "layout", "packing", "pieces", "reductions"),
    )
)
_PLANNING_TESTS = tuple(
    f"tests/planning/test_{name}.py"
    for name in ("plan", "algorithms", "plan_parts", "buckets", "bucket_limits", "lane_plans", "simulator", "strategy")
)
_GRAPH_TESTS = (
    *(str(path.relative_to(TOP)) for path in sorted((TOP / "tests" / "graph").glob("test_*.py"))),
    "tests/training/test_updates.py",
    "tests/training/test_tower_optimizer.py",
)
_TESTED = 60.0  # seconds of CPU time of the tests of one mutant; the fastest come first
_MEMORY = 8 << 30  # bytes that a mutant may take
_STARTED = 1500  # seconds until the tests are collected, or have run once
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


def _parsed(module):
    return ast.parse((_PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def owners(tree):
    """Return ``{node: (line of the statement that runs it, name of its function)}`` for all nodes in functions.

    A default value is run by nobody's test alone: it belongs to the line of its function's ``def``.
    """
    found = {}

    def visit(node, line, function):
        if isinstance(node, ast.FunctionDef):
            function = f"{function}.{node.name}" if function else node.name
            line = node.lineno
        elif isinstance(node, ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
        elif isinstance(node, ast.stmt):
            line = node.lineno
        found[node] = (line, function)
        for child in ast.iter_child_nodes(node):
            visit(child, line, function)

    visit(tree, 0, "")
    return found


class Mutant:
    """A module with its nth change."""

    def __init__(self, module, number):
        self.module, self.number = module, number
        tree = _parsed(module)
        node, change = places(tree)[number]
        self.line, self.function = owners(tree)[node]
        before, at = _text(node), getattr(node, "lineno", getattr(getattr(node, "target", None), "lineno", 0))
        self.what, make = list(changes(node))[change]
        new = make(node)
        if not isinstance(new, ast.comprehension):
            ast.copy_location(new, node)
        self.tree = ast.fix_missing_locations(_Replace(node, new).visit(_keeping_classes(tree)))
        self.name, self.path = f"{module}:{number}", str(_PACKAGE / f"{module}.py")
        self.text = f"{module}.py:{at}: {self.what}: {before} → {_text(new)}"

    def is_none(self):
        """Return whether the change leaves the code as it is."""
        return compile(self.tree, self.path, "exec") == compile(
            _keeping_classes(_parsed(self.module)), self.path, "exec"
        )

    def put(self, functions):
        """Give the module's ``functions`` the changed code; return False if they cannot take it."""
        old = _codes(compile(_keeping_classes(_parsed(self.module)), self.path, "exec"))
        new = _codes(compile(self.tree, self.path, "exec"))
        try:
            for function in functions:
                place = _place(function.__code__)
                if new[place] == old[place]:
                    continue
                if len(new[place]) != 1:  # two lambdas in a line
                    return False
                function.__code__ = new[place][0]
            return self._put_defaults(functions)
        except ValueError:  # another number of free variables
            return False

    def _put_defaults(self, functions):
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                for function in functions:
                    if (function.__name__, function.__code__.co_firstlineno) == (node.name, _first_line(node)):
                        given = [ast.Expression(default) for default in node.args.defaults]
                        values = [eval(compile(one, self.path, "eval"), function.__globals__) for one in given]
                        function.__defaults__ = tuple(values) or None
        return True


def _keeping_classes(tree):
    """Return the tree with ``if False: __class__`` in methods with ``super()``, which then is no free variable too few.

    Only functions with equally many free variables take each other's code.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(node)
        ):
            node.body.append(ast.If(ast.Constant(False), [ast.Expr(ast.Name("__class__", ast.Load()))], []))
    return ast.fix_missing_locations(tree)


def _first_line(node):
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _place(code):
    return (getattr(code, "co_qualname", code.co_name), code.co_firstlineno)


def _codes(code):
    """Return ``{(name, line): [code]}`` of a module's functions; what is inside a function belongs to it."""
    found = defaultdict(list)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if inner.co_flags & 0x2:  # its variables are fast: a function, no class body
                found[_place(inner)].append(inner)
            for place, codes in _codes(inner).items():
                found[place] += codes
    return found


def _text(node):
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split("\n")[0][:90]


# ---- processes with pytest ---------------------------------------------------------------------------


class Child:
    """A forked process that runs ``function()`` and sends its text."""

    def __init__(self, function, limit):
        self._line, theirs = os.pipe()
        self._child, self._text, self._end = os.fork(), b"", time.monotonic() + limit
        if not self._child:
            os.close(self._line)
            try:
                os.setsid()  # so that processes of the tests end with it
                with os.fdopen(theirs, "w", encoding="utf-8") as line:
                    line.write(function())
            finally:
                os._exit(0)
        os.close(theirs)
        os.set_blocking(self._line, False)

    def has_ended(self):
        """Return whether it has ended, or has run for too long."""
        with contextlib.suppress(BlockingIOError):
            while True:
                part = os.read(self._line, 1 << 20)
                if not part:
                    return True
                self._text += part
        return time.monotonic() > self._end

    def result(self):
        """End it; return its text, None if it has sent none."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self._line)
        return self._text.decode() or None


def forked(function, limit):
    """Return what ``function()`` returns in a forked process: its text; None if it takes longer or dies."""
    child = Child(function, limit)
    while not child.has_ended():
        time.sleep(0.02)
    return child.result()


def _quiet():
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def in_pytest(tests, run):
    """Collect tests and call ``run(items, session)`` instead of pytest's loop; return pytest's exit status."""
    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session):
        if session.testsfailed:
            raise session.Failed("tests cannot be collected")
        run(session.items, session)
        return True

    os.chdir(str(TOP))
    sys.path[:0] = [str(TOP / "tests"), str(TOP)]
    sys.dont_write_bytecode = True
    options = ["-q", "-n", "0", "-s", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main([*options, *tests], [types.SimpleNamespace(pytest_runtestloop=pytest_runtestloop)]))


def _compiled(trees):
    """Let the imports of modules compile these trees, ``{name: tree}``."""
    real = machinery.SourceFileLoader.get_code

    def get_code(loader, fullname):
        if fullname in trees:
            return compile(trees[fullname], loader.path, "exec")
        return real(loader, fullname)

    machinery.SourceFileLoader.get_code = get_code


def _name(module):
    return "hier_allreduce." + module.replace("/", ".")


def _forget():
    """Clear the package's caches, so that a test runs the lines whose results an earlier one has left there."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hier_allreduce"):
            for thing in list(vars(module).values()):
                if hasattr(thing, "cache_clear"):
                    thing.cache_clear()


# ---- which tests run which statement -----------------------------------------------------------------


class _Marked(ast.NodeTransformer):
    """Puts a call before each statement of the functions, which notes (module, line)."""

    def __init__(self, module):
        self._module, self._depth = module, 0

    def _mark(self, node):
        place = ast.Tuple([ast.Constant(self._module), ast.Constant(node.lineno)], ast.Load())
        return ast.copy_location(ast.Expr(ast.Call(ast.Name("_trust_ran", ast.Load()), [place], [])), node)

    def visit(self, node):
        changed = super().visit(node)
        is_marked = self._depth and isinstance(node, ast.stmt) and not _is_docstring(node)
        return [self._mark(node), changed] if is_marked else changed

    def visit_FunctionDef(self, node):
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        node.body.insert(_is_docstring(node.body[0]), self._mark(node))
        return node


class Ran:
    """What one run of the tests has shown: the seconds of each test, and the tests of each statement."""

    def __init__(self, modules, files):
        self.seconds, self._tests, known = {}, defaultdict(set), {}
        names = {file: _KEPT / f"{_key(modules, file)}.json" for file in files}
        missing = [file for file in files if not names[file].exists()]
        if missing:
            text = forked(lambda: _measured(modules, missing), _STARTED)
            known = json.loads(text) if text else {"status": "none"}
            if known["status"] != 0:
                raise SystemExit(f"the tests fail without any change (pytest's status {known['status']})")
            _KEPT.mkdir(parents=True, exist_ok=True)
            for file in missing:
                found = [test for test in known["tests"] if test[0].split("::")[0] == file]
                names[file].write_text(json.dumps(found), encoding="utf-8")
        for file in files:
            tests = json.loads(names[file].read_text(encoding="utf-8"))
            for test, seconds, ran, _ in tests:
                self.seconds[test] = seconds
                for place in map(tuple, ran):
                    self._tests[place].add(test)
            for place in {tuple(place) for *_, in_setup in tests for place in in_setup}:
                self._tests[place].update(test for test, *_ in tests)  # another test may use the same fixture

    def tests(self, mutant, first):
        """Return the tests of a mutant: those that are ``first`` by their count, then the fastest."""
        ordered = sorted(
            self._tests[mutant.module, mutant.line], key=lambda test: (-first[test], self.seconds[test], test)
        )
        total = list(itertools.accumulate(map(self.seconds.get, ordered)))
        return ordered[: max(1, sum(until_here <= _TESTED for until_here in total))]


def _key(modules, file):
    """Return a text that differs if anything differs that decides which statements the tests of a file run."""
    sources = [*sorted(_PACKAGE.rglob("*.py")), *sorted((TOP / "tests" / "helpers").glob("*.py"))]
    sources += [TOP / "tests" / "conftest.py", TOP / file]
    content = [sys.version, *modules, *(part for path in sources for part in (str(path), path.read_text("utf-8")))]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:24]


def _measured(modules, files):
    """Run the tests of files once in this process, which must be a forked one; return JSON."""
    _quiet()
    _compiled({_name(module): ast.fix_missing_locations(_Marked(module).visit(_parsed(module))) for module in modules})
    seen, tests = set(), []
    builtins._trust_ran = seen.add

    def run(items, session):
        in_setup = set()

        def pytest_runtest_logreport(report):
            if report.when == "setup":
                in_setup.update(seen)

        session.config.pluginmanager.register(types.SimpleNamespace(pytest_runtest_logreport=pytest_runtest_logreport))
        for item, following in zip(items, [*items[1:], None]):
            _forget()
            seen.clear()
            in_setup.clear()
            began = time.process_time()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            tests.append((item.nodeid, time.process_time() - began, sorted(seen), sorted(in_setup)))

    return json.dumps({"status": in_pytest(files, run), "tests": tests})


# ---- mutants -----------------------------------------------------------------------------------------


def failing(items, session, seconds):
    """Run tests until one fails, in a forked process; return its name, "" if none fails.

    A test that takes far longer than without the change ends the process.
    """
    _forget()
    os.environ["HIER_ALLREDUCE_CACHE"] = ""  # plans that other processes have kept would hide a changed search
    for item, following in zip(items, [*items[1:], None]):
        taken = seconds.get(item.nodeid, 1.0)
        signal.setitimer(signal.ITIMER_PROF, 20 + 10 * taken)
        signal.setitimer(signal.ITIMER_REAL, 60 + 30 * taken)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return item.nodeid
    return ""


def _bounded():
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    with open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, resource.RLIM_INFINITY))


def again(mutant, ran):
    """Return the test that notices a mutant that is imported as such, "" if none does."""
    tests = ran.tests(mutant, Counter())
    found = []

    def run(items, session):
        by_name = {item.nodeid: item for item in items}
        chosen = [by_name[test] for test in tests] if all(test in by_name for test in tests) else items
        found.append(failing(chosen, session, ran.seconds))

    def process():
        _quiet()
        _bounded()
        _compiled({_name(mutant.module): mutant.tree})
        status = in_pytest(sorted({test.split("::")[0] for test in tests}), run)
        return json.dumps(found[0] if found else f"pytest's status {status}: the tests cannot be collected")

    text = forked(process, 60 + 60 * sum(map(ran.seconds.get, tests))) if tests else json.dumps("")
    return json.loads(text) if text else "a test that does not end, or a crash"


def shuffled(modules, seed):
    """Return all mutants of modules as (module, number), in random order."""
    numbers = [(module, number) for module in modules for number in range(len(places(_parsed(module))))]
    random.Random(seed).shuffle(numbers)
    return numbers


def _numbered(name):
    module, number = name.split(":")
    return module, int(number)


class Search:
    """Tries mutants until the time is over."""

    def __init__(self, numbers, files, ran, end, processes):
        self._numbers, self._files, self._ran, self._end, self._processes = numbers, files, ran, end, processes
        self.counts, self.findings = Counter({"mutants that exist": len(self._numbers)}), []
        self._killers = defaultdict(Counter)  # by function: the tests that noticed its mutants

    def run(self, items, session):
        """Try mutants in forked processes, as many at a time as there may be."""
        by_name = {item.nodeid: item for item in items}
        gc.unfreeze()
        functions = defaultdict(list)
        for thing in gc.get_objects():
            if isinstance(thing, types.FunctionType):
                functions[thing.__code__.co_filename].append(thing)
        gc.freeze()
        waiting, running = iter(self._numbers), []
        while True:
            while len(running) < self._processes and time.monotonic() < self._end:
                number = next(waiting, None)
                if number is None:
                    break
                mutant = Mutant(*number)
                if mutant.is_none():
                    self.counts["  without any effect on the code"] += 1
                    continue
                tests = self._ran.tests(mutant, self._killers[mutant.module, mutant.function])

                def process(mutant=mutant, tests=tests):
                    _quiet()
                    _bounded()
                    if not mutant.put(functions[mutant.path]):
                        return "null"
                    return json.dumps(failing([by_name[test] for test in tests], session, self._ran.seconds))

                limit = 120 + 60 * sum(map(self._ran.seconds.get, tests))
                running.append((mutant, tests, Child(process, limit)))
            if not running:
                return
            time.sleep(0.01)
            for one in [one for one in running if one[2].has_ended()]:
                running.remove(one)
                self._note(one[0], one[1], one[2].result())

    def _note(self, mutant, tests, text):
        noticed = json.loads(text) if text else "a test that does not end, or a crash"
        if noticed is None:  # functions cannot take the change: it is imported
            command = [sys.executable, "-m", "trust.mutants_of_code", "--again", mutant.name, "--tests", *self._files]
            noticed = (
                "imported"
                if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
                else ""
            )
            self.counts["  imported in a new process"] += 1
        if noticed in tests:
            self._killers[mutant.module, mutant.function][noticed] += 1
        self.counts["mutants tried"] += 1
        self.counts["  in lines that no test runs"] += not tests
        self.counts["  by a time limit or a crash"] += not text
        self.counts["  noticed" if noticed else "  survived"] += 1
        self.counts[f"  {mutant.module}.py"] += 1
        self.counts[f"  {mutant.module}.py noticed"] += bool(noticed)
        if not noticed:
            self.findings.append(Finding(mutant.module, mutant.number, f"{mutant.name}  {mutant.text}"))
            print("survived so far:", mutant.name, mutant.text, file=sys.__stderr__, flush=True)


def main(argv=None):
    """Try mutants until the time is over, and print the survivors."""

    def add(parser):
        parser.add_argument("--quick", action="store_true", help="planning only, without TensorFlow")
        parser.add_argument("--modules", nargs="+", metavar="MODULE", help="such as planning/plan")
        parser.add_argument("--tests", nargs="+", metavar="FILE", help="such as tests/graph/test_entries.py")
        parser.add_argument("--only", nargs="+", metavar="MODULE:NUMBER", help="these mutants, such as graph/emit:12")
        parser.add_argument("--again", metavar="MODULE:NUMBER", help="one mutant, in a new process")

    args = parse(__doc__, argv, 1800, add)
    began = time.monotonic()
    modules = args.modules or (_PLANNING if args.quick else _PLANNING + _GRAPH)
    marks = tuple(dict.fromkeys([*_PLANNING, *_GRAPH, *modules]))
    files = args.tests or (_PLANNING_TESTS if args.quick else _PLANNING_TESTS + _GRAPH_TESTS)
    if not args.quick:
        import tensorflow  # noqa: F401  once, for all forked processes
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = None
        ran = Ran(marks, files)
        if args.again:
            mutant = Mutant(*_numbered(args.again))
            noticed = again(mutant, ran)
            print(f"{mutant.text}\n{(noticed and f'noticed by {noticed}') or 'survived'}")
            return 0 if noticed else 1
        numbers = [_numbered(name) for name in args.only or ()] or shuffled(modules, args.seed)
        search = Search(numbers, files, ran, time.monotonic() + args.seconds, args.processes)
        in_pytest(files, search.run)
    counts, findings = search.counts, search.findings
    killed, total = counts["  noticed"], counts["  noticed"] + counts["  survived"]
    share = f"{killed / total:.1%}" if total else "none"
    print("\n".join(f"SURVIVED {finding.text}" for finding in findings))
    rows = [*sorted(counts.items()), ("noticed, of those tried", share)]
    missed = [Finding("mutants", args.seed, f"only {share} are noticed")] if not total or killed / total < _GOAL else []
    return report(args, began, rows, missed, lambda finding: f"python -m trust.mutants_of_code --seed {finding.seed}")


if __name__ == "__main__":
    sys.exit(main())
