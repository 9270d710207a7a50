"""Topologies: what links and shared resources a table means, YAML in and out, presets, calibration, detection."""

import json
import os
import re
import subprocess
import textwrap
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.machines import of_kinds

from hier_allreduce import presets
from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.topology import calibrated, detect, flat_host, from_text, guessed, links, load, subset
from hier_allreduce.topology.contention import crowds, resources
from hier_allreduce.topology.gpus import GPUS, guess_speeds
from hier_allreduce.topology.topology import from_yaml

MACHINES = presets.names("machines")
TABLE = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV2\tNV1\nGPU1\tNV2\tX\tSYS\nGPU2\tNV1\tSYS\tX\n"
INDENTED = "".join(f"  {line}\n" for line in TABLE.expandtabs(6).splitlines())


@pytest.mark.parametrize("name", MACHINES)
def test_presets_load_without_warnings_and_survive_yaml(name):
    machine = load(name)
    assert machine.warnings == ()
    assert from_yaml(machine.to_yaml()) == machine


def test_presets_show_their_matrix():
    for name in MACHINES:
        text = presets.find("machines", name).read_text(encoding="utf-8")
        assert "matrix: |" in text and "GPU0" in text


def test_a_link_has_the_speed_of_its_nvlinks_or_pcie_path():
    machine = load("dgx-1v")
    assert machine.link(0, 3).bandwidth == 2 * machine.link(0, 1).bandwidth == pytest.approx(45.6e9)
    assert machine.link(0, 5).kind == "SYS" and machine.link(0, 5).bandwidth < machine.link(0, 1).bandwidth


def test_every_ordered_pair_has_its_link():
    machine = load("dgx-1p")
    assert [(link.src, link.dst) for link in machine.links] == [(i, j) for i in range(8) for j in range(8) if i != j]
    assert all(machine.link(link.src, link.dst) is link for link in machine.links)


def test_many_nvlinks_of_one_gpu_mean_a_switch():
    assert "GPU1 NVSwitch in" in load("dgx-a100").link(0, 1).through
    assert load("hgx-a100-4").link(0, 1).through == ()


def test_a_port_is_as_fast_as_the_fastest_link_behind_it():
    """One slow link slows down its own copies only."""
    ports = dict(calibrated(load("dgx-a100"), {"links": {"GPU0-GPU7": 5e9}}).shared)
    assert ports["GPU0 NVSwitch out"] == ports["GPU7 NVSwitch in"] == load("dgx-a100").link(0, 7).bandwidth


def test_copies_share_the_uplink_of_a_switch_and_the_bus():
    through = load("pcie-sockets").link(0, 4).through
    assert "uplink of GPU0+GPU1+GPU2+GPU3 out" in through
    assert "uplink of GPU4+GPU5+GPU6+GPU7 in" in through
    assert "socket of GPU0+GPU1+GPU2+GPU3 out" in through
    assert not [name for name in load("pcie-sockets").link(0, 1).through if " of " in name]


def test_copies_that_fill_an_uplink_hold_both_senders():
    """One alone uses 77 % of it. All four senders are busy in both cases, and so is what crowds count."""
    machine = load("pcie-sockets")
    inside, far = machine.link(0, 1).bandwidth, machine.link(0, 4).bandwidth
    uplink = dict(machine.shared)["uplink of GPU0+GPU1+GPU2+GPU3 out"]
    from_first_socket = [crowd for crowd in crowds(machine) if (0, 4) in crowd and (4, 0) not in crowd]
    two_cross = {(0, 4): uplink / 2, (1, 5): uplink / 2, (2, 3): inside, (3, 2): inside}
    one_crosses = {(0, 4): far, (1, 0): inside, (2, 3): inside, (3, 2): inside}
    for rates in (two_cross, one_crosses):
        used = [sum(crowd[pair] * rate for pair, rate in rates.items()) for crowd in from_first_socket]
        assert max(used) == pytest.approx(1.0)


def test_a_port_that_one_copy_fills_crowds_nobody():
    assert crowds(load("dgx-a100")) == crowds(load("hgx-a100-4")) == ()


