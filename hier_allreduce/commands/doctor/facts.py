"""Facts about this machine: packages, variables, the GPUs of TensorFlow and of nvidia-smi."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from .nvidia_smi import NvidiaSmi

if sys.version_info < (3, 8):
    import pkg_resources  # of setuptools, which every environment of Python 3.7 has
else:
    from importlib import metadata

_PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "keras",
    "tf_keras",
    "tensorpack",
    "numpy",
    "protobuf",
    "horovod",
    "nvidia-nccl-cu12",
)
# they change which GPUs there are, where copies go, or which ops run
_VARIABLES = re.compile(
    r"(CUDA_\w*DEVICE\w*|NVIDIA_VISIBLE_DEVICES|XLA_FLAGS|NCCL_\w*"
    r"|TF_(XLA|GPU|FORCE|USE|PLUGGABLE)_\w*)$"
)
_TIMEOUT = 120  # seconds; the first use of many GPUs takes a while
# the lines in which TensorFlow says why it uses no GPU
_COMPLAINT = re.compile(
    r"(Could not load dynamic library '[^']+'|Cannot dlopen some GPU libraries"
    r"|[Ff]ailed call to cuInit: .*|Ignoring visible gpu device .*)"
)
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")  # of Docker, of Podman


class Gpu(NamedTuple):
    """A GPU that TensorFlow sees, and the numbers of the GPUs that it reaches without the host."""

    name: str
    model: str
    bytes: int
    peers: Tuple[int, ...]


class TensorFlow(NamedTuple):
    """TensorFlow as a process of its own finds it.

    Attributes:
        version: empty if it cannot be used.
        cuda: whether it was built with CUDA. Without, a plug-in may still bring GPUs.
        gpus: in the order of ``/gpu:0``, ``/gpu:1``, ….
        complaint: its own line about GPUs that it does not use.
        fault: why it cannot be used; empty if it can.
    """

    version: str = ""
    cuda: bool = False
    gpus: Tuple[Gpu, ...] = ()
    complaint: str = ""
    fault: str = ""


class Facts(NamedTuple):
    """All that ``doctor`` knows about a machine."""

    packages: Dict[str, str]
    variables: Dict[str, str]
    tensorflow: TensorFlow
    nvidia: NvidiaSmi
    cores: int
    in_container: bool


def gather(nvidia: NvidiaSmi) -> Facts:
    """Return the facts about this machine, with the answers of its nvidia-smi."""
    versions = {name: _version(name) for name in _PACKAGES}
    variables = {name: value for name, value in os.environ.items() if _VARIABLES.match(name)}
    return Facts(
        packages={name: version for name, version in versions.items() if version},
        variables=variables,
        tensorflow=_tensorflow(),
        nvidia=nvidia,
        cores=_cores(),
        in_container=_in_container(),
    )


def _cores() -> int:
    """Return the number of cores that this process may use; macOS and Windows do not tell."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> Optional[str]:
    if sys.version_info < (3, 8):
        found = pkg_resources.WorkingSet().by_key.get(package.replace("_", "-"))
        return str(found.version) if found else None
    return next((found.version for found in metadata.distributions(name=package)), None)


def _tensorflow() -> TensorFlow:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}  # its complaints are warnings
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{__package__}.probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        hint = "look at `dmesg`, reset the GPUs"
        return TensorFlow(fault=f"TensorFlow did not list its devices within {_TIMEOUT} s: {hint}")
    errors = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode:
        return TensorFlow(fault=_fault(done.returncode, errors.splitlines()))
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    found = json.loads(lines[-1])  # before it, plug-ins may have printed theirs
    gpus = [Gpu(*gpu) for gpu in found["gpus"]]
    complaint = _COMPLAINT.search(errors)
    said = complaint.group() if complaint else ""
    return TensorFlow(found["version"], found["cuda"], tuple(gpus), said)


def _fault(status: int, errors: List[str]) -> str:
    """Return why TensorFlow cannot be used, from the end of a process that has tried."""
    last = errors[-1] if errors else ""
    if "No module named 'tensorflow'" in last:
        return "TensorFlow is missing"
    if not last:
        by = f"status {status}" if status > 0 else signal.Signals(-status).name
        last = f"it ended with {by}"
    return f"TensorFlow cannot be used, install one that fits this processor and Python: {last}"


def _in_container() -> bool:
    return any(Path(name).exists() for name in _CONTAINER_FILES) or "container" in os.environ
