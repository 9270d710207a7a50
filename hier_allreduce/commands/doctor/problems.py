"""Known problems of a machine.

Each has a function that returns the problem with its remedy, or an empty text.
"""

from __future__ import annotations

from typing import List

from ..._lazy import advice, keras_2_install
from ...errors import HierAllreduceError
from ...formatting import count
from .facts import Facts
from .nvidia_smi import visible_gpus
from .nvlinks import read_table

_MOST_PEERS = 8  # of one GPU; CUDA's limit, but not through an NVSwitch


def problems(facts: Facts) -> List[str]:
    """Return a line for every known problem: the problem, and its remedy."""
    found = [check(facts) for check in _CHECKS]
    return [line for line in found if line]


def _tensorflow_fails(facts: Facts) -> str:
    fault = facts.tensorflow.fault
    return advice("hier_allreduce", "tensorflow", "tf") if fault.endswith("is missing") else fault


def _several_tensorflows(facts: Facts) -> str:
    names = [name for name in facts.packages if name.startswith("tensorflow")]
    if len(names) < 2:
        return ""
    return f"{', '.join(names)} overwrite each other's files: uninstall all, then install one"


def _tensorpack_with_keras_3(facts: Facts) -> str:
    is_legacy = "tf_keras" in facts.packages and facts.variables.get("TF_USE_LEGACY_KERAS") == "1"
    is_old = int(facts.packages.get("keras", "2").split(".")[0]) < 3
    if "tensorpack" not in facts.packages or is_old or is_legacy:
        return ""
    command = keras_2_install(facts.tensorflow.version)
    install = "" if "tf_keras" in facts.packages else f"{command}, and "
    return f"tensorpack's layers need Keras 2: {install}set TF_USE_LEGACY_KERAS=1"


def _nvidia_smi_fails(facts: Facts) -> str:
    fault = facts.nvidia.fault
    if not fault or fault.startswith("not found"):
        return ""
    if "mismatch" in fault:
        remedy = "the driver was updated while it ran: reboot, or load its module again"
    elif facts.in_container:
        remedy = "this is a container: try nvidia-smi on its host, and start it with its GPUs"
    else:
        remedy = "load or install the driver; `dmesg | grep -i nvrm` tells more"
    return f"nvidia-smi fails ({fault}): {remedy}"


def _hidden_gpus(facts: Facts) -> str:
    """Return whether CUDA_VISIBLE_DEVICES hides all GPUs, or some by an entry that is no GPU."""
    value = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if not facts.nvidia.gpus or value is None or "MIG-" in value:
        return ""
    shown, unknown = visible_gpus(facts.nvidia, value)
    setting = f"CUDA_VISIBLE_DEVICES={value}"
    if unknown:
        return f"{setting}: {unknown!r} is no GPU here, and hides itself and all after it"
    return "" if shown else f"{setting!r} hides all GPUs: unset it"


def _unused_gpus(facts: Facts) -> str:
    tensorflow = facts.tensorflow
    shown, _ = visible_gpus(facts.nvidia, facts.variables.get("CUDA_VISIBLE_DEVICES"))
    if tensorflow.fault or len(tensorflow.gpus) >= len(shown):
        return ""
    used = f"TensorFlow uses {len(tensorflow.gpus)} of {count(len(shown), 'GPU')}"
    if not tensorflow.cuda:
        return f"{used}, since it is built without CUDA: see tensorflow.org/install"
    said = f" ({tensorflow.complaint})" if tensorflow.complaint else ""
    if tensorflow.gpus:
        return f"{used}{said}: it leaves out old and small ones, such as those that drive a display"
    return f"{used}{said}: install the CUDA libraries that fit it, see tensorflow.org/install"


def _no_peer_access(facts: Facts) -> str:
    # TensorFlow lists peers for CUDA only
    gpus = facts.tensorflow.gpus if facts.tensorflow.cuda else ()
    lonely = [gpu.name for gpu in gpus if len(gpu.peers) < min(len(gpus) - 1, _MOST_PEERS)]
    if not lonely:
        return ""
    return (
        f"no peer access from {', '.join(lonely)} to all others, so that copies go through the "
        "host's memory. GeForce cards have it over NVLink only, virtual machines if their host "
        "gives it; else turn off ACS and the IOMMU in the firmware. `hier-allreduce doctor "
        "--copies` shows how fast the copies are"
    )


def _more_gpus_than_peers(facts: Facts) -> str:
    number = len(facts.tensorflow.gpus)
    if not facts.tensorflow.cuda or number <= _MOST_PEERS + 1 or _has_switch(facts):
        return ""
    return (
        f"CUDA lets a GPU reach {_MOST_PEERS} others without the host, unless an NVSwitch joins "
        f"them, and here are {number}: some copies go through the host's memory. `hier-allreduce "
        f"doctor --copies` shows which; train on {_MOST_PEERS + 1} GPUs or fewer, or in several "
        "processes"
    )


def _has_switch(facts: Facts) -> bool:
    """Return whether NVLinks join all pairs of more GPUs than one has peers."""
    try:
        links = read_table(facts.nvidia.table).links
    except HierAllreduceError:
        return False
    return all(sum(map(bool, row)) == len(links) - 1 for row in links)


def _few_threads(facts: Facts) -> str:
    number = len(facts.tensorflow.gpus)
    if number < 2 or facts.cores > number:
        return ""
    return (
        f"{count(facts.cores, 'core')} for {number} GPUs: a step ends with a thread that waits for "
        f"each GPU, so give the session inter_op_parallelism_threads={2 * number}"
    )


def _xla(facts: Facts) -> str:
    if "auto_jit" not in facts.variables.get("TF_XLA_FLAGS", ""):
        return ""
    return "XLA may merge copies that are planned apart: leave auto_jit out of TF_XLA_FLAGS"


_CHECKS = (
    _tensorflow_fails,
    _several_tensorflows,
    _tensorpack_with_keras_3,
    _nvidia_smi_fails,
    _hidden_gpus,
    _unused_gpus,
    _no_peer_access,
    _more_gpus_than_peers,
    _few_threads,
    _xla,
)
