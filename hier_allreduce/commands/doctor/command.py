"""``hier-allreduce doctor``: versions, GPUs, known problems with their remedies; with ``--measure``, copies."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
from typing import Any, Dict, List, Optional

from ... import measure
from ..._lazy import advice
from ..._version import __version__
from ...errors import HierAllreduceError
from ...formatting import amount, count, table
from ...topology import Topology, this_machine
from ..options import output

_PACKAGES = (
    *(
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "keras",
        "tf_keras",
        "tensorpack",
        "numpy",
        "protobuf",
    ),
    *("horovod", "nvidia-nccl-cu12"),
)
# they change where copies go, or which ops run
_VARIABLES = re.compile("(CUDA_VISIBLE_DEVICES|TF_(XLA|GPU|FORCE|USE)_.*|XLA_FLAGS|NCCL_.*)$")
_TIMEOUT = 120  # seconds; the first use of many GPUs takes a while
_PROBE = "import json; from hier_allreduce.commands.doctor.command import probe; print(json.dumps(probe()), flush=True)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "--measure",
        action="store_true",
        help="copies between all pairs of devices: equal bits, speeds",
    )
    measured = "two or more devices of TensorFlow to measure: /gpu:0,/gpu:1 (default: all GPUs)"
    add("--devices", type=different_devices, metavar="A,B", help=measured)
    add(
        "-o",
        type=output,
        metavar="FILE",
        help="file for this machine with measured links, for plan and topology=",
    )
    add("--json", action="store_true", help="one JSON object instead of the text")


def different_devices(text: str) -> List[str]:
    """Read two or more different devices, such as ``/gpu:0,/gpu:1``."""
    found = text.split(",")
    for device in found:
        if not re.match(r"/[cg]pu:\d+$", device):
            raise argparse.ArgumentTypeError(f"{device!r} is no device such as /gpu:0 or /cpu:1")
    if len(found) < 2 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected two or more different devices, such as /gpu:0,/gpu:1"
        )
    return found


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there are problems."""
    if (args.devices or args.o) and not args.measure:
        raise HierAllreduceError("--devices and -o go with --measure; add it")
    packages = {
        name: version for name, version in ((name, _version(name)) for name in _PACKAGES) if version
    }
    versions = {"hier_allreduce": __version__, "python": platform.python_version(), **packages}
    print("asking TensorFlow for its devices …", file=sys.stderr)
    seen = _tensorflow()
    driver = _driver()
    try:
        machine = this_machine()
    except HierAllreduceError:
        machine = None
    variables = {name: value for name, value in os.environ.items() if _VARIABLES.match(name)}
    facts: Dict[str, Any] = {
        "packages": versions,
        "variables": variables,
        "driver": driver,
        "tensorflow": seen,
    }
    text = [
        f"{platform.platform()}, {os.cpu_count()} cores\n",
        table([("package", "version"), *versions.items()]),
        "",
    ]
    text += [
        *_gpu_lines(seen, driver, machine),
        *(f"{name}={value}" for name, value in variables.items()),
    ]
    todo = remedies(packages, seen, driver, machine)
    if args.measure:
        found = _measured(args, len(seen.get("gpus", [])), machine)
        facts["measured"] = measure.as_json(found)
        text += ["", measure.report(found)]
        todo += measure.faults(found)
    facts["todo"] = todo
    lines = [f"{number}. {line}" for number, line in enumerate(todo, 1)]
    print(
        json.dumps(facts)
        if args.json
        else "\n".join([*text, "", *(lines or ["no known problems"])])
    )
    return 1 if todo else 0


def _measured(args: argparse.Namespace, gpus: int, machine: Optional[Topology]) -> measure.Measured:
    """Measure copies, and write the machine's file if one is wanted."""
    devices = args.devices or [f"/gpu:{number}" for number in range(gpus)]
    numbers = [int(device[5:]) for device in devices if device.startswith("/gpu:")]
    if len(devices) < 2 or not gpus > max(numbers, default=-1):
        raise HierAllreduceError(
            f"--measure: TensorFlow sees {count(gpus, 'GPU')}; name --devices such as /cpu:0,/cpu:1"
        )
    machine = (
        machine.subset(numbers) if machine is not None and len(numbers) == len(devices) else None
    )
    if args.o and machine is None:
        raise HierAllreduceError(
            "-o: only GPUs that nvidia-smi shows make a machine's file; leave -o out"
        )
    print("measuring copies …", file=sys.stderr)
    found = measure.measure(devices, machine)
    if args.o and machine is not None:
        args.o.write_text(measure.with_figures(machine, devices, found).to_yaml(), encoding="utf-8")
    return found


def _version(name: str) -> Optional[str]:
    if sys.version_info < (3, 8):
        import pkg_resources  # of setuptools, which every environment of Python 3.7 has

        found = pkg_resources.working_set.by_key.get(name.replace("_", "-"))
        return str(found.version) if found else None
    from importlib import metadata

    return next((found.version for found in metadata.distributions(name=name)), None)


