"""The package and the tools seen from outside: layers, public names, docstrings, dependencies."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.project import TOP, setup_cfg
from packaging.requirements import Requirement

import hier_allreduce
import hier_allreduce_tools

PACKAGE = Path(hier_allreduce.__file__).parent
TOOLS = Path(hier_allreduce_tools.__file__).parent

# A folder imports from those before it only. The first entry is the ground: single files.
LAYERS = [
    {"errors", "formatting", "compat", "configs", "graphs", "_version"},
    {"cluster", "planning"},
    {"graph"},
    {"auditing", "training"},
    {"integrations"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
MOST_NAMES = 15  # of a folder's __init__
PACKAGE_NAME = ast.dump(ast.parse("hier_allreduce", mode="eval").body)
FILES = sorted([*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")])


def name_of(path):
    """Return a module's name as a tuple: ``("hier_allreduce", "graph", "sums")``."""
    distribution = PACKAGE if PACKAGE in path.parents else TOOLS
    return path.relative_to(distribution.parent).with_suffix("").parts


TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
OF_PACKAGE = [here for here in TREES if here[0] == "hier_allreduce"]
OF_TOOLS = [here for here in TREES if here[0] == "hier_allreduce_tools"]


def imports_of(here):
    """Return the (module, name) pairs that a module imports; a module is a tuple of names."""
    pairs = []
    for node in ast.walk(TREES[here]):
        if isinstance(node, ast.Import):
            pairs += [(tuple(alias.name.split(".")), "") for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            folder = here[: len(here) - node.level] if node.level else ()
            below = tuple(node.module.split(".")) if node.module else ()
            pairs += [(folder + below, alias.name) for alias in node.names]
    return pairs


@pytest.mark.parametrize("here", OF_PACKAGE, ids=".".join)
def test_imports_go_down(here):
    inside = [pair for pair in imports_of(here) if pair[0][0] == "hier_allreduce"]
    for source, name in inside:
        target = (source + (name,))[1]
        if here[1] in ("__init__", "__main__") or target == here[1]:
            continue
        is_below = LAYER[target] < LAYER[here[1]]
        both_are_ground = LAYER[target] == LAYER[here[1]] == 0
        assert is_below or both_are_ground, f"{here} imports {target}"
        assert re.match("__|[^_]", name), f"{here} imports {name} of {target}, which is not public"


@pytest.mark.parametrize("here", OF_PACKAGE, ids=".".join)
def test_the_package_does_not_know_its_tools(here):
    assert not [source for source, _ in imports_of(here) if source[0] == "hier_allreduce_tools"]


@pytest.mark.parametrize("here", OF_TOOLS, ids=".".join)
def test_tools_import_public_names_only(here):
    public = {*hier_allreduce.__all__, "__version__"}
    for source, name in imports_of(here):
        if source == ("hier_allreduce",):
            assert not name or name in public, f"{here} imports {name}"
        elif source[0] == "hier_allreduce":
            # a front end's class is public by its module's name and its own
            assert source[1] == "integrations" and name[0].isupper(), f"{here} imports {source}"
    used = [node for node in ast.walk(TREES[here]) if isinstance(node, ast.Attribute)]
    of_package = [node.attr for node in used if ast.dump(node.value) == PACKAGE_NAME]
    assert {*of_package} <= public, f"{here} uses {of_package}"


def test_no_modules_import_each_other_in_a_circle():
    modules = {here for here in TREES if here[-1] != "__init__"}
    needs = {}
    for here in modules:
        # `from .plan import Copy` needs the module plan, and so does `from . import plan`
        sources = {source for source, _ in imports_of(here)}
        members = {(*source, name) for source, name in imports_of(here)}
        needs[here] = (sources | members) & modules
    while needs:
        free = {here for here, below in needs.items() if not below & set(needs)}
        assert free, f"these import each other: {sorted('.'.join(here) for here in needs)}"
        needs = {here: below for here, below in needs.items() if here not in free}


def test_every_folder_is_in_the_layers_and_exports_few_names():
    pytest.importorskip("tensorflow")
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(LAYER)
    for folder in sorted(folders):
        exported = getattr(importlib.import_module(f"hier_allreduce.{folder}"), "__all__", [])
        assert len(set(exported)) == len(exported) <= MOST_NAMES, folder


def test_public_docstrings_have_an_example():
    trainers = {"HierarchicalAllReduce", "HierarchicalTrainer"}
    public = {name for name in hier_allreduce.__all__ if not name.endswith("Error")} | trainers
    nodes = [
        node
        for here in OF_PACKAGE
        for node in TREES[here].body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]
    assert public <= {node.name for node in nodes if "::\n" in (ast.get_docstring(node) or "")}


def test_nothing_that_is_read_can_run_as_code():
    """No eval, no shell, no pickle, and YAML only by its safe loader."""
    for here, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & {
                    "pickle",
                    "marshal",
                    "shelve",
                    "dill",
                }, here
            if isinstance(node, ast.Call):
                name = ast.dump(node.func)
                assert not re.search(
                    r"id='(eval|exec|compile)'|attr='(system|popen|unsafe_load|full_load)'", name
                ), here
                assert name != ast.dump(ast.parse("yaml.load", mode="eval").body), here
                assert not {word.arg for word in node.keywords} & {"shell", "allow_pickle"}, here


def run_python(*arguments):
    """Run a Python without TensorFlow's lines, and return what it did."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, timeout=280, encoding="utf-8")


@pytest.mark.parametrize(
    "program",
    [
        "import hier_allreduce.planning, hier_allreduce_tools as tools; dir(tools)",
        "import hier_allreduce as h; dir(h), h.check, h.Reduce, h.HierAllreduceError, h.Strategy",
        "from hier_allreduce_tools.entry import parser; parser()",
    ],
)
def test_planning_and_commands_import_no_tensorflow(program):
    slow = ["tensorflow", "tensorpack", "matplotlib"]
    program += f"\nimport sys; sys.exit(any(name in sys.modules for name in {slow}))"
    assert run_python("-c", program).returncode == 0


def test_the_package_says_what_installs_its_command():
    ran = run_python("-m", "hier_allreduce")
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "`python -m pip install ./tools`" in ran.stderr


def test_all_public_names_are_there_and_are_no_modules():
    pytest.importorskip("tensorflow")
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not folders & set(
        hier_allreduce.__all__
    )  # once a folder is imported, its name would be the folder
    assert list(hier_allreduce.__all__) == sorted(set(hier_allreduce.__all__))
    for name in hier_allreduce.__all__:
        assert callable(getattr(hier_allreduce, name)) and name in dir(hier_allreduce)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hier_allreduce.nothing


def test_what_an_owner_pays_for_does_not_grow(monkeypatch):
    """Lower a limit when its count falls."""
    monkeypatch.syspath_prepend(str(TOP / "docs" / "generate"))
    count = importlib.import_module("counts").counts_of
    counted = count(PACKAGE) + count(TOOLS)
    limits = {
        "types": 57,
        "decisions": 741,
        "expression nodes": 27474,
        "functions with one use": 145,
    }
    assert {what: counted[what] for what in limits if counted[what] > limits[what]} == {}
    assert counted["lines that raise or warn"] <= 0.026 * counted["lines"]


def test_dependencies_are_few_and_each_system_gets_its_tensorflow():
    package, tools = setup_cfg(), setup_cfg(TOP / "tools")
    assert package["options"]["install_requires"].split() == ["numpy", "PyYAML"]
    lines = tools["options"]["install_requires"].split("\n")[1:]
    needed = [Requirement(line).name for line in lines]
    libraries = ["importlib_metadata", "matplotlib", "tabulate", "tqdm", "wrapt"]
    assert needed == ["hier_allreduce", *libraries]
    assert tools["metadata"]["version"] == hier_allreduce.__version__
    tensorflows = package["options.extras_require"]["tf"].split("\n")[1:]
    for system, machine, python, wanted in [
        ("linux", "x86_64", "3.7", "tensorflow"),
        ("linux", "x86_64", "3.13", "tensorflow-cpu"),
        ("linux", "aarch64", "3.11", "tensorflow"),
        ("darwin", "arm64", "3.11", "tensorflow"),
    ]:
        here = {"sys_platform": system, "platform_machine": machine, "python_version": python}
        lines = [Requirement(line) for line in tensorflows]
        names = [
            line.name for line in lines if line.marker is not None and line.marker.evaluate(here)
        ]
        assert [name for name in names if "tensorflow" in name] == [wanted]
