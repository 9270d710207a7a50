"""GPUs cut into towers and lanes: TensorFlow's numbers, memory, and what is refused. No test needs a GPU."""

import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, checked, cpus, tf1

from hier_allreduce import HierAllreduceError, Strategy, gpu_lanes
from hier_allreduce.graph.layout import lay_out

GIB, MIB = 1 << 30, 1 << 20


def lanes_of(setup):
    """The devices of each tower's lanes."""
    towers = range(len(setup.devices))
    return [tuple(lane.device for lane in setup.lanes if lane.tower == tower) for tower in towers]


@pytest.fixture
def gpus(monkeypatch):
    """A machine with three GPUs, of which the last has the least free memory."""
    monkeypatch.setattr(tf.config.experimental, "list_physical_devices", lambda kind: ["a", "b", "c"])
    monkeypatch.setattr("hier_allreduce.logical.lanes.free_gpu_memory", lambda: (16 * GIB, 16 * GIB, 10 * GIB))


def test_towers_and_lanes_have_tensorflows_numbers(gpus):
    setup = gpu_lanes(2, 3, memory_limit=GIB)
    if IS_TF2:
        assert setup.devices == ("/gpu:0", "/gpu:1")
        assert lanes_of(setup) == [("/gpu:2", "/gpu:4", "/gpu:6"), ("/gpu:3", "/gpu:5", "/gpu:7")]
    else:
        assert setup.devices == ("/gpu:0", "/gpu:4")
        assert lanes_of(setup) == [("/gpu:1", "/gpu:2", "/gpu:3"), ("/gpu:5", "/gpu:6", "/gpu:7")]
    options = setup.config.gpu_options
    assert options.visible_device_list == "0,1" and len(options.experimental.virtual_devices) == 2
    tower = int(16 * 1024 * 0.95) - 3 * 1024
    for logical in options.experimental.virtual_devices:
        assert list(logical.memory_limit_mb) == [tower, 1024, 1024, 1024]
        assert not IS_TF2 or list(logical.device_ordinal) == [0, 1, 2, 3]


def test_towers_go_by_the_order_of_their_gpus(gpus):
    setup = gpu_lanes(["/gpu:2", 0], 1, gradient_bytes=100 * MIB)
    assert setup.devices == (("/gpu:1", "/gpu:0") if IS_TF2 else ("/gpu:2", "/gpu:0"))
    assert lanes_of(setup) == [("/gpu:3",), ("/gpu:2",)] if IS_TF2 else [("/gpu:3",), ("/gpu:1",)]
    assert setup.config.gpu_options.visible_device_list == "0,2"
    assert [(lane.gpu, lane.memory) for lane in setup.lanes] == [(2, 400 * MIB), (0, 400 * MIB)]
    assert setup.tower_memory == (int(10 * 1024 * 0.95) - 400) * MIB, "the fullest GPU decides"


def test_the_links_are_those_of_gpus_not_of_tensorflow(gpus, graph):
    rows = [[tf.zeros([500_000])] * 2] * 2
    setup = gpu_lanes([2, 1], 1, memory_limit=GIB)
    grads = checked(rows, setup.devices, False, lanes=setup.lanes)
    assert lay_out(grads, Strategy(topology="dgx-1v")).machine.devices == ("GPU2", "GPU1")


def test_each_lane_and_tower_may_have_its_own_memory(gpus):
    setup = gpu_lanes([1], 2, memory_limit=[MIB + 1, GIB], tower_memory=4 * GIB)
    (logical,) = setup.config.gpu_options.experimental.virtual_devices
    assert list(logical.memory_limit_mb) == [4096, 2, 1024]


def test_a_sessions_own_configuration_is_kept_and_not_changed(gpus):
    own = tf1.ConfigProto(allow_soft_placement=True)
    own.gpu_options.per_process_gpu_memory_fraction = 0.99  # as tensorpack sets it
    own.gpu_options.allow_growth = True
    changed = gpu_lanes(1, 1, memory_limit=GIB).added_to(own)
    assert changed.allow_soft_placement and changed.gpu_options.allow_growth
    assert changed.gpu_options.per_process_gpu_memory_fraction == 0
    assert not own.gpu_options.experimental.virtual_devices