def test_sockets_are_known_from_cpu_affinity():
    rows = ["GPU0 X SYS SYS SYS 0-7", "GPU1 SYS X SYS SYS 0-7", "GPU2 SYS SYS X SYS 8-15", "GPU3 SYS SYS SYS X 8-15"]
    machine = from_text("\n".join(["GPU0 GPU1 GPU2 GPU3 CPU Affinity", *rows]), "far")
    assert "socket of GPU0+GPU1 out" in machine.link(0, 2).through
    assert "socket of GPU0+GPU1 out" not in machine.link(0, 1).through


@pytest.mark.parametrize(
    "cpus, together",
    [
        (["0-71", "0-71", "72-143", "72-143"], True),
        (["0-71", "", "72-143", ""], False),
        (["0-71", "N/A", "72-143", "N/A"], False),
        (["NUMA 0", "NUMA 0", "NUMA 1", "NUMA 1"], True),
    ],
)
def test_a_socket_is_known_from_its_cpus_alone(cpus, together):
    machine = of_kinds("X SYS SYS SYS", "SYS X SYS SYS", "SYS SYS X SYS", "SYS SYS SYS X", cpus=cpus)
    assert ("socket of GPU0+GPU1 out" in machine.link(0, 2).through) == together
    assert "socket of GPU1+GPU3 out" not in machine.link(1, 2).through


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
    ids=["P100", "A6000", "V100", "A100", "H100", "two V100", "mesh of A100", "A6000 and one more", "NV5"],
)
def test_the_gpu_is_guessed_from_its_links(rows, nvlink):
    assert of_kinds(*rows).speeds.nvlink == nvlink


@pytest.mark.parametrize(
    "gpu, pcie",
    [
        ("Tesla P100-SXM2-16GB", 12e9),
        ("NVIDIA A100 80GB PCIe", 24e9),
        ("NVIDIA A10", 24e9),
        ("NVIDIA H100 NVL", 48e9),
        ("NVIDIA H20", 48e9),
        ("NVIDIA L20", 24e9),
        ("NVIDIA GeForce RTX 5090", 48e9),
        ("NVIDIA GeForce RTX 4090", 24e9),
        ("NVIDIA GeForce RTX 3060", 24e9),
        ("NVIDIA RTX 6000 Ada Generation", 24e9),
        ("Quadro RTX 6000", 12e9),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 48e9),
        ("NVIDIA RTX 6000D", 48e9),
        ("NVIDIA RTX PRO 4500 Blackwell", 48e9),
        ("NVIDIA RTX 4500 Ada Generation", 24e9),
        ("NVIDIA RTX A4500", 24e9),
        ("NVIDIA B200", 48e9),
        ("NVIDIA GH200 480GB", 48e9),
        ("Tesla K80", 12e9),
        ("GeForce GTX 1080 Ti", 12e9),
    ],
)
def test_a_known_model_decides_the_port(gpu, pcie):
    assert guess_speeds((("X", "SYS"), ("SYS", "X")), gpu).pcie == pcie


PAGE = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")


def documented_speeds():
    """The table of docs/cost-model.md: the models of each row, and its numbers."""
    rows = PAGE.split("| GPU | NVLinks |")[1].split("\n\n")[0].splitlines()[2:]
    for models, *numbers in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        yield models.split(", "), [0.0 if number == "–" else float(number) for number in numbers]


def test_the_documented_speeds_are_those_of_each_model():
    *known, (others, (_, _, *unknown)) = documented_speeds()
    assert [numbers for _, numbers in known] == [list(gpu[1:]) for gpu in GPUS]
    for models, (_, nvlink, pcie, memory) in known:
        for model in models:
            speeds = guess_speeds((("X", "SYS"), ("SYS", "X")), model)
            assert [speeds.nvlink, speeds.pcie, speeds.memory] == [1e9 * nvlink, 1e9 * pcie, 1e9 * memory], model
    speeds = guess_speeds((("X", "SYS"), ("SYS", "X")), others[0])
    assert [speeds.pcie, speeds.memory] == [1e9 * number for number in unknown]
    assert f"or than {links._MOST_NVLINKS} where that is unknown" in PAGE


def test_the_documented_machine_loads():
    (text,) = [text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) if "matrix" in text]
    machine = from_yaml(text)
    assert (machine.name, machine.gpu, machine.kinds[0]) == ("workstation", "RTX 3090", ("X", "NV4", "PHB", "PHB"))
    assert [machine.link(*pair).bandwidth for pair in ((0, 1), (2, 3), (1, 2))] == [52e9, 39e9, 21e9 * 0.93]


