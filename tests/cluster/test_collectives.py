"""The collectives that a cluster builds: engines, their order on each device, dtypes."""

from itertools import groupby

import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2, cpus

from hier_allreduce import Cluster, ClusterError, Strategy, allreduce_grads
from hier_allreduce.cluster import collectives
from hier_allreduce.cluster.collectives import check_order, collectives_of

tf1 = tf.compat.v1
HOSTS = ["127.0.0.1:2222", "127.0.0.1:2223"]


@pytest.fixture
def with_nccl(monkeypatch):
    """A TensorFlow that was built with NCCL."""
    monkeypatch.setattr(collectives, "_has_nccl", lambda: True)


def reduced(communication, devices, gradients=5, dtype=tf.float32, cluster=None):
    """Return the results of an all-reduce of vectors, each in a chunk of its own."""
    cluster = cluster or Cluster(HOSTS, 0, len(devices), communication=communication)
    rows = [[tf.zeros([n + 1], dtype) for n in range(gradients)]] * len(devices)
    return allreduce_grads(rows, devices, strategy=Strategy(pack_below=0), cluster=cluster)


def by_device(graph, scope):
    """Return the collectives in a scope, in building order, of each device."""
    found = [op for op in graph.get_operations() if op.type.startswith("Collective") and op.name.startswith(scope)]
    return [list(ops) for _, ops in groupby(sorted(found, key=lambda op: op.device), lambda op: op.device)]


def hints(graph, scope):
    return {op.get_attr("communication_hint").decode() for ops in by_device(graph, scope) for op in ops}


@pytest.mark.parametrize("engine", ["ring", "nccl"])
def test_nccl_calls_of_a_main_follow_each_other_ring_ones_do_not(graph, engine):
    reduced(engine, cpus(2))
    assert hints(graph, "hier_allreduce/") == {engine}
    mains = by_device(graph, "hier_allreduce/")
    assert sorted(map(len, mains)) == [2, 3]
    for ops in mains:
        followed = [[each for each in op.control_inputs if each in ops] for op in ops]
        assert followed == ([[]] + [[op] for op in ops[:-1]] if engine == "nccl" else [[]] * len(ops))


def test_a_bucket_crosses_when_its_last_gradient_is_ready(graph):
    """Gradients become ready from the last variable's to the first one's."""
    small, large = tf.zeros([1], name="small"), tf.zeros([1 << 15], name="large")
    cluster = Cluster(HOSTS, 0, 2, communication="nccl")
    allreduce_grads([[small, large, small]] * 2, cpus(2), strategy=Strategy(mains=0), cluster=cluster)
    ((alone, bucket),) = by_device(graph, "hier_allreduce/")
    assert "large" in alone.name and alone in bucket.control_inputs


def test_the_meeting_and_the_check_of_shapes_use_the_ring(graph):
    """They are on CPU devices, for which NCCL has nothing."""
    cluster = Cluster(HOSTS, 0, 2, communication="nccl")
    allreduce_grads([[tf1.placeholder(tf.float32, [None])]] * 2, cpus(2), cluster=cluster)
    assert hints(graph, "CollectiveReduce") == {"ring"}
    assert hints(graph, "hier_allreduce/shapes_across") == {"ring"}
    assert hints(graph, "hier_allreduce/Placeholder") == {"nccl"}


@pytest.mark.parametrize(
    ("built", "devices", "engine"),
    [
        (True, ["/gpu:0", "/gpu:1"], "nccl"),
        (True, ["/gpu:0", "/cpu:0"], "ring"),
        (True, ["/cpu:0", "/cpu:1"], "ring"),
        (False, ["/gpu:0", "/gpu:1"], "ring"),
    ],
)
def test_auto_is_nccl_where_all_towers_are_gpus(graph, monkeypatch, built, devices, engine):
    monkeypatch.setattr(collectives, "_has_nccl", lambda: built)
    cluster = Cluster(HOSTS, 0, 2, communication="auto")
    reduced("auto", devices, cluster=cluster)
    assert hints(graph, "hier_allreduce/") == {engine}
    assert cluster._manifest.entries(graph)["all-reduce 0 (hier_allreduce)"]["communication"] == engine


@pytest.mark.parametrize("task", [0, 1], ids=["sent", "received"])
def test_variables_on_gpus_are_broadcast_over_nccl_in_order(graph, with_nccl, task):
    made = []
    for device in ("/gpu:1", "/gpu:0", "/cpu:0"):
        with tf.device(device):
            made += [tf1.get_variable(f"w{len(made)}", [2]), tf1.get_variable(f"w{len(made) + 1}", [2])]
    cluster = Cluster(HOSTS, task, 2, communication="auto")
    cluster.broadcast(made)
    on_cpu, first, second = by_device(graph, "broadcast/")
    assert {op.get_attr("communication_hint") for op in on_cpu} == {b"ring"} and len(on_cpu) == 2
    groups = [{op.get_attr("group_key") for op in ops} for ops in (on_cpu, first, second)]
    assert [len(keys) for keys in groups] == [1, 1, 1] and len(set.union(*groups)) == 3
    for ops in (first, second):
        assert {op.get_attr("communication_hint") for op in ops} == {b"nccl"}
        earlier, later = ops
        assert earlier in collectives_of([later]) and "GPU" in earlier.device
        check_order(ops)
    assert len(cluster._manifest.entries(graph)["broadcast 0"]["over NCCL"]) == 4


def test_two_all_reduces_over_nccl_need_an_order_in_one_step(graph):
    cluster = Cluster(HOSTS, 0, 2, communication="nccl")
    first, second = (reduced("nccl", cpus(2), cluster=cluster) for _ in range(2))
    check_order(collectives_of(ops_of(first)))
    with pytest.raises(ClusterError, match=r"'hier_allreduce/\S+' and 'hier_allreduce_1/\S+' would .* one step"):
        check_order(collectives_of(ops_of(first) + ops_of(second)))
    with tf1.control_dependencies(ops_of(first)):
        third = reduced("nccl", cpus(2), cluster=cluster)
    check_order(collectives_of(ops_of(third)))


def test_all_reduces_over_the_ring_need_no_order(graph):
    cluster = Cluster(HOSTS, 0, 2)
    check_order(collectives_of([op for _ in range(2) for op in ops_of(reduced("ring", cpus(2), cluster=cluster))]))


def ops_of(rows):
    return [tensor.op for row in rows for tensor in row]


@pytest.mark.parametrize(
    ("dtype", "crosses"),
    [
        ("float16", "float16" if IS_TF2 else "float32"),
        ("bfloat16", "float32"),
        ("float64", "float64"),
        ("int32", "int64"),
        ("uint8", "int64"),
        ("int64", "int64"),
    ],
)
def test_what_collectives_cannot_add_on_gpus_crosses_wider(graph, dtype, crosses):
    (row, _) = reduced("nccl", cpus(2), dtype=dtype)
    assert {tensor.dtype.name for tensor in row} == {dtype}
    seen = {op.get_attr("T").name for ops in by_device(graph, "hier_allreduce/") for op in ops}
    assert seen == {crosses}
