"""The messages of one session, as entries of the hosts' key-value stores.

::

    key                  on whose server    put there by                     text
    facts/S              its own            every host                       its facts, as JSON
    refused/S            another host's     a host whose facts differ        the difference, for an error
    failed/S             all others'        a host whose step has failed     the reason, for an error
    left by ADDRESS/S    all others'        a host that leaves its session   the number of steps it has begun

S is the number of the session in its process.
"""

from __future__ import annotations

from typing import Callable, Container, Optional, Sequence

from .kv_store import KeyValueStore
from .polling import attempts

REFUSED = "refused"
FAILED = "failed"


class Messages:
    """What one host publishes, sends and receives in one session."""

    def __init__(self, kv_store: KeyValueStore, hosts: Sequence[str], task: int, session: int):
        """Note the arguments; nothing is put or got yet.

        Args:
            kv_store: the stores of all hosts.
            hosts: the addresses of all hosts, by task.
            task: the index of this host.
            session: the number of this session, the same on all hosts.
        """
        self._kv_store, self._hosts, self._task, self._session = kv_store, hosts, task, session

    def publish_facts(self, text: str) -> bool:
        """Put this host's facts on its own server; return False if the server does not answer."""
        return self._put(self._task, "facts", text)

    def facts(self, task: int) -> Optional[str]:
        """Return the facts that a host has published; None if it has not yet."""
        return self._get(task, "facts")

    def send(
        self,
        tasks: Sequence[int],
        topic: str,
        text: str,
        seconds: float,
        unreachable: Callable[[Sequence[int]], Container[int]],
    ) -> None:
        """Put a message on other hosts' servers.

        Args:
            tasks: the hosts to tell.
            topic: ``REFUSED`` or ``FAILED``.
            text: the message.
            seconds: how long to try again if a live server is slow to take it.
            unreachable: which of some hosts are gone or silent; they are not told.
        """
        pending = list(tasks)
        for _ in attempts(seconds):
            lost = unreachable(pending)
            pending = [task for task in pending if task not in lost and not self._put(task, topic, text)]
            if not pending:
                return

    def received(self, topic: str) -> Optional[str]:
        """Return the message that another host has sent to this one, or None."""
        return self._get(self._task, topic)

    def announce_departure(self, task: int, steps: int) -> bool:
        """Tell a host that this one leaves after ``steps`` steps, and close the session on its server.

        Returns False if the server does not answer.
        """
        told = self._put(task, self._departure(self._task), str(steps))
        if told:
            self._kv_store.close(task)
        return told

    def departure(self, task: int) -> Optional[int]:
        """Return after how many steps a host has left, as it announced to this one; None if it has not."""
        steps = self._get(self._task, self._departure(task))
        return None if steps is None else int(steps)

    def close(self) -> None:
        """Close the session on this host's own server."""
        # Not those on other servers: closing one would wait for a host that may be gone.
        self._kv_store.close(self._task)

    def _departure(self, task: int) -> str:
        # by address: hosts whose lists differ number each other differently
        return f"left by {self._hosts[task]}"

    def _put(self, task: int, topic: str, text: str) -> bool:
        return self._kv_store.put(task, f"{topic}/{self._session}", text)

    def _get(self, task: int, topic: str) -> Optional[str]:
        return self._kv_store.get(task, f"{topic}/{self._session}")