@pytest.mark.parametrize(
    "rows, like",
    [
        (["X NV18", "NV18 X"], "H100 GPUs"),
        (["X NV12", "NV12 X"], "A100 GPUs"),
        (["X SYS", "SYS X"], "GPUs with PCIe ports of 12 GB/s"),
    ],
)
def test_an_unknown_model_gives_a_warning_and_guessed_speeds(rows, like):
    machine = of_kinds(*rows, gpu="NVIDIA R100")
    assert (machine.speeds, machine.links) == (of_kinds(*rows).speeds, of_kinds(*rows).links)
    assert machine.gpu == "NVIDIA R100"
    assert machine.warnings == (f"the model 'NVIDIA R100' is not known; speeds as of {like} (guessed from the links)",)
    assert from_yaml(machine.to_yaml()) == machine
    assert calibrated(machine, {"speeds": {"kernel": 1e-6}}).warnings == machine.warnings
    assert calibrated(machine, {"gpu": "V100"}).warnings == ()
    assert calibrated(machine, {"speeds": {"nvlink": 30e9, "pcie": 30e9}}).warnings == ()


def test_a_calibration_is_checked_like_a_file():
    with pytest.raises(HierAllreduceError, match=r"^'link' is unknown; did you mean 'links'"):
        calibrated(load("dgx-1v"), {"link": {"NV1": 20e9}})
    with pytest.raises(HierAllreduceError, match=r"^links: NV1: expected bytes/s"):
        calibrated(load("dgx-1v"), {"links": {"NV1": 20}})


def dgx_1v_with(tmp_path, keys):
    """Write the file of a DGX-1V with these keys."""
    path = tmp_path / "own.yaml"
    path.write_text(f"{keys}\nmatrix: |2\n{textwrap.indent(load('dgx-1v').table(), '  ')}", encoding="utf-8")
    return str(path)


def test_a_file_gives_speeds_of_parts_kinds_and_pairs(tmp_path):
    machine = load(dgx_1v_with(tmp_path, "speeds: {copy_latency: 5e-6}\nlinks: {NV1: 20e9, GPU3-GPU0: 44e9}"))
    assert machine.link(0, 1).bandwidth == 20e9
    assert machine.link(0, 3).bandwidth == machine.link(3, 0).bandwidth == 44e9
    assert machine.link(0, 4).bandwidth == pytest.approx(45.6e9)
    assert machine.link(0, 4).latency == 5e-6
    assert from_yaml(machine.to_yaml()) == machine


