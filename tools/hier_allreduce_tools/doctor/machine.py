"""What is found on a machine: a fact is a line, and a problem is one with its remedy."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Tuple

from hier_allreduce import __version__

from ..text import amount, count
from .nvidia_smi import NvidiaSmi, groups_of
from .topology import Groups

if sys.version_info < (3, 8):
    import pkg_resources  # setuptools has it, which every environment of Python 3.7 has
else:
    from importlib import metadata

_PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "keras", "tf_keras", "tensorpack"),
    *("numpy", "protobuf", "horovod", "nvidia-nccl-cu12"),
)
# they change which GPUs there are, where copies go, or which ops run
_VARIABLES = re.compile(
    r"(CUDA_\w*DEVICE\w*|NVIDIA_VISIBLE_DEVICES|XLA_FLAGS|NCCL_\w*"
    r"|TF_(XLA|GPU|FORCE|USE|PLUGGABLE)_\w*)$"
)
_TIMEOUT = 120  # seconds; the first use of many GPUs takes a while


class Finding(NamedTuple):
    """A fact; one with a remedy is a problem."""

    fact: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"! {self.fact}: {self.remedy}" if self.remedy else self.fact


class TensorFlow(NamedTuple):
    """TensorFlow as a process of its own finds it."""

    version: str = ""  # empty if it cannot be used
    cuda: bool = False  # whether it was built with CUDA; without, a plug-in may still bring GPUs
    gpus: Tuple[Any, ...] = ()  # of each its name, model, bytes, and numbers of GPUs it reaches
    problem: Tuple[Finding, ...] = ()  # why it cannot be used


def findings(nvidia: NvidiaSmi, tensorflow: TensorFlow) -> Iterator[Finding]:
    """Yield all that is known about this machine, and its problems."""
    # A container or a batch system may give this process few cores; macOS and Windows do not tell.
    asked = getattr(os, "sched_getaffinity", None)
    cores = len(asked(0)) if asked else os.cpu_count() or 1
    yield Finding(f"{platform.platform()}, {count(cores, 'core')}")
    yield from _packages()
    variables = sorted(name for name in os.environ if _VARIABLES.match(name))
    yield from (Finding(f"{variable}={os.environ[variable]}") for variable in variables)
    yield from _nvidia(nvidia)
    yield from tensorflow.problem or _tensorflow(nvidia, tensorflow)
    yield from _steps(tensorflow, cores)


def _packages() -> Iterator[Finding]:
    """Yield the versions of installed packages."""
    version_by_package = {"hier_allreduce": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        installed: Any = None
        if sys.version_info < (3, 8):
            installed = pkg_resources.WorkingSet().by_key.get(package.replace("_", "-"))
        else:
            installed = next(iter(metadata.distributions(name=package)), None)
        if installed is not None and installed.version:
            version_by_package[package] = str(installed.version)
    yield Finding(", ".join(map(" ".join, version_by_package.items())))

    # Packages of TensorFlow have the same files, so that the last one installed wins, in parts.
    tensorflows = [package for package in version_by_package if package.startswith("tensorflow")]
    if len(tensorflows) > 1:
        names = ", ".join(tensorflows)
        yield Finding(f"{names} overwrite each other's files", "uninstall all, then install one")


def _nvidia(nvidia: NvidiaSmi) -> Iterator[Finding]:
    """Yield nvidia-smi's answers: GPUs, links, groups."""
    # A machine without nvidia-smi may have no GPU, or is a container with GPUs: both are fine.
    if nvidia.fault.startswith("not found"):
        yield Finding(f"nvidia-smi: {nvidia.fault}")
    elif nvidia.fault:
        remedy = (
            "look for the driver's own words, `dmesg | grep -i -e nvrm -e xid`, and reboot if it"
            " hangs or was updated while it ran; a container needs the driver of its host"
        )
        yield Finding(f"nvidia-smi: {nvidia.fault}", remedy)
    yield from (Finding(f"nvidia-smi: {gpu}") for gpu in nvidia.gpus)
    if len(nvidia.gpus) > 1:
        # The legends are left out, because the reader of an issue knows their words.
        tables = [table.split("\n\n")[0] for table in (nvidia.table, nvidia.reads) if table]
        yield from (Finding(f"\n{table}\n") for table in tables)
    groups = groups_of(nvidia)
    if groups:
        yield Finding(groups_line(groups))


