"""The hosts of a job, and the index of this process among them, from environment variables.

::

    TF_CONFIG   {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
                ─► hosts ("a:1", "b:2"), task 1
    srun        SLURM_STEP_NODELIST=n[1-2], SLURM_NODEID=1, SLURM_JOB_ID=7
                ─► hosts ("n1:10007", "n2:10007"), task 1

Without either there is one host. If the job has several processes or nodes, that is an error,
because every process would train a model alone. ``TF_CONFIG={}`` says that this is wanted.

TensorFlow's resolvers would be shorter. But ``TFConfigClusterResolver`` takes a TF_CONFIG without
"cluster" for one host. ``SlurmClusterResolver`` sorts the nodes as texts, and then takes
SLURM_PROCID for an index of them; it has one port for all jobs, and on 1.15 it asks ``scontrol``.

This module needs no TensorFlow.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ..configs import is_whole_number
from ..errors import ClusterError

_JOBS = ("chief", "worker")
_EXAMPLE = (
    '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": WHOLE NUMBER}}'
)
# Jobs of Slurm have ports below those that Linux gives to outgoing connections.
_PORTS_OF_JOBS = range(10000, 30000)

# The variable in which a launcher tells each process how many there are, and the source of that.
_LAUNCHER_BY_COUNT = {
    # slurm.schedmd.com/srun.html, output environment variables
    "SLURM_STEP_NUM_TASKS": "srun",
    # docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    # MPICH, Intel MPI, Cray PALS: github.com/pmodels/mpich, pmip_cb.c of its launcher Hydra
    "PMI_SIZE": "mpiexec",
    # MVAPICH2: github.com/huggingface/accelerate, utils/environment.py
    "MV2_COMM_WORLD_SIZE": "mpirun_rsh",
    "MVP_COMM_WORLD_SIZE": "mpirun_rsh",  # MVAPICH 3
    # IBM: github.com/Lightning-AI/pytorch-lightning, fabric/plugins/environments/lsf.py
    "JSM_NAMESPACE_SIZE": "jsrun",
    # github.com/horovod/horovod, runner/gloo_run.py
    "HOROVOD_SIZE": "horovodrun",
    # github.com/bytedance/byteps, docs/env.md: on one host, and hosts
    "BYTEPS_LOCAL_SIZE": "bpslaunch",
    "DMLC_NUM_WORKER": "bpslaunch",
    # docs.pytorch.org/docs/stable/elastic/run.html; also accelerate, deepspeed and Kubeflow
    "WORLD_SIZE": "a launcher such as torchrun",
    # github.com/flux-framework/flux-core, doc/man7/flux-environment.rst
    "FLUX_JOB_SIZE": "flux",
    # htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html
    "_CONDOR_NPROCS": "HTCondor's parallel universe",
    # docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
    "AWS_BATCH_JOB_NUM_NODES": "AWS Batch",
    # lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables
    "LWS_GROUP_SIZE": "a Kubernetes LeaderWorkerSet",
    # github.com/PaddlePaddle/Paddle, python/paddle/distributed/launch
    "PADDLE_TRAINERS_NUM": "Paddle's launcher",
}
# The number of components of a heterogeneous job, of which each step's variables describe one:
# slurm.schedmd.com/heterogeneous_jobs.html; before Slurm 20.02 they were packs.
_COMPONENTS = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")
# The beginning of OpenPAI's variables, each with the number of processes of one role:
# openpai.readthedocs.io, manual of cluster users, environmental variables.
_COUNT_OF_ROLE = "PAI_TASK_ROLE_TASK_COUNT_"
# The variable in which a system of containers tells each one its index, but not how many there are.
_SYSTEM_BY_INDEX = {
    # kubernetes.io/docs/concepts/workloads/controllers/job, completion mode
    "JOB_COMPLETION_INDEX": "a Kubernetes Indexed Job",
    # volcano.sh, user guide of the plugin "env"
    "VC_TASK_INDEX": "a Volcano Job",
    # Cray's manual page of aprun
    "ALPS_APP_PE": "aprun",
}
# The index that PMIx tells; Open MPI and Slurm tell the number too, its own launcher does not.
_PMIX_INDEX = "PMIX_RANK"  # github.com/openpmix/openpmix, PMIx_server_setup_fork
# The step of salloc's own shell, if it is on a node: slurm/slurm.h, SLURM_INTERACTIVE_STEP. Its
# task is the shell.
_SHELL_STEP = "4294967290"
# The hosts of a job on SageMaker as a JSON list; it starts the program on each of them.
_SAGEMAKER = "SM_HOSTS"  # github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md


class Job(NamedTuple):
    """The addresses of all hosts, in one order on every host, and the index of this process."""

    hosts: Tuple[str, ...]
    task: int


ALONE = Job(("127.0.0.1:2222",), 0)


def job_of(environ: Mapping[str, str]) -> Job:
    """Return the job that environment variables describe; ``ALONE`` if none does.

    Raises:
        ClusterError: TF_CONFIG or Slurm's variables describe no job; or there are several processes
            or nodes, and nothing describes them.
    """
    tf_config = environ.get("TF_CONFIG", "").strip()
    if tf_config:
        return _from_tf_config(tf_config)
    # In a heterogeneous job of Slurm each component would train alone.
    for variable in _COMPONENTS:
        components = environ.get(variable, "").strip()
        if components not in ("", "1"):
            raise _without_description(
                f"Slurm has {components} components in this heterogeneous job ({variable})"
            )
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_NODELIST" in environ and tasks != "1":
        return _from_slurm(environ, tasks)
    _check_that_it_is_alone(environ)
    return ALONE


# ---- launchers -------------------------------------------------------------------------------


def _check_that_it_is_alone(environ: Mapping[str, str]) -> None:
    """Raise a ClusterError if there are several processes, or the job has several nodes."""
    counts = {variable: environ.get(variable, "").strip() for variable in _LAUNCHER_BY_COUNT}
    for variable, processes in counts.items():
        if processes not in ("", "1"):
            launched = f"{_LAUNCHER_BY_COUNT[variable]} has started {processes} processes"
            raise _without_description(f"{launched} ({variable})")
    # OpenPAI has a variable for each role, and all roles together are the job.
    roles = [variable for variable in environ if variable.startswith(_COUNT_OF_ROLE)]
    tasks = sum(_whole(environ[role]) for role in roles)
    if tasks > 1:
        raise _without_description(f"OpenPAI has started {tasks} processes ({_COUNT_OF_ROLE}…)")
    for variable, system in _SYSTEM_BY_INDEX.items():
        if variable in environ:
            index = f"{variable}={environ[variable]}"
            raise _without_description(f"{system} has started this process ({index})")
    if environ.get(_SAGEMAKER, "").count(",") > 0:
        hosts = environ[_SAGEMAKER]
        raise _without_description(f"SageMaker has started a process on each of {hosts}")
    # If a launcher was told to start one process, that is wanted, whatever the number of nodes.
    is_in_shell = environ.get("SLURM_STEP_ID", "") == _SHELL_STEP
    if any(counts.values()) and not is_in_shell:
        return
    if _PMIX_INDEX in environ and not is_in_shell:
        index = f"{_PMIX_INDEX}={environ[_PMIX_INDEX]}"
        raise _without_description(f"a launcher with PMIx has started this process ({index})")
    for batch_system, nodes in _nodes_of_batch_job(environ).items():
        if nodes > 1:
            raise _without_description(
                f"{batch_system} gives this job {nodes} nodes, and this process runs on one of"
                " them, because no launcher has started it (such as srun --ntasks-per-node=1)"
            )


def _without_description(processes: str) -> ClusterError:
    return ClusterError(
        f"{processes}, but there is no TF_CONFIG: every process would train a model alone. Set"
        f" TF_CONFIG={_EXAMPLE}; or TF_CONFIG={{}} if they shall train alone"
    )


def _nodes_of_batch_job(environ: Mapping[str, str]) -> Dict[str, int]:
    """Return the number of nodes that each batch system gives; it runs the script on one of them.

    Sources: slurm.schedmd.com/sbatch.html; IBM Spectrum LSF 10.1, "Environment variables set for
    job execution" (``LSB_MCPU_HOSTS`` is ``"n1 4 n2 4"``); the user's guide of OpenPBS (a file with
    a line for each slot), and OAR's (the same); the manual page of Grid Engine's qsub (a file with
    a line for each host, and their number); learn.microsoft.com/azure/batch, environment variables
    of a compute node (``AZ_BATCH_HOST_LIST`` is ``"10.0.0.4,10.0.0.5"``).
    """
    nodes_by_system = {}
    nodes_by_system["Slurm (SLURM_JOB_NUM_NODES)"] = _whole(environ.get("SLURM_JOB_NUM_NODES", ""))
    hosts_and_slots = environ.get("LSB_MCPU_HOSTS", "").split()
    nodes_by_system["LSF (LSB_MCPU_HOSTS)"] = len(set(hosts_and_slots[::2]))
    nodes_by_system["PBS (PBS_NODEFILE)"] = _hosts_in_file(environ.get("PBS_NODEFILE", ""))
    nodes_by_system["OAR (OAR_NODEFILE)"] = _hosts_in_file(environ.get("OAR_NODEFILE", ""))
    nodes_by_system["Grid Engine (PE_HOSTFILE)"] = _hosts_in_file(environ.get("PE_HOSTFILE", ""))
    nodes_by_system["Grid Engine (NHOSTS)"] = _whole(environ.get("NHOSTS", ""))
    azure = environ.get("AZ_BATCH_HOST_LIST", "").replace(",", " ").split()
    nodes_by_system["Azure Batch (AZ_BATCH_HOST_LIST)"] = len(set(azure))
    return nodes_by_system


def _whole(written: str) -> int:
    """Return a whole number; 0 for any other text."""
    return int(written) if written.strip().isdecimal() else 0


def _hosts_in_file(path: str) -> int:
    """Return how many different words lines begin with; 0 if there is no such file."""
    try:
        content = Path(path).read_text(encoding="utf-8") if path else ""
    except (OSError, ValueError):
        return 0
    lines = [line.split() for line in content.splitlines()]
    return len({words[0] for words in lines if words})


# ---- TF_CONFIG -------------------------------------------------------------------------------


def _from_tf_config(written: str) -> Job:
    try:
        content = json.loads(written)
        if content and "cluster" not in content:
            keys = ", ".join(map(repr, content))
            raise ClusterError(
                f'TF_CONFIG has {keys} and no "cluster", the list of hosts, without which every'
                f" process would train a model alone. Set TF_CONFIG={_EXAMPLE}; or TF_CONFIG={{}}"
                " if they shall train alone"
            )
        hosts_by_job = {job: hosts for job, hosts in content.get("cluster", {}).items() if hosts}
        # TensorFlow's resolver takes this for one host, too.
        if not hosts_by_job and content.get("task", {}).get("index", 0) in (0, "0"):
            return ALONE
        for job, hosts in hosts_by_job.items():
            if not isinstance(hosts, list):
                raise ClusterError(
                    f"TF_CONFIG has {job!r}: {hosts!r}: expected a list of addresses, such as"
                    ' ["a:2222", "b:2222"]'
                )
        own_job = content["task"]["type"]
        index = content["task"]["index"]
        strange = sorted({*hosts_by_job, own_job} - set(_JOBS))
        if strange:
            raise _other_jobs(strange)
        if not str(index).isdecimal():  # true, 1.7
            raise ValueError
        # The chief is host 0, because it comes before the workers in every process.
        tasks: List[Tuple[str, int]] = []
        for job in _JOBS:
            tasks += [(job, k) for k in range(len(hosts_by_job.get(job, ())))]
        addresses = tuple(hosts_by_job[job][k] for job, k in tasks)
        return Job(addresses, tasks.index((own_job, int(index))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ClusterError(
            f"TF_CONFIG={written!r}: expected {_EXAMPLE}, with this process in the list"
        ) from None


def _other_jobs(strange: Sequence[str]) -> ClusterError:
    """Return the same error on every host, whatever its own job."""
    listed = ", ".join(map(repr, strange))
    renamed = ""
    # Other programs call the chief "master", and some write jobs in capitals.
    for job in strange:
        known = "chief" if job == "master" else job.lower()
        if known in _JOBS:
            renamed += f"; call a {job!r} {known!r}"
    return ClusterError(
        f"TF_CONFIG has {listed}: the jobs here are 'chief' and 'worker', and all of their tasks"
        f' train. Remove {listed} from "cluster" on every host, and start no such task{renamed}'
    )


# ---- Slurm -----------------------------------------------------------------------------------


def _from_slurm(environ: Mapping[str, str], tasks: str) -> Job:
    nodes = expand(environ["SLURM_STEP_NODELIST"])
    if str(len(nodes)) != tasks:
        raise ClusterError(
            f"srun has started {tasks} tasks on {len(nodes)} nodes, and one process uses all"
            " devices of its node: use srun --ntasks-per-node=1"
        )
    # SLURM_PROCID would be wrong, because it need not follow the list.
    index = environ.get("SLURM_NODEID", "")
    job = environ.get("SLURM_JOB_ID", "0")
    if not (index.isdecimal() and job.isdecimal()):
        raise ClusterError(
            f"SLURM_NODEID={index!r}, SLURM_JOB_ID={job!r}: expected whole numbers, as srun sets"
            " them"
        )
    port = _PORTS_OF_JOBS[int(job) % len(_PORTS_OF_JOBS)]
    return Job(tuple(f"{node}:{port}" for node in nodes), int(index))


def expand(nodelist: str) -> List[str]:
    """Return the names in a Slurm node list: ``"n[08-10],r[1-2]c[1,3]-ib"`` has seven.

    Raises:
        ClusterError: it is not such a list.
    """
    nodes: List[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        before, bracket, within = pattern.partition("[")
        if not bracket:
            nodes.append(pattern)
            continue
        spans, _, after = within.partition("]")
        for span in spans.split(","):
            start, _, stop = span.partition("-")
            if not (start + stop).isdecimal():
                raise ClusterError(
                    f"SLURM_STEP_NODELIST={nodelist!r}: expected names such as n[08-10,12],login"
                )
            # A number has as many digits as the first one: n[08-10] is n08, n09, n10. More brackets
            # may come behind.
            for k in range(int(start), int(stop or start) + 1):
                digits = str(k).zfill(len(start))
                nodes += expand(f"{before}{digits}{after}")
    return nodes


# ---- addresses -------------------------------------------------------------------------------


def split_address(address: Any) -> Tuple[str, int]:
    """Split ``"10.0.0.1:2222"`` into ``("10.0.0.1", 2222)``; an IPv6 address is in brackets.

    Raises:
        ClusterError: the port is missing or not between 1 and 65535, or the address is a URL.
    """
    # The last colon counts, because an IPv6 address has more of them.
    host, colon, port = str(address).rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= 5
    is_port = is_number and 0 < int(port) < 65536
    if not (colon and host and "/" not in host and is_port):
        raise ClusterError(
            f"{address!r} is not an address: expected HOST:PORT, such as '10.0.0.1:2222'"
        )
    return host.strip("[]"), int(port)


def check_hosts(hosts: Sequence[str], task: int) -> None:
    """Check the list of hosts, and that ``task`` is an index of it.

    Raises:
        ClusterError: no hosts, an address that is invalid or there twice, or no such index.
    """
    if isinstance(hosts, str) or not isinstance(hosts, Sequence) or not hosts:
        raise ClusterError(
            f"hosts={hosts!r}: expected a list of addresses such as ['10.0.0.1:2222', …]"
        )
    addresses = [split_address(host) for host in hosts]
    # Names of hosts are the same in capitals.
    if len({(host.lower(), port) for host, port in addresses}) < len(hosts):
        raise ClusterError(
            f"hosts={list(hosts)}: an address is there more than once; give each host its own, and"
            " hosts on one machine different ports"
        )
    if not is_whole_number(task) or task >= len(hosts):
        raise ClusterError(f"task={task!r}: expected the index of a host, 0 to {len(hosts) - 1}")
