"""Machines: links and shared resources of a table, YAML in and out, presets, detection."""

import os
import re
import subprocess
import textwrap
import threading

import pytest
from helpers.machines import all_of, of_kinds

from hier_allreduce import HierAllreduceError, Topology, configs
from hier_allreduce.topology import detect, from_text, links_of
from hier_allreduce.topology.gpus import guess_speeds

MACHINES = configs.names("machines")
TABLE = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV2\tNV1\nGPU1\tNV2\tX\tSYS\nGPU2\tNV1\tSYS\tX\n"
INDENTED = "".join(f"  {line}\n" for line in TABLE.expandtabs(6).splitlines())
PAIR = (("X", "SYS"), ("SYS", "X"))


def passed(machine, src, dst):
    """Return the names of the resources that copies between two devices share."""
    links = links_of(machine)
    return [links.resources[number][0] for number, _ in links.ways[src, dst].shared]


@pytest.mark.parametrize("name", MACHINES)
def test_presets_load_without_warnings_and_survive_yaml(name):
    machine = Topology.load(name)
    assert machine.warnings == ()
    assert from_text(machine.to_yaml(), "") == machine
    some = machine.subset(range(0, len(machine), 2))
    assert links_of(from_text(some.to_yaml(), "")) == links_of(some)


# ---- links and their shared resources -----------------------------------------------------------------------


def test_a_link_has_the_speed_of_its_nvlinks_or_pcie_path():
    machine = Topology.load("dgx-1v")
    assert machine.bandwidth(0, 3) == 2 * machine.bandwidth(0, 1) == pytest.approx(45.6e9)
    assert machine.bandwidth(0, 5) < machine.bandwidth(0, 1) and machine.kinds[0][5] == "SYS"
    assert sorted(links_of(machine).ways) == [(i, j) for i in range(8) for j in range(8) if i != j]


def test_many_nvlinks_of_one_gpu_mean_a_switch():
    assert "GPU1 NVSwitch in" in passed(Topology.load("dgx-a100"), 0, 1)
    assert passed(Topology.load("hgx-a100-4"), 0, 1) == []
    assert "GPU1 NVSwitch in" in passed(Topology.load("dgx-2").subset(range(3)), 0, 1)


def test_copies_share_the_uplink_of_a_switch_and_the_bus():
    machine = Topology.load("pcie-sockets")
    assert passed(machine, 0, 4)[:2] == ["GPU0 out", "GPU4 in"]
    assert {"GPU0+GPU1+GPU2+GPU3 out", "GPU4+GPU5+GPU6+GPU7 in"} <= set(passed(machine, 0, 4))
    assert passed(machine, 0, 1) == ["GPU0 out", "GPU1 in"]


@pytest.mark.parametrize(
    "cpus, together",
    [
        (["0-71", "0-71", "72-143", "72-143"], True),
        (["0-71", "", "72-143", ""], False),
        (["0-71", "N/A", "72-143", "N/A"], False),
        (["N/A N/A", "N/A N/A", "0-71", "72-143"], False),
        (["", "", "", ""], False),
    ],
)
def test_a_socket_is_known_from_its_cpus_alone(cpus, together):
    assert ("GPU0+GPU1 out" in passed(all_of("SYS", 4, cpus=cpus), 0, 2)) == together


def test_a_staged_copy_passes_all_switches_and_the_hosts_memory():
    rows = ("X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PIX", "SYS SYS PIX X")
    machine = of_kinds(*rows, staged=["PIX", "GPU0-GPU2"], speeds={"pcie": 24e9})
    assert passed(machine, 0, 1) == ["GPU0 out", "GPU1 in", "host", "GPU0+GPU1 out", "GPU0+GPU1 in"]
    assert "host" in passed(machine, 2, 0) and "host" not in passed(machine, 1, 2)
    assert dict(links_of(machine).resources)["host"] == machine.speeds.staged
    assert machine.latency(0, 1) == machine.latency(1, 2) + machine.speeds.staged_latency


def test_shared_speeds_of_a_file_replace_the_usual_ones():
    machine = of_kinds("X PIX SYS", "PIX X SYS", "SYS SYS X", shared={"GPU0+GPU1": 9e9})
    resources = dict(links_of(machine).resources)
    assert resources["GPU0+GPU1 out"] == resources["GPU0+GPU1 in"] == 9e9


