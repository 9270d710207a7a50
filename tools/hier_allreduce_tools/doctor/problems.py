"""Known problems of a machine.

Each is a paragraph, which yields the problem with its remedy.
"""

from __future__ import annotations

from typing import Iterator, List

from hier_allreduce._lazy import advice, keras_2_install
from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.formatting import count

from .facts import Facts
from .nvidia_smi import visible_gpus
from .nvlinks import read_table

_MOST_PEERS = 8  # CUDA's limit for one GPU, but not through an NVSwitch


def problems(facts: Facts) -> List[str]:
    """Return a line for every known problem: the problem, and its remedy."""
    return [*_package_problems(facts), *_driver_problems(facts), *_training_problems(facts)]


def _package_problems(facts: Facts) -> Iterator[str]:
    """Yield the problems of installed packages."""
    fault = facts.tensorflow.fault
    if fault.endswith("is missing"):
        yield advice("hier_allreduce", "tensorflow", "tf")
    elif fault:
        yield fault

    # Packages of TensorFlow have the same files, so that the last one installed wins, in parts.
    tensorflows = [package for package in facts.packages if package.startswith("tensorflow")]
    if len(tensorflows) > 1:
        yield (
            f"{', '.join(tensorflows)} overwrite each other's files: uninstall all, then install"
            " one"
        )

    # tensorpack's layers call functions of Keras that Keras 3 has no more; tf_keras is Keras 2.
    has_keras_2 = "tf_keras" in facts.packages
    is_legacy = has_keras_2 and facts.variables.get("TF_USE_LEGACY_KERAS") == "1"
    is_old = int(facts.packages.get("keras", "2").split(".")[0]) < 3
    if "tensorpack" in facts.packages and not is_old and not is_legacy:
        command = keras_2_install(facts.tensorflow.version)
        install = "" if has_keras_2 else f"{command}, and "
        yield f"tensorpack's layers need Keras 2: {install}set TF_USE_LEGACY_KERAS=1"


def _driver_problems(facts: Facts) -> Iterator[str]:
    """Yield why GPUs are not used: the driver's fault, CUDA_VISIBLE_DEVICES, or TensorFlow."""
    # A machine without nvidia-smi may have no GPU, or is a container with GPUs: both are fine.
    fault = facts.nvidia.fault
    if fault and not fault.startswith("not found"):
        remedy = "load or install the driver; `dmesg | grep -i nvrm` tells more"
        if "mismatch" in fault:
            remedy = "the driver was updated while it ran: reboot, or load its module again"
        elif facts.in_container:
            remedy = "this is a container: try nvidia-smi on its host, and start it with its GPUs"
        yield f"nvidia-smi fails ({fault}): {remedy}"

    # CUDA hides GPUs in silence; the parts of one GPU (MIG) are not in nvidia-smi's list.
    visible = facts.variables.get("CUDA_VISIBLE_DEVICES")
    shown, unknown = visible_gpus(facts.nvidia, visible)
    if facts.nvidia.gpus and visible is not None and "MIG-" not in visible:
        setting = f"CUDA_VISIBLE_DEVICES={visible}"
        if unknown:
            yield f"{setting}: {unknown!r} is no GPU here, and hides itself and all after it"
        elif not shown:
            yield f"{setting!r} hides all GPUs: unset it"

    # TensorFlow says in a warning of its own why it leaves GPUs out, and few people see it.
    tensorflow = facts.tensorflow
    if not tensorflow.fault and len(tensorflow.gpus) < len(shown):
        used = f"TensorFlow uses {len(tensorflow.gpus)} of {count(len(shown), 'GPU')}"
        said = f"{used} ({tensorflow.complaint})" if tensorflow.complaint else used
        if not tensorflow.cuda:
            yield f"{used}, since it is built without CUDA: see tensorflow.org/install"
        elif tensorflow.gpus:
            yield (
                f"{said}: it leaves out old and small ones, such as those that drive a display, and"
                " CUDA shows it one part of split ones (MIG: `nvidia-smi -L` lists the parts)"
            )
        else:
            yield f"{said}: install the CUDA libraries that fit it, see tensorflow.org/install"


def _training_problems(facts: Facts) -> Iterator[str]:
    """Yield what makes copies between GPUs slow, and what delays or changes them in a step."""
    # TensorFlow lists peers for CUDA only, so that a plug-in's GPUs would all look lonely.
    gpus = facts.tensorflow.gpus if facts.tensorflow.cuda else ()
    lonely = [gpu.name for gpu in gpus if len(gpu.peers) < min(len(gpus) - 1, _MOST_PEERS)]
    if lonely:
        yield (
            f"no peer access from {', '.join(lonely)} to all others, so that copies go through "
            "main memory. GeForce cards have it over NVLink only, virtual machines if their host "
            "gives it; else turn off ACS and the IOMMU in the firmware. `hier-allreduce doctor "
            "--copies` shows how fast the copies are"
        )

    # NVLinks of each GPU to all others mean an NVSwitch, to which CUDA's limit does not apply.
    try:
        links = read_table(facts.nvidia.table).links
        has_switch = all(sum(map(bool, ends)) == len(links) - 1 for ends in links)
    except HierAllreduceError:
        has_switch = False
    if len(gpus) > _MOST_PEERS + 1 and not has_switch:
        yield (
            f"CUDA lets a GPU reach {_MOST_PEERS} others directly, unless an NVSwitch "
            f"joins them, and here are {len(gpus)}: some copies go through main memory. "
            "`hier-allreduce doctor --copies` shows which; train on "
            f"{_MOST_PEERS + 1} GPUs or fewer, or in several processes"
        )

    # A thread that waits for a GPU runs no ops, so that with fewer cores all threads may wait.
    all_gpus = len(facts.tensorflow.gpus)
    if all_gpus > 1 and facts.cores <= all_gpus:
        yield (
            f"{count(facts.cores, 'core')} for {all_gpus} GPUs: a step ends with a thread that "
            "waits for each GPU, so give the session "
            f"inter_op_parallelism_threads={2 * all_gpus}"
        )

    if "auto_jit" in facts.variables.get("TF_XLA_FLAGS", ""):
        yield "XLA may merge copies that are planned apart: leave auto_jit out of TF_XLA_FLAGS"
