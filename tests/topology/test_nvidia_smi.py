"""Reading `nvidia-smi topo -m`: as people paste it, cut, contradictory, or with a link that is not like its peers."""

import contextlib
import json
import textwrap
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hier_allreduce.errors import TopologyError
from hier_allreduce.topology import load
from hier_allreduce.topology.anomalies import odd_links
from hier_allreduce.topology.nvidia_smi import parse_nvidia_smi

REAL = Path(__file__).parent / "nvidia_smi"  # verbatim from public bug trackers and wikis

# What a person counts in each file: GPUs, links by kind.
COUNTED = {
    "dgx-1p-p100-soc-mlx5": (8, {"NV1": 16, "SYS": 12}),
    "az-2x-m60": (2, {"SYS": 1}),
    "8x-rtx6000pro-wiki-numa-suffix": (8, {"PIX": 4, "NODE": 8, "SYS": 16}),
    "2x-nv2": (2, {"NV2": 1}),
    "8x-v100-dgx1v-indented": (8, {"NV1": 8, "NV2": 8, "SYS": 12}),
    "1x-a100-sxm4-80gb-nic1": (1, {}),
    "2x-a30-sys": (2, {"SYS": 1}),
    "3x-a100-sxm4-80gb-nv12-nic1": (3, {"NV12": 3}),
    "4x-h100-nvl-phb-nv12": (4, {"PHB": 4, "NV12": 2}),
    "4x-a800-80gb-pcie-pxb-pix-nic3": (4, {"PXB": 5, "PIX": 1}),
    "6x-rtx-3090-node-phb": (6, {"NODE": 13, "PHB": 2}),
    "8x-v100-sxm2-32gb-sys-nv1-nv2-nic18": (8, {"SYS": 12, "NV1": 8, "NV2": 8}),
    "8x-h20-nv18-nic26": (8, {"NV18": 28}),
    "8x-h100-nv18-nic10": (8, {"NV18": 28}),
    "8x-rtx-a6000-sys-nv4": (8, {"SYS": 24, "NV4": 4}),
    "8x-a800-80gb-pcie-sys-pix-nv8-nic2": (8, {"SYS": 16, "PIX": 8, "NV8": 2, "NV6": 1, "NV4": 1}),
    "8x-rtx-4090-sys-pxb-pix-nic2": (8, {"SYS": 16, "PXB": 9, "PIX": 3}),
}