@pytest.mark.parametrize(
    "text, message",
    [
        ("gpu: [V100]", "gpu: expected a name, in quotes if it is a number, not .'V100'."),
        ("links: 0", "links: expected `key: value` lines, not 0"),
        ("speed: {}", "'speed' is unknown; did you mean 'speeds'"),
        ("speeds: {nvlnk: 1}", "'nvlnk' is unknown; did you mean 'nvlink'"),
        ("links: {NVL: 1e9}", "'NVL' is neither a kind"),
        ("links: {GPU0-GPU9: 1e9}", "'GPU0-GPU9' is neither"),
        ("links: {NV1: fast}", "NV1: expected bytes/s from 1e6 to 1e15"),
        ("links: {NV1: -1}", "NV1: expected bytes/s from 1e6 to 1e15"),
        ("links: {NV1: 1e400}", "NV1: expected bytes/s from 1e6 to 1e15"),
        (f"links: {{NV1: 1{'0' * 400}}}", "NV1: expected bytes/s from 1e6 to 1e15"),
        ("links: fast", "links: expected `key: value` lines, not 'fast'"),
        ("speeds: [1]", r"speeds: expected `key: value` lines, not \[1\]"),
        *[
            (f"speeds: {{{name}: {value}}}", rf"speeds: {name}: expected bytes/s from 1e6 to 1e15 .12 GB/s are 12e9.")
            for name in ("nvlink", "pcie", "memory", "host")
            for value in (".inf", ".nan", "12", "1e300")
        ],
        *[
            (f"speeds: {{{name}: {value}}}", rf"speeds: {name}: expected seconds above 0, up to 1 .10 µs are 10e-6.")
            for name in ("copy_latency", "kernel")
            for value in (".inf", ".nan", "10", "0")
        ],
        ("[1, 2", "not readable as YAML"),
        ("gpu: 2024-13-45", "not readable as YAML .month must be in 1..12"),
    ],
)
def test_an_invalid_speed_is_an_error_that_names_the_file(tmp_path, text, message):
    path = dgx_1v_with(tmp_path, text)
    with pytest.raises(HierAllreduceError, match="own.yaml.*" + message) as caught:
        load(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("name: x\nmatrix: 3\n", r"expected a `matrix: \|2`: what .* two blanks before each line; or into a file"),
        (f"name: x\nmatrix: |\n{INDENTED}", r"not readable as YAML.*below `matrix: \|2`, with two blanks"),
        (f"name: x\nmatrix: |\n{TABLE}", r"not readable as YAML.*below `matrix: \|2`, with two blanks"),
        (f"name: x\n'Matrix' : |\n{TABLE}", r"not readable as YAML.*below `matrix: \|2`, with two blanks"),
        (f"gpu: P100\nMatrix: |2\n{INDENTED}", "'Matrix' is unknown; did you mean 'matrix'"),
        (f"gpu: P100\nMATRIX: |2\n{INDENTED}", "'MATRIX' is unknown; did you mean 'matrix'"),
        (f"gpu: [P100]\nmatrix: |2\n{INDENTED}", r"gpu: expected a name, in quotes if it is a number, not \['P100'\]"),
        (f"gpu: 5\nmatrix: |2\n{INDENTED}", "gpu: expected a name, in quotes if it is a number, not 5"),
        (f"name: [x]\nmatrix: |2\n{INDENTED}", r"name: expected a name, in quotes if it is a number, not \['x'\]"),
        (f"name: 2024-13-45\nmatrix: |2\n{INDENTED}", "not readable as YAML .month must be in 1..12"),
        ("matrix: |\n  GPU0 GPU1\n  GPU0 X NV1\n  GPU1 NV1 X\nlatency: 3\n", "'latency' is unknown"),
        ("matrix: |\n  GPU0 GPU1\n  GPU0 X NV1\n", "row GPU1 is missing"),
        (f"gpu: P100\nmatrx: |2\n{INDENTED}", "'matrx' is unknown; did you mean 'matrix'"),
        (f"matrx: |2\r\n{INDENTED}", "'matrx' is unknown; did you mean 'matrix'"),
        (f"gpu: P100\ntopology: |2\n{INDENTED}", "'topology' is unknown; there are name, matrix"),
        (f"gpu: P100\nmatrx: |\n{TABLE}", r"not readable as YAML.*below `matrix: \|2`"),
        (f"gpu: P100\nmatrx: |2\n  \x1b[4m{INDENTED[2:]}\x1b[0m", "'matrx' is unknown; did you mean 'matrix'"),
        (json.dumps({"gpu": "P100", "matrx": TABLE}), "'matrx' is unknown; did you mean 'matrix'"),
        ("name: x\n", r"expected a `matrix: \|2`"),
        ("name: [x\n", "not readable as YAML"),
        ("name: x\nlinks: {GPU0-GPU1: 3", "not readable as YAML"),
    ],
)
def test_an_invalid_machine_file_is_an_error_that_names_it(tmp_path, text, message):
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(HierAllreduceError, match="machine.yaml.*" + message) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"gpu: P100\nmatrix: |2\n{INDENTED}",
        "gpu: P100\nmatrix: |2\n" + "".join(f"  {line}\n" for line in TABLE.splitlines()),  # tabs and all
        f"gpu: P100\n'matrix': |2\n{INDENTED}",
        json.dumps({"gpu": "P100", "matrix": TABLE}),
        f"gpu: P100\nmatrix: |2\n  \x1b[4m{INDENTED[2:]}\x1b[0m",  # the header underlined, as it comes
    ],
)
def test_a_matrix_may_be_written_in_several_ways(text):
    machine = from_yaml(text)
    assert (machine.gpu, machine.kinds[0], machine.speeds.nvlink) == ("P100", ("X", "NV2", "NV1"), 18.4e9)


@pytest.mark.parametrize(
    "text, message",
    [
        ("devices: 4\n", "'devices' is unknown"),
        ("4 GPUs\n", "expected `key: value` lines, not str"),
        ("devices: [4\n", "not readable as YAML"),
    ],
)
def test_a_file_called_yaml_without_a_table_is_answered_as_yaml(tmp_path, text, message):
    for ending in (".yaml", ".YML"):
        path = tmp_path / f"machine{ending}"
        path.write_text(text)
        with pytest.raises(HierAllreduceError, match=message):
            load(str(path))


