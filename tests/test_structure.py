"""The house: no import runs upwards, TensorFlow stays upstairs, and what the package says about itself is true."""

import ast
import configparser
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hier_allreduce

PACKAGE = Path(hier_allreduce.__file__).parent

# A module may import those before it only.
ORDER = [
    "errors",
    "words",
    "arguments",
    "presets",
    # machines, plans, and what they cost: plain Python
    "table",
    "speeds",
    "oddlinks",
    "smi",
    "calibration",
    "links",
    "topology",
    "occupancy",
    "plan",
    "algorithms",
    "trees",
    "cost",
    "recipes",
    "planner",
    "scaling",
    "hosts",
    "shapes",
    "anchors",
    "report",
    "pictures",
    "buckets",
    "routes",
    "strategy",
    "alive",
    "clusterfile",
    "watch",
    "launcher",
    # from here on: TensorFlow
    "compat",
    "detect",
    "devices",
    "gradients",
    "kinds",
    "layout",
    "packing",
    "emit",
    "allreduce",
    "board",
    "collectives",
    "meeting",
    "clustersession",
    "cluster",
    "auditing",
    "writes",
    "updates",
    "replicas",
    "optimizer",
    # what is built on the package, and imported by nothing below
    "benchmark.case",
    "benchmark.floor",
    "benchmark.contenders",
    "benchmark.measuring",
    "benchmark.report",
    "benchmark.updates",
    "benchmark.workers",
    "benchmark.hosts",
    "integrations",
    "benchmark.distribute",
    "benchmark",
    "demos",
    "commands",
    "cli",
]
FIRST_WITH_TENSORFLOW = ORDER.index("compat")
WITH_TENSORPACK = ("integrations", "demos")


def modules():
    """Every module of the package by its name inside it, with its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text(encoding="utf-8")), parts[-1] == "__init__"


def imported(name, tree, is_package):
    """Absolute names of all that a module imports, at its top or inside functions, with the node."""
    home = ["hier_allreduce", *name.split(".")] if name else ["hier_allreduce"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - node.level + is_package] + ([node.module] if node.module else [])
            for alias in node.names:
                yield ".".join([*base, alias.name]), node


def place(name):
    """A module's place in the order: its own, or that of the package it is in; None for what is no module."""
    while name:
        if name in ORDER:
            return ORDER.index(name)
        name = name.rpartition(".")[0]
    return None


def configured():
    """What setup.cfg says."""
    setup = configparser.ConfigParser()
    setup.read(str(PACKAGE.parent / "setup.cfg"), encoding="utf-8")
    return setup


MODULES = [pytest.param(*module, id=module[0] or "__init__") for module in modules()]


@pytest.mark.parametrize("name, tree, is_package", MODULES)
def test_no_import_runs_upwards(name, tree, is_package):
    if not name:
        assert not [what for what, _ in imported(name, tree, is_package) if what.startswith("hier_allreduce")]
        return
    here = place(name)
    assert here is not None, f"give {name} its place in ORDER"
    for what, node in imported(name, tree, is_package):
        package, _, inside = what.partition(".")
        below = place(inside) if package == "hier_allreduce" else None
        if below is not None and ORDER[below] != name:
            same_package = ORDER[below] == ORDER[here] == name.partition(".")[0]
            assert below < here or same_package, f"{name}, line {node.lineno}: imports {what}, which is above it"


@pytest.mark.parametrize("name, tree, is_package", MODULES)
def test_only_the_upper_rooms_know_the_frameworks(name, tree, is_package):
    for what, node in imported(name, tree, is_package):
        framework = what.partition(".")[0]
        if framework == "tensorflow":
            assert name and place(name) >= FIRST_WITH_TENSORFLOW, f"{name}, line {node.lineno}: imports TensorFlow"
        if framework == "tensorpack" and node in tree.body:
            assert name.startswith(WITH_TENSORPACK), f"{name}, line {node.lineno}: importing tensorpack changes globals"


