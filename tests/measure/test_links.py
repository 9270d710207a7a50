"""Copies that are measured: on CPU devices, and figures as a GPU machine gives them."""

import pytest

from hier_allreduce import HierAllreduceError, measure
from hier_allreduce.measure import links
from hier_allreduce.measure.links import Copies, Measured
from hier_allreduce.topology import Topology

GPUS = ["/gpu:0", "/gpu:1", "/gpu:2", "/gpu:3"]
PAIRS = [(a, b) for a in GPUS for b in GPUS if a != b]
GOOD = Copies(rate=(9.9e9, 10.1e9), start=(20e-6, 21e-6))


def at_once(rate, dispatch=(3e-6, 3.1e-6)):
    """Return figures of copies that are as fast as GOOD, four of which run at once."""
    around = tuple(zip(GPUS, GPUS[1:] + GPUS[:1]))
    return Measured(
        dict.fromkeys(PAIRS, GOOD), {"host": Copies(around, rate=rate)}, Copies(start=dispatch)
    )


def machine():
    return Topology.load("dgx-1v").subset([0, 1, 2, 3])


def test_bits_of_cpu_devices_are_compared():
    found = measure.measure(["/cpu:0", "/cpu:1"], None)
    assert {pair: (copies.differ, copies.fault) for pair, copies in found.pairs.items()} == {
        ("/cpu:0", "/cpu:1"): (0, ""),
        ("/cpu:1", "/cpu:0"): (0, ""),
    }
    assert "are no copies" in measure.report(found) and measure.faults(found) == []
    assert [copies["differ"] for copies in measure.as_json(found)["copies"]] == [0, 0]


def test_a_copy_that_does_not_end_is_left_out(monkeypatch):
    monkeypatch.setattr(links, "LIMIT", 0.001)
    found = measure.measure(["/cpu:0", "/cpu:1"], None)
    assert [copies.fault for copies in found.pairs.values()] == ["no answer for 0.001 s"] * 2
    (line,) = measure.faults(found)
    assert line.startswith(
        "copies did not end or failed (/cpu:0 → /cpu:1, /cpu:1 → /cpu:0): turn off"
    )


def test_a_device_that_does_not_exist_is_an_error():
    with pytest.raises(
        HierAllreduceError, match=r"TensorFlow cannot use /gpu:7: the process ended: .*Error"
    ):
        measure.measure(["/gpu:7", "/cpu:0"], None)


def test_figures_that_repeat_are_written_and_plan_takes_the_file(tmp_path):
    found = at_once((20e9, 20.4e9))
    found.pairs[PAIRS[2]] = GOOD._replace(rate=(5e9, 9e9))
    found.pairs[PAIRS[1]] = GOOD._replace(differ=3)
    (tmp_path / "machine.yaml").write_text(
        measure.with_figures(machine(), GPUS, found).to_yaml(), encoding="utf-8"
    )
    loaded = Topology.load(str(tmp_path / "machine.yaml"))
    assert len(loaded.links) == 10 and len(loaded.starts) == 11
    assert dict(loaded.links)["GPU1-GPU0"] == 10e9 and dict(loaded.starts)[
        "GPU1-GPU0"
    ] == pytest.approx(20.5e-6)
    assert not {"GPU0-GPU3", "GPU0-GPU2"} & set(dict(loaded.links))
    assert loaded.shared == (("host", 20.2e9),) and loaded.speeds.dispatch == pytest.approx(3.05e-6)
    text = measure.report(found)
    assert "does not repeat: 5 GB/s, 9 GB/s" in text and "3 B DIFFER" in text
    assert "bits differ after copies /gpu:0 → /gpu:2" in measure.faults(found)[0]


def test_groups_as_fast_as_their_copies_share_nothing():
    assert measure.with_figures(machine(), GPUS, at_once((30e9, 30e9))).shared == (("host", 30e9),)
    written = measure.with_figures(machine(), GPUS, at_once((39e9, 40e9), dispatch=(3e-6, 5e-6)))
    assert written.shared == () and written.speeds.dispatch is None