# ---- models of GPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, nvlink",
    [
        (["X NV1 NV1", "NV1 X NV1", "NV1 NV1 X"], 18.4e9),
        (["X NV4", "NV4 X"], 13e9),
        (["X NV2 NV1", "NV2 X NV2", "NV1 NV2 X"], 22.8e9),
        (["X NV12", "NV12 X"], 22e9),
        (["X NV18", "NV18 X"], 21e9),
        (["X NV1", "NV1 X"], 22.8e9),
        (["X NV4 NV4", "NV4 X NV4", "NV4 NV4 X"], 22e9),
        (["X NV4 SYS", "NV4 X SYS", "SYS SYS X"], 13e9),
        (["X NV5", "NV5 X"], 22e9),
    ],
    ids=[
        "P100",
        "A6000",
        "V100",
        "A100",
        "H100",
        "two V100",
        "mesh of A100",
        "A6000 and one more",
        "NV5",
    ],
)
def test_the_gpu_is_guessed_from_its_links(rows, nvlink):
    assert of_kinds(*rows).speeds.nvlink == nvlink


@pytest.mark.parametrize(
    "gpu, pcie",
    [
        ("NVIDIA H100 NVL", 48e9),
        ("NVIDIA RTX 6000 Ada Generation", 24e9),
        ("Quadro RTX 6000", 12e9),
        ("NVIDIA RTX 6000D", 48e9),
        ("NVIDIA RTX 4500 Ada Generation", 24e9),
        ("NVIDIA RTX A4500", 24e9),
        ("GeForce RTX 309...", 24e9),
        ("GeForce GTX 1080 Ti", 12e9),
    ],
)
def test_names_that_resemble_each_other_have_their_ports(gpu, pcie):
    assert guess_speeds(PAIR, gpu).pcie == pcie


@pytest.mark.parametrize(
    "gpu, staged",
    [
        ("NVIDIA GeForce RTX 4090 D", True),
        ("RTX 3090", True),
        ("RTX 2080 Ti", True),
        ("GeForce RTX 208...", True),
        ("RTX 5000 Ada", False),
        ("Quadro RTX 4000", False),
        ("GeForce GTX 1080 Ti", False),
    ],
)
def test_geforce_cards_have_peer_access_over_nvlink_only(gpu, staged):
    machine = of_kinds("X NV4 PHB", "NV4 X PHB", "PHB PHB X", gpu=gpu)
    assert (machine.is_staged(0, 1), machine.is_staged(0, 2)) == (False, staged)
    assert links_of(from_text(machine.to_yaml(), "")) == links_of(machine)


GUESS = "peer access assumed; GeForce cards have none: add `nvidia-smi -L`"
UNNAMED = "no model of GPU is named; speeds as of GPUs with PCIe ports of 12 GB/s (guessed from the links)"


@pytest.mark.parametrize(
    "machine, warnings",
    [
        (all_of("PHB", 2), (GUESS, UNNAMED)),
        (all_of("PHB", 2, staged=[]), (UNNAMED,)),
        (all_of("PHB", 2, gpu="NVIDIA L40S"), ()),
        (all_of("PHB", 2, speeds={"pcie": 24e9}, staged=["PHB"]), ()),
        (
            all_of("NV12", 2),
            ("no model of GPU is named; speeds as of A100 (guessed from the links)",),
        ),
        (
            all_of("NV18", 2, gpu="NVIDIA R100"),
            ("the model 'NVIDIA R100' is not known; speeds as of H100 (guessed from the links)",),
        ),
    ],
    ids=["nothing", "access", "named", "measured", "NVLinks only", "unknown model"],
)
def test_guesses_are_warnings_and_peer_access_comes_first(machine, warnings):
    assert machine.warnings == warnings


def test_different_models_give_a_warning_and_no_model():
    several = from_text("GPU 0: Tesla V100 (UUID: a)\nGPU 1: Tesla K80 (UUID: b)\n" + TABLE, "")
    assert several.gpu == "" and "several models (Tesla K80, Tesla V100)" in several.warnings[-1]
    geforce = from_text("GPU 0: RTX 3090 (UUID: a)\nGPU 1: RTX 4090 (UUID: b)\n" + TABLE, "")
    assert geforce.is_staged(1, 2) and not any(
        "peer access" in warning for warning in geforce.warnings
    )
    alike = from_text("GPU 0: NVIDIA L40S (UUID: a)\nGPU 1: NVIDIA L40 (UUID: b)\n" + TABLE, "")
    assert (alike.gpu, alike.warnings) == ("NVIDIA L40", ())


# ---- files -------------------------------------------------------------------------------------------