@pytest.mark.parametrize("ending", [".txt", ".log", ""])
@pytest.mark.parametrize("before", ["", "$ nvidia-smi topo -m\n", "name: a host of ours\ngpu: P100\n\n", "Matrix:\n"])
def test_a_table_is_read_from_any_other_file(tmp_path, ending, before):
    path = tmp_path / f"topo{ending}"
    path.write_bytes(f"{before}{TABLE}".replace("\n", "\r\n").encode())
    assert load(str(path)).kinds == from_text(TABLE, "test").kinds


def test_what_a_files_name_says_is_not_guessed_from_its_text(tmp_path):
    yaml, table = tmp_path / "table.yaml", tmp_path / "machine.txt"
    yaml.write_text(TABLE)
    table.write_text(f"gpu: P100\nmatrix: |2\n{INDENTED}")
    with pytest.raises(HierAllreduceError, match=r"not readable as YAML .*whose name does not end in \.yaml"):
        load(str(yaml))
    with pytest.raises(HierAllreduceError, match=r"must stand in a file whose name ends in \.yaml"):
        load(str(table))


def test_an_unknown_machine_names_the_nearest_preset():
    with pytest.raises(HierAllreduceError, match="did you mean 'dgx-1v'"):
        load("dgx1v")


@pytest.mark.parametrize("text", [TABLE, "\n" + 1000 * TABLE], ids=["short", "too long for a file's name"])
def test_a_table_instead_of_a_file_name_is_an_error_that_says_so(text):
    with pytest.raises(
        HierAllreduceError, match=r"text that begins with '.*GPU0.*write the text into a file"
    ) as caught:
        load(text)
    assert len(str(caught.value)) < 200
    with pytest.raises(HierAllreduceError, match="neither a file nor one of the machines"):
        load("GPU0" * 1000)


MEASURED = """
measured: {date: 2026-11-22, tensorflow: 2.21.0, hier_allreduce: 0.1.0, devices: [Tesla V100, Tesla V100, Tesla V100]}
links: {GPU0-GPU1: 10e9, GPU0-GPU2: 8e9, GPU1-GPU2: 8e9}
shared:
  way into GPU2: {speed: 9e9, copies: {GPU0: [GPU2], GPU1: [GPU2]}}
matrix: |2
        GPU0 GPU1 GPU2
  GPU0  X    PIX  SYS
  GPU1  PIX  X    SYS
  GPU2  SYS  SYS  X
"""


def test_what_copies_share_can_be_given_instead_of_the_matrix():
    machine = from_yaml(MEASURED)
    assert machine.shared == (("way into GPU2", 9e9),)
    assert [machine.link(src, 2).through for src in (0, 1)] == [("way into GPU2",)] * 2
    assert machine.link(0, 1).through == ()
    assert machine.measured.date == "2026-11-22"
    assert guessed(machine) == ""
    assert from_yaml(machine.to_yaml()) == machine


def test_a_part_of_a_measured_machine_keeps_what_it_shares():
    part = subset(from_yaml(MEASURED), [2, 0])
    assert part.ways[0].copies == (("GPU0", "GPU2"),)
    assert part.measured
    assert from_yaml(part.to_yaml()) == part


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("copies: {GPU0: [GPU2], GPU1: [GPU2]}", "copies: [GPU0]", "shared: way into GPU2: copies: expected for each"),
        ("GPU1: [GPU2]}", 'GPU1: ["\\0"]}', r"GPU1 to \x00: no such pair"),  # a terminal would obey a control character
        ("GPU1: [GPU2]}", "GPU7: [GPU2]}", "GPU7 to GPU2: no such pair of devices of this machine, which has GPU0"),
        ("speed: 9e9, ", "", "shared: way into GPU2: speed is missing"),
        ("tensorflow: 2.21.0, ", "", "measured: tensorflow is missing"),
        ("[Tesla V100, Tesla V100, Tesla V100]", "3", "measured: devices: expected a list of names, in quotes, not 3"),
        ("[Tesla V100, Tesla", "[V100 UUID: 1, Tesla", "devices: expected a list of names, in quotes, not [{"),
    ],
)
def test_an_invalid_machine_is_an_error_that_names_the_key(old, new, message):
    assert old in MEASURED
    with pytest.raises(HierAllreduceError, match=re.escape(message)):
        from_yaml(MEASURED.replace(old, new))


