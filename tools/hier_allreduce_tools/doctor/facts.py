"""Facts about this machine: packages, variables, the GPUs of TensorFlow and of nvidia-smi."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, NamedTuple, Tuple

from .causes import cause_of_end
from .nvidia_smi import NvidiaSmi

if sys.version_info < (3, 8):
    import pkg_resources  # setuptools has it, which every environment of Python 3.7 has
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
# the lines in which TensorFlow says why it uses no GPU; libnvinfer is TensorRT's, which none needs
_COMPLAINT = re.compile(
    r"(Could not load dynamic library '(?!libnvinfer)[^']+'|Cannot dlopen some GPU libraries"
    r"|[Ff]ailed call to cuInit: .*|Ignoring visible gpu device .*)"
)
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")  # Docker's and Podman's


class Gpu(NamedTuple):
    """A GPU that TensorFlow sees, and the numbers of the GPUs that it reaches directly."""

    name: str
    model: str
    bytes: int
    peers: Tuple[int, ...]


class TensorFlow(NamedTuple):
    """TensorFlow as a process of its own finds it.

    Attributes:
        version: empty if it cannot be used.
        cuda: whether it was built with CUDA. Without, a plug-in may still bring GPUs.
        gpus: the GPUs in the order of ``/gpu:0``, ``/gpu:1``, ….
        complaint: TensorFlow's own line about GPUs that it does not use.
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
    # Python has its own list of packages since 3.8; before that, setuptools keeps one.
    version_by_package: Dict[str, str] = {}
    for package in _PACKAGES:
        installed: Any = None
        if sys.version_info < (3, 8):
            installed = pkg_resources.WorkingSet().by_key.get(package.replace("_", "-"))
        else:
            installed = next(iter(metadata.distributions(name=package)), None)
        if installed is not None and installed.version:
            version_by_package[package] = str(installed.version)
    # A container or a batch system may give this process few cores; macOS and Windows do not tell.
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    settings = os.environ.items()
    variables = {variable: setting for variable, setting in settings if _VARIABLES.match(variable)}
    has_file = any(Path(file).exists() for file in _CONTAINER_FILES)
    return Facts(
        packages=version_by_package,
        variables=variables,
        tensorflow=_tensorflow(),
        nvidia=nvidia,
        cores=cores,
        in_container=has_file or "container" in os.environ,
    )


def _tensorflow() -> TensorFlow:
    """Return what a process of its own finds, because TensorFlow may hang or end it."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", f"{__package__}.probe"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            # all lines, because a GPU that is ignored is no warning to TensorFlow
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"},
        )
    except subprocess.TimeoutExpired:
        hint = "look at `dmesg`, reset the GPUs"
        return TensorFlow(fault=f"TensorFlow did not list its devices within {_TIMEOUT} s: {hint}")
    errors = done.stderr.decode("utf-8", "replace")
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    if done.returncode:
        cause = cause_of_end(done.returncode, errors)
        if "No module named 'tensorflow'" in cause:
            return TensorFlow(fault="TensorFlow is missing")
        # Once it is imported, TensorFlow fits, unless the processor lacks an instruction.
        if "{}" in lines and not cause.startswith("SIGILL"):
            users = "`nvidia-smi` shows who uses them"
            return TensorFlow(fault=f"TensorFlow cannot list its GPUs: {cause}; {users}")
        advice = "install one that fits this processor and Python"
        return TensorFlow(fault=f"TensorFlow cannot be used, {advice}: {cause}")
    # Plug-ins may have printed lines of their own before the answer.
    answer = json.loads(lines[-1])
    gpus = [Gpu(*gpu) for gpu in answer["gpus"]]
    complaint = _COMPLAINT.search(errors)
    said = complaint.group() if complaint else ""
    return TensorFlow(answer["version"], answer["cuda"], tuple(gpus), said)
