"""Several hosts: results, what each host sends, which hosts may take part, and all kinds of failure.

Hosts are real processes with real servers on loopback; see helpers/clusters.py and helpers/cluster_child.py.
"""

import contextlib
import re
import signal
import socket
import warnings

import numpy as np
import pytest
import tensorflow as tf
from helpers import cluster_child
from helpers.clusters import SECONDS, TIMEOUT, job
from helpers.graphs import IS_TF2, cpus
from helpers.ports import free_addresses

from hier_allreduce import Cluster, ClusterError, HierAllreduceError, Strategy, TowerOptimizer, allreduce_grads
from hier_allreduce.cluster.rendezvous import differences
from hier_allreduce.planning.algorithms import flat

tf1 = tf.compat.v1


def facts(hosts):
    return [host.facts() for host in hosts]


# ---- sums ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(k, marks=pytest.mark.xdist_group(f"{k} hosts")) for k in (2, 3)])
def summed(request):
    """``(hosts, [facts of each host])`` for all kinds of gradients."""
    with job("sums", request.param) as hosts:
        return request.param, facts(hosts)


def expected(hosts, average=False):
    rows = [row for task in range(hosts) for row in cluster_child.host_rows(task, 2)]
    dense = [sum(np.asarray(row[n], np.float64) for row in rows) for n in range(9)]
    sparse = np.zeros(4)
    for task in range(hosts):
        sparse[task] += sum(row[3][0] + task for row in cluster_child.host_rows(task, 2))
    values = [*dense, sparse, dense[1]]
    return [value / (2 * hosts) for value in values] if average else values


@pytest.mark.parametrize("built", ["default", "alone"])
def test_every_tower_of_every_host_gets_the_sum_over_all(summed, built):
    """Buckets or not; every dtype, scalars, no elements; a sparse gradient becomes dense; None stays None."""
    hosts, results = summed
    for host in results:
        assert host["none"] == [True, True]
        for row in host["results"][built]:
            assert len(row) == 11
            for value, exact in zip(row, expected(hosts)):
                np.testing.assert_array_equal(value, exact)


def test_the_mean_is_over_all_towers_of_all_hosts(summed):
    hosts, results = summed
    for host in results:
        for row in host["results"]["mean"]:
            for value, exact in zip(row, expected(hosts, average=True)):
                np.testing.assert_allclose(value, exact, atol=0.01 if value.dtype == np.float16 else 1e-6)


def test_half_precision_on_the_wire_stays_near_the_mean(summed):
    hosts, results = summed
    for host in results:
        for row in host["results"]["wire"]:
            for value, exact in zip(row, expected(hosts, average=True)):
                np.testing.assert_allclose(value, exact, atol=8 * (hosts + 2) / 2048)


def test_all_hosts_hold_the_same_bits(summed):
    _, results = summed
    rows = [[value.tobytes() for value in row] for host in results for row in host["results"]["mean"]]
    assert all(row == rows[0] for row in rows)


def test_hosts_send_each_chunk_across_once_from_its_main(summed):
    """One collective for each chunk, on its main only, whatever the number of towers."""
    _, results = summed
    for task, host in enumerate(results):
        chunks = [name for name, _ in host["collectives"]]
        assert len(chunks) == len(set(chunks))
        alone = [device for name, device in host["collectives"] if name.startswith("hier_allreduce_1/")]
        assert len(alone) == 10  # eleven gradients, one of them empty
        assert {device.rpartition("/")[2] for device in alone} == {"device:CPU:0", "device:CPU:1"}
        assert all(f"task:{task}" in device for device in alone)


def test_the_audit_counts_what_crosses_to_the_other_hosts(summed):
    """The last all-reduce has five chunks, one of them without elements."""
    hosts, results = summed
    size = 4 * (4 * 3 + 7 + 1 + 1 + 300 * 70 + 6) + 8 * 2 * 2 + (2 if IS_TF2 else 4) * 5  # the last: float16
    for host in results:
        good, never, twice = host["audits"]
        line = next(line for line in good.splitlines() if line.startswith("hier_allreduce_3/: "))
        assert f"5 chunks, 10 copies, 4 collectives over {hosts} hosts ({size / 1000:.4g} kB), planned" in line
        assert re.search(r"chunk 0 \('\S+'\): missing [01]→other hosts\nfetch the results", never)
        assert re.search(r"chunk 0 \('\S+'\): not planned [01]→other hosts$", twice)


