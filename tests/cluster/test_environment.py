"""The hosts, and which one this process is: TF_CONFIG, Slurm, other launchers, arguments."""

import json

import numpy as np
import pytest

from hier_allreduce import Cluster, ClusterError
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
SHELL = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}  # of salloc
TWO_LINES = "hosts of a batch job"  # stands for the path of a file


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


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**STEP, "TF_CONFIG": "{}"},
        {"JOB_COMPLETION_INDEX": "1", "TF_CONFIG": "{}"},
        {**ALLOCATION, "TF_CONFIG": "{}"},
        {**ALLOCATION, "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"},
        {**ALLOCATION, "SLURM_STEP_NUM_TASKS": "1"},
        {**ALLOCATION, "SLURM_JOB_NUM_NODES": "1", **SHELL},
        {**ALLOCATION, "PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"LSB_MCPU_HOSTS": "n1 8"},
        {"PBS_NODEFILE": "/no such file"},
        {"SM_HOSTS": '["algo-1"]'},
        {"WORLD_SIZE": ""},
        tf_config({"worker": [], "ps": []}, type="worker", index=0),
        {"TF_CONFIG": '{"cluster": {}, "task": {"type": "master", "index": "0"}, "job": {}}'},
        {"PAI_TASK_ROLE_COUNT": "1", "PAI_TASK_ROLE_TASK_COUNT_worker": "1"},
        {"SLURM_HET_SIZE": "2", "TF_CONFIG": "{}"},
        {"NHOSTS": "1", "NSLOTS": "8", "SGE_TASK_ID": "3"},
        {"AZ_BATCH_HOST_LIST": "10.0.0.4", "PADDLE_TRAINERS_NUM": "1"},
    ],
)
def test_one_process_is_one_host(environ):
    assert job_of(environ) == ALONE


# ---- several processes that nothing describes ----------------------------------------------------


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"srun has started 4 processes \(SLURM_STEP_NUM_TASKS\)"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun has started 4"),
        ({"PMI_SIZE": "2"}, "mpiexec has started 2"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "mpirun_rsh has started 2"),
        ({"MVP_COMM_WORLD_SIZE": "2"}, "mpirun_rsh has started 2"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "jsrun has started 2"),
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1"}, "horovodrun has started 4"),
        ({"BYTEPS_LOCAL_SIZE": "2", "DMLC_NUM_WORKER": "1"}, "bpslaunch has started 2"),
        ({"BYTEPS_LOCAL_SIZE": "1", "DMLC_NUM_WORKER": "3"}, "bpslaunch has started 3"),
        ({"_CONDOR_NPROCS": "2", "_CONDOR_PROCNO": "0"}, "HTCondor's parallel universe has"),
        ({"WORLD_SIZE": "2"}, "torchrun has started 2"),
        ({"FLUX_JOB_SIZE": "2"}, "flux has started 2"),
        ({"AWS_BATCH_JOB_NUM_NODES": "2"}, "AWS Batch has started 2"),
        ({"LWS_GROUP_SIZE": "2"}, "LeaderWorkerSet has started 2"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1"}, "Paddle's launcher has started 2"),
        ({"PAI_TASK_ROLE_TASK_COUNT_worker": "2"}, "OpenPAI has started 2"),
        (
            {"PAI_TASK_ROLE_TASK_COUNT_worker": "1", "PAI_TASK_ROLE_TASK_COUNT_master": "1"},
            "OpenPAI has started 2",
        ),
        # the step of one component looks like a whole job
        ({**STEP, "SLURM_HET_SIZE": "2"}, "Slurm has 2 components in this heterogeneous job"),
        ({"SLURM_PACK_SIZE": "3", "SLURM_STEP_NUM_TASKS": "1"}, "Slurm has 3 components"),
        ({"ALPS_APP_PE": "0"}, "aprun has started this process"),
        ({"JOB_COMPLETION_INDEX": "0"}, "a Kubernetes Indexed Job has started this process"),
        ({"VC_TASK_INDEX": "0", "WORLD_SIZE": "1"}, "a Volcano Job has started this process"),
        ({"PMIX_RANK": "0"}, "PMIx has started this process"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "SageMaker has started a process on each"),
        # a batch script runs on the first node, and has started its program without a launcher
        (ALLOCATION, r"Slurm \(SLURM_JOB_NUM_NODES\) gives this job 2 nodes.*--ntasks-per-node=1"),
        ({"LSB_MCPU_HOSTS": "n1 8 n2 8"}, "LSF .* gives this job 2 nodes"),
        ({"PBS_NODEFILE": TWO_LINES}, "PBS .* gives this job 2 nodes"),
        ({**ALLOCATION, **SHELL}, "Slurm .* gives this job 2 nodes"),
        ({"OAR_NODEFILE": TWO_LINES}, "OAR .* gives this job 2 nodes"),
        ({"PE_HOSTFILE": TWO_LINES}, "Grid Engine .* gives this job 2 nodes"),
        ({"NHOSTS": "2", "NSLOTS": "16"}, r"Grid Engine \(NHOSTS\) gives this job 2 nodes"),
        ({"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"}, "Azure Batch .* gives this job 2 nodes"),
    ],
)
def test_several_processes_without_a_description_are_an_error(environ, words, tmp_path):
    """Each would train a model alone."""
    file = tmp_path / "hosts"
    file.write_text("n1 8 queue\nn1 8 queue\nn2 8 queue\n")
    given = {name: str(file) if text == TWO_LINES else text for name, text in environ.items()}
    with pytest.raises(ClusterError, match=f"{words}.* but there is no TF_CONFIG: every process"):
        job_of(given)


