"""The package seen from outside: its layers, its faces, and what it says about itself."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.project import extras, pyproject
from packaging.requirements import Requirement

import hier_allreduce

PACKAGE = Path(hier_allreduce.__file__).parent

# A folder imports from those before it only. The first entry is the ground floor: single files.
LAYERS = [
    {"errors", "formatting", "presets", "models", "_lazy", "_version"},
    {"topology"},
    {"planning"},
    {"graph"},
    {"auditing", "cluster", "training"},
    {"integrations"},
    {"cli"},
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
MOST_NAMES = 15  # of a face
COMMANDS_WITHOUT_TENSORFLOW = """
from hier_allreduce.cli import main
main(["plan", "p3.8xlarge"])
"""


def modules():
    """Yield each module's path and its imports from the package: (parts, [(source parts, name), ...])."""
    for path in sorted(PACKAGE.rglob("*.py")):
        here = path.relative_to(PACKAGE).with_suffix("").parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
        yield (
            here,
            [
                (
                    here[: len(here) - node.level] + tuple((node.module or "").split(".") if node.module else ()),
                    alias.name,
                )
                for node in found
                for alias in node.names
            ],
        )


MODULES = [pytest.param(*module, id=".".join(module[0])) for module in modules()]


@pytest.mark.parametrize("here, imports", MODULES)
def test_imports_go_down(here, imports):
    for source, name in imports:
        target = (source + (name,))[0]
        if here in (("__init__",), ("__main__",)) or target == here[0]:
            continue
        both_ground = LAYER[target] == LAYER[here[0]] == 0
        assert both_ground or LAYER[target] < LAYER[here[0]], (
            f"{'.'.join(here)} imports {target}, which is not below it"
        )
        assert not name.startswith("_"), f"{'.'.join(here)} imports {name} of {target}, which is not public"


def test_no_modules_import_each_other_in_a_circle():
    names = {here: imports for here, imports in modules() if here[-1] != "__init__"}
    needs = {here: {s if s in names else (*s, n) for s, n in imports} & set(names) for here, imports in names.items()}
    while needs:
        free = {here for here, below in needs.items() if not below & set(needs)}
        assert free, f"these import each other: {sorted('.'.join(here) for here in needs)}"
        needs = {here: below for here, below in needs.items() if here not in free}


RUNS_CODE = {ast.Name: {"eval", "exec", "compile"}, ast.Attribute: {"system", "popen", "unsafe_load", "full_load"}}


def test_nothing_that_is_read_can_run_as_code():
    """No eval, no shell, no pickle, and YAML only by its safe loader."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & {"pickle", "marshal", "shelve", "dill"}, place
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                assert name not in RUNS_CODE.get(type(node.func), ()), place
                assert ast.dump(node.func) != ast.dump(ast.parse("yaml.load", mode="eval").body), place
                assert not {word.arg for word in node.keywords} & {"shell", "allow_pickle"}, place


def test_faces_are_small_and_name_what_exists():
    for folder in sorted(name for names in LAYERS[1:-1] for name in names):
        face = importlib.import_module(f"hier_allreduce.{folder}")
        assert len(set(face.__all__)) == len(face.__all__) <= MOST_NAMES, folder
        assert all(hasattr(face, name) for name in face.__all__), folder


@pytest.mark.parametrize(
    "program",
    [
        "import hier_allreduce.planning, hier_allreduce.cluster",
        "import hier_allreduce as h; dir(h), h.check, h.Reduce, h.HierAllreduceError, h.Strategy, h.Topology",
        COMMANDS_WITHOUT_TENSORFLOW,
    ],
    ids=["folders", "names", "commands"],
)
def test_what_needs_no_tensorflow_imports_none(program):
    program += "\nimport sys; sys.exit(any(name in sys.modules for name in ('tensorflow', 'tensorpack')))"
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, timeout=280).returncode == 0


def test_all_public_names_are_there():
    assert list(hier_allreduce.__all__) == sorted(set(hier_allreduce.__all__))
    for name in hier_allreduce.__all__:
        assert getattr(hier_allreduce, name) is not None
        assert name in dir(hier_allreduce)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hier_allreduce.nothing


def test_no_public_name_is_a_folders_or_a_files():
    files = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not files & set(hier_allreduce.__all__)


def test_whoever_installs_it_gets_every_module_and_preset():
    setup, top = pyproject()["tool"]["setuptools"], PACKAGE.parent
    packages, patterns = setup["packages"], setup["package-data"]["*"]
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
    here = {"sys_platform": system, "platform_machine": machine, "python_version": python}
    wanted = [Requirement(line) for line in extras()["tf"]]
    names = [each.name for each in wanted if each.marker.evaluate(here)]
    assert [name for name in names if "tensorflow" in name] == [package]


def test_every_error_is_a_value_error_in_one_tree():
    errors = importlib.import_module("hier_allreduce.errors")
    found = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    assert len(found) == 3
    for error in found:
        assert issubclass(error, errors.HierAllreduceError) and issubclass(error, ValueError)
        assert error.__name__ in errors.__doc__
