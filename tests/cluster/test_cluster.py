"""Several hosts without faults: sums, training; and errors that need no other host.

The hosts are the processes of helpers/clusters.py.
"""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from helpers import cluster_child
from helpers.clusters import free_addresses, job
from helpers.graphs import config, floats, gpus_or_cpus, session

from hier_allreduce import Cluster, ClusterError, HierAllreduceError, allreduce_grads
from hier_allreduce.cluster.collectives import collectives_of, fingerprints
from hier_allreduce.graphs import memory_of

tf1 = tf.compat.v1


def two():
    return Cluster(["127.0.0.1:2222", "127.0.0.1:2223"], 0)


def check_near(hosts, expected):
    """Check that all towers of all hosts have the same bits, near those of another job."""
    rows = [row for host in hosts for row in host["towers"]]
    for row in rows:
        for value, first, exact in zip(row, rows[0], expected["towers"][0]):
            np.testing.assert_array_equal(value, first)
            np.testing.assert_allclose(value, exact, atol=1e-5)


@pytest.fixture(scope="module", params=[2, 3])
def summed(request):
    """``(hosts, [facts of each host])`` for all kinds of gradients."""
    with job("sums", request.param) as hosts:
        return request.param, [host.facts() for host in hosts]


def test_every_tower_of_every_host_gets_the_sum_or_mean_over_all(summed):
    """Packed or not. There are all dtypes, scalars, and tensors without elements.

    A sparse gradient becomes dense, and None stays None.
    """
    hosts, results = summed
    rows = [cluster_child.tower_row(tower) for tower in range(2 * hosts)]
    sums = [sum(column) for column in zip(*rows)]
    sparse = np.zeros(4)
    for task in range(hosts):
        sparse[task] = rows[2 * task][1][0] + rows[2 * task + 1][1][0]
    means = [total / (2 * hosts) for total in sums[:8]]
    for host in results:
        for kind, expected in (
            ("sum", [*sums, sparse]),
            ("alone", [*sums, sparse]),
            ("again", [*sums, sparse]),
        ):
            for row in host["results"][kind]:
                assert len(row) == len(expected)
                for value, exact in zip(row, expected):
                    np.testing.assert_array_equal(value, exact)
        for row in host["results"]["mean"]:
            assert [value.tobytes() for value in row] == [
                value.tobytes() for value in results[0]["results"]["mean"][0]
            ]
            for value, exact, dtype in zip(row, means, cluster_child.DTYPES):
                np.testing.assert_allclose(
                    value, exact, rtol=0.02 if dtype.endswith("16") else 1e-6
                )


def test_each_chunk_crosses_once_from_its_root(summed):
    """The number of towers does not matter. A chunk without elements does not cross."""
    for task, host in enumerate(summed[1]):
        names = [name for name, _ in host["crossed"]]
        assert len(names) == len(set(names))
        alone = [device for name, device in host["crossed"] if name.startswith("hier_allreduce_1/")]
        assert len(alone) == 10  # eleven gradients, one of them empty
        assert len(set(alone)) == 2 and all(f"/task:{task}/" in device for device in alone)
        assert host["audit"].count("planned = executed") == 3


@pytest.fixture(scope="module")
def alone():
    """One host of four towers, six steps."""
    with job("train", 1, devices=4) as (host,):
        return host.facts()


@pytest.mark.parametrize(
    "options",
    [{}, {"update": "sharded"}, {"algorithm": "tree"}],
    ids=["flat", "sharded", "tree"],
)
def test_two_hosts_of_two_towers_train_to_the_weights_of_one_host_of_four(alone, options):
    with job("train", 2, **options) as hosts:
        results = [host.facts() for host in hosts]
    check_near(results, alone)
    np.testing.assert_allclose(
        np.mean([host["losses"] for host in results], 0), alone["losses"], rtol=1e-4
    )


def test_hosts_that_restored_one_checkpoint_pass(alone, tmp_path):
    """The chief saves after the third step. A second job restores, and broadcasts nothing."""
    folder = str(tmp_path / "model")
    with job("train", 2, steps=3, save_at=2, folder=folder) as hosts:
        assert all(host.facts() for host in hosts)
    with job("train", 2, first=3, restore=folder, broadcast=False) as hosts:
        check_near([host.facts() for host in hosts], alone)


def test_fingerprints_tell_the_bits_of_elements_and_their_order(graph):
    values = [[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, -3.0]]
    values += [[0.0, 0.0, 0.0], [-0.0, 0.0, 0.0], [0.0, 0.0, -0.0], [1e-45, 0.0, 0.0]]
    for number, value in enumerate([*values, values[0]]):
        tf1.get_variable(f"v{number}", initializer=floats(value), use_resource=True)
    tf1.get_variable("more", initializer=2**53, dtype=tf.int64, use_resource=True)
    tf1.get_variable("most", initializer=2**53 + 1, dtype=tf.int64, use_resource=True)
    found = fingerprints(graph)
    with session() as sess:
        sess.run(tf1.global_variables_initializer())
        *sums, again, more, most = sess.run(list(found.values()))
    assert len(set(sums)) == len(values)
    assert again == sums[0] and more != most


def test_a_variable_made_after_the_first_session_gets_a_fingerprint_too(graph):
    tf1.get_variable("w", [2])
    assert list(fingerprints(graph)) == ["w"]
    tf1.get_variable("late", [3])
    found = fingerprints(graph)
    assert list(found) == ["w", "late"]
    graph.finalize()
    assert fingerprints(graph) == found


