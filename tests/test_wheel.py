"""The wheel: its files, and the types that people's checkers and editors see in it."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from helpers.project import TOP

import hier_allreduce

pytestmark = pytest.mark.xdist_group("wheel")  # built once

PROGRAM = """
from typing import Any, List

import hier_allreduce as h


def reduced(grads: List[List[Any]], optimizer: Any, cluster: h.Cluster) -> List[List[Any]]:
    devices = ["/gpu:0", "/gpu:1"]
    h.TowerOptimizer(optimizer, devices, strategy="auto", update="sharded", cluster=cluster)
    h.Strategy(algoritm="tree")  # type: ignore[call-arg]
    return h.allreduce_grads(grads, devices, average=True, strategy=h.Strategy(main=0))


reveal_type((h.audit, h.Strategy, h.TowerOptimizer, h.Cluster))
reveal_type(h.allreduce_grads)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's file, built from a copy of the sources.

    A copy, because setuptools leaves its build folder next to the sources.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("hier_allreduce", "configs"):
        shutil.copytree(
            str(TOP / name), str(source / name), ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "MANIFEST.in"):
        shutil.copy(str(TOP / name), str(source))
    # what pip calls; pip itself would take twice as long
    build = [
        sys.executable,
        "-c",
        "import sys, setuptools.build_meta as it; it.build_wheel(sys.argv[1])",
        str(folder),
    ]
    done = subprocess.run(
        build, cwd=str(source), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280
    )
    assert done.returncode == 0, done.stdout.decode()
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_every_module_and_preset(wheel):
    # hier_allreduce/configs is a link to configs/, into which a glob does not follow it everywhere
    files = {path for path in TOP.glob("configs/*/*") if path.is_file()}
    files |= {path for path in TOP.glob("hier_allreduce/**/*") if path.is_file()}
    names = {path.relative_to(TOP).as_posix() for path in files if path.suffix != ".pyc"}
    expected = {f"hier_allreduce/{name}" if name.startswith("configs/") else name for name in names}
    with zipfile.ZipFile(str(wheel)) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected


def test_the_metadata_is_complete_without_relative_links(wheel):
    with zipfile.ZipFile(str(wheel)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode("utf-8")
    headers, page = text.split("\n\n", 1)
    for line in (
        f"Version: {hier_allreduce.__version__}",
        "License: Apache-2.0",
        "Keywords: all-reduce,",
    ):
        assert f"\n{line}" in headers
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(targets) == 2 and all(target.startswith("https://") for target in targets)


def test_strict_mypy_sees_the_types_of_all_public_names(wheel, tmp_path):
    """In a virtual environment with nothing but the wheel."""
    pytest.importorskip("mypy")
    venv.create(str(tmp_path / "venv"))
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(str(wheel)) as archive:
        archive.extractall(str(packages))
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    python = tmp_path / "venv" / "bin" / "python"
    check = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        str(python),
        "program.py",
    ]
    clean = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")
    }
    done = subprocess.run(check, cwd=str(tmp_path), env=clean, capture_output=True, timeout=280)
    report = done.stdout.decode()
    assert done.returncode == 0, report + done.stderr.decode()
    both, function = re.findall(r'Revealed type is "(.*)"', report)
    assert "ModuleType" not in both and both.count("def (") >= 5, both
    assert re.match(r"def \(all_grads: .*, average: (builtins[.])?bool =", function), function
