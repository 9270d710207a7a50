"""The hosts, and which one this process is: TF_CONFIG, Slurm, counts of processes, arguments."""

import json

import numpy as np
import pytest

from hier_allreduce import Cluster, ClusterError, HierAllreduceError
from hier_allreduce.cluster.environment import ALONE, Job, expand, job_of
from hier_allreduce.cluster.session import session_config

HOSTS = {"chief": ["a:1"], "worker": ["b:2", "c:3"]}
STEP = {
    "SLURM_STEP_NODELIST": "n[09-10],login",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "7",
}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}


def tf_config(cluster, **task):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


# ---- descriptions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ, expected",
    [
        (tf_config(HOSTS, type="worker", index=1), (("a:1", "b:2", "c:3"), 2)),
        ({**STEP, **tf_config(HOSTS, type="worker", index=0)}, (("a:1", "b:2", "c:3"), 1)),
        (tf_config({"ps": [], "worker": ["w:1"]}, type="worker", index=0), (("w:1",), 0)),
        (STEP, (("n09:10007", "n10:10007", "login:10007"), 2)),
    ],
)
def test_the_environment_says_which_host_this_is(environ, expected):
    assert job_of(environ) == expected


# What machines, batch systems and tools set where a process is alone: of the processes of an array
# each one is.
ORDINARY = {
    "a desktop": {
        "XCURSOR_SIZE": "24",
        "HISTSIZE": "1000",
        "HISTFILESIZE": "2000",
        "COLUMNS": "120",
        "NUMBER_OF_PROCESSORS": "16",
        "NPROC": "16",
        "NPROCS": "8",
        "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus",
        "SSH_CONNECTION": "10.0.0.1:5022 10.0.0.2:22",
    },
    "settings of a program": {
        "BATCH_SIZE": "32",
        "GROUP_SIZE": "8",
        "NUM_WORKERS": "4",
        "NUM_GPUS": "8",
        "OMP_NUM_THREADS": "8",
        "WORLD_SIZE": "",
    },
    "one pod": {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
        "TRAIN_SERVICE_PORT": "2222",
        "JOB_COMPLETION_INDEX": "3",
    },
    "one task of an array": {
        **ALLOCATION,
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "8",
        "SLURM_NPROCS": "8",
        "SLURM_CPUS_ON_NODE": "64",
        "SLURM_ARRAY_TASK_COUNT": "40",
        "SGE_TASK_ID": "3",
        "NHOSTS": "1",
        "NSLOTS": "8",
        "AWS_BATCH_JOB_ARRAY_SIZE": "40",
        "AWS_BATCH_JOB_ARRAY_INDEX": "3",
        "BATCH_TASK_COUNT": "40",
        "BATCH_TASK_INDEX": "3",
        "CLOUD_RUN_TASK_COUNT": "40",
        "PBS_NUM_NODES": "1",
        "LSB_DJOB_NUMPROC": "8",
    },
    "parallel tests": {
        "PYTEST_XDIST_WORKER_COUNT": "8",
        "CI_NODE_TOTAL": "4",
        "CIRCLE_NODE_TOTAL": "4",
        "BUILDKITE_PARALLEL_JOB_COUNT": "4",
    },
    "one process of a launcher": {
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "PMI_SIZE": "1",
        "PMI_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "0",
        "BATCH_SIZE": "32",
        "SKYPILOT_NUM_NODES": "1",
    },
}


