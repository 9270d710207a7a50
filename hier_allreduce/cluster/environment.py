"""The hosts of a job, and the index of this process among them, from environment variables.

::

    TF_CONFIG   {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
                ─► hosts ("a:1", "b:2"), task 1
    srun        SLURM_STEP_NODELIST=n[1-2], SLURM_NODEID=1, SLURM_JOB_ID=7
                ─► hosts ("n1:10007", "n2:10007"), task 1

Without either there is one host. If another variable counts several processes or nodes, that is an
error, because every process would train a model alone. ``TF_CONFIG={}`` says that this is wanted.

TensorFlow's resolvers would be shorter. But ``TFConfigClusterResolver`` takes a TF_CONFIG without
"cluster" for one host. ``SlurmClusterResolver`` sorts the nodes as texts, and then takes
SLURM_PROCID for an index of them; it has one port for all jobs, and on 1.15 it asks ``scontrol``.

This module needs no TensorFlow.
"""

from __future__ import annotations

import json
import re
from typing import Any, List, Mapping, NamedTuple, Sequence, Tuple

from ..configs import is_whole_number
from ..errors import ClusterError

_JOBS = ("chief", "worker")
_EXAMPLE = (
    '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": WHOLE NUMBER}}'
)
# Jobs of Slurm have ports below those that Linux gives to outgoing connections.
_PORTS_OF_JOBS = range(10000, 30000)

# A count of nodes or processes ends a name so: SKYPILOT_NUM_NODES, PET_NNODES, DSTACK_NODES_NUM,
# OMPI_COMM_WORLD_SIZE. Counts of tasks are left out, because the tasks of an array train alone. So
# are other sizes, but those beside a rank.
_OF_NODES = re.compile(r"(NUM_NODES|NNODES|NHOSTS|NODES_NUM|NODE_COUNT|WORLD_SIZE|CLUSTER_SPEC)$")
_ADDRESS = re.compile(r"[\w.-]+:\d+")


class Job(NamedTuple):
    """The addresses of all hosts, in one order on every host, and the index of this process."""

    hosts: Tuple[str, ...]
    task: int


ALONE = Job(("127.0.0.1:2222",), 0)


def job_of(environ: Mapping[str, str]) -> Job:
    """Return the job that environment variables describe; ``ALONE`` if none does.

    Raises:
        ClusterError: TF_CONFIG or Slurm's variables describe no job; or another variable counts
            several processes or nodes.
    """
    tf_config = environ.get("TF_CONFIG", "").strip()
    if tf_config:
        return _from_tf_config(tf_config)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks not in ("", "1"):
        return _from_slurm(environ, tasks)
    for variable, written in environ.items():
        # A step of one task may be in a job of several nodes.
        is_of_step = tasks and variable.startswith("SLURM_")
        if not is_of_step and _counts_processes(variable, environ) and _count(written) > 1:
            raise ClusterError(
                f"{variable}={written[:80]!r}: this process seems to be one of several, but there"
                " is no TF_CONFIG, and each would train a model alone. Set"
                f" TF_CONFIG={_EXAMPLE}; or give the hosts to hier_allreduce.Cluster; or start the"
                " program by Slurm's srun --ntasks-per-node=1; or set TF_CONFIG={} if each shall"
                " train alone"
            )
    return ALONE


# ---- launchers -------------------------------------------------------------------------------


def _counts_processes(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether an environment variable has the number of nodes or processes of a job."""
    prefix, is_size, end = variable.rpartition("_SIZE")
    return bool(_OF_NODES.search(variable)) or (is_size and not end and f"{prefix}_RANK" in environ)


def _count(written: str) -> int:
    """Return a whole number; of another text the number of addresses in it."""
    written = written.strip()
    return int(written) if written.isdecimal() else len(set(_ADDRESS.findall(written)))


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
        own_job = content["task"]["type"]
        index = content["task"]["index"]
        strange = sorted({*hosts_by_job, own_job} - set(_JOBS))
        if strange:
            raise _other_jobs(strange)
        are_lists = all(isinstance(hosts, list) for hosts in hosts_by_job.values())
        if not are_lists or not str(index).isdecimal():  # "a:1,b:2"; true, 1.7
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
    return ClusterError(
        f"TF_CONFIG has {listed}: the jobs here are 'chief' and 'worker', and all of their tasks"
        f' train. Rename or remove {listed} in "cluster" on every host, and start no task that does'
        " not train"
    )


# ---- Slurm -----------------------------------------------------------------------------------


def _from_slurm(environ: Mapping[str, str], tasks: str) -> Job:
    nodes = expand(environ.get("SLURM_STEP_NODELIST", ""))
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
