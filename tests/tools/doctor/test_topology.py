"""Links in the output of `nvidia-smi topo -m`, and groups along them.

Any other text, and one that is cut or contradicts itself, is an error.
"""

import contextlib
import json
import textwrap
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from helpers.nvidia_smi import table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hier_allreduce import HierAllreduceError
from hier_allreduce_tools.doctor.topology import linked_groups, read_table

REAL = Path(__file__).parent / "nvidia_smi"  # verbatim from public bug trackers and wikis

# GPUs, and pairs with NVLinks by their number, as a person counts them in each file.
COUNTED = {
    "dgx-1p-p100-soc-mlx5": (8, {1: 16}),
    "az-2x-m60": (2, {}),
    "8x-rtx6000pro-wiki-numa-suffix": (8, {}),
    "2x-nv2": (2, {2: 1}),
    "8x-v100-dgx1v-indented": (8, {1: 8, 2: 8}),
    "1x-a100-sxm4-80gb-nic1": (1, {}),
    "2x-a30-sys": (2, {}),
    "3x-a100-sxm4-80gb-nv12-nic1": (3, {12: 3}),
    "4x-h100-nvl-phb-nv12": (4, {12: 2}),
    "4x-a800-80gb-pcie-pxb-pix-nic3": (4, {}),
    "6x-rtx-3090-node-phb": (6, {}),
    "8x-v100-sxm2-32gb-sys-nv1-nv2-nic18": (8, {1: 8, 2: 8}),
    "8x-h20-nv18-nic26": (8, {18: 28}),
    "8x-h100-nv18-nic10": (8, {18: 28}),
    "8x-rtx-a6000-sys-nv4": (8, {4: 4}),
    "8x-a800-80gb-pcie-sys-pix-nv8-nic2": (8, {8: 2, 6: 1, 4: 1}),
    "8x-rtx-4090-sys-pxb-pix-nic2": (8, {}),
}

