"""GPUs cut into logical ones: what TensorFlow is told, on a machine that has none."""

import types

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hier_allreduce import DeviceError, split_gpus
from hier_allreduce.graph import gpu_count, splitting, with_logical_gpus
from hier_allreduce.integrations.tensorpack.devices import config_for_towers

tf1 = tf.compat.v1
GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch):
    """TensorFlow before its start, on a machine with two GPUs, and nvidia-smi's free memory."""
    fresh = context.Context()
    monkeypatch.setattr(context, "_context", fresh)
    fresh._initialize_physical_devices()
    gpus = [context.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(2)]
    fresh._physical_devices += gpus
    fresh._visible_device_list += gpus
    fresh._memory_growth_map.update(dict.fromkeys(gpus))
    monkeypatch.setattr(splitting, "free_gpu_memory", lambda: (40 * GIB, 20 * GIB))
    return types.SimpleNamespace(context=fresh, gpus=gpus)


def limits(config):
    return [[int(limit) for limit in gpu.memory_limit_mb] for gpu in config.gpu_options.experimental.virtual_devices]


def test_sessions_and_eager_code_get_equal_shares_of_the_fullest_gpu(machine):
    assert gpu_count() == 2
    split = split_gpus(4)
    assert split.devices == tuple(f"/gpu:{number}" for number in range(8)) and gpu_count() == 8
    assert split.memory == 4864 << 20  # of 20 GiB 95 %, in four parts
    for config in (split.config, machine.context.config, config_for_towers(tf1.ConfigProto(), split.devices)):
        assert limits(config) == [[4864] * 4] * 2
        assert config.gpu_options.visible_device_list == "0,1"
    assert split_gpus(4) == split


def test_a_sessions_own_choices_stay(machine):
    config = tf1.ConfigProto(allow_soft_placement=True)
    config.gpu_options.per_process_gpu_memory_fraction = 0.99  # tensorpack's, which TensorFlow refuses
    assert with_logical_gpus(config) is config
    split_gpus(2, memory_limit=GIB)
    changed = with_logical_gpus(config)
    assert changed.allow_soft_placement and limits(changed) == [[1024, 1024]] * 2
    assert changed.gpu_options.per_process_gpu_memory_fraction == 0
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.99
    assert with_logical_gpus(changed) is changed


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), r"split_gpus\(0\): expected the number of logical GPUs of each GPU, 1 or more"),
        ((True,), "expected the number"),
        ((2, -1), "memory_limit=-1: expected the bytes"),
        ((100,), "not enough memory for 100 logical GPUs of 194.6 MiB: 20 GiB are free on the fullest GPU"),
        ((8, 4 * GIB), "not enough memory for 8 logical GPUs of 4 GiB"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(machine, arguments, message):
    with pytest.raises(DeviceError, match=message):
        split_gpus(*arguments)
    assert gpu_count() == 2


def test_without_nvidia_smi_the_memory_must_be_given(machine, monkeypatch):
    monkeypatch.setattr(splitting, "free_gpu_memory", tuple)
    with pytest.raises(DeviceError, match="nvidia-smi does not say how much memory is free; give memory_limit="):
        split_gpus(2)
    assert split_gpus(2, 512 << 20).memory == 512 << 20


def test_one_process_has_one_division_made_before_it_starts(machine):
    split_gpus(2)
    with pytest.raises(DeviceError, match=r"split_gpus\(3\): the GPUs are cut into 2 logical GPUs already"):
        split_gpus(3)
    machine.context._virtual_device_map.clear()
    machine.context._context_handle = object()
    with pytest.raises(DeviceError, match=r"split_gpus\(2\): TensorFlow has started .* before the first op or session"):
        split_gpus(2)
    machine.context._context_handle = None


def test_without_a_gpu_the_reason_is_given():
    with pytest.raises(DeviceError, match=r"split_gpus\(8\): TensorFlow .* finds no GPU here.*not built for GPUs"):
        split_gpus(8)
