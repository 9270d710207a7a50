"""Which hosts there are, and which one this process is: TF_CONFIG, Slurm, other launchers, arguments."""

import json

import pytest

from hier_allreduce import Cluster, ClusterError
from hier_allreduce.cluster.place import ALONE, expand, place

HOSTS = {"chief": ["a:1"], "worker": ["b:2", "c:3"]}
STEP = {
    "SLURM_STEP_NODELIST": "n[09-10],login",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "7",
}


def tf_config(cluster, **task):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


@pytest.mark.parametrize(
    "environ, expected",
    [
        (tf_config(HOSTS, type="worker", index=1), (("a:1", "b:2", "c:3"), 2)),
        ({**STEP, **tf_config(HOSTS, type="worker", index=0)}, (("a:1", "b:2", "c:3"), 1)),
        (STEP, (("n09:10007", "n10:10007", "login:10007"), 2)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        ({**STEP, "TF_CONFIG": "{}"}, ALONE),
        ({"JOB_COMPLETION_INDEX": "1", "TF_CONFIG": "{}"}, ALONE),
        ({}, ALONE),
    ],
)
def test_the_environment_says_which_host_this_is(environ, expected):
    assert place(environ) == expected


@pytest.mark.parametrize(
    "environ, words",
    [
        # each would train a model alone
        (
            {"SLURM_STEP_NUM_TASKS": "4"},
            r"srun has started 4 processes \(SLURM_STEP_NUM_TASKS\), but there is no TF_C",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "mpirun has started 4 processes .*, but there is no TF_CONFIG",
        ),
        ({"PMI_SIZE": "2"}, "mpiexec has started 2 processes"),
        ({"WORLD_SIZE": "2"}, "torchrun has started 2 processes"),
        ({"JOB_COMPLETION_INDEX": "0"}, "a Kubernetes Indexed Job has started this process"),
        (
            {**STEP, "SLURM_STEP_NUM_TASKS": "6"},
            "srun has started 6 tasks on 3 nodes.*--ntasks-per-node=1",
        ),
        ({**STEP, "SLURM_NODEID": ""}, "SLURM_NODEID=''"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[a-b]"}, "expected names such as"),
        ({"TF_CONFIG": "[]"}, "expected {"),
        (tf_config(HOSTS, type="worker", index=2), "with this process in the list"),
        (
            tf_config({**HOSTS, "ps": ["d:4"]}, type="worker", index=0),
            "only the jobs 'chief' and 'worker'",
        ),
    ],
)
def test_a_description_that_is_none_is_an_error(environ, words, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match=words):
        Cluster.from_environment(2)


def test_node_lists_and_ports_of_slurm():
    assert expand("n[08-10],r[1-2]c[1,3]-ib") == [
        "n08",
        "n09",
        "n10",
        "r1c1-ib",
        "r1c3-ib",
        "r2c1-ib",
        "r2c3-ib",
    ]
    assert (
        place({**STEP, "SLURM_JOB_ID": "8"}).hosts != place(STEP).hosts
    )  # another port for each job


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"hosts": []}, "expected a list of addresses"),
        ({"hosts": ["here:²"]}, "'here:²' is not an address"),
        ({"hosts": ["a:1", "b:1", "a:1"]}, "there more than once"),
        ({"task": 2}, "task=2: expected the index of a host, 0 to 1"),
        ({"devices_per_host": 0}, "devices_per_host=0"),
        ({"communication": "auto"}, "communication='auto': expected one of ring, nccl"),
        ({"timeout": float("inf")}, "timeout=inf: expected seconds"),
    ],
)
def test_an_invalid_cluster_is_an_error(arguments, words):
    with pytest.raises(ClusterError, match=words):
        Cluster(**{"hosts": ["a:1", "b:1"], "task": 0, "devices_per_host": 1, **arguments})
