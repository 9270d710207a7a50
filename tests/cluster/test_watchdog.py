"""The thread that waits for other hosts: what it returns and raises, what it keeps, and when it ends."""

import functools
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from hier_allreduce import ClusterError
from hier_allreduce.cluster.watchdog import Watchdog

SECONDS = 150  # for anything that should happen


class Thing:
    """Something that a call may hold."""


@pytest.fixture
def watchdog_and_thread():
    """A watchdog without other hosts, and its thread."""
    before = set(threading.enumerate())
    watchdog = Watchdog(["127.0.0.1:1"], 0, 60.0, 60.0)
    (thread,) = set(threading.enumerate()) - before
    yield watchdog, thread
    watchdog.close()


@pytest.mark.parametrize("function", [str, lambda thing: thing], ids=["given", "returned"])
def test_what_a_call_was_given_and_what_it_returned_are_not_kept(watchdog_and_thread, function):
    watchdog, _ = watchdog_and_thread
    thing, gone = Thing(), threading.Event()
    weakref.finalize(thing, gone.set)
    watchdog.call(functools.partial(function, thing))
    del thing
    assert gone.wait(SECONDS)


def test_a_closed_watchdog_has_no_thread_and_calls_need_none(watchdog_and_thread):
    watchdog, thread = watchdog_and_thread
    watchdog.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert watchdog.call(threading.current_thread) is threading.current_thread()


def test_after_an_interrupted_wait_there_can_be_no_other():
    watchdog, end = Watchdog(["127.0.0.1:1"], 0, 0.06, 60.0), threading.Event()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watchdog.call(end.wait, peer_failure=interrupted)
    with pytest.raises(ClusterError, match="an earlier run was interrupted and still waits for other hosts"):
        watchdog.call(str)
    end.set()
    watchdog.close()


def test_a_watchdog_without_references_has_no_thread():
    before = set(threading.enumerate())
    Watchdog(["127.0.0.1:1"], 0, 60.0, 60.0)
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_call_that_never_returns_does_not_stop_the_exit():
    program = (
        "import threading; from hier_allreduce.cluster.watchdog import Watchdog\n"
        "watchdog = Watchdog(['127.0.0.1:1', '127.0.0.1:2'], 0, 2.0, 60.0)\n"
        "watchdog.call(threading.Event().wait)"
    )
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=SECONDS)
    assert ended.returncode == 1
    assert b"host 1 (127.0.0.1:2) is not listening" in ended.stderr
