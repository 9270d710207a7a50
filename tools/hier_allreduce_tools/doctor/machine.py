"""What is found on a machine: a fact is a line, and a problem is one with its remedy."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Generator, Iterator, Tuple

from hier_allreduce import HierAllreduceError, __version__

from .topology import groups_in

if sys.version_info < (3, 8):
    import importlib_metadata as metadata
else:
    from importlib import metadata

_PACKAGES = re.compile(
    r"(tensorflow([-_](cpu|gpu|rocm))?|keras|tf[-_]keras|tensorpack|numpy|protobuf"
    r"|horovod|nvidia[-_]nccl[-_]cu\d+)$"
)
# they change which GPUs there are, where copies go, or which ops run
_VARIABLES = re.compile(
    r"(CUDA_\w*DEVICE\w*|NVIDIA_VISIBLE_DEVICES|XLA_FLAGS|NCCL_\w*"
    r"|TF_(XLA|GPU|FORCE|USE|PLUGGABLE)_\w*)$"
)
_PATIENCE = 120  # seconds; the first use of many GPUs takes a while
_NOT_FOUND = 127  # the status of a shell whose command does not exist
_LONGEST_LINE = 300  # characters


def problem(fact: str, remedy: str) -> str:
    """Return the line of a problem."""
    return f"! {fact}: {remedy}"


def findings(tensorflow: Dict[str, Any]) -> Iterator[str]:
    """Yield all that is known about this machine, and its problems.

    ``tensorflow`` is the answer of :func:`ask_tensorflow`.
    """
    # A container or a batch system may give this process few cores; macOS and Windows do not tell.
    asked = getattr(os, "sched_getaffinity", None)
    cores = len(asked(0)) if asked else os.cpu_count() or 1
    yield f"{platform.platform()}, cores: {cores}"
    version_by_package = {"hier_allreduce": __version__, "Python": platform.python_version()}
    for installed in metadata.distributions():
        name = str(installed.metadata["Name"])
        if _PACKAGES.match(name):
            version_by_package.setdefault(name, installed.version)
    yield ", ".join(map(" ".join, version_by_package.items()))
    variables = sorted(filter(_VARIABLES.match, os.environ))
    yield from (f"{variable}={os.environ[variable]}" for variable in variables)
    cards = yield from _cards()
    if tensorflow["fault"]:
        remedy = "it has to run here first: `python -c 'import tensorflow'` has all of its lines"
        yield problem(f"TensorFlow cannot list its devices: {tensorflow['fault']}", remedy)
        return
    gpus = tensorflow["gpus"]
    yield from _gpus(tensorflow)
    # Whoever hides GPUs from CUDA sees it in the facts.
    if "CUDA_VISIBLE_DEVICES" not in os.environ and len(gpus) < cards:
        seen = f"GPUs that TensorFlow uses: {len(gpus)} of {cards}"
        yield problem(seen, "its own lines say why, if a program asks for its devices")

    # A thread that waits for a GPU runs no ops, so that with fewer cores all threads may wait.
    if len(gpus) > 1 and cores <= len(gpus):
        yield problem(
            f"{len(gpus)} GPUs have too few cores ({cores}), because at the end of a step a thread"
            " waits for each GPU",
            f"give the session inter_op_parallelism_threads={2 * len(gpus)}",
        )


def _cards() -> Generator[str, None, int]:
    """Yield nvidia-smi's answers: GPUs, links, groups; return the number of its GPUs."""
    asked = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    status, output, errors = _answer_of(*asked)
    # A machine without nvidia-smi may have no GPU, or is a container with GPUs: both are fine.
    if status == _NOT_FOUND:
        yield "nvidia-smi: not found on PATH"
        return 0
    if status:
        words = " ".join((output + errors).split())[:_LONGEST_LINE]
        remedy = (
            "look for the driver's own words, `dmesg | grep -i -e nvrm -e xid`, and reboot if it"
            " hangs or was updated while it ran; a container needs the driver of its host"
        )
        yield problem(f"nvidia-smi ended with status {status}: {words}", remedy)
        return 0
    cards = output.splitlines()
    yield from (f"nvidia-smi: {card}" for card in cards)
    # Links, and which GPUs read each other's memory. Some drivers print no such table.
    for kind in (["-m"], ["-p2p", "r"]) if len(cards) > 1 else ():
        status, table, _ = _answer_of("nvidia-smi", "topo", *kind)
        if status == 0:
            # The legend is left out, because the reader of an issue knows its words.
            yield "\n{}\n".format(table.split("\n\n")[0])
        # The variable may number the GPUs in another way.
        all_gpus = ",".join(map(str, range(len(cards))))
        if os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus) == all_gpus:
            with suppress(HierAllreduceError):  # only the first one has links
                yield groups_in(table)
    return len(cards)


def _gpus(tensorflow: Dict[str, Any]) -> Iterator[str]:
    """Yield TensorFlow's GPUs, and which of them do not reach all others."""
    gpus = tensorflow["gpus"]
    built = "with" if tensorflow["cuda"] else "without"
    yield f"TensorFlow {tensorflow['version']}, built {built} CUDA, GPUs: {len(gpus)}"
    lonely = []
    for name, model, size, peers in gpus:
        line = f"  {name} {model}, {size / 2**30:.3g} GiB"
        # A GPU of a plug-in may have peers, but TensorFlow lists them for CUDA only.
        if tensorflow["cuda"]:
            line += f", peers: {', '.join(map(str, peers)) or 'none'}"
            lonely += [name] if len(peers) < len(gpus) - 1 else []
        yield line
    if lonely:
        yield problem(
            f"no peer access from {', '.join(lonely)} to all others, so copies cross main memory",
            "GeForce cards have it over NVLink only, virtual machines if their host gives it; else"
            " turn off ACS and the IOMMU in the firmware. `--copies` shows how fast copies are",
        )


# ---- processes, which may hang -----------------------------------------------------------------


def ask_tensorflow() -> Dict[str, Any]:
    """Return what a process of its own finds, because TensorFlow may hang or end it.

    The keys are those of ``probe``, and ``fault``: why it cannot be used, or empty.
    """
    probe = str(Path(__file__).with_name("probe.py"))
    status, output, errors = _answer_of(sys.executable, probe)
    if status:
        return {"gpus": [], "fault": last_words(status, errors)}
    # Plug-ins may have printed lines of their own before the answer.
    return {"fault": "", **json.loads(output.splitlines()[-1])}


def _answer_of(*command: str) -> Tuple[int, str, str]:
    """Return the status of a process, what it prints, and its errors."""
    print(*command, "…", file=sys.stderr)  # because it may take a while
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            # TensorFlow's warnings and errors may tell why it ends.
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"},
        )
    except OSError as error:  # not found, or it may not be executed
        return _NOT_FOUND, "", str(error)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, "", f"no answer for {_PATIENCE} s"
    # Only line ends are removed, because a table begins with a tab, above its column of labels.
    output = done.stdout.decode("utf-8", "replace").strip("\r\n")
    return done.returncode, output, done.stderr.decode("utf-8", "replace")


def last_words(status: int, errors: str) -> str:
    """Return the signal or status of a process that has ended, and its last line that says why.

    Other lines of TensorFlow may come after an error, so that of those with errors the last counts.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    words = [line for line in lines if re.search("error", line, re.IGNORECASE)] or lines
    end = signal.Signals(-status).name if status < 0 else f"status {status}"
    return ": ".join([end, *(line[-_LONGEST_LINE:] for line in words[-1:])])
