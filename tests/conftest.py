"""pytest's options, markers and fixtures for all tests.

Only the tests that need TensorFlow import it.
"""

import collections
import gc
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings

# Every run has the same examples, so that a failure is everybody's. `make soak` draws more, and
# new ones. There is no deadline, since the machine may be busy with something else.
settings.register_profile(
    "same every time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak",
    max_examples=500,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
settings.load_profile("same every time")


MARKERS = (
    "tf2: needs eager execution and tf.function",
    "no_gpu_kernel(*ops): TensorFlow has no GPU kernel of these ops, and moves them to the CPU",
    "not_emulated(*ops): emulated GPUs have no kernel of these ops: they move to the CPU",
    "no_fixed_order(*ops): CUDA's kernels of these ops add up in no fixed order",
    "cpu_only(reason): is about CPU devices, and not run on GPUs",
)
EXCEPTIONS = {  # markers of tests that are not like others on GPUs, and words of the summary
    "no_gpu_kernel": "no kernel on GPUs, moved to the CPU:",
    "not_emulated": "no kernel on emulated GPUs, moved to the CPU:",
    "no_fixed_order": "added up in no fixed order on CUDA, compared within rounding:",
    "cpu_only": "about CPU devices, not run:",
}
EXCEPTION = "exception on GPUs"  # the key in a report's properties


def pytest_addoption(parser):
    parser.addoption(
        "--no-tensorflow", action="store_true", help="let each import of TensorFlow fail"
    )
    parser.addoption(
        "--devices",
        choices=["cpu", "gpu"],
        default="cpu",
        help="gpu: the GPUs that TensorFlow sees, or logical ones of the first; else emulated ones",
    )


def pytest_configure(config):
    if config.getoption("no_tensorflow"):
        sys.modules["tensorflow"] = None  # type: ignore[assignment]
    if config.getoption("devices") == "gpu":
        use_gpus()
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def sees_gpus():
    """Return whether TensorFlow sees GPUs. A process of its own looks, since that starts CUDA."""
    program = "import tensorflow as tf; assert tf.config.list_physical_devices('GPU')"
    return (
        subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode == 0
    )


def use_gpus():
    """Let TensorFlow find GPUs when it is imported, here and in the programs that tests start."""
    from emulated_gpu import plugin

    if "TEST_GPUS" not in os.environ:  # the workers of pytest-xdist know it from their parent
        os.environ["TEST_GPUS"] = "real" if sees_gpus() else "emulated"
    if os.environ["TEST_GPUS"] == "emulated":
        if plugin.missing():
            raise pytest.UsageError(plugin.missing())
        os.environ.update(plugin.environment(count=16, memory_mb=64, delay_us=100, seed=1))
    # at a step's end a thread for each GPU waits for it, and one more has to go on
    os.environ.update(TEST_DEVICES="gpu", TF_NUM_INTEROP_THREADS="32")


def pytest_collection_modifyitems(config, items):
    skip_on_tf1([item for item in items if item.get_closest_marker("tf2")])
    for item in items if config.getoption("devices") == "gpu" else []:
        for marker in map(item.get_closest_marker, EXCEPTIONS):
            if marker is not None and holds(marker):
                reason = f"{EXCEPTIONS[marker.name]} {', '.join(marker.args)}"
                item.user_properties.append((EXCEPTION, reason))
                if marker.name == "cpu_only":
                    item.add_marker(pytest.mark.skip(reason=reason))


def holds(marker):
    """Return whether an exception is one on these GPUs, emulated or real."""
    of_others = {"real": "not_emulated", "emulated": "no_fixed_order"}[os.environ["TEST_GPUS"]]
    return marker.name != of_others


def skip_on_tf1(items):
    if items:
        from helpers.graphs import IS_TF2

        for item in items if not IS_TF2 else []:
            item.add_marker(pytest.mark.skip(reason="TensorFlow 2 only"))


def pytest_runtest_setup(item):
    """Let ops move to the CPU in a test that says which have no GPU kernel, and in no other one."""
    if item.config.getoption("devices") == "gpu":
        from helpers.graphs import allow_soft_placement

        markers = map(item.get_closest_marker, ("no_gpu_kernel", "not_emulated"))
        allow_soft_placement(any(marker is not None and holds(marker) for marker in markers))


def pytest_terminal_summary(terminalreporter, config):
    """Count the tests that say why they are not like others on GPUs."""
    if config.getoption("devices") != "gpu":
        return
    found: collections.Counter = collections.Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("skipped"):
        # The report of a file that skips itself has no properties.
        properties = getattr(report, "user_properties", [])
        found.update(value for key, value in properties if key == EXCEPTION)
    gpus = f"{os.environ['TEST_GPUS']} GPUs"
    terminalreporter.section(f"on {gpus}: {sum(found.values())} named exceptions")
    for reason, count in sorted(found.items()):
        terminalreporter.line(f"{count:4} {reason}")


def pytest_collection_finish():
    """Let the garbage collector skip what all modules hold.

    With TensorFlow among them, a full collection would take 0.3 seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def graph():
    """A fresh v1 graph, current while the test runs."""
    import tensorflow as tf

    with tf.Graph().as_default() as fresh:
        yield fresh