def dgx_1v_with(tmp_path, keys):
    """Write the file of a DGX-1V with these keys."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"{keys}\nmatrix: |2\n{textwrap.indent(Topology.load('dgx-1v').table(), '  ')}",
        encoding="utf-8",
    )
    return str(path)


def test_a_file_has_speeds_of_parts_kinds_and_pairs(tmp_path):
    keys = "speeds: {copy_latency: 5e-6}\nlinks: {NV1: 20e9, GPU3-GPU0: 44e9}\nstarts: {GPU0-GPU1: 7e-6}"
    machine = Topology.load(dgx_1v_with(tmp_path, keys))
    assert machine.bandwidth(0, 1) == 20e9
    assert machine.bandwidth(0, 3) == machine.bandwidth(3, 0) == 44e9
    assert machine.bandwidth(0, 4) == pytest.approx(45.6e9)
    assert (machine.latency(0, 4), machine.latency(1, 0)) == (5e-6, 7e-6)
    assert links_of(from_text(machine.to_yaml(), "")) == links_of(machine)
    half = machine.subset([3, 0, 4])
    assert half.kinds == (("X", "NV2", "SYS"), ("NV2", "X", "NV2"), ("SYS", "NV2", "X"))
    assert half.links == (("GPU3-GPU0", 44e9),) and half.starts == ()


@pytest.mark.parametrize(
    "devices, fault", [([0, 8], "8"), ([1, 1], "1 twice"), ([-1], "-1"), ([], "none")]
)
def test_a_subset_of_unknown_or_repeated_devices_is_an_error(devices, fault):
    with pytest.raises(
        HierAllreduceError, match=f"devices 0 to 7, each once; cannot take {fault}$"
    ):
        Topology.load("dgx-1v").subset(devices)


@pytest.mark.parametrize(
    "text, message",
    [
        ("gpu: [V100]", "gpu: expected a name, in quotes if it is a number, not .'V100'."),
        ("speed: {}", "'speed' is unknown; did you mean 'speeds'"),
        ("speeds: {nvlnk: 1}", "'nvlnk' is unknown; did you mean 'nvlink'"),
        (
            "speeds: {pcie: 12}",
            "speeds: pcie: expected bytes/s from 1e6 to 1e15 .12 GB/s are 12e9.",
        ),
        ("speeds: {kernel: 10}", "speeds: kernel: expected seconds from 0 to 1 .10 µs are 10e-6."),
        ("links: {NVL: 1e9}", "links: 'NVL' is neither a kind"),
        (
            "links: {GPU0-GPU9: 1e9}",
            "links: 'GPU0-GPU9' is neither a kind of link .* nor a pair of devices",
        ),
        ("links: {GPU0-GPU1: fast}", "links: GPU0-GPU1: expected bytes/s from 1e6 to 1e15"),
        ("links: {NV1: .nan}", "NV1: expected bytes/s from 1e6 to 1e15"),
        ("links: fast", "links: expected `key: value` lines, not 'fast'"),
        ("staged: [NV3x]", "staged: 'NV3x' is neither"),
        ("staged: PIX", "staged: expected a list of names, not 'PIX'"),
        ("shared: {GPU0+GPU9: 1e9}", "shared: 'GPU0.GPU9' is neither"),
        ("[1, 2", "not readable as YAML"),
        ("gpu: 2024-13-45", "not readable as YAML"),
    ],
)
def test_an_invalid_key_is_an_error_of_one_line_that_names_the_file(tmp_path, text, message):
    path = dgx_1v_with(tmp_path, text)
    with pytest.raises(HierAllreduceError, match="mine.yaml: .*" + message) as caught:
        Topology.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "name: x\nmatrix: 3\n",
            r"expected a `matrix: \|2`: .* two blanks before each line; or into a file",
        ),
        (
            f"name: x\nmatrix: |\n{TABLE}",
            r"not readable as YAML.*below `matrix: \|2`, with two blanks",
        ),
        (f"gpu: P100\nMatrix: |2\n{INDENTED}", "'Matrix' is unknown; did you mean 'matrix'"),
        ("matrix: |\n  GPU0 GPU1\n  GPU0 X NV1\n", "row GPU1 is missing"),
        ("4 GPUs\n", "expected `key: value` lines, not str"),
        (TABLE, r"not readable as YAML: .*whose name does not end in \.yaml"),
    ],
)
@pytest.mark.parametrize("ending", [".yaml", ".YML"])
def test_an_invalid_machine_file_is_an_error_that_names_it(tmp_path, text, message, ending):
    path = tmp_path / f"machine{ending}"
    path.write_text(text)
    with pytest.raises(
        HierAllreduceError, match=f"machine{re.escape(ending)}.*" + message
    ) as caught:
        Topology.load(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"gpu: P100\nmatrix: |2\n{INDENTED}",
        "gpu: P100\nmatrix: |2\n"
        + "".join(f"  {line}\n" for line in TABLE.splitlines()),  # tabs and all
        f"gpu: P100\nmatrix: |2\n  \x1b[4m{INDENTED[2:]}\x1b[0m",  # the header underlined, as it comes
    ],
)
def test_a_matrix_may_be_written_with_tabs_or_escapes(text):
    machine = from_text(text, "")
    assert (machine.gpu, machine.kinds[0], machine.speeds.nvlink) == (
        "P100",
        ("X", "NV2", "NV1"),
        18.4e9,
    )


@pytest.mark.parametrize("ending", [".txt", ".log", ""])
@pytest.mark.parametrize(
    "before", ["", "$ nvidia-smi topo -m\n", "name: a host of ours\ngpu: P100\n\n"]
)
def test_a_table_is_read_from_any_other_file(tmp_path, ending, before):
    path = tmp_path / f"topo{ending}"
    path.write_bytes(f"{before}{TABLE}".replace("\n", "\r\n").encode())
    assert Topology.load(str(path)).kinds == from_text(TABLE, "test").kinds


def test_a_machines_yaml_is_known_by_its_key_in_any_file(tmp_path):
    text = f"gpu: P100\nlinks: {{NV1: 17e9}}\nmatrix: |2\n{INDENTED}"
    for name in ("machine.txt", "machine.yaml"):
        (tmp_path / name).write_text(text)
    loaded = Topology.load(str(tmp_path / "machine.txt"))
    assert loaded == Topology.load(str(tmp_path / "machine.yaml")) == from_text(text, "machine")
    assert loaded.links == (("NV1", 17e9),)


def test_an_unknown_machine_names_the_nearest_preset():
    with pytest.raises(HierAllreduceError, match="did you mean 'dgx-1v'"):
        Topology.load("dgx1v")
    with pytest.raises(
        HierAllreduceError, match="expected the name of one of the machines, or a file's path"
    ):
        Topology.load(TABLE)


def test_a_pipe_is_read_like_a_file(tmp_path):
    """``hier-allreduce plan <(nvidia-smi topo -m)``"""
    pipe = tmp_path / "pipe"
    os.mkfifo(str(pipe))
    writer = threading.Thread(target=pipe.write_text, args=(TABLE,), daemon=True)
    writer.start()
    machine = Topology.load(str(pipe))
    writer.join()
    assert machine.kinds == from_text(TABLE, "").kinds


# ---- the running machine -----------------------------------------------------------------------------


LISTING = "GPU 0: Tesla V100 (UUID: GPU-aa)\nGPU 1: Tesla V100 (UUID: GPU-bb)\nGPU 2: Tesla V100 (UUID: GPU-ab)\n"
ACCESS = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tOK\n GPU1\tOK\tX\tCNS\n GPU2\tOK\tCNS\tX\n"


@pytest.fixture
def nvidia_smi(monkeypatch):
    """A machine with three GPUs, of which CUDA shows all; the calls of its nvidia-smi."""
    answers = {"-L": LISTING, "topo -m": TABLE, "topo -p2p r": ""}
    calls = []

    def run(command, timeout, **_):
        calls.append((" ".join(command[1:]), timeout))
        answer = answers[calls[-1][0]]
        if answer is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0, answer.encode())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    detect._printed.cache_clear()
    yield answers, calls
    detect._printed.cache_clear()


def found(gpus=None):
    """Return this machine, which is there."""
    machine = detect.this_machine(gpus)
    assert machine is not None
    return machine


def test_nvidia_smi_is_asked_once_in_a_process_and_for_five_seconds(nvidia_smi, monkeypatch):
    for visible in ("0,1,2", "2,1", "GPU-bb"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(found()) == len(visible.split(","))
    assert [call for call, _ in nvidia_smi[1]] == ["-L", "topo -m", "topo -p2p r"]
    assert all(timeout <= 5 for _, timeout in nvidia_smi[1])


def test_nvidia_smi_that_hangs_or_is_missing_counts_as_none(nvidia_smi, monkeypatch):
    nvidia_smi[0]["topo -m"] = None
    assert detect.this_machine() is None
    detect._printed.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert detect.this_machine() is None


def test_nvidia_smi_is_asked_for_peer_access(nvidia_smi):
    nvidia_smi[0]["topo -p2p r"] = ACCESS
    machine = found()
    assert (machine.gpu, machine.staged, machine.warnings) == ("Tesla V100", ("GPU1-GPU2",), ())


@pytest.mark.parametrize(
    "visible, gpus, devices",
    [
        (None, None, ("GPU0", "GPU1", "GPU2")),
        (None, [2, 0], ("GPU2", "GPU0")),
        ("2,1", [0, 1], ("GPU2", "GPU1")),
        ("GPU-bb", None, ("GPU1",)),
        ("0,-1,1", None, ("GPU0",)),
    ],
)
def test_this_machine_as_cuda_shows_it(nvidia_smi, monkeypatch, visible, gpus, devices):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert found(gpus).devices == devices


@pytest.mark.parametrize("visible", ["-1", "", "NoDevFiles"])
def test_hidden_gpus_are_no_machine(nvidia_smi, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect.this_machine() is None


def test_a_uuid_of_several_gpus_is_an_error(nvidia_smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    with pytest.raises(HierAllreduceError, match="'GPU-a' is neither"):
        detect.this_machine()