def test_float16_crosses_as_float32_without_a_kernel(summed):
    _, results = summed
    for host in results:
        assert ("float16" in host["dtypes"]) == IS_TF2


@pytest.mark.parametrize(("declared", "last"), [([None, None], [3, 2]), (None, [6])], ids=["shape", "rank"])
def test_a_shape_that_differs_between_hosts_is_an_error_on_all(declared, last):
    """It has the same number of elements, so that a ring would add up what does not belong together."""
    with job("shapes", 2, declared=declared, fed=[[2, 3]] * 2, each={1: {"fed": [[2, 3], last]}}) as hosts:
        for host in hosts:
            host.until([[4.0] * 3] * 2)
        errors = [host.error() for host in hosts]
    for text in errors:
        assert "w0: the shape of its gradient differs between the hosts; on this host it is] [" in text


def test_shapes_that_are_known_cost_nothing(graph):
    for shape in ([2], [None]):
        allreduce_grads([[tf1.placeholder(tf.float32, shape)]] * 2, cpus(2), cluster=two())
    names = [op.name for op in graph.get_operations() if op.type.startswith("CollectiveReduce")]
    assert [name.rpartition("/")[0] for name in names] == [
        "",  # where the hosts meet
        "hier_allreduce/Placeholder/across",
        "hier_allreduce_1/shapes_across",
        "hier_allreduce_1/Placeholder_1/across",
    ]


# ---- training ----------------------------------------------------------------------------------------


compared = pytest.mark.xdist_group("undisturbed")  # one worker runs them, so that the fixture runs once


@pytest.fixture(scope="module")
def undisturbed():
    """Two hosts, six steps."""
    with job("train", 2) as hosts:
        return facts(hosts)


def test_many_steps_leave_the_same_bits_on_all_hosts():
    with job("train", 2, devices=4, steps=200) as hosts:
        results = facts(hosts)
    rows = [row for host in results for row in host["bits"]]
    assert len(rows) == 8
    assert all(row == rows[0] for row in rows)
    assert np.isfinite(results[0]["losses"]).all()


@pytest.mark.parametrize("hosts", [1, 3])
def test_hosts_train_as_one_with_all_their_examples(hosts):
    """Compared with momentum and the gradient of softmax, computed by hand."""
    with job("train", hosts) as started:
        results = facts(started)
    with job("train", 1, steps=0) as (host,):
        values = list(host.facts()["towers"][0])
    slots = [np.zeros_like(v) for v in values]
    losses = []
    for step in range(6):
        x, y = cluster_child.data(step, hosts, 2)
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1)
        a, b, c = values
        hidden = x @ a
        exps = np.exp(hidden @ b + c - (hidden @ b + c).max(1, keepdims=True))
        probs = exps / exps.sum(1, keepdims=True)
        losses.append(-np.log(probs[np.arange(len(y)), y]).mean())
        error = (probs - np.eye(probs.shape[1])[y]) / len(y)
        grads = [x.T @ (error @ b.T), hidden.T @ error, error.sum(0)]
        slots = [0.9 * slot + grad for slot, grad in zip(slots, grads)]
        values = [value - cluster_child.RATE * slot for value, slot in zip(values, slots)]
    np.testing.assert_allclose(np.mean([host["losses"] for host in results], 0), losses, rtol=1e-4)
    for host in results:
        for row in host["towers"]:
            for value, exact in zip(row, values):
                np.testing.assert_allclose(value, exact, atol=1e-4)


@compared
@pytest.mark.parametrize("update", ["replicated", "main"])
def test_the_tower_optimizer_trains_several_hosts_too(undisturbed, update):
    with job("train", 2, update=update) as hosts:
        for host, before in zip(facts(hosts), undisturbed):
            np.testing.assert_allclose(host["losses"], before["losses"], rtol=1e-5)
            for value, exact in zip(host["towers"][1], before["towers"][1]):
                np.testing.assert_allclose(value, exact, atol=1e-5)