def test_a_finalized_graph_that_cannot_be_compared_is_an_error_before_hosts_are_asked(graph):
    cluster = Cluster(free_addresses(2), 0, start_timeout=0.1)
    tf1.get_variable("w", [2])
    fingerprints(graph)
    tf1.get_variable("late", [2])
    allreduce_grads([[tf.zeros([3])]] * 2, gpus_or_cpus(2), cluster=cluster)
    graph.finalize()
    with pytest.raises(RuntimeError, match="Graph is finalized"):
        cluster.session(graph)


def test_a_session_before_the_first_all_reduce_compares_weights_too(graph):
    cluster = Cluster(free_addresses(2), 0, start_timeout=0.1)
    tf1.get_variable("w", [2])
    with pytest.raises(ClusterError):  # the other host is not there
        cluster.session(graph)
    assert list(memory_of(graph).compared) == ["w"]


@pytest.mark.parametrize("name", ["timeout", "start_timeout", "stall_timeout"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_no_host_can_keep_a_timeout_of_nothing_or_for_ever(name, seconds):
    with pytest.raises(ClusterError, match=f"a timeout of {seconds} s: expected more than 0"):
        Cluster(free_addresses(2), 0, **{name: seconds})


def test_what_hosts_compare_is_not_exported_and_keeps_no_graph():
    with tf.Graph().as_default() as graph:
        tf1.get_variable("w", [2])
        allreduce_grads([[tf.zeros([3])]] * 2, gpus_or_cpus(2), cluster=two())
        assert memory_of(graph).shared_lines and fingerprints(graph)
        collections = tf1.train.export_meta_graph(graph=graph).collection_def
        assert not [key for key in collections if key.startswith("hier_allreduce")]
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


def test_one_host_has_no_server_and_no_collective(graph):
    cluster = Cluster(["127.0.0.1:1"], 0)  # no server could listen on port 1
    rows = allreduce_grads(
        [[tf.constant(1.0)], [tf.constant(2.0)]], gpus_or_cpus(2), cluster=cluster
    )
    assert not collectives_of(graph.get_operations())
    cluster.broadcast([])
    with cluster.session(config=config()) as alone:
        assert type(alone) is tf1.Session
        assert alone.run(rows) == [[3.0], [3.0]]
        with pytest.raises(
            ClusterError,
            match=r"a Session does not know the other hosts: open cluster\.session\(\)",
        ):
            two().check_session(alone)


@pytest.mark.tf2
def test_several_hosts_need_a_graph_for_a_session():
    def reduced():
        return allreduce_grads([[tf.constant(1.0)]] * 2, gpus_or_cpus(2), cluster=two())

    for build in (
        reduced,
        lambda: two().broadcast([tf.Variable(1.0)]),
        tf.function(reduced, autograph=False),
    ):
        with pytest.raises(ClusterError, match="a graph and a session"):
            build()
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32, [])
        with pytest.raises(
            ClusterError, match=r"tf\.compat\.v1\.disable_control_flow_v2\(\) before"
        ):
            tf.cond(x > 0, lambda: reduced()[0][0], lambda: x)


def test_bad_gradients_and_variables_leave_the_graph_unchanged(graph):
    good = tf1.get_variable("good", [2])
    words = tf1.get_variable("words", [], tf.string)
    anything = tf1.placeholder(tf.float32)
    unknown = tf1.get_variable("unknown", initializer=anything, validate_shape=False)
    numbers = tf.constant(1.0)
    complexes = tf.zeros([2], tf.complex64)
    before = graph.get_operations()
    cluster = two()
    for build, message in (
        (
            lambda: allreduce_grads([[numbers, complexes]] * 2, gpus_or_cpus(2), cluster=cluster),
            "gradient 1: .*: complex64 cannot cross between hosts; cast it",
        ),
        (
            lambda: allreduce_grads([[numbers, anything]] * 2, gpus_or_cpus(2), cluster=cluster),
            "gradient 1: .*: no known shape; leave it out, or give it one by set_shape()",
        ),
        (
            lambda: cluster.broadcast([good, words]),
            "variable words: string cannot cross between hosts; .* leave it out",
        ),
        (
            lambda: cluster.broadcast([good, unknown]),
            "variable unknown: no known shape; leave it out",
        ),
    ):
        with pytest.raises(HierAllreduceError, match=message):
            build()
        assert graph.get_operations() == before
        assert not memory_of(graph).shared_lines


def test_a_broadcast_may_get_an_iterator(graph):
    two().broadcast(iter([tf1.get_variable("w", [2])]))
    assert len(collectives_of(graph.get_operations())) == 1


def test_the_result_has_no_gradient_and_tensorflow_says_so(graph):
    x = tf1.placeholder(tf.float32, [2])
    rows = allreduce_grads([[x]] * 2, gpus_or_cpus(2), cluster=two())
    with pytest.raises(LookupError, match=r"[Nn]o gradient .*hier_allreduce/Placeholder/across/"):
        tf1.gradients(rows[1][0], [x])


@pytest.mark.parametrize("is_soft", [False, True])
def test_a_plain_session_ends_with_an_error_instead_of_waiting(graph, is_soft):
    rows = allreduce_grads(
        [[tf1.placeholder_with_default(1.0, [])]] * 2, gpus_or_cpus(2), cluster=two()
    )
    words = r"Cannot assign a device for operation .*/job:worker/replica:0/task:0"
    with session(allow_soft_placement=is_soft) as plain, pytest.raises(
        tf.errors.InvalidArgumentError, match=words
    ):
        plain.run(rows)
