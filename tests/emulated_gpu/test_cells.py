"""A cell of ``benchmarks/emulated.py``, at the least scale."""

import sys

import pytest
from helpers.project import TOP
from helpers.real_gpus import ARE_EMULATED

sys.path.insert(0, str(TOP / "benchmarks"))

import emulated
from emulated_cell import Cell

pytestmark = pytest.mark.skipif(not ARE_EMULATED, reason="needs emulated GPUs")
NAMES = ["ours", "ours in a tf.function", "HierarchicalCopyAllReduce in 8 packs"]


def measured(model, hosts, names, ids=0):
    """Return the results of a cell of two GPUs, stretched more where this machine is busy."""
    return emulated.run(Cell("2x-rtx-5090", model, 20, hosts, 4.0, True, 2, names, ids))


def test_a_cell_has_embeddings_or_leaves_them_out():
    (with_rows,) = measured("word_embeddings", [0.2], ["ours", "ours dense"], ids=16)
    (without,) = measured("word_embeddings", [0.2], ["ours"])
    # the table has 94 MB, which cross the bus of 26 GB/s twice; all else has 2.4 MB
    table_ms = 2e3 * 30522 * 768 * 4 / 26e9
    assert with_rows["contenders"]["ours dense"]["limit_ms"] > table_ms
    assert with_rows["contenders"]["ours"]["limit_ms"] < 0.1 * table_ms
    assert without["contenders"]["ours"]["limit_ms"] < 0.1 * table_ms


def test_a_cell_has_each_all_reduce_and_what_disturbed_it():
    results = measured("mobilenet_v2", [0.2, 0.8], NAMES)
    assert [result["host"] for result in results] == [0.2, 0.8]
    for result in results:
        assert list(result["contenders"]) == NAMES
        assert result["base_ms"] >= result["kernels_ms"]  # no step is shorter than its kernels
        assert result["base_ms_of_functions"] >= result["kernels_ms"]
        assert result["op_us"] > 0 and result["other_cores"] >= 0 and result["longest_gap_ms"] >= 0
