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
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from ..errors import ClusterError

_EXAMPLE = (
    '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": WHOLE NUMBER}}'
)

# A count of nodes or processes ends a name so: SKYPILOT_NUM_NODES, PET_NNODES, DSTACK_NODES_NUM,
# OMPI_COMM_WORLD_SIZE. Counts of tasks are left out, because the tasks of an array train alone. So
# are other sizes, but those beside a rank.
_OF_NODES = re.compile(r"(NUM_NODES|NNODES|NHOSTS|NODES_NUM|NODE_COUNT|WORLD_SIZE)$")
_ADDRESS = re.compile(r"(\[.+\]|[\w.-]+):([0-9]{1,5})")


class Job(NamedTuple):
    """What a cluster is made of."""

    hosts: Tuple[str, ...]  # H addresses, in one order on every host
    task: int  # the index of this process
    # Seconds, as in Cluster:
    timeout: float
    start_timeout: float
    stall_timeout: float

    @property
    def size(self) -> int:
        """H, the number of hosts."""
        return len(self.hosts)


# The addresses of all hosts, and the index of this process.
Place = Tuple[Tuple[str, ...], int]
ALONE: Place = (("127.0.0.1:2222",), 0)


def job_of(environ: Mapping[str, str]) -> Place:
    """Return the hosts, and which one this is, from environment variables; else ``ALONE``.

    Raises:
        ClusterError: TF_CONFIG or Slurm's variables describe no job; or another variable counts
            several processes or nodes.
    """
    tf_config = environ.get("TF_CONFIG", "")
    if tf_config:
        return _from_tf_config(tf_config)
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks not in ("", "1"):
        return _from_slurm(environ, tasks)
    sizes = {f"{name[: -len('_RANK')]}_SIZE" for name in environ if name.endswith("_RANK")}
    for variable, written in environ.items():
        # A step of one task may be in a job of several nodes.
        is_of_step = tasks and variable.startswith("SLURM_")
        counts = variable in sizes or _OF_NODES.search(variable)
        if counts and not is_of_step and written.isdecimal() and int(written) > 1:
            raise ClusterError(
                f"{variable}={written!r}: without TF_CONFIG each process would train alone. Set"
                f" TF_CONFIG={_EXAMPLE}, or TF_CONFIG={{}} if each shall; on Slurm use srun"
            )
    return ALONE


def _from_tf_config(written: str) -> Place:
    try:
        content = json.loads(written)
        if content == {}:
            return ALONE
        hosts_by_job = {job: hosts for job, hosts in content["cluster"].items() if hosts}
        index = int(str(content["task"]["index"]))  # 1 and "1", but not true or 1.7
        # The chief is host 0, because it comes before the workers in every process.
        address_by_task: Dict[Tuple[str, int], str] = {}
        for job in ("chief", "worker"):
            for k, address in enumerate(hosts_by_job.pop(job, [])):
                address_by_task[job, k] = address
        # All tasks of a job with other ones end here, so that none waits for those.
        if hosts_by_job:
            raise ValueError
        task = list(address_by_task).index((content["task"]["type"], index))
        return tuple(address_by_task.values()), task
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ClusterError(
            f"TF_CONFIG={written!r}: expected {_EXAMPLE}, with this process in the list, and no"
            " jobs but 'chief' and 'worker', whose tasks all train; or {} if each shall train alone"
        ) from None


def _from_slurm(environ: Mapping[str, str], tasks: str) -> Place:
    nodes = expand(environ.get("SLURM_STEP_NODELIST", ""))
    if str(len(nodes)) != tasks:
        raise ClusterError(
            f"{tasks} tasks on {len(nodes)} nodes: use srun --ntasks-per-node=1, because one task"
            " uses all devices of its node"
        )
    # Jobs have ports below those that Linux gives to outgoing connections.
    port = 10000 + int(environ["SLURM_JOB_ID"]) % 20000
    # SLURM_PROCID would be wrong, because it need not follow the list.
    return tuple(f"{node}:{port}" for node in nodes), int(environ["SLURM_NODEID"])


def expand(nodelist: str) -> List[str]:
    """Return the names in a Slurm node list: ``"n[08-10],r[1-2]c[1,3]-ib"`` has seven."""
    nodes: List[str] = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        before, bracket, within = pattern.partition("[")
        if not bracket:
            nodes.append(pattern)
            continue
        spans, _, after = within.partition("]")
        for span in spans.split(","):
            start, _, stop = span.partition("-")
            # A number has as many digits as the first one: n[08-10] is n08, n09, n10. More brackets
            # may come behind.
            for k in range(int(start), int(stop or start) + 1):
                digits = str(k).zfill(len(start))
                nodes += expand(f"{before}{digits}{after}")
    return nodes


def split_address(address: Any) -> Tuple[str, int]:
    """Split ``"10.0.0.1:2222"`` into ``("10.0.0.1", 2222)``; an IPv6 address is in brackets.

    Raises:
        ClusterError: it is something else.
    """
    match = _ADDRESS.fullmatch(str(address))
    if match is None:
        raise ClusterError(f"{address!r} is not an address: expected HOST:PORT, as '10.0.0.1:2222'")
    return match.group(1).strip("[]"), int(match.group(2))
