"""tensorpack on several hosts trains like one tower; only the chief saves and restores; a lost host ends training."""

import numpy as np
import pytest
from helpers.clusters import TIMEOUT, job


def weights(variables):
    return {n: np.array(v) for n, v in variables.items() if n.split("/")[0] in ("hidden", "out")}


def assert_near(actual, expected):
    actual, expected = weights(actual), weights(expected)
    assert {"hidden/W", "hidden/b", "out/W", "out/b"} <= set(actual)
    for name in set(actual) & set(expected):
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-5)


def all_towers(facts):
    """Return every tower's variables on every host, by the name that tower 0 has for them."""
    rows = []
    for host in facts:
        own = {n: v for n, v in host["after"].items() if n.startswith("tower1/")}
        rows += [
            {n[len("tower1/") :]: v for n, v in own.items()},
            {n[len("tower1/") :]: host["after"][n[7:]] for n in own},
        ]
    return rows


def one_tower(folder, optimizer, towers, **options):
    with job("tensorpack", 1, optimizer=optimizer, folder=str(folder), update="one", towers=towers, **options) as (
        host,
    ):
        return host.facts()


@pytest.mark.parametrize(("hosts", "optimizer", "update"), [(2, "adam", "replicated"), (3, "momentum", "main")])
def test_hosts_train_like_one_tower_with_all_their_examples(tmp_path, hosts, optimizer, update):
    with job("tensorpack", hosts, optimizer=optimizer, update=update, folder=str(tmp_path)) as started:
        facts = [host.facts() for host in started]
    alone = one_tower(tmp_path / "one", optimizer, 2 * hosts)
    assert [host["chief"] for host in facts] == [True] + [False] * (hosts - 1)
    for host in facts:
        assert_near(host["after"], alone["after"])
    first, *others = all_towers(facts)
    assert all(weights(first)[n].tolist() == weights(other)[n].tolist() for other in others for n in weights(first))
    assert {host["after"]["global_step"] for host in facts} == {12}


def test_after_a_lost_host_training_goes_on_from_a_checkpoint(tmp_path):
    """Two epochs; a host dies after the first, which the chief has saved. Only the chief is told of the checkpoint."""
    folder = str(tmp_path)
    with job("tensorpack", 2, timeout=TIMEOUT, optimizer="adam", folder=folder, die_after=1, who=1) as hosts:
        hosts[0].until(1)
        hosts[1].go_on()
        text = hosts[0].error()
    assert text.startswith("ClusterError: host 1 (127.0.0.1:")
    load = str(tmp_path / "saved" / "model-6")
    with job("tensorpack", 2, optimizer="adam", folder=folder, load=load, starting_epoch=2) as hosts:
        again = [host.facts() for host in hosts]
    assert {"model-6.index", "model-12.index"} <= set(again[0]["saved"])
    for host in again:
        assert host["before"] == again[0]["before"]
        assert (host["before"]["global_step"], host["after"]["global_step"]) == (6, 12)
        assert np.any(host["before"]["hidden/W/Adam"])
