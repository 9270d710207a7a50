"""``doctor``: facts about a machine, known problems with their remedies, groups along NVLinks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.nvidia_smi import table_of

# A TensorFlow whose GPUs are those of the variable FAKE_GPUS; it prints the lines of its log level.
TENSORFLOW = """
import json, os, sys
from types import SimpleNamespace as Some
facts = json.loads(os.environ["FAKE_GPUS"])
level = int(os.environ["TF_CPP_MIN_LOG_LEVEL"])
lines = [line for line in facts["complaint"].splitlines() if "IWEF".index(line[0]) >= level]
print(*lines, sep="\\n", file=sys.stderr)
__version__ = "2.21.0"
test = Some(is_built_with_cuda=lambda: facts["cuda"])
"""
DEVICE_LIB = """
from types import SimpleNamespace as Some
from tensorflow import facts

def list_local_devices():
    exec(facts["fault"])
    def gpu(number, peers):
        links = Some(links=Some(link=[Some(device_id=peer) for peer in peers]))
        described = f"device: {number}, name: {facts['model']}, pci bus id: 0000:01:00.0"
        return Some(name=f"/device:GPU:{number}", device_type="GPU", memory_limit=1 << 34,
                    locality=links, physical_device_desc=described)
    return [Some(device_type="CPU"), *(gpu(*gpu_) for gpu_ in enumerate(facts["peers"]))]
"""
# An nvidia-smi: its listing, its tables, and its exit status, from files beside it.
NVIDIA_SMI = """#!/bin/sh
case "$*" in "topo -m") cat "$0.table" ;; topo*) cat "$0.reads" ;; *) cat "$0.listing" ;; esac
exit $(cat "$0.status")
"""
FAILS = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that"
    " the latest NVIDIA driver is installed and running."
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.1"
READS = " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tCNS\tX\n\nLegend:\n\n  X = Self\n"
THIRD_DGX_1V = Path(__file__).parent / "nvidia_smi" / "8x-v100-sxm2-32gb-sys-nv1-nv2-nic18.txt"


def all_peers(count):
    """Return for each GPU the numbers of all others, which it can reach."""
    gpus = range(count)
    return [[*gpus[:gpu], *gpus[gpu + 1 :]] for gpu in gpus]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(peers=[[1], [0]], …)``: make this machine one with such GPUs."""

    def made(
        peers=(), cuda=True, complaint="", fault="", model="Tesla V100", smi=None, **variables
    ):
        """Make a machine.

        ``peers`` has those of each GPU that TensorFlow sees, and ``fault`` is run when it lists
        them; ``smi`` is the number of GPUs that nvidia-smi sees, or its (listing, table, status).
        The lines of ``complaint`` begin with I, W, E or F.
        """
        packages = tmp_path / "packages"
        client = packages / "tensorflow" / "python" / "client"
        client.mkdir(parents=True)
        (packages / "tensorflow" / "__init__.py").write_text(TENSORFLOW)
        (client / "device_lib.py").write_text(DEVICE_LIB)
        monkeypatch.setenv("PYTHONPATH", str(packages))
        facts = {"cuda": cuda, "complaint": complaint, "fault": fault, "model": model}
        facts["peers"] = list(peers)
        monkeypatch.setenv("FAKE_GPUS", json.dumps(facts))
        monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), "/bin", "/usr/bin"]))
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
        if isinstance(smi, int):
            smi = (f"{model}, 535.1\n" * smi, table_of(smi, "SYS"), 0)
        if smi:
            program = tmp_path / "nvidia-smi"
            program.write_text(NVIDIA_SMI)
            program.chmod(0o755)
            (tmp_path / "nvidia-smi.reads").write_text(READS)
            for name, content in zip(("listing", "table", "status"), smi):
                (tmp_path / f"nvidia-smi.{name}").write_text(str(content))

    return made


@pytest.fixture
def problems(run):
    """``problems()``: the lines of problems, and all that is printed."""

    def problems(*arguments):
        status, out, _ = run("doctor", *arguments)
        found = [line[2:] for line in out.splitlines() if line.startswith("! ")]
        end = f"problems: {len(found)}, marked with !" if found else "no known problems"
        assert out.endswith(f"\n\n{end}\n") and status == bool(found)
        assert len(set(found)) == len(found)
        return found, out

    return problems