def test_nothing_but_what_needs_it_imports_tensorflow():
    there = {name for name, _, _ in modules()}
    plain = [f"hier_allreduce.{name}" for name in ORDER[:FIRST_WITH_TENSORFLOW] if name in there]
    program = f"""
import importlib, sys
import hier_allreduce
dir(hier_allreduce), hier_allreduce.Plan, hier_allreduce.verify, hier_allreduce.GradientError, hier_allreduce.Strategy
for name in {plain}:
    importlib.import_module(name)
sys.exit("tensorflow" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=280).returncode == 0


def test_all_public_names_are_there():
    assert list(hier_allreduce.__all__) == sorted(set(hier_allreduce.__all__))
    for name in hier_allreduce.__all__:
        assert getattr(hier_allreduce, name) is not None
        assert name in dir(hier_allreduce)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hier_allreduce.nothing


def test_a_public_function_is_not_hidden_by_the_module_it_lives_in():
    importlib.import_module("hier_allreduce.auditing")
    assert callable(hier_allreduce.audit)
    files = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not files & set(hier_allreduce.__all__)


def test_the_version_is_said_once():
    assert configured()["metadata"]["version"] == hier_allreduce.__version__


def test_whoever_installs_it_gets_every_module_and_preset():
    setup, top = configured(), PACKAGE.parent
    packages = setup["options"]["packages"].split()
    patterns = setup["options.package_data"]["*"].split(", ")
    named = {folder.replace(".", "/").replace("hier_allreduce/configs", "configs") for folder in packages}
    for root in (PACKAGE, top / "configs"):
        for path in root.rglob("*.*"):
            if path.is_file() and path.suffix != ".pyc" and path.name[0] != ".":
                assert path.parent.relative_to(top).as_posix() in named, f"{path}: its folder is no package"
                assert path.suffix == ".py" or any(path.match(pattern) for pattern in patterns), path


@pytest.mark.parametrize(
    "system, machine, python, package",
    [
        ("linux", "x86_64", "3.7", "tensorflow"),
        ("linux", "x86_64", "3.8", "tensorflow-cpu"),
        ("linux", "x86_64", "3.13", "tensorflow-cpu"),
        ("linux", "aarch64", "3.11", "tensorflow"),
        ("win32", "AMD64", "3.12", "tensorflow-cpu"),
        ("darwin", "arm64", "3.11", "tensorflow"),
        ("darwin", "x86_64", "3.11", "tensorflow"),
    ],
)
def test_every_system_gets_the_tensorflow_that_is_made_for_it(system, machine, python, package):
    extras = configured()["options.extras_require"]["tf"]
    here = {"sys_platform": system, "platform_machine": machine, "python_version": python}
    wanted = [Requirement(line) for line in extras.strip().splitlines()]
    names = [each.name for each in wanted if each.marker.evaluate(here)]
    assert [name for name in names if "tensorflow" in name] == [package]


def test_the_page_for_developers_names_what_there_is():
    top, tests = PACKAGE.parent, Path(__file__).parent
    page = (top / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = [place(name) for name in re.findall(r"`(\w+)`", page.split("| | modules |")[1].split("\n\n")[0])]
    assert len(rooms) > 30 and rooms == sorted(rooms)
    sources = [*PACKAGE.rglob("*.py"), *tests.glob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    for name in re.findall(r"`([\w./]+)`", page):
        if name.endswith((".py", ".md")):
            assert any((folder / name).exists() for folder in (top, PACKAGE, tests)), name
        else:
            assert not name.isidentifier() or name in words, name


def test_every_error_is_a_value_error_in_one_tree():
    errors = importlib.import_module("hier_allreduce.errors")
    found = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    assert len(found) >= 7
    for error in found:
        assert issubclass(error, errors.HierAllreduceError) and issubclass(error, ValueError)
        assert error.__name__ in errors.__doc__