@compared
@pytest.mark.parametrize("engine", ["auto", "nccl"])
def test_every_engine_gives_the_same_bits(undisturbed, engine):
    """On CPU devices TensorFlow takes its ring for NCCL; the edges between NCCL's calls are there."""
    each = {task: {"cluster": {"communication": engine}} for task in (0, 1)}
    with job("train", 2, each=each, pack_below=0) as hosts:
        assert [host["bits"] for host in facts(hosts)] == [host["bits"] for host in undisturbed]


def test_a_step_with_two_all_reduces_over_nccl_is_refused():
    with job("sums", 2, each={task: {"cluster": {"communication": "nccl"}} for task in (0, 1)}) as hosts:
        errors = [host.error() for host in hosts]
    for text in errors:
        assert "would cross between the hosts in one step over NCCL, in an order that could differ" in text


@compared
def test_a_restart_goes_on_with_the_same_loss(tmp_path, undisturbed):
    """The chief saves after the third step; then a host dies. The new job restores on the chief only."""
    checkpoint = str(tmp_path / "model")
    dies = {"die_at": 3, "who": 1, "signal": signal.SIGKILL}
    with job("train", 2, timeout=TIMEOUT, checkpoint=checkpoint, save_at=2, **dies) as hosts:
        hosts[0].error()
        assert hosts[1].end() == ("died", -signal.SIGKILL)
    with job("train", 2, checkpoint=checkpoint, first=3) as hosts:
        again = facts(hosts)
    for host, before in zip(again, undisturbed):
        assert host["losses"] == before["losses"][3:]
        assert host["bits"] == before["bits"]


def test_hosts_that_accumulate_may_be_a_step_ahead_of_others():
    """Nothing crosses in the leader's first step, so that nothing makes it wait for the other host."""
    with job("accumulate", 2, each={1: {"waits": True}}) as hosts:
        hosts[0].until(0)
        hosts[1].go_on()
        mean = 2 * (0 + 1 + 4 + 5) / 4
        assert facts(hosts) == [[[step // 2 * mean] * 2 for step in range(1, 7)]] * 2


def test_a_step_during_another_threads_step_is_refused():
    with job("threads", 2) as hosts:
        hosts[0].until("the second step")
        hosts[1].go_on()
        (result, (error,)), (same, none) = facts(hosts)
    assert (result, same, none) == (4, 4, [])
    assert error.startswith("ClusterError: another thread is in a step with the other hosts")


# ---- after the end ----------------------------------------------------------------------------


def test_a_closed_session_leaves_no_session_and_no_thread():
    with job("leave", 3) as hosts:
        assert facts(hosts) == [{"opened": 3, "open": 0, "threads": 0}] * 3


# ---- failures while running --------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.xdist_group("killed host")),
        pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.xdist_group("frozen host")),
    ],
)
def survivors(request):
    """The signal that ended a host, and ``{that host: [errors of the others]}`` of two concurrent jobs."""
    with contextlib.ExitStack() as running:
        options = {"timeout": TIMEOUT, "die_at": 2, "signal": request.param}
        jobs = {who: running.enter_context(job("train", 3, who=who, **options)) for who in (0, 1)}
        for who, hosts in jobs.items():
            hosts[who].until(2)
        said = {who: [host.error() for host in hosts if host is not hosts[who]] for who, hosts in jobs.items()}
        return request.param, said


@pytest.mark.parametrize("who", [1, 0], ids=["a peer", "the leader"])
def test_every_survivor_names_the_host_that_died_or_froze(survivors, who):
    how, said = survivors
    words = "is not listening" if how == signal.SIGKILL else "does not answer"
    for text in said[who]:
        assert text.startswith(f"ClusterError: host {who} (127.0.0.1:")
        assert words in text
        assert text.count("host ") == 1  # no survivor takes another one for the cause
        assert "Start all hosts again" in text


def test_a_late_survivor_names_the_host_that_died():
    dies = {"die_at": 2, "who": 0, "signal": signal.SIGKILL}
    with job("train", 3, timeout=6.0, patient=True, **dies, each={2: {"wait_at": 2}}) as hosts:
        errors = [hosts[1].error()]
        hosts[1].process.join(SECONDS)
        hosts[2].go_on()
        errors.append(hosts[2].error())
    for text in errors:
        assert text.startswith("ClusterError: host 0 (127.0.0.1:") and text.count("host ") == 1, text


