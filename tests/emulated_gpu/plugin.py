"""The emulated GPU for programs in Python: the environment that loads it, and its counters."""

import ctypes
import json
import os
from typing import Any, Dict, Optional

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY = os.path.join(ROOT, "build", "emulated_gpu.so")


def missing() -> Optional[str]:
    """Why the emulated GPU cannot be used, in a line. ``None``: it can."""
    if os.path.exists(LIBRARY):
        return None
    return f"{LIBRARY} is not built: make build/emulated_gpu.so, which needs a C++ compiler"


def environment(
    count: int = 8,
    *,
    memory_mb: int = 512,
    delay_us: int = 0,
    seed: int = 0,
    sum_seed: int = 0,
    waits: bool = True,
    machine: Optional[str] = None,
    timing: Optional[float] = None,
    host_us: float = 0,
    kernel_us: float = 8,
    memory_gbs: float = 700,
    launch_us: float = 0,
    event_us: float = 0,
    chip_us: float = 0,
    trace: Optional[str] = None,
) -> Dict[str, str]:
    """The environment variables with which TensorFlow has ``count`` emulated GPUs.

    They have to be set before TensorFlow is imported.

    Args:
        count: devices, at most 64.
        memory_mb: the memory of each, in MiB.
        delay_us: one item in four of a stream waits for a random time up to so many microseconds.
        seed: of these random times.
        sum_seed: of the orders in which devices add up rows of equal index, each device in its own.
            0: all in the order of the rows.
        waits: ``False``: no stream waits for another, and results are wrong.
        machine: a file of links. Copies between the devices take the time of their link.
        timing: timed mode: nothing is computed, and all takes so many times its time.
        host_us: timed mode: microseconds for which one of the model's kernels keeps the host busy.
        kernel_us: timed mode: microseconds of a kernel beside those of its bytes.
        memory_gbs: timed mode: GB/s of the devices' memory.
        launch_us: timed mode: microseconds for which a launch keeps its thread, and other launches
            on this GPU. A copy takes two launches.
        event_us: timed mode: microseconds of a stream that an event takes.
        chip_us: timed mode: the GPUs are parts of one chip and use its memory by turns; what
            follows a copy takes one thread so many microseconds.
        trace: a file for timed mode's kernels and copies when the process ends.

    Example:
        >>> subprocess.run([sys.executable, "train.py"], env={**os.environ, **environment(count=4)})
    """
    options: Dict[str, Any] = {
        "COUNT": count,
        "MEMORY_MB": memory_mb,
        "DELAY_US": delay_us,
        "SEED": seed,
        "SUM_SEED": sum_seed,
        "WAITS": int(waits),
        "MACHINE": machine,
        "TIMING": timing,
        "HOST_US": host_us,
        "KERNEL_US": kernel_us,
        "MEMORY_GBS": memory_gbs,
        "LAUNCH_US": launch_us,
        "EVENT_US": event_us,
        "CHIP_US": chip_us,
        "TRACE": trace,
    }
    variables = {"TF_PLUGGABLE_DEVICE_LIBRARY_PATH": LIBRARY}
    for name, value in options.items():
        # An empty variable is as none, so that one of this process does not reach its children.
        variables[f"EMULATED_GPU_{name}"] = "" if value is None else str(value)
    return variables


def counters() -> Dict[str, Dict]:
    """What this process's emulated GPUs have done so far.

    Returns:
        ``{"kernels": {"0": {"AddN": 3}}, "copies": {"0-1": {"count": 1, "bytes": 400}},
        "faults": {}}``. A device is its number, or ``"host"``. A fault is a pointer that a real
        GPU could not read.
    """
    library = ctypes.CDLL(LIBRARY)
    library.emulated_gpu_counters.restype = ctypes.c_char_p
    return json.loads(library.emulated_gpu_counters())


def set_host_us(microseconds: float) -> None:
    """Change ``host_us`` for the steps that follow in this process."""
    library = ctypes.CDLL(LIBRARY)
    library.emulated_gpu_set_host_us.argtypes = [ctypes.c_double]
    library.emulated_gpu_set_host_us(microseconds)


def set_launch_us(microseconds: float) -> None:
    """Change ``launch_us`` for the steps that follow in this process."""
    library = ctypes.CDLL(LIBRARY)
    library.emulated_gpu_set_launch_us.argtypes = [ctypes.c_double]
    library.emulated_gpu_set_launch_us(microseconds)


def set_flip(sender: int, receiver: int, number: int) -> None:
    """Let one copy between two GPUs change a bit, the ``number``-th from now on; 0: none."""
    library = ctypes.CDLL(LIBRARY)
    library.emulated_gpu_set_flip.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    library.emulated_gpu_set_flip(sender, receiver, number)


def wait() -> None:
    """Wait until all devices have done what is queued; a ``tf.function`` returns earlier."""
    ctypes.CDLL(LIBRARY).emulated_gpu_wait()


def longest_gap() -> float:
    """The longest time since the last call for which a thread was due and had no core, in seconds.

    Other programs make it long. Times of steps with long gaps are those of this machine.
    """
    library = ctypes.CDLL(LIBRARY)
    library.emulated_gpu_longest_gap.restype = ctypes.c_double
    return float(library.emulated_gpu_longest_gap())
