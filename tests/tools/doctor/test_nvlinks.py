"""NVLinks in the output of `nvidia-smi topo -m`, and groups along them.

Any other text, and one that is cut or contradicts itself, is an error that says where.
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

from hier_allreduce.errors import HierAllreduceError
from hier_allreduce_tools.doctor.nvlinks import linked_groups, read_table

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
QUAD_LINKS = ((0, 1, 2, 0), (1, 0, 0, 2), (2, 0, 0, 1), (0, 2, 1, 0))


def counted(links):
    """Count the pairs with NVLinks by their number."""
    pairs = combinations(range(len(links)), 2)
    return Counter(links[a][b] for a, b in pairs if links[a][b])


@pytest.mark.parametrize("name", COUNTED)
def test_links_are_those_that_a_person_counted(name):
    text = (REAL / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
    table = read_table(text)
    assert (len(table.links), counted(table.links)) == COUNTED[name]


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
    "escape character lost": "[4m" + QUAD.replace("Affinity\n", "Affinity[0m\n", 1),
    "escape character replaced": "\ufffd[4m"
    + QUAD.replace("NUMA Affinity\n", "NUMA Affinity\ufffd[0m\n", 1),
    "prompt before": "user@GPU-node:~$ nvidia-smi topo -m\n" + QUAD + "user@GPU-node:~$ ",
    "one blank between cells": QUAD.replace("\t", " "),
    "non-breaking blanks": QUAD.replace("\t", "\u00a0\u00a0"),
    "header without tabs": QUAD.replace("GPU0\tGPU1\tGPU2\tGPU3\t", "GPU0GPU1GPU2GPU3", 1),
    "prose about GPUs before": "GPU0 and GPU1 are slow together.\nGPU2 is fine.\n\n" + QUAD,
    "no affinity": BARE,
    "legend": QUAD
    + "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n",
    "a blank line between rows": QUAD.replace("\n", "\n\n"),
    "rows in another order": "\n".join([QUAD.splitlines()[i] for i in (0, 3, 1, 4, 2)]),
    "a remark behind a row": QUAD.replace(
        "0-23,48-71\t0\n", "0-23,48-71\t0  <- SYS = the far socket\n", 1
    ),
    "network cards": CARDS + "NIC0\tPIX\tPIX\tSYS\tSYS\tX\n",
}


@pytest.mark.parametrize("text", PASTED.values(), ids=PASTED)
def test_a_table_with_other_text_around_it_is_read(text):
    table = read_table(text)
    assert (table.links, table.warnings) == (QUAD_LINKS, ())


MARKED_UP = {
    "quoted": "".join(f"> {line}\n" for line in QUAD.splitlines()),
    "markdown": "".join("| " + line.replace("\t", " | ") + " |\n" for line in QUAD.splitlines()),
    "HTML": "<pre>" + QUAD.replace("\n", "<br/>") + "</pre>",
    "JSON": json.dumps({"topology": QUAD}),
    "line ends lost": "$ nvidia-smi topo -m " + QUAD.replace("\n", " ") + "Legend:   X    = Self",
    "log prefix": "".join(f"[1,0]<stdout>:{line}\n" for line in QUAD.splitlines()),
    "tabs lost in a row": QUAD.replace("\t X \tNV1\tNV2\tSYS\t", " X NV1NV2SYS", 1),
    "a log's line between rows": QUAD.replace("GPU2\tNV2", "NCCL_DEBUG=INFO\nGPU2\tNV2"),
}


@pytest.mark.parametrize("text", MARKED_UP.values(), ids=MARKED_UP)
def test_markup_around_cells_is_an_error(text):
    with pytest.raises(HierAllreduceError, match=r"no table of GPUs|row GPU\d"):
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


DAMAGED_CARDS = {
    "a tab lost between two": CARDS.replace("\tPIX\tNODE", "\tPIXNODE", 1),
    "two tabs lost": CARDS.replace("\tPIX\tNODE\tSYS", "\tPIXNODESYS", 1),
    "one not available": CARDS.replace("\tPIX\tNODE", "\tN/A\tNODE", 1),
}


@pytest.mark.parametrize("text", DAMAGED_CARDS.values(), ids=DAMAGED_CARDS)
def test_damaged_cells_of_network_cards_are_a_warning(text):
    warning = "row GPU0: cells of network cards are damaged; those of GPUs are whole"
    assert read_table(text) == (QUAD_LINKS, (warning,))


def test_sixteen_gpus():
    table = read_table(table_of(16, "NV6"))
    assert (len(table.links), counted(table.links)) == (16, {6: 120})


def test_old_names_of_kinds():
    assert read_table(table_of(3, "SOC")) == (((0,) * 3,) * 3, ())


NO_HEADER = {
    "no table": "nvidia-smi: command not found",
    "empty": "",
    "no header": "\n".join(QUAD.splitlines()[1:]),
    "a row above itself": "GPU0\t X \tNV1\n" * 2,
    "a word among the columns": QUAD.replace("\tGPU2", "\tX\tGPU2", 1),
}


@pytest.mark.parametrize("text", NO_HEADER.values(), ids=NO_HEADER)
def test_a_text_without_a_header_row_is_an_error(text):
    with pytest.raises(HierAllreduceError, match="no table of GPUs, with a header row"):
        read_table(text)


# a text of QUAD, what replaces it, and the message
WRONG_CELLS = {
    "unknown kind": ("NV1\tNV2\tSYS", "NV1\tQPI\tSYS", "row GPU0, column GPU2.*'QPI'"),
    "not available": ("NV1\tNV2\tSYS", "NV1\tN/A\tSYS", "row GPU0, column GPU2.*'N/A'"),
    "a kind and an affinity": ("SYS\t0-", "SYS0-", "row GPU0, column GPU3.*'SYS0-23,48-71'"),
    "X off the diagonal": (
        "NV1\tNV2\tSYS",
        "NV1\tX\tSYS",
        "row GPU0, column GPU2.*diagonal",
    ),
    "no X on the diagonal": (
        "GPU1\tNV1\t X ",
        "GPU1\tNV1\tNV1",
        "row GPU1, column GPU1.*diagonal",
    ),
    "a bond of nothing": (
        "NV1\tNV2\tSYS",
        "NV00\tNV2\tSYS",
        "row GPU0, column GPU1.*NV00",
    ),
    "a bond of very many links": (
        "NV1\tNV2\tSYS",
        f"NV{'1' * 5000}\tNV2\tSYS",
        "row GPU0, column GPU1.*NV111",
    ),
    "row twice": ("GPU3\tSYS", "GPU2\tSYS", "GPU2 appears twice"),
    "column twice": ("GPU2\tGPU3\t", "GPU2\tGPU2\t", "GPU2 appears twice"),
    "row without column": ("\tGPU3\tCPU", "\tCPU", "row GPU3.*no column GPU3"),
    "row cut": (
        "GPU3\tSYS\tNV2\tNV1\t X \t24-47,72-95\t1\n",
        "GPU3\tSYS\tNV2",
        "row GPU3, column GPU2",
    ),
    "a cell lost after the diagonal": (
        "\tSYS\tNV2\t0-23",
        "\tNV2\t0-23",
        "row GPU1, column GPU3",
    ),
}


@pytest.mark.parametrize("right, wrong, message", WRONG_CELLS.values(), ids=WRONG_CELLS)
def test_an_error_names_the_row_and_column_of_a_wrong_cell(right, wrong, message):
    assert right in QUAD
    with pytest.raises(HierAllreduceError, match=message):
        read_table(QUAD.replace(right, wrong))


ONE_CARD = (
    QUAD.replace("GPU3\tCPU", "GPU3\tNIC0\tCPU")
    .replace("\t0-23", "\tPIX\t0-23")
    .replace("\t24-", "\tSYS\t24-")
)
# a text, and the message
WRONG = {
    "rows missing": ("\n".join(QUAD.splitlines()[:-1]), "row GPU3 is missing"),
    "cell cut": (QUAD[: QUAD.index("GPU3\tSYS") + 11], "row GPU3, column GPU1"),
    "the last row twice": (QUAD + QUAD.splitlines()[-1], "GPU3 appears twice"),
    "cut on the right, to one column": ("\tGPU0\nGPU0\t X\nGPU1\tSY\n", "row GPU1.*no column GPU1"),
    "a cell lost before a card's": (
        ONE_CARD.replace("GPU2\tNV2\t", "GPU2\t"),
        "row GPU2, column GPU1.*diagonal",
    ),
    "cells cut in the middle of the cards'": (
        CARDS.replace("PIX\tNODE\tSYS\tSYS\tSYS\t", "PIX\tNO"),
        "row GPU0, column NIC1",
    ),
    "peer access": (PEERS, "row GPU0, column GPU1.*'OK'.*not the output of `nvidia-smi topo -m`"),
    "another maker's links": (
        QUAD.replace("CPU", "Node").replace("NV", "MX"),
        "row GPU0, column GPU1.*'MX1'",
    ),
    "AMD's links": (
        "       GPU0  GPU1\nGPU0   0     XGMI\nGPU1   XGMI  0\n",
        "row GPU0, column GPU0.*found '0'",
    ),
}


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_cut_and_contradictory_tables_are_errors_that_say_where(text, message):
    with pytest.raises(HierAllreduceError, match=message):
        read_table(text)


@given(st.integers(0, len(QUAD) - 1))
@settings(max_examples=200, deadline=None)
def test_a_table_cut_anywhere_is_never_misread(end):
    """Either an error, or the cut was behind the last link."""
    try:
        table = read_table(QUAD[:end])
    except HierAllreduceError:
        return
    assert table.links == QUAD_LINKS


@given(st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_table_cut_on_its_right_is_never_misread(width):
    lines = QUAD.expandtabs(8).splitlines()
    left_part = "\n".join(line[:width] for line in lines)
    with contextlib.suppress(HierAllreduceError):
        assert read_table(left_part).links == QUAD_LINKS


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["SYS", "PIX", "NV1", "NV12", "N/A", "X", "", "ERR!"]),
)
@settings(max_examples=120, deadline=None)
def test_one_changed_cell_is_an_error_or_a_warning_that_names_it(row, column, cell):
    lines = [line.split("\t") for line in QUAD.splitlines()]
    lines[row + 1][column + 1] = cell
    try:
        table = read_table("\n".join(map("\t".join, lines)))
    except HierAllreduceError as error:
        assert f"row GPU{row}, column GPU{column}" in str(error) or not cell
        return
    named = f"GPU{min(row, column)}–GPU{max(row, column)}"
    assert table.links == QUAD_LINKS or any(warning.startswith(named) for warning in table.warnings)


@pytest.mark.parametrize("filler", [" ", "\t", "GPU 0: A ", "0, Tesla "])
def test_a_line_of_a_megabyte_is_read_at_once(filler):
    """Patterns that go back and forth in such a line would take hours, and time out."""
    assert read_table(QUAD + "\n" + filler * (2**20 // len(filler))).links == QUAD_LINKS


@given(st.text(alphabet="GPU01 XNVSY\t\n|=:-[m", max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_an_error(text):
    """No other exception, whatever is pasted."""
    with contextlib.suppress(HierAllreduceError):
        read_table(text)


def test_an_asymmetric_table_warns_and_counts_as_slower():
    table = read_table(QUAD.replace("GPU1\tNV1", "GPU1\tPHB"))
    assert table.links[0][1] == table.links[1][0] == 0
    (warning,) = table.warnings[:1]
    assert "GPU0–GPU1" in warning and "NV1" in warning and "PHB" in warning


@pytest.mark.parametrize(
    "before", [QUAD, QUAD[QUAD.index("\n") :]], ids=["whole", "without a header"]
)
def test_rows_of_a_second_table_are_mentioned(before):
    table = read_table(before + "\nnode2:\n" + QUAD)
    assert table.links == QUAD_LINKS
    assert table.warnings == ("the text has rows of another table too; only one table was read",)


# ---- groups ------------------------------------------------------------------------------------

# Eight V100: the same links in the four numberings that bug trackers show. The first text has the
# pairs of GPUs with one NVLink, the second those with two.
DGX_1V = {
    "AWS": ("01 02 13 26 37 45 46 57", "03 04 12 15 23 47 56 67"),
    "Azure": ("02 03 12 15 37 46 47 56", "01 04 13 23 26 45 57 67"),
    "third": ("01 02 13 24 35 46 57 67", "03 06 12 17 23 45 47 56"),
    "fourth": ("01 03 12 25 34 47 56 67", "02 07 13 16 23 45 46 57"),
}


def links_of(*pairs_by_count, gpus=8):
    """Return K×K links: the first text has the pairs with one NVLink, the next those with two."""
    links = [[0] * gpus for _ in range(gpus)]
    for count, pairs in enumerate(pairs_by_count, 1):
        for a, b in (map(int, pair) for pair in pairs.split()):
            links[a][b] = links[b][a] = count
    return tuple(map(tuple, links))


@pytest.mark.parametrize("pairs", DGX_1V.values(), ids=DGX_1V)
def test_a_dgx_1v_is_grouped_along_its_links_however_it_is_numbered(pairs):
    links = links_of(*pairs)
    first, second = linked_groups(links) or ((0, 1, 2, 3), (4, 5, 6, 7))
    assert sorted(first + second) == list(range(8)) and len(first) == 4
    inside = [*combinations(first, 2), *combinations(second, 2)]
    assert all(links[a][b] for a, b in [*inside, *zip(first, second)])


def test_groups_are_named_only_where_they_are_not_the_halves():
    found = {name: linked_groups(links_of(*pairs)) for name, pairs in DGX_1V.items()}
    assert found["AWS"] is found["Azure"] is None
    assert found["third"] == ((0, 1, 2, 3), (6, 7, 4, 5))
    assert found["fourth"] == ((0, 1, 2, 3), (7, 6, 5, 4))
    for none in (table_of(8, "SYS"), table_of(16, "NV6"), table_of(2, "NV2"), table_of(3, "NV12")):
        assert linked_groups(read_table(none).links) is None


def test_the_gpus_of_a_bridge_are_in_one_group():
    assert linked_groups(links_of("03 12", gpus=4)) == ((0, 3), (1, 2))
    assert linked_groups(links_of("04 13", gpus=5)) == ((0, 2, 4), (1, 3))
