"""The index of this process among the hosts of its job: from TF_CONFIG or from Slurm. No TensorFlow.

::

    TF_CONFIG   {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}  ─►  ("a:1", "b:2"), 1
    srun        SLURM_STEP_NODELIST=n[1-2], SLURM_NODEID=1, SLURM_JOB_ID=7      ─►  ("n1:10007", "n2:10007"), 1

Without either there is one host. A process that a launcher has started as one of several is then an error: every
process would train a model alone. ``TF_CONFIG={}`` says that this is wanted.
"""

from __future__ import annotations

import json
import re
from typing import Any, List, Mapping, NamedTuple, Sequence, Tuple

from ..errors import ClusterError

_JOBS = ("chief", "worker")
_EXAMPLE = (
    '{"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": WHOLE NUMBER}}'
)
# the variable in which a launcher tells its processes their number
_SIZES = {
    "srun": "SLURM_STEP_NUM_TASKS",
    "mpirun": "OMPI_COMM_WORLD_SIZE",
    "mpiexec": "PMI_SIZE",
    "a launcher such as torchrun": "WORLD_SIZE",
}
_COMPLETION_INDEX = (
    "JOB_COMPLETION_INDEX"  # of a Kubernetes Indexed Job, which does not tell the number
)
_FIRST_PORT, _PORTS = 10000, 20000  # below the ports that Linux gives to outgoing connections


class Place(NamedTuple):
    """The addresses of all hosts, in the same order on every host, and the index of this process."""

    hosts: Tuple[str, ...]
    task: int


ALONE = Place(("127.0.0.1:2222",), 0)


def place(environ: Mapping[str, str]) -> Place:
    """Return the addresses of all hosts and the index of this process; ``ALONE`` without a description.

    Raises:
        ClusterError: TF_CONFIG or Slurm's variables describe no cluster, or a launcher has started several processes
            and there is no description.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if text:
        return _from_tf_config(text)
    tasks = environ.get(_SIZES["srun"], "1")
    if "SLURM_STEP_NODELIST" in environ and tasks != "1":
        return _from_slurm(environ, tasks)
    for launcher, variable in _SIZES.items():
        if environ.get(variable, "1").strip() not in ("", "1"):
            raise _forgotten(f"{launcher} has started {environ[variable]} processes ({variable})")
    if _COMPLETION_INDEX in environ:
        index = environ[_COMPLETION_INDEX]
        raise _forgotten(
            f"a Kubernetes Indexed Job has started this process ({_COMPLETION_INDEX}={index})"
        )
    return ALONE


def _forgotten(started: str) -> ClusterError:
    return ClusterError(
        f"{started}, but there is no TF_CONFIG: every process would train a model alone. Set TF_CONFIG={_EXAMPLE}; or"
        " TF_CONFIG={} if they shall train alone"
    )


def _from_tf_config(text: str) -> Place:
    try:
        content = json.loads(text)
        jobs = content.get("cluster", {})
        if not any(jobs.values()):  # one host for TensorFlow's resolver too
            return ALONE
        task = content["task"]
        if not str(task["index"]).isdecimal():  # true, 1.7
            raise ValueError
        places = [(job, index) for job in _JOBS for index in range(len(jobs.get(job, ())))]
        number = places.index((task["type"], int(task["index"])))
        hosts = tuple(jobs[job][index] for job, index in places)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ClusterError(
            f"TF_CONFIG={text!r}: expected {_EXAMPLE}, with this process in the list"
        ) from None
    if set(jobs) - set(_JOBS):
        raise ClusterError(
            f"TF_CONFIG: only the jobs 'chief' and 'worker' are supported, not {sorted(jobs)}"
        )
    return Place(hosts, number)


def _from_slurm(environ: Mapping[str, str], tasks: str) -> Place:
    nodes = expand(environ["SLURM_STEP_NODELIST"])
    if str(len(nodes)) != tasks:
        raise ClusterError(
            f"srun has started {tasks} tasks on {len(nodes)} nodes, and one process uses all devices of its node: use"
            " srun --ntasks-per-node=1"
        )
    # SLURM_PROCID would be wrong: it need not follow the list
    index, job = environ.get("SLURM_NODEID", ""), environ.get("SLURM_JOB_ID", "0")
    if not (index.isdecimal() and job.isdecimal()):
        raise ClusterError(
            f"SLURM_NODEID={index!r}, SLURM_JOB_ID={job!r}: expected whole numbers, as srun sets them"
        )
    port = _FIRST_PORT + int(job) % _PORTS
    return Place(tuple(f"{node}:{port}" for node in nodes), int(index))


def expand(nodelist: str) -> List[str]:
    """Return the names in a Slurm node list: ``"n[08-10],r[1-2]c[1,3]-ib"`` has seven.

    Raises:
        ClusterError: it is not such a list.
    """
    names: List[str] = []
    for entry in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        before, bracket, rest = entry.partition("[")
        if not bracket:
            names.append(entry)
            continue
        numbers, _, after = rest.partition("]")
        for span in numbers.split(","):
            first, _, last = span.partition("-")
            if not (first + last).isdecimal():
                raise ClusterError(
                    f"SLURM_STEP_NODELIST={nodelist!r}: expected names such as n[08-10,12],login"
                )
            for number in range(int(first), int(last or first) + 1):
                names += expand(f"{before}{number:0{len(first)}}{after}")
    return names


def split_address(address: Any) -> Tuple[str, int]:
    """Split ``"10.0.0.1:2222"`` into ``("10.0.0.1", 2222)``; an IPv6 address is written in brackets.

    Raises:
        ClusterError: the port is missing or not between 1 and 65535, or the address is a URL.
    """
    host, colon, port = str(address).rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    if not (colon and host and "/" not in host and is_port):
        raise ClusterError(
            f"{address!r} is not an address: expected HOST:PORT, such as '10.0.0.1:2222'"
        )
    return host.strip("[]"), int(port)


def check_hosts(hosts: Sequence[str], task: int) -> None:
    """Raise a ClusterError if there are no hosts, an address is invalid or repeated, or ``task`` is not an index."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence) or not hosts:
        raise ClusterError(
            f"hosts={hosts!r}: expected a list of addresses such as ['10.0.0.1:2222', …]"
        )
    if len(set(map(split_address, hosts))) < len(hosts):
        raise ClusterError(f"hosts={list(hosts)}: an address is there more than once")
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < len(hosts):
        raise ClusterError(f"task={task!r}: expected the index of a host, 0 to {len(hosts) - 1}")
