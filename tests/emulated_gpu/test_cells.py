"""A cell of ``benchmarks/emulated.py``, at the least scale."""

import json
import os
import subprocess
import sys

import pytest
from emulated_gpu import plugin
from helpers.project import TOP
from helpers.real_gpus import ARE_EMULATED

pytestmark = pytest.mark.skipif(not ARE_EMULATED, reason="needs emulated GPUs")
LINKS = TOP / "benchmarks" / "machines" / "2x-rtx-5090.links"
NAMES = ["ours", "ours in a tf.function", "HierarchicalCopyAllReduce in 8 packs"]


@pytest.fixture
def measured(tmp_path):
    """``measured(model, …)``: the results of a cell of two GPUs."""

    def measured(model, hosts, names, **fields):
        cell = {
            "machine": "2x-rtx-5090",
            "model": model,
            "pass_ms": 20,
            "hosts": hosts,
            "scale": 4.0,
            "average": True,
            "rounds": 2,
            "names": names,
            **fields,
        }
        path = tmp_path / "cell.json"
        options = plugin.environment(count=2, memory_mb=4000, machine=str(LINKS), timing=4.0)
        program = str(TOP / "benchmarks" / "emulated_cell.py")
        environment = {**os.environ, **options}
        subprocess.run(
            [sys.executable, program, json.dumps(cell), str(path)], env=environment, check=True
        )
        return json.loads(path.read_text())

    return measured


def test_a_cell_has_embeddings_or_leaves_them_out(measured):
    (with_rows,) = measured("word_embeddings", [0.2], ["ours", "ours dense"], ids=16)
    (without,) = measured("word_embeddings", [0.2], ["ours"])
    # the table has 94 MB, which cross the bus of 26 GB/s twice; all else has 2.4 MB
    table_ms = 2e3 * 30522 * 768 * 4 / 26e9
    assert with_rows["contenders"]["ours dense"]["limit_ms"] > table_ms
    assert with_rows["contenders"]["ours"]["limit_ms"] < 0.1 * table_ms
    assert without["contenders"]["ours"]["limit_ms"] < 0.1 * table_ms


def test_a_cell_has_each_all_reduce_and_what_disturbed_it(measured):
    results = measured("mobilenet_v2", [0.2, 0.8], NAMES)
    assert [result["host"] for result in results] == [0.2, 0.8]
    for result in results:
        assert list(result["contenders"]) == NAMES
        assert result["base_ms"] >= result["kernels_ms"]  # no step is shorter than its kernels
        assert result["base_ms_of_functions"] >= result["kernels_ms"]
        assert result["op_us"] > 0 and result["other_cores"] >= 0 and result["longest_gap_ms"] >= 0