QUAD = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV1\tNV2\tSYS\t0-23,48-71\t0
GPU1\tNV1\t X \tSYS\tNV2\t0-23,48-71\t0
GPU2\tNV2\tSYS\t X \tNV1\t24-47,72-95\t1
GPU3\tSYS\tNV2\tNV1\t X \t24-47,72-95\t1
"""
BARE = (
    QUAD.replace("\tCPU Affinity\tNUMA Affinity", "")
    .replace("\t0-23,48-71\t0", "")
    .replace("\t24-47,72-95\t1", "")
)
PEERS = "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n"  # topo -p2p
QUAD_KINDS = (
    ("X", "NV1", "NV2", "SYS"),
    ("NV1", "X", "SYS", "NV2"),
    ("NV2", "SYS", "X", "NV1"),
    ("SYS", "NV2", "NV1", "X"),
)


def counted(kinds):
    """Count the pairs with NVLinks by their number."""
    between = [kinds[a][b] for a, b in combinations(range(len(kinds)), 2)]
    return Counter(int(kind[2:]) for kind in between if kind.startswith("NV"))


@pytest.mark.parametrize("name", COUNTED)
def test_links_are_those_that_a_person_counted(name):
    text = (REAL / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
    kinds = read_table(text)
    assert (len(kinds), counted(kinds)) == COUNTED[name]


def test_every_real_output_here_is_counted():
    assert {path.stem for path in REAL.glob("*.txt")} == set(COUNTED)


CARDS = (
    QUAD.replace("GPU3\tCPU", "GPU3\tNIC0\tNIC1\tmlx5_10\tmlx5_11\tx5_0\tCPU")
    .replace("\t0-23", "\tPIX\tNODE\tSYS\tSYS\tSYS\t0-23")
    .replace("\t24-", "\tSYS\tSYS\tNODE\tPXB\tSYS\t24-")
    .replace("NUMA Affinity", "NUMA Affinity\tGPU NUMA ID")
    .replace("\t0\n", "\t0\t\tN/A\n")
    .replace("\t1\n", "\t1\t\tN/A\n")
)
PASTED = {
    "windows line ends": QUAD.replace("\n", "\r\n"),
    "old mac line ends": QUAD.replace("\n", "\r"),
    "doubled line ends": QUAD.replace("\n", "\r\r\n"),
    "escape sequences": "\x1b[4m" + QUAD.replace("Affinity\n", "Affinity\x1b[0m\n", 1),
    "prompt before": "user@GPU-node:~$ nvidia-smi topo -m\n" + QUAD + "user@GPU-node:~$ ",
    "one blank between cells": QUAD.replace("\t", " "),
    "non-breaking blanks": QUAD.replace("\t", "\u00a0\u00a0"),
    "header without tabs": QUAD.replace("GPU0\tGPU1\tGPU2\tGPU3\t", "GPU0GPU1GPU2GPU3", 1),
    "prose about GPUs before": "GPU0 and GPU1 are slow together.\nGPU2 is fine.\n\n" + QUAD,
    "no affinity": BARE,
    "legend": QUAD
    + "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n",
    "a blank line between rows": QUAD.replace("\n", "\n\n"),
    "a remark behind a row": QUAD.replace(
        "0-23,48-71\t0\n", "0-23,48-71\t0  <- SYS = the far socket\n", 1
    ),
    "network cards": CARDS + "NIC0\tPIX\tPIX\tSYS\tSYS\tX\n",
}


@pytest.mark.parametrize("text", PASTED.values(), ids=PASTED)
def test_a_table_with_other_text_around_it_is_read(text):
    assert read_table(text) == QUAD_KINDS


WHOLE = "expected the whole output of `nvidia-smi topo -m`"
MARKED_UP = {
    "quoted": "".join(f"> {line}\n" for line in QUAD.splitlines()),
    "markdown": "".join("| " + line.replace("\t", " | ") + " |\n" for line in QUAD.splitlines()),
    "HTML": "<pre>" + QUAD.replace("\n", "<br/>") + "</pre>",
    "JSON": json.dumps({"topology": QUAD}),
    "line ends lost": "$ nvidia-smi topo -m " + QUAD.replace("\n", " ") + "Legend:   X    = Self",
    "log prefix": "".join(f"[1,0]<stdout>:{line}\n" for line in QUAD.splitlines()),
    "tabs lost in a row": QUAD.replace("\t X \tNV1\tNV2\tSYS\t", " X NV1NV2SYS", 1),
    "rows in another order": "\n".join([QUAD.splitlines()[i] for i in (0, 3, 1, 4, 2)]),
    "two tables": QUAD + "\nnode2:\n" + QUAD,
}


@pytest.mark.parametrize("text", MARKED_UP.values(), ids=MARKED_UP)
def test_markup_around_cells_is_an_error(text):
    with pytest.raises(HierAllreduceError, match=WHOLE):
        read_table(text)


@pytest.mark.parametrize("width", range(40, 130))
def test_a_wrapped_table_is_never_misread(width):
    lines = CARDS.expandtabs(8).splitlines()
    by_columns = [line[i : i + width] for line in lines for i in range(0, len(line), width)]
    by_words = [part for line in lines for part in textwrap.wrap(line, width)]
    for wrapped in (by_columns, by_words):
        with contextlib.suppress(HierAllreduceError):
            assert read_table("\n".join(wrapped)) == read_table(CARDS)
            assert wrapped in (lines, [line.strip() for line in lines])


def test_sixteen_gpus():
    kinds = read_table(table_of(16, "NV6"))
    assert (len(kinds), counted(kinds)) == (16, {6: 120})


ONE_CARD = (
    QUAD.replace("GPU3\tCPU", "GPU3\tNIC0\tCPU")
    .replace("\t0-23", "\tPIX\t0-23")
    .replace("\t24-", "\tSYS\t24-")
)
WRONG = {
    "no table": "nvidia-smi: command not found",
    "empty": "",
    "no header": "\n".join(QUAD.splitlines()[1:]),
    "a row above itself": "GPU0\t X \tNV1\n" * 2,
    "one row alone": "GPU0\t X",
    "a column missing": QUAD.replace("\tGPU2", "", 1),
    "unknown kind": QUAD.replace("NV1\tNV2\tSYS", "NV1\tQPI\tSYS"),
    "not available": QUAD.replace("NV1\tNV2\tSYS", "NV1\tN/A\tSYS"),
    "X off the diagonal": QUAD.replace("NV1\tNV2\tSYS", "NV1\tX\tSYS"),
    "no X on the diagonal": QUAD.replace("GPU1\tNV1\t X ", "GPU1\tNV1\tNV1"),
    "row twice": QUAD.replace("GPU3\tSYS", "GPU2\tSYS"),
    "rows missing": "\n".join(QUAD.splitlines()[:-1]),
    "row cut": QUAD[: QUAD.index("GPU3\tSYS") + 11],
    "a cell lost": QUAD.replace("\tSYS\tNV2\t0-23", "\tNV2\t0-23"),
    "a cell lost before a card's": ONE_CARD.replace("GPU2\tNV2\t", "GPU2\t"),
    "the last row twice": QUAD + QUAD.splitlines()[-1],
    "two kinds of one link": QUAD.replace("GPU1\tNV1", "GPU1\tPHB"),
    "peer access": PEERS,
    "another maker's links": QUAD.replace("CPU", "Node").replace("NV", "MX"),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_text_without_a_whole_table_is_an_error(text):
    with pytest.raises(HierAllreduceError, match=WHOLE):
        read_table(text)


def test_the_error_quotes_the_begin_of_the_text():
    with pytest.raises(HierAllreduceError, match="'Driver/library version mismatch'"):
        read_table("\nDriver/library version mismatch\nNVML library version: 535.1")


@given(st.integers(0, len(QUAD) - 1))
@settings(max_examples=200, deadline=None)
def test_a_table_cut_anywhere_is_never_misread(end):
    """Either an error, or the cut was behind the last link."""
    with contextlib.suppress(HierAllreduceError):
        assert read_table(QUAD[:end]) == QUAD_KINDS


@given(st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_table_cut_on_its_right_is_never_misread(width):
    lines = QUAD.expandtabs(8).splitlines()
    left_part = "\n".join(line[:width] for line in lines)
    with contextlib.suppress(HierAllreduceError):
        assert read_table(left_part) == QUAD_KINDS


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["SYS", "PIX", "NV1", "NV12", "N/A", "X", "", "ERR!"]),
)
@settings(max_examples=120, deadline=None)
def test_a_table_with_one_changed_cell_is_never_misread(row, column, cell):
    lines = [line.split("\t") for line in QUAD.splitlines()]
    lines[row + 1][column + 1] = cell
    with contextlib.suppress(HierAllreduceError):
        assert read_table("\n".join(map("\t".join, lines))) == QUAD_KINDS


@pytest.mark.parametrize("filler", [" ", "\t", "GPU 0: A ", "0, Tesla "])
def test_a_line_of_a_megabyte_is_read_at_once(filler):
    """Patterns that go back and forth in such a line would take hours, and time out."""
    assert read_table(QUAD + "\n" + filler * (2**20 // len(filler))) == QUAD_KINDS


@given(st.text(alphabet="GPU01 XNVSY\t\n|=:-[m", max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_an_error(text):
    """No other exception, whatever is pasted."""
    with contextlib.suppress(HierAllreduceError):
        read_table(text)


# ---- groups ------------------------------------------------------------------------------------

# Eight V100: the same links in the four numberings that bug trackers show. The first text has the
# pairs of GPUs with one NVLink, the second those with two.
DGX_1V = {
    "AWS": ("01 02 13 26 37 45 46 57", "03 04 12 15 23 47 56 67"),
    "Azure": ("02 03 12 15 37 46 47 56", "01 04 13 23 26 45 57 67"),
    "third": ("01 02 13 24 35 46 57 67", "03 06 12 17 23 45 47 56"),
    "fourth": ("01 03 12 25 34 47 56 67", "02 07 13 16 23 45 46 57"),
}


def kinds_of(*pairs_by_count, gpus=8):
    """Return K×K kinds: the first text has the pairs with one NVLink, the next those with two."""
    kinds = [["X" if a == b else "SYS" for b in range(gpus)] for a in range(gpus)]
    for count, pairs in enumerate(pairs_by_count, 1):
        for a, b in (map(int, pair) for pair in pairs.split()):
            kinds[a][b] = kinds[b][a] = f"NV{count}"
    return tuple(map(tuple, kinds))


@pytest.mark.parametrize("pairs", DGX_1V.values(), ids=DGX_1V)
def test_a_dgx_1v_is_grouped_along_its_links_however_it_is_numbered(pairs):
    kinds = kinds_of(*pairs)
    first, second = linked_groups(kinds) or ((0, 1, 2, 3), (4, 5, 6, 7))
    assert sorted(first + second) == list(range(8)) and len(first) == 4
    inside = [*combinations(first, 2), *combinations(second, 2)]
    assert all(kinds[a][b][:2] == "NV" for a, b in [*inside, *zip(first, second)])


def test_groups_are_named_only_where_they_are_not_the_halves():
    found = {name: linked_groups(kinds_of(*pairs)) for name, pairs in DGX_1V.items()}
    assert found["AWS"] is found["Azure"] is None
    assert found["third"] == ((0, 1, 2, 3), (6, 7, 4, 5))
    assert found["fourth"] == ((0, 1, 2, 3), (7, 6, 5, 4))
    for none in (table_of(8, "SYS"), table_of(16, "NV6"), table_of(2, "NV2"), table_of(3, "NV12")):
        assert linked_groups(read_table(none)) is None


def test_the_gpus_of_a_bridge_are_in_one_group():
    assert linked_groups(kinds_of("03 12", gpus=4)) == ((0, 3), (1, 2))
    assert linked_groups(kinds_of("04 13", gpus=5)) == ((0, 2, 4), (1, 3))


@pytest.mark.parametrize("near", ["PIX", "PHB", "NODE"])
def test_without_nvlinks_the_gpus_of_a_socket_are_in_one_group(near):
    def table(sockets):
        far = [
            ["X" if a == b else (near if x == y else "SYS") for b, y in enumerate(sockets)]
            for a, x in enumerate(sockets)
        ]
        return tuple(map(tuple, far))

    assert linked_groups(table("0101")) == ((0, 2), (1, 3))
    assert linked_groups(table("0011")) is linked_groups(table("0000")) is None
