"""The key-value store on each host's TensorFlow server."""

import gc
import weakref

import pytest
import tensorflow as tf
from helpers.clusters import job
from helpers.ports import free_addresses

from hier_allreduce.cluster.kv_store import KeyValueStore

tf1 = tf.compat.v1


@pytest.fixture
def sessions(monkeypatch):
    """Weak references to all sessions that this process opens."""
    opened = []

    class Session(tf1.Session):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            opened.append(weakref.ref(self))

    monkeypatch.setattr(tf1, "Session", Session)
    return opened


def test_further_attempts_to_put_or_get_build_no_more_ops(sessions):
    kv_store = KeyValueStore(free_addresses(1), 0.1)
    sizes = []
    for text in ("one", "two", "three"):
        assert not kv_store.put(0, "key", text)
        assert kv_store.get(0, "key") is None
        sizes.append(len(sessions[0]().graph.get_operations()))
    assert sizes == sizes[:1] * 3
    assert len(sessions) == 1


def test_a_restarted_server_has_lost_the_old_session(sessions):
    hosts = free_addresses(1)
    kv_store = KeyValueStore(hosts, 2.0)
    for text in ("first", "second"):
        with job("serve", 1, addresses=hosts) as (host,):
            host.until("serving")
            # at first the old connection is broken, then the server does not know the old session
            assert any(kv_store.put(0, "key", text) for _ in range(20))
            assert kv_store.get(0, "key") == text
    gc.collect()
    assert [session() is None for session in sessions] == [True, False]
