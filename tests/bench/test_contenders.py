"""The contenders: peers, strategies, planned ones, and unknown names."""

import pytest
from helpers.benches import SMALL, case, measure_one
from helpers.own import FILE

from hier_allreduce.bench import measuring
from hier_allreduce.bench.contenders import PEERS, all_contenders, find_contender, is_ours, planned_for
from hier_allreduce.errors import HierAllreduceError


def test_tf_distribute_is_wrong_for_odd_numbers_of_devices():
    for devices, status in ((3, "wrong"), (4, "ok")):
        peers = [find_contender(name) for name in ("distribute-0", "distribute-1", "distribute-8")]
        report = measuring.measure(case(SMALL[:2], devices), peers, rounds=1, floor=False)
        assert {m.status for m in report.contenders} == {status}


def test_all_contenders_are_ours_and_each_peer_that_runs():
    assert [contender.name for contender in all_contenders()] == ["ours", *PEERS]


def test_unknown_contenders_are_refused_with_the_nearest():
    with pytest.raises(HierAllreduceError, match="did you mean 'tensorpack-packed'"):
        find_contender("tensorpack-paked")
    with pytest.raises(HierAllreduceError, match="'fastest' is neither a file nor one of the strategies"):
        find_contender("ours:fastest")
    assert find_contender("ours:tensorpack").name == "ours:tensorpack"


def test_ours_takes_a_function_of_a_file():
    assert find_contender(f"ours:{FILE}:two_quads").name == f"ours:{FILE}:two_quads"
    with pytest.raises(HierAllreduceError, match="has no function 'none'"):
        find_contender(f"ours:{FILE}:none")


def test_ours_planned_for_a_machine():
    contender = planned_for("p3.8xlarge")
    assert is_ours(contender.name) and contender.name == "ours on p3.8xlarge"
    assert measure_one(contender.build, devices=4).status == "ok"
    refused = measure_one(contender.build, devices=5)  # it has 4 GPUs
    assert refused.status == "cannot run" and "p3.8xlarge" in refused.error