def groups_line(groups: Groups) -> str:
    """Return what a program writes for two groups."""
    return f'along the links: Strategy(algorithm="hierarchical", groups={groups})'


def ask_tensorflow() -> TensorFlow:
    """Return what a process of its own finds, because TensorFlow may hang or end it."""
    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("probe.py"))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            # its warnings and errors may tell why it ends
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"},
        )
    except subprocess.TimeoutExpired:
        fact = f"TensorFlow did not list its devices within {_TIMEOUT} s"
        return TensorFlow(problem=(Finding(fact, "look at `dmesg`, and reset the GPUs"),))
    if done.returncode:
        words = last_words(done.returncode, done.stderr.decode("utf-8", "replace"))
        fact = f"TensorFlow cannot list its devices: {words}"
        remedy = "it has to run here first: `python -c 'import tensorflow'` has all of its lines"
        return TensorFlow(problem=(Finding(fact, remedy),))
    # Plug-ins may have printed lines of their own before the answer.
    return TensorFlow(**json.loads(done.stdout.decode("utf-8", "replace").splitlines()[-1]))


def last_words(status: int, errors: str) -> str:
    """Return the signal or status of a process that has ended, and its last line that says why.

    Other lines of TensorFlow may come after an error, so that of those with errors the last counts.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    words = [line for line in lines if re.search("error", line, re.IGNORECASE)] or lines
    end = signal.Signals(-status).name if status < 0 else f"status {status}"
    return ": ".join([end, *(line[-300:] for line in words[-1:])])


def _tensorflow(nvidia: NvidiaSmi, tensorflow: TensorFlow) -> Iterator[Finding]:
    """Yield TensorFlow's GPUs, and whether it uses all of nvidia-smi's."""
    built = "with" if tensorflow.cuda else "without"
    seen = f"TensorFlow {tensorflow.version}, built {built} CUDA, sees"
    yield Finding(f"{seen} {count(len(tensorflow.gpus), 'GPU')}")
    for name, model, size, peers in tensorflow.gpus:
        # A GPU of a plug-in may have peers, but TensorFlow lists them for CUDA only.
        direct = f", peers: {', '.join(map(str, peers)) or 'none'}" if tensorflow.cuda else ""
        yield Finding(f"  {name} {model}, {amount(size, binary=True)}{direct}")

    # Whoever hides GPUs from CUDA sees it in the facts.
    all_gpus = count(len(nvidia.gpus), "GPU")
    if "CUDA_VISIBLE_DEVICES" not in os.environ and len(tensorflow.gpus) < len(nvidia.gpus):
        yield Finding(
            f"TensorFlow uses {len(tensorflow.gpus)} of {all_gpus}",
            "its own lines say why, if a program asks for its devices",
        )


def _steps(tensorflow: TensorFlow, cores: int) -> Iterator[Finding]:
    """Yield what makes copies between GPUs slow, and what delays or changes them in a step."""
    # TensorFlow lists peers for CUDA only, so that a plug-in's GPUs would all look lonely.
    gpus = tensorflow.gpus if tensorflow.cuda else ()
    lonely = [name for name, _, _, peers in gpus if len(peers) < len(gpus) - 1]
    if lonely:
        yield Finding(
            f"no peer access from {', '.join(lonely)} to all others, so copies cross main memory",
            "GeForce cards have it over NVLink only, virtual machines if their host gives it; else"
            " turn off ACS and the IOMMU in the firmware. `--copies` shows how fast copies are",
        )

    # A thread that waits for a GPU runs no ops, so that with fewer cores all threads may wait.
    all_gpus = len(tensorflow.gpus)
    if all_gpus > 1 and cores <= all_gpus:
        yield Finding(
            f"{count(cores, 'core')} for {all_gpus} GPUs, and a step ends with a thread that waits"
            " for each GPU",
            f"give the session inter_op_parallelism_threads={2 * all_gpus}",
        )
    if "auto_jit" in os.environ.get("TF_XLA_FLAGS", ""):
        remedy = "leave auto_jit out of TF_XLA_FLAGS"
        yield Finding("XLA may merge copies that are planned apart", remedy)
