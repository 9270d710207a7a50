"""Real GPUs for tests: at least 16, which are logical ones of the first GPU where there are fewer.

``pytest --devices gpu`` sets ``TEST_GPUS=real`` where TensorFlow sees a GPU. Then each program that
imports this module has the same 16: in eager mode, in each session, in each server. Nothing here
starts CUDA. TensorFlow does so when it first needs a device, and that is never in a fork server,
whose children could not use CUDA any more.
"""

import functools
import inspect
import os

COUNT = 16
ARE_REAL = os.environ.get("TEST_GPUS") == "real"
ARE_EMULATED = os.environ.get("TEST_GPUS") == "emulated"
# of each: small, because each process of a test has its own 16
MEMORY_MB = int(os.environ.get("TEST_GPU_MB", "160"))


def cut():
    """Let TensorFlow cut the first GPU wherever it starts devices; it has no setting for that."""
    from tensorflow.python.client import device_lib, session
    from tensorflow.python.eager import context
    from tensorflow.python.training import server_lib

    _before(context.Context, "ensure_initialized", _cut_eager_devices)
    for starting, name in ((session.BaseSession, "__init__"), (server_lib.Server, "__init__")):
        _with_config(starting, name, "config")
    _with_config(device_lib, "list_local_devices", "session_config")


def _before(owner, name, first):
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def changed(*args, **kwargs):
        first()
        return usual(*args, **kwargs)

    setattr(owner, name, changed)


def _with_config(owner, name, argument):
    """Let a function get our ConfigProto, whatever its callers give it."""
    usual = getattr(owner, name)
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def changed(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.arguments[argument] = _cut_config(given.arguments.get(argument))
        return usual(*given.args, **given.kwargs)

    setattr(owner, name, changed)


@functools.lru_cache(maxsize=1)
def _cut_eager_devices():
    """Once, before the devices of eager mode start."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < COUNT and tf.config.get_logical_device_configuration(gpus[0]) is None:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=MEMORY_MB)
        tf.config.set_logical_device_configuration(gpus[0], [limit] * COUNT)


def _cut_config(config):
    import tensorflow as tf

    full = tf.compat.v1.ConfigProto()
    if config is not None:
        full.CopyFrom(config)
    options = full.gpu_options
    wants_gpus = full.device_count.get("GPU", 1) > 0
    are_few = len(tf.config.list_physical_devices("GPU")) < COUNT
    if wants_gpus and are_few and not options.experimental.virtual_devices:
        full.device_count.pop("GPU", None)
        # no others, because TensorFlow wants limits for each visible GPU
        options.visible_device_list = "0"
        options.experimental.virtual_devices.add().memory_limit_mb.extend([MEMORY_MB] * COUNT)
        # TensorFlow refuses these two beside the limits
        options.per_process_gpu_memory_fraction = 0
        options.allow_growth = False
    return full


if ARE_REAL:
    cut()
else:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # nothing starts CUDA
