"""A host fails in any way: every other host ends with an error that names it, and none hangs.

Hosts are real processes with real servers on loopback: see helpers/clusters.py and
helpers/cluster_child.py.
"""

import os
import random
import signal
import socket
import socketserver
import threading

import pytest
from helpers.clusters import free_addresses, job
from helpers.graphs import IS_TF2

from hier_allreduce.cluster import health
from hier_allreduce.cluster.environment import Job

# of clusters in which a host dies or freezes; a live host answers within a sixth of it
TIMEOUT = 12.0
HOW = {signal.SIGKILL: "is not listening", signal.SIGSTOP: "does not answer"}


def check_names(text, who, how):
    """Check that an error names one host, and its fault."""
    assert text.startswith(f"ClusterError: host {who} (127.0.0.1:"), text
    assert text.count("host ") == 1 and HOW[how] in text and "Start all hosts again" in text, text


@pytest.mark.parametrize("how", list(HOW), ids=["killed", "frozen"])
@pytest.mark.parametrize("who", [0, 1], ids=["the leader", "another host"])
def test_every_survivor_names_the_host_that_died_or_froze(who, how):
    with job("train", 3, timeout=TIMEOUT, each={who: {"wait_at": 2}}) as hosts:
        hosts[who].until(2)
        os.kill(hosts[who].process.pid, how)
        for host in hosts:
            if host is not hosts[who]:
                check_names(host.error(), who, how)


@pytest.mark.parametrize("seed", range(3))
def test_a_fault_at_any_moment_is_found(seed):
    """The signal comes while the hosts start, compare their weights, train, or end."""
    chance = random.Random(100 * IS_TF2 + seed)
    who = chance.randrange(2)
    how = chance.choice(list(HOW))
    messages = chance.randrange(40)
    limits = {"start_timeout": 60.0}
    with job("train", 2, timeout=TIMEOUT, cluster=limits, steps=10000, heartbeats=True) as hosts:
        hosts[who].until("built")
        hosts[1 - who].until("built")
        for _ in range(messages):
            hosts[chance.randrange(2)].next()
        os.kill(hosts[who].process.pid, how)
        text = hosts[1 - who].error()
    if "not all hosts are there" in text:  # Its server did not listen yet: it could start later.
        assert text.startswith(f"ClusterError: after 60 s not all hosts are there: host {who} (")
    else:
        check_names(text, who, how)


@pytest.mark.parametrize(
    "fault", [{"raise_at": 2}, {"steps": 3}], ids=["an exception", "fewer steps"]
)
def test_a_host_that_leaves_early_is_named(fault):
    with job("train", 2, timeout=6.0, each={1: fault}) as hosts:
        check_names(hosts[0].error(), 1, signal.SIGKILL)


def test_a_chief_may_save_for_longer_than_the_timeout():
    """It stays in Python until the other host has waited for longer than the timeout."""
    with job("train", 2, timeout=6.0, each={0: {"wait_at": 1}, 1: {"heartbeats": True}}) as hosts:
        hosts[1].until(1)
        for _ in range(8):  # six within the timeout
            hosts[1].until("a heartbeat")
        hosts[0].go_on()
        assert [len(host.facts()["losses"]) for host in hosts] == [6, 6]


def test_a_host_whose_name_is_not_found_once_is_asked_again(monkeypatch):
    answers = {"b:1": ["Temporary failure in name resolution", ""], "c:1": ["", ""]}
    monkeypatch.setattr(health, "heartbeat", lambda address, _: answers[address].pop(0))
    check = health.HealthCheck(Job(("a:1", "b:1", "c:1"), 0, 1.2, 1.2, 1.2))
    assert check.fault() == "" and answers == {"b:1": [], "c:1": []}
    answers["b:1"], answers["c:1"] = ["no route", "no route"], ["", ""]
    assert check.fault() == "host 1 (b:1) no route"


def test_a_live_host_that_does_not_come_ends_in_a_stall_timeout():
    with job(
        "train", 2, timeout=6.0, each={0: {"wait_at": 2}, 1: {"cluster": {"stall_timeout": 2.0}}}
    ) as hosts:
        text = hosts[1].error()
    assert "waited 2 s for the other hosts; all of them answer" in text


@pytest.mark.parametrize("missing", [0, 1], ids=["the leader", "another host"])
def test_a_host_that_never_starts_is_named(missing):
    with job(
        "train",
        2,
        timeout=6.0,
        cluster={"start_timeout": 0.5},
        each={missing: {"wait_at": "built"}},
    ) as hosts:
        text = hosts[1 - missing].error()
    assert (
        f"after 0.5 s not all hosts are there: host {missing} (127.0.0.1:" in text
        and "is not listening" in text
    )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"width": 7}, "gradient 0: a: float32 [5, 7] there"),
        ({"name": "bias"}, "gradient 1: bias: float32 [5, 3] there"),
        ({"algorithm": "tree"}, "layout: tree, 1 chunk"),
        ({"towers": 3}, "devices: 3 there"),
    ],
    ids=["shape", "variables", "plan", "devices"],
)
def test_hosts_that_build_another_graph_are_named(options, words):
    with job("train", 3, each={1: options}) as hosts:
        errors = [host.error() for host in hosts]
    for task in (0, 2):
        assert errors[task].startswith("ClusterError: host 1 (127.0.0.1:")
        assert f"differs from this host ({task})" in errors[task] and words in errors[task]
    assert "differs from this host (1)" in errors[1]