QUAD = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV1\tNV2\tSYS\t0-23,48-71\t0
GPU1\tNV1\t X \tSYS\tNV2\t0-23,48-71\t0
GPU2\tNV2\tSYS\t X \tNV1\t24-47,72-95\t1
GPU3\tSYS\tNV2\tNV1\t X \t24-47,72-95\t1
"""
BARE = QUAD.replace("\tCPU Affinity\tNUMA Affinity", "").replace("\t0-23,48-71\t0", "").replace("\t24-47,72-95\t1", "")
PEERS = "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\tX\tOK\tNS\tOK\nGPU1\tOK\tX\tOK\tNS\n"  # topo -p2p
ROCM = "====\n       GPU0         GPU1         \nGPU0   0            XGMI         \nGPU1   XGMI         0            \n"
QUAD_KINDS = (
    ("X", "NV1", "NV2", "SYS"),
    ("NV1", "X", "SYS", "NV2"),
    ("NV2", "SYS", "X", "NV1"),
    ("SYS", "NV2", "NV1", "X"),
)


def counted(kinds):
    return Counter(kinds[i][j] for i in range(len(kinds)) for j in range(i))


def grid(count, kind, changes=()):
    """A table in which all pairs are of one kind, but for ``changes``: {(i, j): kind}."""
    rows = [["X" if i == j else kind for j in range(count)] for i in range(count)]
    for (i, j), other in dict(changes).items():
        rows[i][j] = rows[j][i] = other
    lines = ["\t" + "\t".join(f"GPU{i}" for i in range(count))]
    return "\n".join(lines + [f"GPU{i}\t" + "\t".join(row) for i, row in enumerate(rows)]) + "\n"


@pytest.mark.parametrize("name", COUNTED)
def test_real_outputs(name):
    text = (REAL / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
    table = parse_nvidia_smi(text)
    assert (len(table.labels), counted(table.kinds)) == COUNTED[name]


def test_every_real_output_here_is_counted():
    assert {path.stem for path in REAL.glob("*.txt")} == set(COUNTED)


PASTED = {
    "windows line ends": QUAD.replace("\n", "\r\n"),
    "old mac line ends": QUAD.replace("\n", "\r"),
    "doubled line ends": QUAD.replace("\n", "\r\r\n"),
    "escape sequences": "\x1b[4m" + QUAD.replace("Affinity\n", "Affinity\x1b[0m\n", 1),
    "escape character lost": "[4m" + QUAD.replace("Affinity\n", "Affinity[0m\n", 1),
    "escape character replaced": "\ufffd[4m" + QUAD.replace("NUMA Affinity\n", "NUMA Affinity\ufffd[0m\n", 1),
    "prompt before": "user@GPU-node:~$ nvidia-smi topo -m\n" + QUAD + "user@GPU-node:~$ ",
    "fenced": "Output of `nvidia-smi topo -m`:\n```\n" + QUAD + "```\n",
    "quoted": "".join(f"> {line}\n" for line in QUAD.splitlines()),
    "markdown table": "".join("| " + line.replace("\t", " | ") + " |\n" for line in QUAD.splitlines()),
    "one blank between cells": QUAD.replace("\t", " "),
    "header without tabs": QUAD.replace("GPU0\tGPU1\tGPU2\tGPU3\t", "GPU0GPU1GPU2GPU3", 1),
    "rows without tabs": QUAD.replace("\t X \tNV1\tNV2\tSYS\t", " X NV1NV2SYS", 1),
    "log prefix": "".join(f"[1,0]<stdout>:{line}\n" for line in QUAD.splitlines()),
    "prose about GPUs before": "GPU0 and GPU1 are slow together.\nGPU2 is fine.\n\n" + QUAD,
    "non-breaking blanks": QUAD.replace("\t", "\u00a0\u00a0"),
    "no affinity": "\n".join(line.split("\t0-")[0].split("\t24")[0].split("\tCPU")[0] for line in QUAD.splitlines()),
    "rows wrapped": QUAD.replace("NV2\tSYS\t0", "NV2\t\nSYS\t0").replace("\tNUMA Affinity", "\nNUMA Affinity"),
    "rows wrapped within a cell": QUAD.replace("NV2\tSYS\t0", "NV2\tS\nYS\t0"),
    "header wrapped": QUAD.replace("GPU2\tGPU3", "GPU2\n\tGPU3", 1),
    "header wrapped within a word": QUAD.replace("NUMA Affinity", "NUMA Aff\ninity", 1),
    "legend": QUAD + "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n",
    "a blank line between rows": QUAD.replace("\n", "\n\n"),
    "rows in another order": "\n".join([QUAD.splitlines()[i] for i in (0, 3, 1, 4, 2)]),
    "a network card between": QUAD.replace("GPU2\tNV2", "NIC0\tPIX\tPIX\tSYS\tSYS\nGPU2\tNV2"),
    "network cards' columns": QUAD.replace("GPU3\tCPU", "GPU3\tNIC0\tmlx5_1\tCPU")
    .replace("\t0-23", "\tPIX\tSYS\t0-23")
    .replace("\t24-", "\tSYS\tPIX\t24-"),
    "lower case": QUAD.replace("SYS", "sys"),
    "bold in markdown": "".join(
        "| " + line.replace("\t", " | ").replace("NV2", "**NV2**") + " |\n" for line in BARE.splitlines()
    ),
    "entities": QUAD.replace(" ", "&nbsp;").replace("\t", "&#9;"),
    "quoted in HTML": "".join(f"&gt; {line}<br>\n" for line in QUAD.splitlines()),
    "HTML without line ends": "<pre>" + QUAD.replace("\n", "<br/>") + "</pre>",
    "HTML table": "".join(f"<tr><td>{line}</td></tr>".replace("\t", "</td><td>") for line in BARE.splitlines()),
    "a string in JSON": json.dumps({"topology": "\x1b[4m" + QUAD.replace("Affinity\n", "Affinity\x1b[0m\n", 1)}),
    "a list in JSON": json.dumps([*QUAD.splitlines(), "", "Legend:", "", "  X    = Self"]),
    "line ends lost": "$ nvidia-smi topo -m " + QUAD.replace("\n", " ") + "Legend:   X    = Self",
    "what peers can do before": "$ nvidia-smi topo -p2p r\n" + PEERS + "$ nvidia-smi topo -m\n" + QUAD,
    "what peers can do after": QUAD + "\n" + PEERS,
    "the last card's cell cut by the driver": QUAD.replace("GPU3\tCPU", "GPU3\tNIC0\tNIC1\tCPU")
    .replace("\t0-23", "\tPHB\tPH0-23")
    .replace("\t24-", "\tPHB\tPH24-"),
    "header wrapped before NUMA ID": QUAD.replace("NUMA Affinity", "NUMA Affinity\tGPU\n NUMA ID"),
    "header wrapped within a label": QUAD.replace("GPU2\tGPU3", "GPU2\tGP\nU3", 1),
    "rows wrapped within a number": QUAD.replace("NV1\t X \tSYS\tNV2\t0-", "NV1\t X \tSYS\tNV\n2\t0-"),
    "rows wrapped after a number, tabs lost": QUAD.replace("SYS\tNV2\t0-23", "SYS\tNV2\n0-23"),
    "a worker's prefix": "".join(f"(Worker rank=0 pid=12) {line}\n" for line in QUAD.splitlines()),
    "a remark behind a row": QUAD.replace("0-23,48-71\t0\n", "0-23,48-71\t0  <- SYS = the far socket\n", 1),
    "a log's line between rows": QUAD.replace("GPU2\tNV2", "NCCL_DEBUG=INFO\nGPU2\tNV2"),
    "heavy table rules": "".join("┃ " + line.replace("\t", " ┃ ") + " ┃\n" for line in QUAD.splitlines()),
    "a last column of another table's words": BARE.replace("\n", "\tOK\n").replace("GPU3\tOK", "GPU3\tState", 1),
}


@pytest.mark.parametrize("text", PASTED.values(), ids=PASTED)
def test_pasted_in_many_ways(text):
    table = parse_nvidia_smi(text)
    assert table.labels == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert table.kinds == QUAD_KINDS
    assert table.warnings == ()


CARDS = (
    QUAD.replace("GPU3\tCPU", "GPU3\tNIC0\tNIC1\tmlx5_10\tmlx5_11\tx5_0\tCPU")
    .replace("\t0-23", "\tPIX\tNODE\tSYS\tSYS\tSYS\t0-23")
    .replace("\t24-", "\tSYS\tSYS\tNODE\tPXB\tSYS\t24-")
    .replace("NUMA Affinity", "NUMA Affinity\tGPU NUMA ID")
    .replace("\t0\n", "\t0\t\tN/A\n")
    .replace("\t1\n", "\t1\t\tN/A\n")
)


@pytest.mark.parametrize("width", range(40, 130))
def test_a_terminal_of_any_width_wraps_it(width):
    lines = CARDS.expandtabs(8).splitlines()
    table = parse_nvidia_smi("\n".join(line[i : i + width] for line in lines for i in range(0, len(line), width)))
    assert table == parse_nvidia_smi(CARDS)
    by_words = parse_nvidia_smi("\n".join(part for line in lines for part in textwrap.wrap(line, width)))
    assert (by_words.kinds, by_words.warnings) == (QUAD_KINDS, ())
    assert [cpu.split()[0] for cpu in by_words.cpus] == ["0-23,48-71", "0-23,48-71", "24-47,72-95", "24-47,72-95"]


def test_other_columns_of_a_log_are_not_an_affinity():
    log = CARDS + "NIC0\tPIX\tPIX\tSYS\tSYS\tX\n"
    stamped = "".join(f"2025-05-21T09:40:05.00{i}Z {line}\n" for i, line in enumerate(log.splitlines()))
    assert parse_nvidia_smi(stamped).cpus == parse_nvidia_smi(CARDS).cpus


@pytest.mark.parametrize("after", ["4", "- 4\n- 5", "0 0"])
def test_numbers_after_the_table_are_not_an_affinity(after):
    assert parse_nvidia_smi(QUAD + after).cpus == parse_nvidia_smi(QUAD).cpus
    assert parse_nvidia_smi(BARE + after).cpus == ("",) * 4


def test_an_empty_column_of_cpus_is_not_filled_with_the_next_one():
    text = QUAD.replace("\t24-47,72-95\t1", "\t\t1\t\tN/A")
    assert parse_nvidia_smi(text).cpus[2:] == ("N/A 1 N/A",) * 2


def test_affinity_tells_sockets_apart():
    assert parse_nvidia_smi(QUAD).cpus == ("0-23,48-71 0",) * 2 + ("24-47,72-95 1",) * 2


def test_the_gpu_model_is_read_from_a_pasted_listing():
    listing = "".join(f"GPU {i}: Tesla V100-SXM2-16GB (UUID: GPU-{i}{i})\n" for i in range(4))
    assert parse_nvidia_smi(listing + QUAD).gpu == "Tesla V100-SXM2-16GB"


LISTED = {
    "collected": "GPU 0,1,2,3: Tesla V100-SXM2-16GB\nGPU 0,1,2,3 Compute Capability: 7.0\n",
    "queried": "index, name, memory.total [MiB]\n0, Tesla V100-SXM2-16GB, 16160 MiB\n",
    "queried without more": "index, name\n0, Tesla V100-SXM2-16GB\n",
    "queried without a number": "name, compute_cap\nTesla V100-SXM2-16GB, 7.0\nTesla V100-SXM2-16GB, 7.0\n",
    "queried with the identity": "name, uuid\nTesla V100-SXM2-16GB, GPU-11-22\n",
    "in full": "    Product Name                          : Tesla V100-SXM2-16GB\n",
    "in a report": "**GPU 0:** Tesla V100-SXM2-16GB | 16160 MiB | BIOS 1\n**GPU 1:** Tesla V100-SXM2-16GB | BIOS 2\n",
    "with its memory": "GPU 0: Tesla V100-SXM2-16GB 15.78 GiB sm_70\n",
    "by the peer-to-peer sample": "Device: 0, Tesla V100-SXM2-16GB, pciBusID: 1a, pciDeviceID: 0\n",
    "by nccl-tests": "#  Rank  0 Group  0 Pid  1 on host device  0 [0x1a] Tesla V100-SXM2-16GB\n",
    "queried by name": "name\nTesla V100-SXM2-16GB\nTesla V100-SXM2-16GB\n",
    "with a worker's number": "0: GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-11)\n",
    "with a time": "2026-11-21T10:00:00.1Z stdout F GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-11)\n",
    "with odd blanks": "GPU\u20070:\u3000Tesla V100-SXM2-16GB\u2007(UUID: GPU-11)\n",
    "nvidia-smi alone": "|   0  Tesla V100-SXM2-16GB           On  | 00000000:06:00.0 Off |                    0 |\n"
    "| N/A   31C    P0    42W / 300W |      0MiB / 16160MiB |      0%      Default |\n",
}


@pytest.mark.parametrize("listing", LISTED.values(), ids=LISTED)
def test_the_gpu_model_is_read_from_other_listings(listing):
    assert parse_nvidia_smi(listing + QUAD).gpu == "Tesla V100-SXM2-16GB"


@pytest.mark.parametrize(
    "listing, gpu",
    [
        ("index, name\n0, A100-PCIE-40GB, 40536 MiB\n", "A100-PCIE-40GB"),
        ("0, A40\n", "A40"),
        ("|   0  A40                 On   | 00000000:01:00.0 Off |                    0 |\n", "A40"),
        ("NVIDIA RTX 5000 72GB Edition, 73415 MiB\n", "NVIDIA RTX 5000 72GB Edition"),
        ("NVIDIA driver 535, CUDA 12.2 and 4 GPUs\n", ""),
        ("NVIDIA driver 535\nNVIDIA-SMI 535 and CUDA 12\n", ""),
        ("NVIDIA GeForce RTX 4090\n", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation\n", "NVIDIA RTX 6000 Ada Generation"),
    ],
)
def test_a_model_needs_no_maker_and_a_sentence_is_not_a_model(listing, gpu):
    assert parse_nvidia_smi(listing + QUAD).gpu == gpu


@pytest.mark.parametrize(
    "listing",
    [
        "- GPU 0: 15 MiB / 49140 MiB used\n- GPU 1: 14 MiB / 49140 MiB used\n",
        "GPU 0: GPU-11-22\nGPU 1: GPU-33-44\n",
        "GPU 0: 45C\nGPU 1: 51C\n",
        "GPU 0: PCIe Gen4 x16\nGPU 1: PCIe Gen4 x8\n",
        "index, pstate\n0, P0\n1, P8\n",
    ],
)
def test_other_listings_by_gpu_are_not_models(listing):
    table = parse_nvidia_smi(listing + QUAD)
    assert (table.gpu, table.warnings) == ("", ())


def test_remarks_that_begin_with_a_gpu_are_not_rows():
    assert parse_nvidia_smi("NVLink: (GPU0↔GPU1 NV2, GPU2↔GPU3 NV2)\n" + QUAD).warnings == ()
    cut = "".join(line + "\n" for line in QUAD.splitlines() if not line.startswith("GPU3"))
    with pytest.raises(TopologyError, match="row GPU3 is missing"):
        parse_nvidia_smi(cut + "\nGPU0 is on the first socket.\n")


@pytest.mark.parametrize(
    "listing", ["GPU 0: Tesla V100\nGPU 1: Tesla K80\n", "index, name\n0, Tesla K80\n1, Tesla V100\n2, Tesla V100\n"]
)
def test_different_models_give_a_warning_and_no_model(listing):
    table = parse_nvidia_smi(listing + QUAD)
    assert table.gpu == ""
    assert table.warnings == (
        "the GPUs are of several models (Tesla K80, Tesla V100); speeds are guessed from the links",
    )


def test_models_of_the_same_speeds_are_alike():
    table = parse_nvidia_smi("GPU 0: NVIDIA L40S\nGPU 1: NVIDIA L40\n" + QUAD)
    assert (table.gpu, table.warnings) == ("NVIDIA L40", ())
    unknown = parse_nvidia_smi("GPU 0: NVIDIA R100\nGPU 1: NVIDIA R200\n" + QUAD)
    assert unknown.gpu == "" and "several models (NVIDIA R100, NVIDIA R200)" in unknown.warnings[0]


def test_bytes_are_an_error_that_says_what_to_do():
    with pytest.raises(TopologyError, match=r"not bytes: \.decode\(\)"):
        parse_nvidia_smi(QUAD.encode())


def test_sixteen_gpus():
    table = parse_nvidia_smi(grid(16, "NV6"))
    assert (len(table.labels), counted(table.kinds)) == (16, {"NV6": 120})


def test_old_names_of_kinds():
    assert counted(parse_nvidia_smi(grid(3, "SOC")).kinds) == {"SYS": 3}


WRONG = {
    "no table": ("nvidia-smi: command not found", "no table of GPUs"),
    "empty": ("", "no table of GPUs"),
    "no header": ("\n".join(QUAD.splitlines()[1:]), "row GPU0 has no header"),
    "rows missing": ("\n".join(QUAD.splitlines()[:-1]), "row GPU3 is missing"),
    "row cut": (QUAD.replace("GPU3\tSYS\tNV2\tNV1\t X \t24-47,72-95\t1\n", "GPU3\tSYS\tNV2"), "row GPU3, column GPU2"),
    "cell cut": (QUAD[: QUAD.index("GPU3\tSYS") + 11], "row GPU3, column GPU1"),
    "unknown kind": (QUAD.replace("NV1\tNV2\tSYS", "NV1\tQPI\tSYS"), "row GPU0, column GPU2.*'QPI'"),
    "not available": (QUAD.replace("NV1\tNV2\tSYS", "NV1\tN/A\tSYS"), "row GPU0, column GPU2.*'N/A'"),
    "X off the diagonal": (QUAD.replace("NV1\tNV2\tSYS", "NV1\tX\tSYS"), "row GPU0, column GPU2.*diagonal"),
    "no X on the diagonal": (QUAD.replace("GPU1\tNV1\t X ", "GPU1\tNV1\tNV1"), "row GPU1, column GPU1.*diagonal"),
    "row twice": (QUAD.replace("GPU3\tSYS", "GPU2\tSYS"), "row GPU2 appears twice"),
    "column twice": (QUAD.replace("GPU2\tGPU3", "GPU2\tGPU2", 1), "column GPU2 appears twice"),
    "row without column": (QUAD.replace("\tGPU3\tCPU", "\tCPU"), "row GPU3.*no column GPU3"),
    "a cell lost before a card's": (
        QUAD.replace("GPU3\tCPU", "GPU3\tNIC0\tCPU")
        .replace("\t0-23", "\tPIX\t0-23")
        .replace("\t24-", "\tSYS\t24-")
        .replace("GPU2\tNV2\t", "GPU2\t"),
        "row GPU2, column GPU1: X, which belongs under GPU2; a cell before it is missing .4 of 5",
    ),
    "a cell lost after the diagonal": (QUAD.replace("\tSYS\tNV2\t0-23", "\tNV2\t0-23"), "row GPU1, column GPU3"),
    "the last row twice": (QUAD + QUAD.splitlines()[-1], "row GPU3 appears twice"),
    "cut on the right, to one column": ("\tGPU0\nGPU0\t X\nGPU1\tSY\n", "row GPU1.*no column GPU1"),
    "cells cut in the middle of the cards'": (
        CARDS.replace("PIX\tNODE\tSYS\tSYS\tSYS\t", "PIX\tNO"),
        "row GPU0, column NIC1",
    ),
    "what peers can do": (PEERS, "row GPU0 tells what peers can do"),
    "peers that are disabled": (PEERS.replace("OK", "DR").replace("NS", "DR"), "row GPU0 tells what peers can do"),
    "peers of which nothing is known": (PEERS.replace("OK", "U").replace("NS", "U"), "row GPU0 tells what peers can"),
    "AMD's links": (ROCM, "row GPU0 is of rocm-smi's table"),
    "AMD's weights": (ROCM.replace("XGMI", "15"), "row GPU0 is of rocm-smi's table"),
    "another maker's links": (
        QUAD.replace("CPU", "Node").replace("NV", "MX"),
        "row GPU0, column GPU1.*'MX1'.*or not of NVIDIA's GPUs",
    ),
    "a bond of nothing": (QUAD.replace("NV1\tNV2\tSYS", "NV0\tNV2\tSYS"), "row GPU0, column GPU1.*NV0"),
    "a bond of nothing at all": (QUAD.replace("NV1\tNV2\tSYS", "NV00\tNV2\tSYS"), "row GPU0, column GPU1.*NV00"),
}


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_cut_and_contradictory_tables_are_errors_that_say_where(text, message):
    with pytest.raises(TopologyError, match=message):
        parse_nvidia_smi(text)


@given(st.integers(0, len(QUAD) - 1))
@settings(max_examples=200, deadline=None)
def test_a_table_cut_anywhere_is_never_misread(end):
    """Either an error, or the cut was in what follows the last link."""
    try:
        table = parse_nvidia_smi(QUAD[:end])
    except TopologyError:
        return
    assert table.kinds == QUAD_KINDS


@given(st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_table_cut_on_its_right_is_never_misread(width):
    with contextlib.suppress(TopologyError):
        assert parse_nvidia_smi("\n".join(line.expandtabs(8)[:width] for line in QUAD.splitlines())).kinds == QUAD_KINDS


@given(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["SYS", "PIX", "NV1", "NV12", "N/A", "X", "", "ERR!"]))
@settings(max_examples=120, deadline=None)
def test_one_changed_cell_is_an_error_or_a_warning_that_names_it(row, column, cell):
    lines = [line.split("\t") for line in QUAD.splitlines()]
    lines[row + 1][column + 1] = cell
    try:
        table = parse_nvidia_smi("\n".join(map("\t".join, lines)))
    except TopologyError as error:
        assert f"row GPU{row}, column GPU{column}" in str(error) or not cell
        return
    named = f"GPU{min(row, column)}–GPU{max(row, column)}"
    assert table.kinds == QUAD_KINDS or any(warning.startswith(named) for warning in table.warnings)


@pytest.mark.parametrize("filler", [" ", "\t", "GPU 0: A ", "0, Tesla "])
def test_a_line_of_a_megabyte_is_read_at_once(filler):
    """Patterns that go back and forth in such a line would take hours: the limit of time of each test ends them."""
    assert parse_nvidia_smi(QUAD + "\n" + filler * (2**20 // len(filler))).kinds == QUAD_KINDS


@given(st.text(alphabet="GPU01 XNVSY\t\n|=:-[m", max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text):
    """No other exception, whatever is pasted."""
    with contextlib.suppress(TopologyError):
        parse_nvidia_smi(text)


def test_an_asymmetric_table_is_a_warning_and_the_slower_reading_counts():
    table = parse_nvidia_smi(QUAD.replace("GPU1\tNV1", "GPU1\tPHB"))
    assert table.kinds[0][1] == table.kinds[1][0] == "PHB"
    (warning,) = table.warnings[:1]
    assert "GPU0–GPU1" in warning and "NV1" in warning and "PHB" in warning


FOUR = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
ODD = {
    "one pair of a switch": (grid(8, "NV12", {(2, 5): "NV11"}), ["GPU2–GPU5 is NV11"]),
    "one GPU of a switch": (
        grid(4, "NV18", {(3, 0): "SYS", (3, 1): "SYS", (3, 2): "SYS"}),
        [],  # half of the pairs are of each kind: no saying which is odd
    ),
    "one GPU of a switch with fewer links": (
        grid(8, "NV12", {(i, 3): "NV11" for i in range(8) if i != 3}),
        [f"GPU{min(i, 3)}–GPU{max(i, 3)} is NV11" for i in range(8) if i != 3],
    ),
    "a missing bridge": (
        grid(8, "SYS", {(0, 1): "NV4", (2, 3): "NV4", (4, 5): "NV4"}),
        ["GPU6–GPU7 is SYS"],
    ),
    "a bridge with fewer links": (
        grid(8, "SYS", {(0, 1): "NV4", (2, 3): "NV4", (4, 5): "NV4", (6, 7): "NV3"}),
        ["GPU6–GPU7 is NV3"],
    ),
    "a PCIe link that fits no tree": (grid(4, "PIX", {(0, 3): "SYS"}), ["GPU0–GPU3 is SYS"]),
    "a PCIe link nearer than its tree": (
        grid(4, "SYS", {(0, 1): "PHB", (2, 3): "PHB", (0, 2): "PHB"}),
        ["GPU0–GPU2 is PHB"],
    ),
    "groups of different sizes": (grid(7, "SYS", dict.fromkeys([*FOUR, (4, 5), (4, 6), (5, 6)], "PIX")), []),
    "a link of a smaller group": (
        grid(7, "SYS", dict.fromkeys([*FOUR, (4, 5), (5, 6)], "PIX")),
        ["GPU4–GPU6 is SYS"],
    ),
    "a link of a larger group": (
        grid(7, "SYS", dict.fromkeys([*FOUR[1:], (4, 5), (4, 6), (5, 6)], "PIX")),
        ["GPU0–GPU1 is SYS"],
    ),
    "one of two bridges with fewer links": (grid(4, "NODE", {(0, 1): "NV12", (2, 3): "NV8"}), ["GPU2–GPU3 is NV8"]),
    "a narrow bridge and a missing one": (
        grid(8, "SYS", {(0, 1): "NV4", (2, 3): "NV4", (4, 5): "NV3"}),
        ["GPU4–GPU5 is NV3", "GPU6–GPU7 is SYS"],
    ),
    "two bridges and a GPU without": (grid(5, "SYS", {(0, 1): "NV4", (2, 3): "NV4"}), []),
    "pairs": (grid(8, "SYS", {(0, 1): "NV4", (2, 3): "NV4", (4, 5): "NV4", (6, 7): "NV4"}), []),
    "two switches of two": (grid(4, "PXB", {(0, 1): "PIX", (2, 3): "PIX"}), []),
    "cards in pairs and alone": (grid(8, "NODE", {(1, 2): "PHB", (3, 4): "PHB", (6, 7): "PIX"}), []),
    "one pair of five cards": (grid(5, "NODE", {(3, 4): "PHB"}), []),
    "four of a P100 mesh": (grid(4, "NV1", {(1, 3): "SYS", (2, 3): "SYS"}), []),
    "two pairs of a V100 mesh": (grid(4, "SYS", {(0, 1): "NV1", (2, 3): "NV2"}), []),
}


@pytest.mark.parametrize("text, expected", ODD.values(), ids=ODD)
def test_a_link_unlike_its_peers_is_named(text, expected):
    warnings = parse_nvidia_smi(text).warnings
    assert len(warnings) == len(expected)
    assert all(warning.startswith(start) for warning, start in zip(warnings, expected))


def test_broken_bridges_of_a_real_machine_are_named():
    text = (REAL / "8x-a800-80gb-pcie-sys-pix-nv8-nic2.txt").read_text(encoding="utf-8")
    assert [warning.split(",")[0] for warning in parse_nvidia_smi(text).warnings] == [
        "GPU4–GPU7 is NV6",
        "GPU5–GPU6 is NV4",
    ]


def test_a_bridge_where_others_have_none_is_not_called_broken():
    (warning,) = parse_nvidia_smi(grid(7, "PXB", {(0, 1): "NV4"})).warnings
    assert warning.startswith("GPU0–GPU1 is NV4") and "down" not in warning


@pytest.mark.parametrize(
    "rows", ["X NV2 NV1 NV2,NV2 X NV2 NV1,NV1 NV2 X NV2,NV2 NV1 NV2 X", "X NV1 NV1,NV1 X NV2,NV1 NV2 X"]
)
def test_a_square_and_three_of_a_mesh_have_nothing_odd(rows):
    lines = [f"GPU{i} {row}" for i, row in enumerate(rows.split(","))]
    header = " ".join(line.split()[0] for line in lines)
    assert parse_nvidia_smi("\n".join([header, *lines])).warnings == ()


@pytest.mark.parametrize("count", range(3, 8))
def test_some_of_a_v100_mesh_have_nothing_odd(count):
    kinds = load("dgx-1v").kinds
    for left in combinations(range(8), count):
        labels = [f"GPU{i}" for i in left]
        assert odd_links(labels, [[kinds[i][j] for j in left] for i in left]) == ()


def test_cards_in_odd_slots_are_not_called_broken():
    (warning,) = parse_nvidia_smi(grid(6, "NODE", {(2, 3): "PHB", (4, 5): "PHB"})).warnings
    assert warning.startswith("GPU0–GPU1 is NODE, not PHB") and "slots" in warning


def test_rows_of_a_damaged_table_above_are_mentioned():
    assert "another table" in parse_nvidia_smi(QUAD[QUAD.index("\n") :] + "\nnode2:\n" + QUAD).warnings[-1]


def test_a_second_table_is_mentioned():
    assert "second table" in parse_nvidia_smi(QUAD + "\nnode2:\n" + QUAD).warnings[-1]