def test_a_session_has_the_cpu_devices():
    setup = gpu_lanes(["/cpu:0", "/cpu:2"], 2)
    assert setup.devices == ("/cpu:0", "/cpu:2")
    assert lanes_of(setup) == [("/cpu:3", "/cpu:4"), ("/cpu:5", "/cpu:6")]
    with tf1.Session(graph=tf.Graph(), config=setup.config) as session:
        assert sum(device.device_type == "CPU" for device in session.list_devices()) == 7


@pytest.mark.tf2
def test_configure_makes_logical_gpus_once(gpus, monkeypatch):
    made = {}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a", "b", "c"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda chosen, kind: made.update(chosen=chosen))
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", made.__setitem__)
    gpu_lanes([2, 0], 1, memory_limit=GIB).configure()
    assert made["chosen"] == ["a", "c"]
    for gpu in "ac":
        sizes = [(logical.memory_limit, logical.experimental_device_ordinal) for logical in made[gpu]]
        assert sizes == [(int(10 * 1024 * 0.95) - 1024, 0), (1024, 1)]


@pytest.mark.tf2
def test_configure_after_the_first_op_is_an_error():
    tf.constant(1)
    with pytest.raises(HierAllreduceError, match="TensorFlow has started with other devices"):
        gpu_lanes(cpus(2), 4).configure()


REFUSED = {
    "lanes_per_gpu=-1: expected a whole number": lambda: gpu_lanes(2, -1, GIB),
    "lanes_per_gpu=True: expected a whole number": lambda: gpu_lanes(2, True, GIB),
    "expected at most 256": lambda: gpu_lanes(10**12, 1, GIB),
    "devices is empty": lambda: gpu_lanes(0, 1, GIB),
    "must be a list": lambda: gpu_lanes("/gpu:0", 1, GIB),
    "lanes need towers on different GPUs": lambda: gpu_lanes([0, "/cpu:0"], 1, GIB),
    r"\['/gpu:0', '/gpu:0'\]: lanes need": lambda: gpu_lanes([0, 0], 1, GIB),
    r"\['/gpu'\]: lanes need": lambda: gpu_lanes(["/gpu"], 1, GIB),
    "GPUs 3 do not exist: TensorFlow finds 3 GPUs": lambda: gpu_lanes([0, 3], 1, GIB),
    "give memory_limit=": lambda: gpu_lanes(2, 1),
    "not both": lambda: gpu_lanes(2, 1, GIB, gradient_bytes=1),
    "memory_limit=0: expected bytes": lambda: gpu_lanes(2, 1, 0),
    "one for each of 2 lanes": lambda: gpu_lanes(2, 2, [GIB]),
    "does not fit: 10 GiB are free on the fullest GPU, the lanes of each take 10 GiB": lambda: gpu_lanes(3, 2, 5 * GIB),
    "does not fit: .* and its tower 9 GiB": lambda: gpu_lanes(3, 1, GIB, tower_memory=9 * GIB),
    "already; leave both out": lambda: gpu_lanes(2, 1, GIB).added_to(gpu_lanes(2, 1, GIB).config),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_set_up_is_refused(gpus, words):
    with pytest.raises(HierAllreduceError, match=words):
        REFUSED[words]()


def test_unknown_free_memory_asks_for_tower_memory(gpus, monkeypatch):
    monkeypatch.setattr("hier_allreduce.logical.lanes.free_gpu_memory", lambda: ())
    with pytest.raises(HierAllreduceError, match="give tower_memory="):
        gpu_lanes(2, 1, GIB)
    assert gpu_lanes(2, 1, GIB, tower_memory=4 * GIB).tower_memory == 4 * GIB
