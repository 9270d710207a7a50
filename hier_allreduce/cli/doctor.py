"""``hier-allreduce doctor``: versions, GPUs, peer access and known problems, as text to paste into an issue."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from .._lazy import advice
from .._version import __version__
from ..errors import HierAllreduceError
from ..formatting import amount, count, duration, rate, table
from ..topology import Speeds, Topology, this_machine
from ..topology.gpus import staged_kinds

_PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
    "keras",
    "tf_keras",
    "tensorpack",
    "horovod",
    "numpy",
    "scipy",
    "protobuf",
    "nvidia-nccl-cu12",
)
# what changes where copies go or which ops run; TF_CONFIG holds addresses, so only its presence is told
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "TF_XLA_FLAGS", "XLA_FLAGS", "TF_GPU_THREAD_MODE", "TF_FORCE_GPU_ALLOW_GROWTH")
_TIMEOUT = 120  # seconds; the first use of many GPUs takes a while


# a third of the time would go into collecting the garbage of a process that is about to end
_PROBE = """\
import gc; gc.disable()
import json, os
from hier_allreduce.cli.doctor import probe
print(json.dumps(probe()), flush=True)
os._exit(0)
"""


class TensorFlowSeen(NamedTuple):
    """What TensorFlow sees, or why it cannot tell: ``facts`` as :func:`probe` returns them, or an ``error``."""

    facts: Dict[str, Any]
    error: str = ""

    @property
    def gpus(self) -> List[Dict[str, Any]]:
        """TensorFlow's GPUs."""
        return list(self.facts.get("gpus", []))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: it has none."""


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there are problems."""
    packages = _installed_packages()
    seen = _tensorflow() if _tensorflow_packages(packages) else TensorFlowSeen({})
    driver = _driver()
    machine = _machine(seen)
    print(f"hier_allreduce {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"{count(os.cpu_count() or 1, 'core')}\n")
    print(table([("package", "version"), *packages.items()]))
    print(f"\n{_gpu_text(seen, driver, machine)}")
    variables = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    variables += ["TF_CONFIG is set"] if "TF_CONFIG" in os.environ else []
    if variables:
        print("\n" + "\n".join(variables))
    problems = _problems(packages, seen, driver, machine)
    print("\n" + "\n".join(f"problem: {problem}" for problem in problems) if problems else "\nno known problems")
    return 1 if problems else 0


def _installed_packages() -> Dict[str, str]:
    """Return the version of each package that matters and is installed."""
    versions = {}
    for name in _PACKAGES:
        version = _version(name)
        if version is not None:
            versions[name] = version
    return versions


def _version(name: str) -> Optional[str]:
    if sys.version_info >= (3, 8):
        from importlib import metadata

        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None
    import pkg_resources  # of setuptools, which every environment of Python 3.7 has

    try:
        return str(pkg_resources.get_distribution(name).version)
    except pkg_resources.DistributionNotFound:
        return None


def _tensorflow_packages(packages: Dict[str, str]) -> List[str]:
    return [name for name in packages if name.startswith("tensorflow")]


def _tensorflow() -> TensorFlowSeen:
    """Return what TensorFlow sees, from a process of its own: one that does not fit the processor ends its process."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return TensorFlowSeen({}, f"TensorFlow did not list its devices within {_TIMEOUT} s")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        hint = ": it may be built for another processor (AVX)" if name == "SIGILL" else ""
        return TensorFlowSeen({}, f"importing TensorFlow ended with {name}{hint}")
    lines = (done.stdout if done.returncode == 0 else done.stderr).decode("utf-8", "replace").strip().splitlines()
    if done.returncode:
        return TensorFlowSeen({}, f"TensorFlow cannot be used: {lines[-1] if lines else 'no message'}")
    return TensorFlowSeen(json.loads(lines[-1]))


def probe() -> Dict[str, Any]:
    """Return TensorFlow's version, how it was built, and its GPUs with the peers that each can reach."""
    import tensorflow as tf
    from tensorflow.python.client import device_lib

    gpus = [device for device in device_lib.list_local_devices() if device.device_type == "GPU"]
    return {
        "version": tf.__version__,
        "cuda": tf.test.is_built_with_cuda(),
        "gpus": [_described(gpu) for gpu in gpus],
    }


def _described(gpu: Any) -> Dict[str, Any]:
    name = re.search(r"name: ([^,]+)", gpu.physical_device_desc)
    peers = sorted({link.device_id for link in gpu.locality.links.link})
    return {"name": gpu.name, "model": name.group(1) if name else "", "bytes": gpu.memory_limit, "peers": peers}


def _driver() -> List[str]:
    """Return ``model, driver version`` of each GPU that nvidia-smi lists; nothing without it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.decode("utf-8", "replace").strip().splitlines()


def _machine(seen: TensorFlowSeen) -> Optional[Topology]:
    """Return this machine's links, if nvidia-smi knows them."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        return this_machine()
    except HierAllreduceError:
        return None


def _gpu_text(seen: TensorFlowSeen, driver: List[str], machine: Optional[Topology]) -> str:
    none = "no GPUs" if shutil.which("nvidia-smi") else "not found; a container has it if it was started with GPUs"
    lines = [f"nvidia-smi: {line}" for line in driver or [none]]
    if seen.facts:
        built = "with" if seen.facts["cuda"] else "without"
        lines.append(f"TensorFlow {seen.facts['version']}, built {built} CUDA, sees {count(len(seen.gpus), 'GPU')}")
    for gpu in seen.gpus:
        peers = ", ".join(map(str, gpu["peers"])) or "none"
        lines.append(f"  {gpu['name']} {gpu['model']}, {amount(gpu['bytes'], binary=True)}, peers: {peers}")
    if machine is not None and len(machine) > 1:
        lines.append(machine.table().rstrip())
    return "\n".join(lines)


def _no_peer_access(gpus: Sequence[Dict[str, Any]]) -> str:
    """Return which GPUs do not reach all others, why, what that costs, and what to do."""
    speeds = Speeds()
    return (
        f"no peer access from {', '.join(gpu['name'] for gpu in gpus)} to all others: {_cause(gpus)}. Copies go through"
        f" the host's memory: each starts some {duration(speeds.staged_latency)} later, and all together move some"
        f" {rate(speeds.staged)}. `hier-allreduce calibrate` measures it, so that plans fit"
    )


def _cause(gpus: Sequence[Dict[str, Any]]) -> str:
    """Return what most probably turns peer access off here."""
    if all(staged_kinds(gpu["model"]) for gpu in gpus):
        return "NVIDIA's driver gives GeForce cards none but over NVLink"
    if " hypervisor" in _text_of("/proc/cpuinfo"):
        return "this is a virtual machine, which has to be given it"
    if any(Path("/sys/kernel/iommu_groups").glob("*")):
        return "the IOMMU is on (kernel option iommu=pt, or off in the firmware)"
    return "ACS of the PCIe switches may be on (off in the firmware), or they are on different sockets"


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _problems(
    packages: Dict[str, str], seen: TensorFlowSeen, driver: List[str], machine: Optional[Topology]
) -> List[str]:
    """Return what is known to go wrong here, each with what to do."""
    tensorflows, problems = _tensorflow_packages(packages), []
    if not tensorflows:
        problems.append(f"TensorFlow is missing; only topo and plan work. {advice('The rest', 'tensorflow', 'tf')}")
    if len(tensorflows) > 1:
        problems.append(f"{', '.join(tensorflows)} overwrite each other's files: uninstall all, then install one")
    if seen.error:
        problems.append(seen.error)
    if driver and seen.facts and not seen.gpus:
        why = "finds no CUDA libraries that fit" if seen.facts["cuda"] else "is built without CUDA"
        problems.append(
            f"TensorFlow {why}, and does not use the {count(len(driver), 'GPU')}: see tensorflow.org/install"
        )
    without = [gpu for gpu in seen.gpus if len(gpu["peers"]) < len(seen.gpus) - 1]
    if without:
        problems.append(_no_peer_access(without))
    if "auto_jit" in os.environ.get("TF_XLA_FLAGS", ""):
        problems.append("TF_XLA_FLAGS turns on XLA's clustering, which may merge copies that the plan keeps apart")
    problems += list(machine.warnings) if machine is not None else []
    return problems
