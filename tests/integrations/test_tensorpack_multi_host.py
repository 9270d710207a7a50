"""tensorpack on several hosts trains like one host with all towers.

Only the chief saves and restores.
"""

import numpy as np
import pytest
from helpers.clusters import job
from helpers.forks import run_forked


def trained(hosts, folder, **options):
    """Train four towers for an epoch, and again from its checkpoint; return facts.

    Only the chief knows of the checkpoint.
    """
    for epoch, checkpoint in ((1, None), (2, f"{folder}/saved/model-6")):
        started = {"devices": 4 // hosts, "folder": str(folder), "epoch": epoch, "load": checkpoint}
        with job("tensorpack", hosts, **started, **options) as running:
            facts = [host.facts() for host in running]
    return facts


@pytest.mark.parametrize("optimizer, update", [("adam", "replicated"), ("momentum", "sharded")])
def test_two_hosts_train_like_one_with_all_their_towers(tmp_path, optimizer, update):
    options = {"optimizer": optimizer, "update": update}
    (alone,) = trained(1, tmp_path / "one", **options)
    for host in trained(2, tmp_path / "two", **options):
        assert (host["before"]["global_step"], host["after"]["global_step"]) == (6, 12)
        for name in ("hidden/W", "hidden/b", "out/W", "out/b"):
            for when in ("before", "after"):
                np.testing.assert_allclose(host[when][name], alone[when][name], atol=1e-5)
                assert host[when][name] == host[when][f"tower1/{name}"]


@pytest.mark.parametrize("devices", [1, 2])
def test_what_the_chief_changes_at_an_epochs_end_goes_to_all_hosts(tmp_path, devices):
    options = {"optimizer": "sgd with a variable", "slower": True, "epochs": 2}
    with job("tensorpack", 2, devices=devices, folder=str(tmp_path), **options) as hosts:
        for host in hosts:
            np.testing.assert_allclose(host.facts()["rates"], [0.1, 0.01], rtol=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_hosts_are_compared_while_they_train(tmp_path, devices):
    options = {"optimizer": "sgd", "folder": str(tmp_path), "each": {1: {"spoil": True}}}
    with job("tensorpack", 2, devices=devices, **options) as hosts:
        for host in hosts:
            assert "after 2 steps the hosts' weights are different: 1 of" in host.error()


def test_a_cluster_of_another_class_is_an_error(tmp_path):
    program = """
from hier_allreduce import ClusterError
from hier_allreduce.integrations.tensorpack import HierarchicalTrainer
try:
    HierarchicalTrainer(2, cluster="10.0.0.1:2222")
except ClusterError as error:
    print(error)
"""
    done = run_forked(program, folder=tmp_path)
    assert "cluster='10.0.0.1:2222': expected a hier_allreduce.Cluster" in done.out, done.err