def probe() -> Dict[str, Any]:
    """Return TensorFlow's version, how it was built, and its GPUs with the peers that each can reach."""
    import tensorflow as tf
    from tensorflow.python.client import device_lib

    gpus = []
    for gpu in device_lib.list_local_devices():
        if gpu.device_type == "GPU":
            name = re.search(r"name: ([^,]+)", gpu.physical_device_desc)
            peers = sorted({link.device_id for link in gpu.locality.links.link})
            model = name.group(1) if name else ""
            gpus.append(
                {"name": gpu.name, "model": model, "bytes": gpu.memory_limit, "peers": peers}
            )
    return {"version": tf.__version__, "cuda": tf.test.is_built_with_cuda(), "gpus": gpus}


def _tensorflow() -> Dict[str, Any]:
    """Return the probe's facts, or an ``error``, from another process: on a wrong processor it dies."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            timeout=_TIMEOUT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {
            "error": f"TensorFlow did not list its devices within {_TIMEOUT} s: look at `dmesg`, reset the GPUs"
        }
    last = (
        (done.stderr if done.returncode else done.stdout)
        .decode("utf-8", "replace")
        .strip()
        .rpartition("\n")[2]
    )
    if done.returncode and "No module named 'tensorflow'" in last:
        return {
            "error": f"TensorFlow is missing; only plan works. {advice('The rest', 'tensorflow', 'tf')}"
        }
    if done.returncode:
        by = (
            f"status {done.returncode}"
            if done.returncode > 0
            else signal.Signals(-done.returncode).name
        )
        fault = last or f"it ended with {by}"
        return {
            "error": f"TensorFlow cannot be used, install one that fits this processor and Python: {fault}"
        }
    facts: Dict[str, Any] = json.loads(last)
    return facts


def _driver() -> List[str]:
    """Return ``model, driver version`` of each GPU that nvidia-smi lists; nothing without it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.decode("utf-8", "replace").strip().splitlines()


def _gpu_lines(seen: Dict[str, Any], driver: List[str], machine: Optional[Topology]) -> List[str]:
    none = "no GPUs; a container has them if it was started with GPUs"
    lines = [f"nvidia-smi: {line}" for line in driver or [none]]
    if "gpus" in seen:
        built = "with" if seen["cuda"] else "without"
        lines.append(
            f"TensorFlow {seen['version']}, built {built} CUDA, sees {count(len(seen['gpus']), 'GPU')}"
        )
    for gpu in seen.get("gpus", []):
        peers = ", ".join(map(str, gpu["peers"])) or "none"
        lines.append(
            f"  {gpu['name']} {gpu['model']}, {amount(gpu['bytes'], binary=True)}, peers: {peers}"
        )
    return lines + ([machine.table().rstrip()] if machine is not None and len(machine) > 1 else [])


def remedies(
    packages: Dict[str, str], seen: Dict[str, Any], driver: List[str], machine: Optional[Topology]
) -> List[str]:
    """Return a line for every known problem here: the problem, and its remedy."""
    lines, gpus = [seen["error"]] if "error" in seen else [], seen.get("gpus", [])
    tensorflows = [name for name in packages if name.startswith("tensorflow")]
    if len(tensorflows) > 1:
        lines.append(
            f"{', '.join(tensorflows)} overwrite each other's files: uninstall all, then install one"
        )
    is_legacy = "tf_keras" in packages and os.environ.get("TF_USE_LEGACY_KERAS") == "1"
    if "tensorpack" in packages and packages.get("keras", "2") >= "3" and not is_legacy:
        install = "" if "tf_keras" in packages else "pip install tf_keras, and "
        lines.append(f"tensorpack's layers need Keras 2: {install}set TF_USE_LEGACY_KERAS=1")
    if driver and "gpus" in seen and not gpus:
        why = "finds no CUDA libraries that fit" if seen["cuda"] else "is built without CUDA"
        lines.append(
            f"TensorFlow {why}, and does not use {count(len(driver), 'GPU')}: see tensorflow.org/install"
        )
    without = [gpu["name"] for gpu in gpus if len(gpu["peers"]) < len(gpus) - 1]
    if without:
        lines.append(
            f"no peer access from {', '.join(without)} to all others, so that copies go through the host's memory. "
            "GeForce cards have it over NVLink only, virtual machines if their host gives it; else turn off ACS and "
            "the IOMMU in the firmware. `hier-allreduce doctor --measure -o machine.yaml` measures it for plans"
        )
    if "auto_jit" in os.environ.get("TF_XLA_FLAGS", ""):
        lines.append(
            "XLA may merge copies that the plan keeps apart: leave auto_jit out of TF_XLA_FLAGS"
        )
    return lines + list(machine.warnings if machine is not None else ())