def test_a_survivor_that_detects_nothing_names_whom_another_survivor_names():
    dies = {"die_at": 2, "who": 0, "signal": signal.SIGKILL}
    with job("train", 3, timeout=12.0, patient=True, **dies, each={2: {"wait_at": 2, "blind": True}}) as hosts:
        first = hosts[1].error()
        hosts[2].go_on()
        assert hosts[2].error() == first
    assert first.startswith("ClusterError: host 0 (127.0.0.1:")


def test_an_exception_on_one_host_is_named_by_the_others():
    """A host that leaves its session by an exception does not wait for the others."""
    with job("train", 2, timeout=TIMEOUT, each={1: {"raise_at": 2}}) as hosts:
        assert hosts[1].end() == ("error", "HierAllreduceError: the program's own mistake")
        text = hosts[0].error()
    assert text.startswith("ClusterError: host 1 (127.0.0.1:")


@pytest.mark.parametrize("who", [0, 1], ids=["the leader", "a peer"])
def test_a_failed_ops_host_is_named_by_the_others(who):
    """On the others, TensorFlow raises the same error as if it were theirs, or an internal one."""
    with job("train", 3, busy=True, each={who: {"bad_at": 2}}) as hosts:
        errors = [host.error() for host in hosts]
    text = errors.pop(who)
    assert text.startswith("InvalidArgumentError: ") and "label" in text
    for text in errors:
        assert text.startswith(f"ClusterError: host {who} (127.0.0.1:")
        assert ") ended its step with InvalidArgumentError: " in text
        assert "label" in text


def test_a_host_with_fewer_steps_is_named_when_it_leaves():
    with job("train", 2, timeout=6.0, patient=True, each={1: {"steps": 4}}) as hosts:
        text = hosts[0].error()
        assert len(hosts[1].facts()["losses"]) == 4
    assert text.startswith("ClusterError: host 1 (127.0.0.1:")
    assert "has left its session after run 5 with the other hosts (broadcasts count too), and this host is" in text
    assert "in run 6: all hosts must run the same number of steps" in text


@compared
def test_a_chief_may_save_for_longer_than_the_timeout(undisturbed):
    """It stays in Python until the other host has probed it for longer than the timeout."""
    with job("train", 2, timeout=2.0, patient=True, each={0: {"wait_at": 1}}) as hosts:
        hosts[1].until(1)
        for _ in range(7):  # six within the timeout
            hosts[1].until("a probe")
        hosts[0].go_on()
        assert [host["bits"] for host in facts(hosts)] == [host["bits"] for host in undisturbed]


def test_a_live_host_that_stays_away_ends_in_a_stall_timeout():
    impatient = {"cluster": {"stall_timeout": 3.0}}
    with job("train", 2, timeout=2.0, patient=True, each={0: {"wait_at": 1}, 1: impatient}) as hosts:
        text = hosts[1].error()
        hosts[0].go_on()
        hosts[0].error()
    assert "waited 3 s for hosts [0], which all answer" in text


def test_the_end_of_data_is_no_slow_hosts_last_step():
    """The chief has not run its last step, so the other must not begin an epoch. Local ops still run."""
    with job("epochs", 2, sessions=False, each={0: {"waits": True}}) as hosts:
        hosts[1].until("the second epoch")
        hosts[0].go_on()
        errors = [host.error() for host in hosts]
    for text in errors:
        assert text.startswith("ClusterError: this host's last step with the other hosts ended with the end of")
        assert "(OutOfRangeError: End of sequence" in text
        assert "open a session for each epoch" in text


def test_a_session_for_each_epoch_has_all_steps_of_all_epochs():
    with job("epochs", 2, sessions=True) as hosts:
        assert facts(hosts) == [[[0.0, 4.0, 8.0]] * 3] * 2


# ---- failures at the start -----------------------------------------------------------------------------


@compared
def test_the_leader_may_be_late(undisturbed):
    with job("train", 2, each={0: {"late": True}}) as hosts:
        for host in hosts:
            host.until("built")
        assert not hosts[1]._line.poll(1)
        hosts[0].go_on()
        assert [host["bits"] for host in facts(hosts)] == [host["bits"] for host in undisturbed]


