"""``benchmarks/real.py`` on CPU devices; its GPUs are like them, but for their times.

And what all programs check before they measure.
"""

import json
import subprocess
import sys

import pytest
from helpers.project import TOP
from helpers.real_gpus import ARE_REAL

pytestmark = [pytest.mark.tf2, pytest.mark.cpu_only("starts its own devices")]


def run(*arguments, program="real"):
    """Run the program, and return its status, output and errors."""
    done = subprocess.run(
        [sys.executable, str(TOP / "benchmarks" / f"{program}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_step_is_timed_with_and_without_its_checks(tmp_path):
    path = tmp_path / "checks.json"
    arguments = ["cpu", "word_embeddings", "--rounds", "2", "--json", str(path)]
    status, out, err = run(*arguments, program="checks")
    assert status == 0, err
    (cell,) = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(len(rounds) == 2 for rounds in cell["step_ms"].values())
    ops = cell["ops"]
    step = "update=replicated"
    assert ops[f"{step} without its flag"] < ops[step] < ops[f"{step} and compared copies"]
    assert "cpu, word_embeddings" in out


@pytest.mark.parametrize("over", ["gpu", "host"])
def test_steps_are_measured_in_the_emulators_schema(tmp_path, over):
    path = tmp_path / "steps.json"
    where = ["--cpu", "--gpus", "2", "--over", over, "--models", "mobilenet_v2", "--passes", "0"]
    names = "ours,ours without edges,tensorpack gpu"
    what = ["--rounds", "2", "--host", "0", "--only", names, "--json", str(path)]
    status, out, err = run(*where, *what, "--trace", str(tmp_path / "traces"))
    assert status == 0, err
    found = json.loads(path.read_text(encoding="utf-8"))
    (cell,) = found["cells"]
    assert (cell["machine"], cell["kind"], cell["gpus"]) == ("2 × CPU device", "cpu", 2)
    assert list(cell["contenders"]) == names.split(",")
    assert all(len(one["exposed_ms"]) == 2 for one in cell["contenders"].values())
    edges = {name: one.get("over_host") for name, one in cell["contenders"].items()}
    assert (edges["ours"] is not None) == (over == "host")
    if over == "host":  # each gradient goes to the other device and back
        assert edges["ours"]["bytes"] == 2 * 4 * 3504872  # MobileNet-v2's parameters
    assert len(list((tmp_path / "traces").glob("*.pb.gz"))) == 4
    assert "ours ÷ best baseline" in out


@pytest.mark.skipif(ARE_REAL, reason="there are GPUs")
def test_without_gpus_it_says_what_to_do():
    status, _, err = run()
    assert status == 1 and "TensorFlow sees no GPU. Install tensorflow[and-cuda]" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--only", "treee/8"], "treee"),
        (["--models", "resnet5"], "resnet5: no such model; there are"),
        (["--json", "nowhere/mine.json"], "nowhere/mine.json: there is no such folder"),
        (["--picture", "mine.gif"], "mine.gif: expected a .png, .svg or .pdf"),
    ],
)
def test_what_cannot_be_measured_fails_before_anything_is(arguments, why):
    status, out, err = run("--cpu", "--gpus", "2", *arguments)
    assert status == 1 and why in err and "calibrated" not in out


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("cpu_devices", ["--devices", "2"]),
        ("emulated", ["2x-rtx-5090", "mobilenet_v2"]),
    ],
)
def test_other_programs_look_for_the_files_place_first_too(tmp_path, program, arguments):
    status, out, err = run(*arguments, "--json", str(tmp_path), program=program)
    assert (status, out) == (1, "") and err.endswith(f"{tmp_path}: expected a file, not a folder\n")


def test_cpu_devices_measures_all_kinds_of_all_reduces(tmp_path):
    path = tmp_path / "steps.json"
    names = "ours,tensorpack gpu,HierarchicalCopyAllReduce"
    what = ["--models", "mobilenet_v2", "--devices", "2", "--rounds", "2", "--json", str(path)]
    status, _, err = run(*what, "--only", names, program="cpu_devices")
    assert status == 0, err
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [case["average"] for case in found] == [False, True]
    for contender in [one for case in found for one in case["contenders"]]:
        assert contender["error"] is None and len(contender["steps"]) == 2, contender


def test_help_has_a_line_for_a_stranger():
    status, out, _ = run("--help")
    assert status == 0 and "--json mine.json" in out and "attach it to an issue" in out