# ---- a machine that is as it says --------------------------------------------------------------


def test_a_good_machine_has_no_problems(machine, problems):
    machine(all_peers(4), smi=4)
    found, text = problems()
    assert found == []
    assert "nvidia-smi: Tesla V100, 535.1\n" * 4 in text
    assert f"\n\n{table_of(4, 'SYS')}" in text  # with the tab before its header
    assert READS.split("\n\n")[0] in text and "Legend" not in text
    assert "TensorFlow 2.21.0, built with CUDA, GPUs: 4" in text
    assert "  /device:GPU:2 Tesla V100, 16 GiB, peers: 0, 1, 3" in text


@pytest.mark.parametrize("smi", [None, 4])
def test_gpus_that_nvidia_smi_does_not_see_are_no_problem(machine, problems, tmp_path, smi):
    """As in a container without nvidia-smi, or where it may not be executed."""
    machine(all_peers(4), smi=smi)
    if smi:
        (tmp_path / "nvidia-smi").chmod(0o644)
    found, text = problems()
    assert found == []
    assert "nvidia-smi: not found on PATH" in text and "CUDA, GPUs: 4" in text
    assert "no GPUs" not in text


def test_gpus_that_somebody_hides_are_a_fact(machine, problems):
    machine(smi=2, CUDA_VISIBLE_DEVICES="")
    found, text = problems()
    assert found == [] and "CUDA_VISIBLE_DEVICES=\n" in text and "CUDA, GPUs: 0" in text


def test_gpus_of_a_plug_in_have_no_known_peers(machine, problems):
    machine([[], []], cuda=False)
    found, text = problems()
    assert found == []
    assert "built without CUDA, GPUs: 2\n  /device:GPU:0 Tesla V100, 16 GiB\n" in text


def test_a_sentence_stands_once(machine, problems):
    machine(smi=(FAILS, "", 9))
    (line,), text = problems()
    assert text.count(FAILS) == 1 and FAILS in line


# ---- known problems ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts, line",
    [
        (
            {"smi": (FAILS, "", 9)},
            f"nvidia-smi ended with status 9: {FAILS}: look for the driver's",
        ),
        ({"smi": (MISMATCH, "", 18)}, "version mismatch NVML library version: 535.1: look for the"),
        (
            {"peers": all_peers(4), "smi": (FAILS, "", 9)},
            f"nvidia-smi ended with status 9: {FAILS}",
        ),
        ({"smi": 1, "cuda": False}, "TensorFlow uses: 0 of 1: its own lines say why"),
        ({"peers": [[]], "smi": 8}, "TensorFlow uses: 1 of 8: its own lines say why"),
        (
            {"smi": 2, "fault": "raise RuntimeError('CUDA_ERROR_OUT_OF_MEMORY')"},
            "list its devices: status 1: RuntimeError: CUDA_ERROR_OUT_OF_MEMORY: it has to run",
        ),
        (
            {"smi": 2, "complaint": "I cpu: AVX", "fault": "import os\nos.abort()"},
            "TensorFlow cannot list its devices: SIGABRT: it has to run here first",
        ),
        (
            {"peers": [[], [0]], "model": "RTX 4090"},
            "no peer access from /device:GPU:0 to all others, so copies cross main memory: GeForce",
        ),
    ],
)
def test_a_problem_has_its_remedy(machine, problems, facts, line):
    machine(**facts)
    found, _ = problems()
    assert len(found) == 1 and line in found[0]


def test_fewer_cores_than_gpus_want_more_threads(machine, problems, monkeypatch):
    machine(all_peers(4))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    found, _ = problems()
    assert len(found) == 1 and found[0].startswith("4 GPUs have too few cores (2), ")
    assert found[0].endswith("inter_op_parallelism_threads=8")