@pytest.mark.parametrize("missing", [0, 1], ids=["the leader", "a peer"])
def test_a_host_that_never_comes_is_named(missing):
    impatient = {"cluster": {"start_timeout": 0.001}}
    with job("train", 2, busy=True, each={0: impatient, 1: impatient, missing: {"late": True}}) as hosts:
        text = hosts[1 - missing].error()
    assert f"after 0.001 s not all hosts are there: host {missing} (127.0.0.1:" in text
    assert "is not listening" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 7}, ["gradients, ", "a: float32 [5, 7] there, float32 [5, 5] here"]),
        ({"name": "bias"}, ["c: only here (float32 [3])", "bias: only there (float32 [3])"]),
        ({"pack_below": 4096}, ["strategy, pack_below: 4096 there, 65536 here"]),
        ({"cluster": {"communication": "nccl"}}, ["(hier_allreduce), communication: nccl there, ring here"]),
    ],
    ids=["shape", "variables", "strategy", "engine"],
)
def test_hosts_that_build_something_else_are_refused(options, words):
    with job("train", 3, each={1: options}) as hosts:
        errors = [host.error() for host in hosts]
    for task, text in enumerate(errors):
        assert f"differs from this host ({task})" in text
    for word in words:
        for task in (0, 2):
            assert errors[task].startswith("ClusterError: host 1 (127.0.0.1:")
            assert word in errors[task]


def test_a_late_host_receives_the_difference_too():
    """The others wait for it before they raise: it could not reach them any more."""
    with job("train", 3, each={1: {"width": 7}, 2: {"late": True}}) as hosts:
        for host in hosts:
            host.until("built")
        assert not hosts[0]._line.poll(1)
        hosts[2].go_on()
        errors = [host.error() for host in hosts]
    assert "host 1 " in errors[2]
    assert "differs from this host (2)" in errors[2]


def test_hosts_with_different_numbers_of_devices_are_refused():
    with job("train", 2, each={1: {"cluster": {"devices_per_host": 3}}}) as hosts:
        for text in [host.error() for host in hosts]:
            assert "devices_per_host: " in text


def test_another_list_of_hosts_is_refused():
    a, b, c = free_addresses(3)
    for hosts_of_1, task, words in (
        ([a, b, c], 1, f"hosts, 2: only there ({c})"),
        ([b, a], 0, f"0: {b} there, {a} here"),
    ):
        other = {"cluster": {"hosts": hosts_of_1, "task": task}}
        with job("train", 2, each={1: other}, addresses=[a, b]) as hosts:
            errors = [host.error() for host in hosts]
        assert words in errors[0]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_address_is_named_by_both_sides(wrong):
    """One host waits at an unused address, and learns of it from the other, which knows both lists."""
    a, b, nobody = free_addresses(3)
    own_list = [a, nobody] if wrong == 0 else [nobody, b]
    with job("train", 2, busy=True, each={wrong: {"cluster": {"hosts": own_list}}}, addresses=[a, b]) as hosts:
        errors = [host.error() for host in hosts]
    other = 1 - wrong
    assert f"hosts, {other}: {nobody} there, {[a, b][other]} here" in errors[other]
    assert f"hosts, {other}: {[a, b][other]} there, {nobody} here" in errors[wrong]


def test_hosts_at_unused_addresses_end_after_start_timeout():
    a, b, c, d = free_addresses(4)
    each = {task: {"cluster": {"hosts": own, "start_timeout": 0.001}} for task, own in enumerate([[a, c], [d, b]])}
    with job("train", 2, each=each) as hosts:
        first, second = (host.error() for host in hosts)
    assert f"host 1 ({c}) is not listening" in first
    assert f"host 0 ({d}) is not listening" in second


def test_two_hosts_with_the_same_index_are_refused():
    a, b = free_addresses(2)
    with job("train", 2, each={1: {"cluster": {"hosts": [b, a], "task": 0}}}, addresses=[a, b]) as hosts:
        text = hosts[0].error()
    assert f"host 1 ({b}) differs from this host (0): it was started as host 0" in text


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with job("train", 2, addresses=[f"127.0.0.1:{port}", *free_addresses(1)]) as hosts:
            text = hosts[0].error()
    assert f"cannot listen on port {port} of this host (127.0.0.1:{port}): Address already in use" in text