@pytest.mark.parametrize(
    "environ, words",
    [
        ({**STEP, "SLURM_STEP_NUM_TASKS": "6"}, "6 tasks on 3 nodes.*--ntasks-per-node=1"),
        ({**STEP, "SLURM_NODEID": ""}, "SLURM_NODEID=''"),
        ({**STEP, "SLURM_STEP_NODELIST": "n[a-b]"}, "expected names such as"),
        ({"TF_CONFIG": "[]"}, "expected {"),
        (tf_config(HOSTS, type="worker", index=2), "with this process in the list"),
        (tf_config(HOSTS, type=["worker"], index=0), "with this process in the list"),
        (tf_config({}, type="worker", index=1), "with this process in the list"),
        (
            {"TF_CONFIG": '{"Cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}'},
            "TF_CONFIG has 'Cluster', 'task' and no \"cluster\".*alone. Set TF_CONFIG=",
        ),
        (
            {"TF_CONFIG": '{"sparseCluster": {}, "task": {"type": "chief", "index": 0}}'},
            "TF_CONFIG has 'sparseCluster', 'task' and no",
        ),
        ({"TF_CONFIG": '{"environment": "cloud"}'}, "TF_CONFIG has 'environment' and no"),
        (
            tf_config({"worker": "a:1,b:1"}, type="worker", index=0),
            "TF_CONFIG has 'worker': 'a:1,b:1': expected a list of addresses",
        ),
        (tf_config({"worker": {"0": "a:1"}}, type="worker", index=0), "expected a list of"),
        (tf_config(HOSTS, type="worker", index=True), "with this process in the list"),
    ],
)
def test_a_wrong_description_is_an_error(environ, words, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match=words):
        Cluster.from_environment(2)


@pytest.mark.parametrize(
    "jobs, removed",
    [
        ({**HOSTS, "evaluator": ["e:1"]}, "Remove 'evaluator' from \"cluster\" on every host"),
        ({**HOSTS, "ps": ["p:1"], "evaluator": ["e:1"]}, "Remove 'evaluator', 'ps' from"),
        ({"Worker": ["w:1", "x:1"]}, "Remove 'Worker' .* call a 'Worker' 'worker'"),
        ({"CHIEF": ["m:1"], "master": ["n:1"]}, "'CHIEF' 'chief'; call a 'master' 'chief'"),
        ({"master": ["m:1"], "worker": ["w:1"], "ps": []}, "Remove 'master' .* call a 'master'"),
    ],
)
def test_every_task_of_a_job_with_other_jobs_gets_the_same_error(jobs, removed):
    messages = set()
    for kind in [job for job, hosts in jobs.items() if hosts]:
        with pytest.raises(ClusterError, match=removed) as caught:
            job_of(tf_config(jobs, type=kind, index=0))
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_an_evaluator_that_its_cluster_does_not_list_is_told_to_leave():
    """That is how TensorFlow's estimators describe one."""
    with pytest.raises(ClusterError, match="Remove 'evaluator'"):
        job_of(tf_config(HOSTS, type="evaluator", index=0))


def test_node_lists_and_ports_of_slurm():
    names = ["n08", "n09", "n10", "r1c1-ib", "r1c3-ib", "r2c1-ib", "r2c3-ib"]
    assert expand("n[08-10],r[1-2]c[1,3]-ib") == names
    # another port for each job
    assert job_of({**STEP, "SLURM_JOB_ID": "8"}).hosts != job_of(STEP).hosts


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"hosts": []}, "expected a list of addresses"),
        ({"hosts": ["here:²"]}, "'here:²' is not an address"),
        ({"hosts": ["a:1", "b:1", "a:1"]}, "there more than once"),
        ({"hosts": ["node:1", "Node:1"]}, "there more than once; .* one machine different ports"),
        ({"task": 2}, "task=2: expected the index of a host, 0 to 1"),
        ({"task": True}, "task=True: expected the index"),
        ({"devices_per_host": 0}, "devices_per_host=0"),
        ({"devices_per_host": np.bool_(True)}, "devices_per_host=.*True"),
        ({"devices_per_host": np.float32(2)}, r"devices_per_host=.*2\.0"),
        ({"communication": "auto"}, "communication='auto': expected one of ring, nccl"),
        ({"timeout": float("inf")}, "timeout=inf: expected seconds"),
        ({"timeout": np.float32("nan")}, "timeout=.*nan.*: expected seconds"),
    ],
)
def test_an_invalid_cluster_is_an_error(arguments, words):
    with pytest.raises(ClusterError, match=words):
        Cluster(**{"hosts": ["a:1", "b:1"], "task": 0, "devices_per_host": 1, **arguments})


def test_numbers_of_numpy_are_numbers():
    numbers: dict = {"task": np.int64(1), "devices_per_host": np.array(2), "timeout": np.float32(4)}
    cluster = Cluster(["a:1", "b:1"], **numbers)
    assert str(cluster) == "Cluster(['a:1', 'b:1'], task=1, devices_per_host=2)"
    assert cluster.timeout == 4 and not cluster.is_chief
    config = session_config(Job(cluster.hosts, cluster.task), cluster.devices_per_host)
    assert config.device_count["CPU"] == 2
    assert list(config.device_filters) == ["/job:worker/task:1"]