@pytest.mark.parametrize(
    "source, line",
    [
        (
            "raise ImportError('no libcudart')",
            "! TensorFlow cannot list its devices: status 1: ImportError: no libcudart: it has",
        ),
        (
            "import os, signal, sys\nprint('unrelated', file=sys.stderr, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGILL)",
            "devices: SIGILL: unrelated: it has to run here first",
        ),
        (
            "raise TypeError('Descriptors cannot be created directly.')",
            "devices: status 1: TypeError: Descriptors cannot be created directly.: it has to",
        ),
        ("import sys\nsys.exit(3)", "devices: status 3: it has to run here first"),
        (
            "raise ImportError(\"No module named 'tensorflow'\")",
            "No module named 'tensorflow': it has to run here first",
        ),
    ],
)
def test_a_tensorflow_that_cannot_be_imported_is_a_problem(
    run, monkeypatch, tmp_path, source, line
):
    (tmp_path / "tensorflow.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, out, _ = run("doctor")
    assert status == 1 and line in out


# ---- groups ------------------------------------------------------------------------------------


GROUPS = 'along the links: Strategy(algorithm="hierarchical", groups=((0, 1, 2, 3), (7, 6, 5, 4)))'


def test_groups_along_the_nvlinks_are_printed(machine, problems, monkeypatch):
    machine(all_peers(8), smi=("Tesla V100, 535.1\n" * 8, THIRD_DGX_1V.read_text(), 0))
    for numbers in (None, "0,1,2,3,4,5,6,7"):
        if numbers:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", numbers)
        assert problems()[1].splitlines().count(GROUPS) == 1
    for numbers in ("0,1,2,3,7,6,5,4", "GPU-0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", numbers)
        assert "along the links" not in problems()[1]


@pytest.mark.parametrize("smi", [None, (FAILS, "", 9), ("V100, 1\n" * 2, "no table", 0), 1])
def test_without_a_table_there_are_no_groups(machine, run, smi):
    machine(smi=smi)
    assert "along the links" not in run("doctor")[1]


def test_groups_of_a_saved_text(run, tmp_path):
    assert run("doctor", "--topo", THIRD_DGX_1V) == (0, GROUPS + "\n", "")
    with THIRD_DGX_1V.open() as table:
        command = [sys.executable, "-m", "hier_allreduce_tools", "doctor", "--topo", "-"]
        assert subprocess.check_output(command, stdin=table).decode() == GROUPS + "\n"


@pytest.mark.parametrize("name", ["4x-h100-nvl-phb-nv12", "2x-a30-sys"])
def test_a_saved_text_whose_halves_are_fine(run, name):
    words = "keep the default, and write no groups=: no others follow the links better\n"
    assert run("doctor", "--topo", THIRD_DGX_1V.with_name(f"{name}.txt")) == (0, words, "")


def test_a_text_without_a_table_is_an_error(fails, tmp_path):
    (tmp_path / "topo.txt").write_text("bash: nvidia-smi: command not found")
    error = fails("doctor", "--topo", tmp_path / "topo.txt")
    assert "hier-allreduce doctor: expected the whole output of `nvidia-smi topo -m`" in error
    assert "doctor: [Errno 2] No such file or directory: ''" in fails("doctor", "--topo", "")
    assert "Is a directory" in fails("doctor", "--topo", tmp_path)


# ---- copies ------------------------------------------------------------------------------------


def test_doctor_says_what_it_asks(machine, run):
    machine([[], []], smi=2)
    _, out, err = run("doctor", "--copies")
    lines = err.splitlines()
    assert lines[0].endswith("probe.py …") and lines[1].startswith("nvidia-smi --query-gpu=")
    assert lines[2:4] == ["nvidia-smi topo -m …", "nvidia-smi topo -p2p r …"]
    assert "! copies /gpu:0 → /gpu:1: the process ended: status 1: " in out  # a fake TensorFlow


@pytest.mark.parametrize("arguments", [["--copies"], ["--copies", "3"]])
def test_one_gpu_has_no_pair(machine, run, arguments):
    machine([[]])
    status, out, err = run("doctor", *arguments)
    assert (status, out) == (2, "")
    assert err.endswith("hier-allreduce doctor: copies are between two GPUs or more, not 1\n")


def test_gpus_for_copies_are_chosen_by_their_numbers(machine, run):
    machine(all_peers(4))
    out = run("doctor", "--copies", "3,0")[1]
    assert "\n          /gpu:3    /gpu:0\n" in out and "! copies /gpu:3 → /gpu:0: " in out