def test_a_pair_cannot_have_two_speeds():
    pair = "matrix: |2\n" + INDENTED + "links: {{GPU0-GPU1: 40e9, GPU1-GPU0: {}}}\n"
    with pytest.raises(HierAllreduceError, match="'GPU0-GPU1' and 'GPU1-GPU0' are the same pair"):
        from_yaml(pair.format("1e9"))
    both = from_yaml(pair.format("40e9"))
    assert both.link(0, 1).bandwidth == both.link(1, 0).bandwidth == 40e9


def test_copies_of_a_sender_share_its_stream_unless_ideal():
    machine = load("dgx-1v")
    queue, ideal = resources(machine).paths, resources(machine, ideal_links=True).paths
    assert queue[0, 1][0][0] == queue[0, 3][0][0] != queue[1, 0][0][0]
    assert ideal[0, 1][0][0] != ideal[0, 3][0][0]


def test_a_pipe_is_read_like_a_file(tmp_path):
    """``hier-allreduce topo <(nvidia-smi topo -m)``"""
    pipe = tmp_path / "pipe"
    os.mkfifo(str(pipe))
    writer = threading.Thread(target=pipe.write_text, args=(TABLE,), daemon=True)
    writer.start()
    machine = load(str(pipe))
    writer.join()
    assert machine.kinds == from_text(TABLE, "").kinds


def test_a_subset_keeps_the_links_between_its_devices():
    half = subset(load("dgx-1v"), [3, 0, 4])
    assert half.kinds == (("X", "NV2", "SYS"), ("NV2", "X", "NV2"), ("SYS", "NV2", "X"))
    assert half.link(0, 1).kind == "NV2"
    with pytest.raises(HierAllreduceError, match="devices 0 to 7"):
        subset(load("dgx-1v"), [0, 8])
    with pytest.raises(HierAllreduceError, match=r"devices 0 to .*, each once; cannot take 1 twice"):
        subset(load("dgx-1v"), [1, 1])