# ---- one host, and errors that need no host ----------------------------------------------------------


def test_one_host_has_no_server_and_no_collective(graph):
    cluster = Cluster(["127.0.0.1:1"], 0, 2)  # no server could listen on port 1
    with_it = allreduce_grads([[tf.constant(1.0)], [tf.constant(2.0)]], ["/cpu:0", "/cpu:1"], cluster=cluster)
    names = [op.type for op in graph.get_operations()]
    with tf.Graph().as_default() as plain:
        allreduce_grads([[tf.constant(1.0)], [tf.constant(2.0)]], ["/cpu:0", "/cpu:1"])
        assert names == [op.type for op in plain.get_operations()]
    cluster.broadcast([])
    with cluster.session() as session:
        assert type(session) is tf1.Session
        assert session.run(with_it) == [(3.0,), (3.0,)]


def test_several_hosts_accept_only_the_clusters_own_session():
    with tf.Graph().as_default(), tf1.Session() as plain:
        Cluster(["127.0.0.1:2222"], 0, 2).check_session(plain)
        with pytest.raises(ClusterError, match=r"a Session knows nothing of the other hosts, .* cluster\.session\(\)"):
            two().check_session(plain)
        optimizer = TowerOptimizer(tf1.train.GradientDescentOptimizer(1.0), ["/cpu:0", "/cpu:1"], cluster=two())
        with pytest.raises(ClusterError, match="a Session knows nothing of the other hosts"):
            optimizer.hook().after_create_session(plain, None)


def two():
    return Cluster(["127.0.0.1:2222", "127.0.0.1:2223"], 0, 2)


@pytest.mark.skipif(not IS_TF2, reason="TensorFlow 1 is not eager")
def test_several_hosts_need_a_graph():
    variable = tf.Variable(1.0)
    for build in (
        lambda: allreduce_grads([[tf.constant(1.0)]] * 2, ["/cpu:0", "/cpu:1"], cluster=two()),
        lambda: two().broadcast([variable]),
    ):
        with pytest.raises(ClusterError, match="a graph and a session"):
            build()
        with pytest.raises(ClusterError, match="a graph and a session"):
            tf.function(build, autograph=False)()


@pytest.mark.tf2
def test_control_flow_that_works_is_named_where_it_does_not(graph):
    def reduced(x):
        return allreduce_grads([[x]] * 2, cpus(2), cluster=two())[0][0]

    x = tf1.placeholder(tf.float32, [])
    for build in (
        lambda: tf.cond(x > 0, lambda: reduced(x), lambda: x),
        lambda: tf.while_loop(lambda y: y < 8, lambda y: [reduced(y)], [x]),
    ):
        with pytest.raises(ClusterError, match=r"tf\.compat\.v1\.disable_control_flow_v2\(\) before"):
            build()


