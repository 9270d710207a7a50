"""The command line: unusual standard streams, what it imports, this machine, ``doctor``."""

import os
import re
import subprocess
import sys

import pytest

from hier_allreduce import __version__, presets
from hier_allreduce.cli import doctor, main
from hier_allreduce.topology import detect, flat_host, load

COMMAND = [sys.executable, "-m", "hier_allreduce"]


def in_a_shell(redirected, *arguments):
    """What a shell gives back for the command with ``redirected`` behind it: exit status, output, errors."""
    done = subprocess.run(["sh", "-c", f'"$@" {redirected}', "sh", *COMMAND, *arguments], capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_full_disk_is_one_line():
    assert in_a_shell("> /dev/full", "topo", "dgx-1v") == (
        2,
        "",
        "hier-allreduce topo: [Errno 28] No space left on device\n",
    )


def test_without_standard_streams_nothing_breaks():
    assert in_a_shell(">&-", "topo", "dgx-1v") == (0, "", "")
    assert in_a_shell("<&-", "topo", "-") == (2, "", "hier-allreduce topo: -: standard input is closed\n")


def test_auto_is_the_planners_own_choice(run):
    assert run("plan", "p3.8xlarge", "--algorithm", "auto") == run("plan", "p3.8xlarge")


def test_as_a_module_and_without_arguments():
    done = subprocess.run([sys.executable, "-m", "hier_allreduce", "topo", "--list"], capture_output=True)
    lines = done.stdout.decode().splitlines()
    assert [line.split()[0] for line in lines[1:]] == presets.names("machines")
    assert any(re.match(r"dgx-2 +16 +Tesla V100-SXM3-32GB +DGX-2", line) for line in lines)


def test_version_and_help_import_only_what_they_need():
    """A command that is not used costs nothing: NumPy alone takes longer than --version may."""
    program = "import sys; from hier_allreduce.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    for argument in ("--version", "--help"):
        modules = subprocess.run([sys.executable, "-c", program, argument], stdout=subprocess.PIPE).stdout.decode()
        assert not {"numpy", "yaml", "hier_allreduce.planning"} & set(modules.splitlines()[-1].split())


@pytest.mark.parametrize("name", [[], ["this machine"]])
def test_plan_without_a_topology_is_for_this_machine(run, monkeypatch, name):
    monkeypatch.setattr(detect, "_whole_machine", lambda: load("p3.8xlarge"))
    assert run("plan", *name) == run("plan", "p3.8xlarge")
    monkeypatch.setattr(detect, "_whole_machine", lambda: flat_host(1))
    status, _, err = run("plan", *name)
    assert status == 2 and "fewer than two GPUs" in err and "dgx-1v" in err


def test_this_machine_without_tensorflow_is_one_line(run, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    detect._run.cache_clear()
    status, out, err = run("topo")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "neither nvidia-smi nor TensorFlow" in err and "topo --list" in err


def test_this_machine_is_found_without_start_up_lines(monkeypatch, capfd):
    found = load("2x-rtx-5090")

    def slow_start():
        os.write(2, b"failed call to cuInit\n")
        return found

    monkeypatch.setattr("hier_allreduce.cli.topo.this_machine", slow_start)
    for command in ("topo", "plan"):
        assert main([command]) == 0
        out, err = capfd.readouterr()
        assert "RTX 5090" in out and not err


# ---- plan --model ------------------------------------------------------------------------------------


def test_step_times_of_a_model_and_of_other_all_reduces(run, tmp_path):
    shapes = tmp_path / "model.tsv"
    shapes.write_text("name\tshape\tdtype\tsparse\nrows\t9,9\tfloat32\tyes\nw\t1000,25000\tfloat32\tno\n")
    model = ["plan", "4x-rtx-4090", "--model", str(shapes), "--step", "100ms"]
    status, out, _ = run(*model, "--backward", "0")
    rows = {line[:38].strip(): line[38:].split() for line in out.splitlines()}
    # three times 100 MB into GPU 0's port, then out of it one after another, and a sum of four in between
    one_device = 300e6 / 24e9 + 300e6 / (0.93 * 24e9) + 500e6 / 650e9
    assert status == 0
    assert float(rows["TensorFlow, ReductionToOneDevice"][0]) == pytest.approx(1e3 * one_device, rel=0.01)
    assert rows["TensorFlow, ReductionToOneDevice"][2:] == ["127", "ms", "79%"]
    assert float(rows["ours, planned for the machine"][0]) < float(rows["ours, without a topology"][0])
    assert "The plan saves " in out and "1 sparse gradient left out" in out
    assert "tensorpack, mode hierarchical" not in out and "NCCL" not in out
    for machine, nccl in (("dgx-1v", 2 * 7 / 8 * 100e6 / 135.5e9), ("4x-rtx-5090", 2 * 3 / 4 * 100e6 / 35e9)):
        _, out, _ = run("plan", machine, *model[2:])
        assert f"NCCL, if it works, leaves at most {1e3 * nccl:.2f} ms exposed." in out
    for wrong, message in (
        (model[:4], "--model and --step go together"),
        ([*model, "--json"], "--model makes no use of --json"),
        ([*model, "--backward", "200ms"], "is longer than --step"),
        (["plan", "4x-rtx-4090", "--model", "resnet5", "--step", "1s"], "did you mean 'resnet50'"),
    ):
        status, _, error = run(*wrong)
        assert status == 2 and message in error


# ---- doctor ------------------------------------------------------------------------------------------


PEERS = [{"name": f"/device:GPU:{k}", "model": "V100", "bytes": 1 << 34, "peers": [1 - k]} for k in range(2)]
DRIVER = ["Tesla V100, 535.1", "Tesla V100, 535.1"]


@pytest.mark.parametrize(
    "packages, facts, error, driver, words",
    [
        (["tensorflow"], {"cuda": True, "gpus": PEERS}, "", DRIVER, None),
        ([], {}, "", [], "TensorFlow is missing"),
        (["tensorflow", "tensorflow-cpu"], {"cuda": True, "gpus": PEERS}, "", DRIVER, "overwrite each other's files"),
        (
            ["tensorflow-cpu"],
            {"cuda": False, "gpus": []},
            "",
            DRIVER,
            "built without CUDA, and does not use the 2 GPUs",
        ),
        (["tensorflow"], {}, "importing TensorFlow ended with SIGILL", [], "ended with SIGILL"),
        (["tensorflow"], {"cuda": True, "gpus": [{**gpu, "peers": []} for gpu in PEERS]}, "", DRIVER, "no peer access"),
        (
            ["tensorflow"],
            {"cuda": True, "gpus": [{**gpu, "model": "NVIDIA GeForce RTX 4090", "peers": []} for gpu in PEERS]},
            "",
            DRIVER,
            "NVIDIA's driver gives GeForce cards none but over NVLink",
        ),
    ],
)
def test_doctor_names_known_problems(run, monkeypatch, packages, facts, error, driver, words):
    monkeypatch.setattr(doctor, "_installed_packages", lambda: dict.fromkeys(packages, "2.15.0"))
    seen = doctor.TensorFlowSeen({"version": "2.15.0", **facts} if facts else {}, error)
    monkeypatch.setattr(doctor, "_tensorflow", lambda: seen)
    monkeypatch.setattr(doctor, "_driver", lambda: driver)
    monkeypatch.setattr(doctor, "_machine", lambda seen: None)
    status, out, _ = run("doctor")
    assert __version__ in out
    assert (status, out.count("problem:")) == ((1, 1) if words else (0, 0))
    assert (words or "no known problems") in out


def test_doctor_tells_a_missing_nvidia_smi_from_one_without_gpus(monkeypatch):
    for path, words in ((None, "not found; a container has it"), ("/usr/bin/nvidia-smi", "no GPUs")):
        monkeypatch.setattr("shutil.which", lambda name, path=path: path)
        assert doctor._gpu_text(doctor.TensorFlowSeen({}), [], None).startswith(f"nvidia-smi: {words}")


def test_doctor_survives_a_tensorflow_that_ends_the_process(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/sh")  # which cannot run `-m`
    assert "TensorFlow cannot be used" in doctor._tensorflow().error