@pytest.mark.parametrize("name", MACHINES)
def test_a_subset_survives_yaml(name):
    machine = load(name)
    for devices in (range(len(machine) // 2), range(len(machine) - 2, len(machine)), range(0, len(machine), 3), [0]):
        part = subset(machine, devices)
        assert replace(from_yaml(part.to_yaml()), warnings=()) == part
        assert {name for name, _ in part.shared} == {name for link in part.links for name in link.through}


def test_a_subset_keeps_the_overrides_of_its_links_and_no_others():
    speeds = {"GPU0-GPU7": 40e9, "GPU0-GPU3": 44e9, "NV1": 20e9, "SYS": 8e9}
    part = subset(calibrated(load("dgx-1v"), {"links": speeds}), range(4))
    assert part.overrides == (("GPU0-GPU3", 44e9), ("NV1", 20e9))
    assert [part.link(0, peer).bandwidth for peer in (1, 3)] == [20e9, 44e9]
    assert from_yaml(part.to_yaml()) == part


def test_a_part_of_a_switch_is_known_from_the_gpus_model():
    assert "GPU1 NVSwitch in" in subset(load("dgx-2"), range(3)).link(0, 1).through
    assert subset(load("hgx-a100-4"), range(4)).link(0, 1).through == ()


def test_a_flat_host_has_one_kind_of_link():
    host = flat_host(3)
    assert {link.kind for link in host.links} == {"HOST"}
    assert from_yaml(host.to_yaml()) == host


@pytest.mark.parametrize(
    "gpu, staged",
    [
        ("NVIDIA GeForce RTX 4090 D", True),
        ("RTX 3090", True),
        ("RTX 2080 Ti", True),
        ("RTX 5000 Ada", False),
        ("Quadro RTX 4000", False),
        ("GeForce GTX 1080 Ti", False),
    ],
)
def test_geforce_cards_have_peer_access_over_nvlink_only(gpu, staged):
    machine = of_kinds("X NV4 PHB", "NV4 X PHB", "PHB PHB X", gpu=gpu)
    assert (machine.link(0, 1).staged, machine.link(0, 2).staged) == (False, staged)
    assert from_yaml(machine.to_yaml()) == machine
    assert not any(link.staged for link in from_yaml(machine.to_yaml() + "staged: []\n").links) or not staged


def test_a_staged_copy_passes_all_switches_and_the_hosts_memory():
    gpus = of_kinds("X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PIX", "SYS SYS PIX X")
    machine = calibrated(gpus, {"staged": ["PIX", "GPU0-GPU2"], "speeds": {"pcie": 24e9}})
    memory, out, into = "memory of the host", "uplink of GPU0+GPU1 out", "uplink of GPU0+GPU1 in"
    assert machine.link(0, 1).through == ("GPU0 PCIe out", "GPU1 PCIe in", memory, out, into)
    assert dict(machine.shared)[memory] == machine.speeds.staged
    assert memory in machine.link(2, 0).through and memory not in machine.link(1, 2).through
    assert machine.link(0, 1).latency == machine.link(1, 2).latency + machine.speeds.staged_latency
    assert calibrated(gpus, {"gpu": "RTX 4090"}).link(0, 1).staged
    with pytest.raises(HierAllreduceError, match="staged: 'NV3x' is neither"):
        calibrated(gpus, {"staged": ["NV3x"]})


# ---- the running machine ----------------------------------------------------------------------------


LISTING = "GPU 0: Tesla V100 (UUID: GPU-aa)\nGPU 1: Tesla V100 (UUID: GPU-bb)\nGPU 2: Tesla V100 (UUID: GPU-ab)\n"


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """A machine with three GPUs, of which CUDA shows all, without a calibration."""
    monkeypatch.setenv(presets.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(detect, "_run", lambda *arguments: {"-L": LISTING, "-m": TABLE}.get(arguments[-1], ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_this_machine_by_nvidia_smi(nvidia_smi):
    machine = detect.this_machine()
    assert (len(machine), machine.gpu) == (3, "Tesla V100")


def test_nvidia_smi_is_asked_for_peer_access(nvidia_smi, monkeypatch):
    answers = {
        "-L": LISTING,
        "-m": TABLE,
        "r": " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tOK\n GPU1\tOK\tX\tCNS\n GPU2\tOK\tCNS\tX\n",
    }
    monkeypatch.setattr(detect, "_run", lambda *arguments: answers[arguments[-1]])
    machine = detect.this_machine()
    assert (machine.staged, machine.warnings) == (("GPU1-GPU2",), ())
    assert machine.link(2, 1).staged and not machine.link(0, 2).staged


def test_this_machine_for_some_devices_in_their_order(nvidia_smi):
    machine = detect.this_machine(["/gpu:2", "/job:localhost/replica:0/task:0/device:GPU:0"])
    assert machine.devices == ("GPU2", "GPU0") and machine.link(0, 1).kind == "NV1"


def test_this_machine_as_cuda_shows_it(nvidia_smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert detect.this_machine(["/gpu:0", "/gpu:1"]).devices == ("GPU2", "GPU1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert detect.this_machine().devices == ("GPU1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    with pytest.raises(HierAllreduceError, match="'GPU-a' is neither"):
        detect.this_machine()


def test_free_memory_of_the_gpus_that_cuda_shows(nvidia_smi, monkeypatch):
    answers = {"-L": LISTING, "--query-gpu=memory.free": "15000\n16000\n100\n"}
    monkeypatch.setattr(detect, "_run", lambda *arguments: answers[arguments[0]])
    assert detect.free_gpu_memory() == (15000 << 20, 16000 << 20, 100 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-ab,0")
    assert detect.free_gpu_memory() == (100 << 20, 15000 << 20)
    for nothing in ("", "[N/A]\n[N/A]\n[N/A]\n"):
        answers["--query-gpu=memory.free"] = nothing
        assert detect.free_gpu_memory() == ()


@pytest.mark.parametrize("visible, left", [("0,-1,1", ("GPU0",)), ("-1", ("CPU0",)), ("NoDevFiles", ("CPU0",))])
def test_gpus_that_cuda_hides_do_not_count(nvidia_smi, monkeypatch, visible, left):
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(detect, "_by_tensorflow", lambda: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect.this_machine().devices == left


def test_cpu_devices_are_a_flat_host_and_strange_ones_an_error(nvidia_smi):
    assert detect.this_machine(["/cpu:0", "/device:CPU:1"]).devices == ("CPU0", "CPU1")
    with pytest.raises(HierAllreduceError, match="'/tpu:0'"):
        detect.this_machine(["/tpu:0"])
    for mixed in (["/gpu:0", "/cpu:1"], ["/cpu:1", "/GPU:0"]):
        with pytest.raises(HierAllreduceError, match=f"'{mixed[0]}' and '{mixed[1]}' are of two kinds"):
            detect.this_machine(mixed)


def test_nvidia_smi_is_asked_once_in_a_process(monkeypatch):
    asked = []

    def run(command, **how):
        asked.append(tuple(command[1:]))
        return subprocess.CompletedProcess(command, 0, {"-L": LISTING, "-m": TABLE}.get(command[-1], "").encode())

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(detect.shutil, "which", lambda name: name)
    detect._run.cache_clear()
    try:
        for visible in ("0,1,2", "2,1", "GPU-bb"):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            assert len(detect.this_machine()) == len(visible.split(","))
    finally:
        detect._run.cache_clear()
    assert asked == [("topo", "-m"), ("-L",), ("topo", "-p2p", "r")]


MEASURED_HERE = """
measured:
  {date: 2026-11-22, tensorflow: 2.21.0, hier_allreduce: 0.1.0, devices: ['V100 (UUID: aa)', 'V100 (UUID: bb)']}
links: {GPU0-GPU1: 10e9}
shared: {}
matrix: |2
        GPU0 GPU1
  GPU0  X    SYS
  GPU1  SYS  X
"""


@pytest.fixture
def kept_calibration(monkeypatch, tmp_path):
    """Two GPUs and TensorFlow 2.21.0, and their speeds in the user's cache folder."""
    listing = "GPU 0: V100 (UUID: aa)\nGPU 1: V100 (UUID: bb)\n"
    table = "\tGPU0\tGPU1\nGPU0\tX\tSYS\nGPU1\tSYS\tX\n"
    monkeypatch.setattr(detect, "_run", lambda *arguments: {"-L": listing, "-m": table}.get(arguments[-1], ""))
    monkeypatch.setattr(detect, "_tensorflow_version", lambda: "2.21.0")
    monkeypatch.setenv(presets.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    detect.calibration_file().write_text(MEASURED_HERE)


def test_this_machine_has_its_measured_speeds(kept_calibration):
    assert detect.this_machine().link(0, 1).bandwidth == 10e9
    assert detect.this_machine(["/gpu:1", "/gpu:0"]).measured.date == "2026-11-22"
    assert detect.detected(["/gpu:1", "/gpu:0"]).measured is None


def test_the_folder_of_what_is_kept_may_be_in_the_users_home(monkeypatch):
    monkeypatch.setenv(presets.CACHE_VARIABLE, "~/kept")
    assert detect.calibration_file() == Path.home() / "kept" / "this-machine.yaml"


def test_other_machines_calibration_is_not_used_with_a_warning(kept_calibration, monkeypatch):
    def warned():
        machine = detect.this_machine()
        return machine.measured is None and "run `hier-allreduce calibrate` again" in machine.warnings[-1]

    assert not warned()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert warned()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(detect, "_tensorflow_version", lambda: "2.22.0")
    assert warned()
    detect.calibration_file().unlink()
    assert detect.this_machine().warnings == ()


def test_without_nvidia_smi_tensorflow_is_asked(monkeypatch):
    monkeypatch.setattr(detect.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(detect, "_run", lambda *arguments: "")
    monkeypatch.setattr(detect, "_by_tensorflow", lambda: None)
    assert detect.this_machine().devices == ("CPU0",)


def test_tensorflows_locality_tells_peers_from_others():
    link = namedtuple("link", "device_id")
    links = namedtuple("links", "link")
    locality = namedtuple("locality", "links numa_node")
    gpu = namedtuple("gpu", "locality physical_device_desc")
    name = "device: 0, name: Tesla P100-SXM2-16GB, pci bus id: 0000:06:00.0"
    gpus = [gpu(locality(links([link(j) for j in peers]), 0), name) for peers in ((1,), (0,), ())]
    machine = detect.from_locality(gpus)
    assert machine.kinds == (("X", "PHB", "SYS"), ("PHB", "X", "SYS"), ("SYS", "SYS", "X"))
    assert machine.gpu == "Tesla P100-SXM2-16GB"
    assert machine.link(0, 2).staged and not machine.link(0, 1).staged
    assert detect.from_locality([]) is None