@pytest.mark.parametrize("broadcasts", [False, True])
def test_hosts_that_train_and_start_apart_are_warned(graph, broadcasts):
    with socket.socket() as taken:  # so that no session is opened, and no host waited for
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = Cluster([f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:1"], 0, 2)
        variable = tf1.get_variable("w", [2])
        allreduce_grads([[variable + 1.0]] * 2, cpus(2), cluster=cluster)
        if broadcasts:
            cluster.broadcast([variable])
        with warnings.catch_warnings(record=True) as seen, pytest.raises(ClusterError, match="cannot listen on port"):
            warnings.simplefilter("always")
            cluster.session()
    told = [str(each.message) for each in seen if "cluster.broadcast" in str(each.message)]
    assert [text[:44] for text in told] == ["no cluster.broadcast was built in this graph"] * (not broadcasts)


def collectives(hosts):
    """Return the number of collectives that a planned strategy builds over so many hosts."""
    devices = [f"/cpu:{k}" for k in range(8)]
    cluster = Cluster([f"127.0.0.1:{port}" for port in range(1, hosts + 1)], 0, 8)
    with tf.Graph().as_default() as graph:
        rows = [[tf.zeros([4 << 20]), tf.zeros([100, 100])] for _ in devices]
        allreduce_grads(rows, devices, strategy=Strategy(topology="dgx-1v"), cluster=cluster)
        return sum(op.type.startswith("CollectiveReduce") for op in graph.get_operations())


def test_more_hosts_share_fewer_collectives():
    assert collectives(2) > collectives(100) == 1 + 1  # and the one in which a session's hosts first meet


def facts_of(places, **how):
    """Return what a host compares with the others, for an all-reduce on these devices; by default a planned one."""
    cluster = Cluster(["127.0.0.1:1", "127.0.0.1:2"], 0, 4)
    with tf.Graph().as_default() as graph:
        devices = [f"/gpu:{k}" for k in places]
        allreduce_grads(
            [[tf.zeros([1 << 20])]] * 4, devices, strategy=Strategy(**how or {"topology": "dgx-1v"}), cluster=cluster
        )
        return cluster._manifest.entries(graph)["all-reduce 0 (hier_allreduce)"]


def test_hosts_compare_their_plans():
    """Other devices of the same machine have other links, so plans and their collectives would not match."""
    here, there = facts_of([0, 1, 2, 3]), facts_of([0, 1, 6, 7])
    assert here == facts_of([0, 1, 2, 3])
    assert [key for key in here if here[key] != there[key]] == ["plan"]


def test_hosts_compare_the_names_and_steps_of_functions():
    def algorithm(root):  # each host has a function of its own
        def mine(devices, chunk):
            return [step._replace(chunk=chunk) for step in flat(devices, root)]

        return mine

    here, same, there = (facts_of(range(4), algorithm=algorithm(root)) for root in (0, 0, 1))
    assert here == same and here["strategy"]["algorithm"] == "mine"
    assert [key for key in here if here[key] != there[key]] == ["plan"]


def built(program):
    """Return what a host compares after it has built a program.

    The program is a text: a number is an all-reduce of that many gradients, letters are a broadcast of these variables,
    and | begins another graph.
    """
    cluster = two()
    for graph in program.split("|"):
        with tf.Graph().as_default() as current:
            made = {name: tf1.get_variable(name, [2]) for name in "abc"}
            for step in graph.split():
                if step.isdigit():
                    row = [tf.zeros([2])] * int(step)
                    allreduce_grads([row] * 2, cpus(2), strategy=Strategy(pack_below=0), cluster=cluster)
                else:
                    cluster.broadcast([made[name] for name in step])
    return cluster._facts(current)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        ("a c", "ab c", "broadcast 0, variables, b: only there (float32 [2])"),
        ("ab c", "ab", "broadcast 1: only here"),
        ("1 a", "a 1", "all-reduce 0 (hier_allreduce), collectives before: 1 there, 0 here"),
        ("1 1", "1 | 1 1", "all-reduce 0 (hier_allreduce), collectives before: 1 there, 0 here"),
    ],
    ids=["another list", "another number", "another order", "another graph"],
)
def test_hosts_compare_all_that_they_have_built(here, there, words):
    """Collectives meet by number: if one host has built more before, the others would wait for ever."""
    assert not list(differences(built(here), built(here)))
    assert words in list(differences(built(here), built(there)))


def test_other_than_devices_per_host_towers_are_refused(graph):
    with pytest.raises(ClusterError, match=r"for 3 devices, and .* has 2|devices_per_host=2\) has 2"):
        allreduce_grads([[tf.constant(1.0)]] * 3, ["/cpu:0"] * 3, cluster=two())


def left_as_it_was(graph, cluster, build):
    """Return the error of ``build``, which must leave graph and cluster unchanged."""
    before = graph.get_operations(), cluster._facts(graph)
    with pytest.raises(HierAllreduceError) as refused:
        build()
    assert (graph.get_operations(), cluster._facts(graph)) == before
    return f"{refused.typename}: {refused.value}"


