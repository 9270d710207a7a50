"""GPUs cut into logical ones for the bench: what TensorFlow is told, on a machine that has none."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hier_allreduce import HierAllreduceError
from hier_allreduce.bench import case, devices_here
from hier_allreduce.graph import gpu_count, tf1
from hier_allreduce.logical import split_gpu, splitting, with_logical_gpus

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
    return fresh


def limits(config):
    return [[int(limit) for limit in gpu.memory_limit_mb] for gpu in config.gpu_options.experimental.virtual_devices]


def test_the_benchs_sessions_get_equal_shares_of_the_fullest_gpu(machine, monkeypatch):
    monkeypatch.setattr(tf1, "Session", lambda graph, config: config)
    assert gpu_count() == 2
    names = split_gpu(4)
    assert names == [f"/gpu:{number}" for number in range(8)] and devices_here() == tuple(names)
    for config in (case.session(None, case.Case((), tuple(names))), machine.config):
        assert limits(config) == [[4096] * 4] * 2  # of 20 GiB, four of five parts
        assert config.gpu_options.visible_device_list == "0,1"


def test_a_sessions_other_choices_stay(machine):
    config = tf1.ConfigProto(allow_soft_placement=True)
    config.gpu_options.per_process_gpu_memory_fraction = 0.99  # tensorpack's, which TensorFlow refuses
    before = str(config)
    assert str(with_logical_gpus(config)) == before
    split_gpu(2, memory_limit=GIB)
    assert limits(with_logical_gpus(config)) == [[1024, 1024]] * 2
    assert config.allow_soft_placement and config.gpu_options.per_process_gpu_memory_fraction == 0
    assert limits(with_logical_gpus(config)) == [[1024, 1024]] * 2


def test_what_is_missing_is_said(machine, monkeypatch):
    monkeypatch.setattr(splitting, "free_gpu_memory", tuple)
    with pytest.raises(HierAllreduceError, match="nvidia-smi does not tell how much memory of the GPU is free"):
        split_gpu(2)
    monkeypatch.setattr(tf.config.experimental, "get_visible_devices", lambda kind: [])
    with pytest.raises(HierAllreduceError, match="finds no GPU here, and is not built for GPUs"):
        split_gpu(2)