@pytest.mark.parametrize("environ", ORDINARY.values(), ids=list(ORDINARY))
def test_an_ordinary_environment_is_one_host(environ):
    assert job_of(environ) == ALONE


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**STEP, "TF_CONFIG": "{}"},
        {**ALLOCATION, "TF_CONFIG": "{}"},
        {**ALLOCATION, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_is_one_host(environ):
    assert job_of(environ) == ALONE


# ---- several processes that nothing describes ----------------------------------------------------


@pytest.mark.parametrize(
    "counts",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},  # mpirun
        {"PMI_SIZE": "2", "PMI_RANK": "0"},  # mpiexec
        {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"},  # jsrun
        {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1"},
        {"BYTEPS_LOCAL_SIZE": "2", "BYTEPS_LOCAL_RANK": "0"},
        {"WORLD_SIZE": "2"},  # torchrun, accelerate, deepspeed, Kubeflow, RunPod
        {"WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"},
        {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1"},  # Kubeflow Trainer
        {"SKYPILOT_NUM_NODES": "2"},
        {"AWS_BATCH_JOB_NUM_NODES": "2"},
        {"AZUREML_NODE_COUNT": "2"},
        {"BATCH_NODE_COUNT": "2"},  # Google Cloud
        {"NODE_COUNT": "2"},  # OCI
        {"DSTACK_NODES_NUM": "2"},
        {"FLUX_JOB_NNODES": "2"},
        {"DET_NUM_NODES": "2"},  # Determined
        # a batch script runs on the first node, and has started its program without a launcher
        {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
        {"PBS_NUM_NODES": "2"},
        {"NHOSTS": "2", "NSLOTS": "16"},  # Grid Engine
    ],
    ids=lambda counts: next(iter(counts)),
)
def test_several_processes_without_a_description_are_an_error(counts):
    """Each would train a model alone."""
    variable, written = next(iter(counts.items()))
    with pytest.raises(ClusterError) as caught:
        job_of(counts)
    words = "without TF_CONFIG each process would train alone. Set TF_CONFIG="
    assert str(caught.value).startswith(f"{variable}={written!r}: {words}")
    assert job_of({**counts, "TF_CONFIG": "{}"}) == ALONE


@pytest.mark.parametrize(
    "environ, words",
    [
        ({**STEP, "SLURM_STEP_NUM_TASKS": "6"}, "6 tasks on 3 nodes.*--ntasks-per-node=1"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "4 tasks on 0 nodes"),
        ({"TF_CONFIG": "[]"}, "expected {"),
        (tf_config(HOSTS, type="worker", index=2), "with this process in the list"),
        (tf_config(HOSTS, type=["worker"], index=0), "with this process in the list"),
        (tf_config({}, type="worker", index=0), "or {} if each shall train alone"),
        (
            {"TF_CONFIG": '{"Cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}'},
            "or {} if each shall train alone",
        ),
        (
            {"TF_CONFIG": '{"sparseCluster": {}, "task": {"type": "chief", "index": 0}}'},
            "with this process in the list",
        ),
        ({"TF_CONFIG": '{"environment": "cloud"}'}, "expected {"),
        (tf_config({"worker": "a:1,b:1"}, type="worker", index=0), "'a' is not an address"),
        (tf_config({"worker": {"0": "a:1"}}, type="worker", index=0), "'0' is not an address"),
        (tf_config(HOSTS, type="worker", index=True), "with this process in the list"),
    ],
)
def test_a_wrong_description_is_an_error(environ, words, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match=words):
        Cluster.from_environment()


@pytest.mark.parametrize(
    "jobs",
    [
        {**HOSTS, "evaluator": ["e:1"]},
        {**HOSTS, "ps": ["p:1"], "evaluator": ["e:1"]},
        {"Worker": ["w:1", "x:1"]},
        {"master": ["m:1"], "worker": ["w:1"], "ps": []},
    ],
)
def test_every_task_of_a_job_with_other_jobs_gets_an_error(jobs):
    """So none waits for those."""
    for kind in [job for job, hosts in jobs.items() if hosts]:
        with pytest.raises(ClusterError, match="no jobs but 'chief' and 'worker', whose tasks all"):
            job_of(tf_config(jobs, type=kind, index=0))


def test_an_evaluator_that_its_cluster_does_not_list_is_told_to_leave():
    """That is how TensorFlow's estimators describe one."""
    with pytest.raises(ClusterError, match="no jobs but 'chief' and 'worker', whose tasks all"):
        job_of(tf_config(HOSTS, type="evaluator", index=0))


def test_node_lists_and_ports_of_slurm():
    names = ["n08", "n09", "n10", "r1c1-ib", "r1c3-ib", "r2c1-ib", "r2c3-ib"]
    assert expand("n[08-10],r[1-2]c[1,3]-ib") == names
    # another port for each job
    assert job_of({**STEP, "SLURM_JOB_ID": "8"}) != job_of(STEP)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"hosts": []}, "expected the index of one of 0 hosts"),
        ({"hosts": "a:1,b:1"}, "'a' is not an address"),
        ({"hosts": ["here:²"]}, "'here:²' is not an address"),
        ({"hosts": ["a:1", "b:1", "a:1"]}, "each host needs an address of its own"),
        ({"task": 2}, "task=2: expected the index of one of 2 hosts"),
    ],
)
def test_an_invalid_cluster_is_an_error(arguments, words):
    with pytest.raises(HierAllreduceError, match=words):
        Cluster(**{"hosts": ["a:1", "b:1"], "task": 0, **arguments})


def test_numbers_of_numpy_are_numbers():
    numbers: dict = {"task": np.int64(1), "timeout": np.float32(4)}
    cluster = Cluster(["a:1", "b:1"], **numbers)
    assert str(cluster) == "Cluster(['a:1', 'b:1'], task=1)"
    assert not cluster.is_chief
    config = session_config(Job(cluster.hosts, cluster.task, 4.0, 600.0, 1800.0))
    assert list(config.device_filters) == ["/job:worker/task:1"]