def test_the_result_has_no_gradient_and_the_error_says_so(graph):
    x = tf1.placeholder(tf.float32, [2])
    rows = allreduce_grads([[x]] * 2, cpus(2), cluster=two())
    with pytest.raises(ClusterError, match=r"'hier_allreduce/Placeholder/across/\w+': .* has no gradient\. Take"):
        tf1.gradients(rows[1][0], [x])
    assert tf1.gradients(tf.stop_gradient(rows[1][0]) * x, [x]) != [None]


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_a_dtype_that_no_collective_adds_is_refused_at_once(graph, dtype):
    cluster, row = two(), [tf.constant(1.0), tf.zeros([2], dtype)]
    text = left_as_it_was(graph, cluster, lambda: allreduce_grads([row] * 2, cpus(2), cluster=cluster))
    assert text.startswith(f"HierAllreduceError: variable 1 ('zeros'): {dtype} cannot be added up across hosts")


def test_what_cannot_be_broadcast_is_refused_before_the_first_op(graph):
    cluster, good = two(), tf1.get_variable("good", [2])
    start = tf1.placeholder(tf.float32, None)
    with tf.Graph().as_default():
        foreign = tf1.get_variable("foreign", [2])
    for bad, words in (
        (tf1.get_variable("words", [], tf.string), "variable 'words' is string []: only numbers"),
        (tf1.get_variable("shapeless", initializer=start, validate_shape=False), "is float32 ?: only numbers"),
        (foreign, "is not a variable of the graph being built"),
        (tf.constant(1.0), "is not a variable of the graph"),
        ("good", "'good' is not a variable of the graph"),
    ):
        text = left_as_it_was(graph, cluster, lambda bad=bad: cluster.broadcast([good, bad]))
        assert text.startswith("ClusterError: ") and words in text


def test_gathering_from_several_hosts_is_refused(graph):
    grad = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([4, 2]))
    with pytest.raises(ValueError, match=r"variable 0 .*cannot be gathered from several hosts.*sparse='dense'"):
        allreduce_grads([[grad]] * 2, ["/cpu:0", "/cpu:1"], strategy=Strategy(sparse="gather"), cluster=two())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hosts": []}, "expected a list of addresses"),
        ({"hosts": "127.0.0.1:1"}, "expected a list of addresses"),
        ({"hosts": ["here"]}, "'here' is not an address"),
        ({"hosts": ["here:99999"]}, "'here:99999' is not an address"),
        ({"hosts": ["grpc://here:1"]}, "'grpc://here:1' is not an address"),
        ({"hosts": ["here:²"]}, "'here:²' is not an address"),
        ({"hosts": ["a:1", "b:1", "a:1"]}, "a:1 is there more than once"),
        ({"task": 2}, "task=2: expected the index of a host, 0 to 1"),
        ({"task": True}, "task=True"),
        ({"devices_per_host": 0}, "devices_per_host=0"),
        ({"communication": "mpi"}, "communication='mpi': expected one of ring, nccl, auto"),
        ({"timeout": -1}, "timeout=-1: expected seconds"),
        ({"start_timeout": "long"}, "start_timeout='long'"),
        ({"timeout": float("inf")}, "timeout=inf: expected seconds"),
    ],
)
def test_an_invalid_cluster_is_refused(arguments, words):
    with pytest.raises(ClusterError, match=words.replace("[", r"\[")):
        Cluster(**{"hosts": ["a:1", "b:1"], "task": 0, "devices_per_host": 1, **arguments})


# ---- where a cluster comes from -----------------------------------------------------------------------


def test_a_cluster_comes_from_tf_config_or_a_file(monkeypatch):
    config = '{"cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"]}, "task": {"type": "worker", "index": 1}}'
    monkeypatch.setenv("TF_CONFIG", config)
    cluster = Cluster.from_environment(4, timeout=7.0)
    assert (cluster.hosts, cluster.task, cluster.size) == (("a:1", "b:2", "c:3"), 2, 3)
    assert (cluster.devices_per_host, cluster.timeout, cluster.is_chief) == (4, 7.0, False)
    monkeypatch.setenv("TF_CONFIG", "[]")
    with pytest.raises(ClusterError, match="expected"):
        Cluster.from_environment(1)
    monkeypatch.delenv("TF_CONFIG")
    assert Cluster.from_environment(4).size == 1
    loaded = Cluster.load("loopback-2x4", 1, communication="auto")
    assert (loaded.size, loaded.task, loaded.devices_per_host, loaded.communication) == (2, 1, 4, "auto")