class Stranger(socketserver.BaseRequestHandler):
    """A service with an answer to everything."""

    answer = b""

    def handle(self):
        self.request.recv(1024)
        self.request.sendall(self.answer)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"]
)
def test_another_program_on_a_hosts_port_is_no_host(answer):
    handler = type("Handler", (Stranger,), {"answer": answer})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hosts = [*free_addresses(1), f"127.0.0.1:{server.server_address[1]}"]
        with job(
            "train", 2, timeout=6.0, cluster={"hosts": hosts, "start_timeout": 0.5}
        ) as started:
            text = started[0].error()
        server.shutdown()
    assert f"not all hosts are there: host 1 ({hosts[1]}) is not listening" in text
    assert "or another program has its port" in text


def test_a_host_that_starts_again_alone_tells_all_to_start_again():
    """A supervisor has started it before the others have found that it was gone."""
    with job("train", 2, timeout=30.0, steps=10000, each={1: {"wait_at": 2}}) as hosts:
        hosts[1].until(2)
        with hosts[1].again() as again:
            # Each may name the other one, whichever finds it first.
            for other, text in ((0, again.error()), (1, hosts[0].error())):
                assert text.startswith("ClusterError: ") and "Start all hosts again" in text, text
                assert "TensorFlow's error: " in text or f"host {other} (" in text, text


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with job("train", 2, cluster={"hosts": [address, *free_addresses(1)]}) as hosts:
            assert f"this host's server ({address}) does not start" in hosts[0].error()


def test_a_proxy_is_not_asked_for_the_hosts():
    """Else gRPC would ask it, and the hosts would wait for ever."""
    (nobody,) = free_addresses(1)
    environ = {
        "http_proxy": f"http://{nobody}",
        "grpc_proxy": f"http://{nobody}",
        "no_proxy": "example.org",
    }
    with job("train", 2, environ=environ) as hosts:
        assert [len(host.facts()["losses"]) for host in hosts] == [6, 6]


@pytest.mark.parametrize(
    "options, words",
    [
        (
            {"broadcast": False},
            "after 0 steps the hosts' weights are different: 4 of 4 variables are not the same on",
        ),
        (
            {"steps": 10, "without_hook": True, "each": {1: {"spoil_at": 5}}},
            "after 8 steps the hosts' weights are different: 1 of 4 variables are not the same on",
        ),
    ],
    ids=["at the start", "later"],
)
def test_other_weights_are_an_error_on_all_hosts(options, words):
    with job("train", 2, **options) as hosts:
        for host in hosts:
            text = host.error()
            assert words in text and "tower1/a" in text, text


@pytest.mark.parametrize(
    "ours, theirs, steps",
    [
        ({}, {"rate": 0.01}, "1 step"),
        ({"optimizer": "fed"}, {"optimizer": "fed", "rate": 0.01}, "1 step"),
        # momentum shows in the second step
        ({"update": "once"}, {"update": "once", "optimizer": "less momentum"}, "2 steps"),
    ],
    ids=["rate", "fed rate", "momentum"],
)
def test_another_update_is_an_error_after_the_step_in_which_it_shows(ours, theirs, steps):
    """In a session without a hook, too; and the variables are named."""
    with job("train", 2, without_hook=True, **ours, each={1: theirs}) as hosts:
        for host in hosts:
            text = host.error()
            words = f"after {steps} the hosts' weights are different: 4 of 4 variables are not the"
            assert f"ClusterError: {words}" in text and "tower1/a, tower1/b among" in text, text
            assert "Every host needs the same optimizer with the same numbers" in text, text


def test_hosts_that_compare_nothing_may_differ():
    """As hosts with other processors do in the last bits."""
    options = {"choices": {"check_replicas_every": 0}, "each": {1: {"rate": 0.01}}}
    with job("train", 2, without_hook=True, **options) as hosts:
        assert [len(host.facts()["losses"]) for host in hosts] == [6, 6]


@pytest.mark.parametrize("update", ["replicated", "once", "sharded"])
def test_hosts_with_one_update_may_build_other_ops(update):
    with job("train", 2, each={0: {"more_ops": 3}}, update=update) as hosts:
        assert [len(host.facts()["losses"]) for host in hosts] == [6, 6]


def test_the_end_of_data_is_no_slow_hosts_last_step():
    """The chief has not run its last step, so the other host must not begin an epoch.

    Runs that need no other host are possible.
    """
    with job("epochs", 2, epochs=[3], each={0: {"wait_at": (1, 3)}}) as hosts:
        hosts[1].until((2, 0))
        hosts[0].go_on()
        for host in hosts:
            text = host.error()
            assert text.startswith(
                "ClusterError: this host's last step with the other hosts ended with OutOfRangeErr"
            )
            assert "open a session for each epoch" in text


def test_a_session_for_each_epoch_has_all_steps_of_all_epochs():
    with job("epochs", 2, epochs=[1, 1, 1]) as hosts:
        assert [host.facts() for host in hosts] == [[[0.0, 4.0, 8.0]] * 3] * 2


def test_a_host_may_be_a_step_ahead_of_others_if_nothing_crosses():
    with job("fed", 2, fed=[False, True, False, True], each={1: {"wait_at": 1}}) as hosts:
        hosts[0].until(2)
        hosts[1].go_on()
        assert [host.facts() for host in hosts] == [[[1.0], [4.0], [1.0], [4.0]]] * 2


def test_a_step_during_another_threads_step_is_an_error():
    with job("fed", 2, fed=[True], each={0: {"threads": 2}, 1: {"wait_at": "open"}}) as hosts:
        hosts[0].until("an error")
        hosts[1].go_on()
        (result, error), (same,) = (host.facts() for host in hosts)
    assert result == same == [4.0] and error.startswith(
        "another thread is in a step with the other hosts"
    )
