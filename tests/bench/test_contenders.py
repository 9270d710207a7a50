"""The contenders: peers, strategies, planned ones, and unknown names."""

import pytest
from helpers.benches import SMALL, case, measure_one

from hier_allreduce.bench import measuring
from hier_allreduce.bench.contenders import find_contender, is_ours, ours, planned_for, sweep_contenders
from hier_allreduce.errors import BenchError, StrategyError
from hier_allreduce.planning.strategy import Strategy


def test_tf_distribute_is_wrong_for_an_odd_number_of_devices_and_right_for_an_even_one():
    for devices, status in ((3, "wrong"), (4, "ok")):
        peers = [find_contender(name) for name in ("distribute-0", "distribute-1", "distribute-8")]
        report = measuring.measure(case(SMALL[:2], devices), peers, rounds=1, floor=False)
        assert {m.status for m in report.contenders} == {status}


def test_unknown_contenders_are_refused_with_the_nearest():
    with pytest.raises(BenchError, match="did you mean 'tensorpack-packed'"):
        find_contender("tensorpack-paked")
    with pytest.raises(StrategyError, match="'fastest' is neither a file nor one of the strategies"):
        find_contender("ours:fastest")
    assert find_contender("ours:tensorpack").name == "ours:tensorpack"


def test_the_sweep_begins_with_the_default_and_names_each_choice():
    names = [contender.name for contender in sweep_contenders()]
    assert (
        names[0] == "ours"
        and {"ours:pack_below=0", "ours:pack_below=4K", "ours:mains=rotate"} < set(names)
        and len(set(names)) == len(names)
    )
    assert ours(Strategy(pack_below=0), "plain").name == "plain"


def test_ours_planned_for_a_machine():
    contender = planned_for("p3.8xlarge")
    assert is_ours(contender.name) and contender.name == "ours on p3.8xlarge"
    assert measure_one(contender.build, devices=4).status == "ok"
    refused = measure_one(contender.build, devices=5)  # it has 4 GPUs
    assert refused.status == "cannot run" and "p3.8xlarge" in refused.error
