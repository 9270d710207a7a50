"""tensorpack on several hosts trains like one host; only the chief saves and restores; a lost host ends training."""

import numpy as np
import pytest
from helpers.clusters import TIMEOUT, job

LAYERS = ("hidden/W", "hidden/b", "out/W", "out/b")


def trained(hosts, **options):
    """Return the facts of each host of a job with four towers in all."""
    with job("tensorpack", hosts, devices=4 // hosts, **options) as started:
        return [host.facts() for host in started]


@pytest.mark.parametrize("optimizer, update", [("adam", "replicated"), ("momentum", "main")])
def test_two_hosts_train_like_one_with_all_their_towers(tmp_path, optimizer, update):
    options = {"optimizer": optimizer, "update": update}
    hosts = trained(2, folder=str(tmp_path / "two"), **options)
    (alone,) = trained(1, folder=str(tmp_path / "one"), **options)
    for host in hosts:
        assert host["after"]["global_step"] == alone["after"]["global_step"] == 12
        for name in LAYERS:
            np.testing.assert_allclose(host["after"][name], alone["after"][name], atol=1e-5)
            assert host["after"][name] == host["after"][f"tower1/{name}"] == hosts[0]["after"][name]
            assert host["before"][name] == hosts[0]["before"][name]


def test_after_a_lost_host_training_goes_on_from_a_checkpoint(tmp_path):
    """Two epochs; a host dies after the first, which the chief has saved. Only the chief is told of the checkpoint."""
    options = {"optimizer": "adam", "update": "replicated", "folder": str(tmp_path)}
    with job("tensorpack", 2, timeout=TIMEOUT, each={1: {"waits": True}}, **options) as hosts:
        hosts[0].until(1)
        hosts[1].until(1)
        hosts[1].process.kill()
        text = hosts[0].error()
    assert text.startswith("ClusterError: host 1 (127.0.0.1:")
    again = trained(2, load=str(tmp_path / "saved" / "model-6"), starting_epoch=2, **options)
    assert {"model-6.index", "model-12.index"} <= set(again[0]["saved"])
    for host in again:
        assert (host["before"]["global_step"], host["after"]["global_step"]) == (6, 12)
        assert host["before"]["hidden/W/Adam"] == again[0]["before"]["hidden/W/Adam"]
        assert np.any(host["before"]["hidden/W/Adam"])
