"""Waiting for other hosts without hanging: the wait happens in one thread while another looks after the hosts.

A collective cannot tell a host that saves a checkpoint from one that is dead, and a time limit on it cannot either. So
nothing here limits the wait itself: as long as every host answers (see ``alive``), it goes on.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from typing import Any, Callable, Collection, Dict, Iterable, Optional, Sequence

from ..errors import ClusterError
from . import liveness as alive

START_AGAIN = "Start all hosts again, from the last checkpoint"


class _Call:
    """A function that runs in the waiting thread, and what became of it."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._result: Any = None
        self._error: Optional[BaseException] = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # it is raised again in the thread that asked
            self._error = error
        self.done.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Watchdog:
    """Makes calls that wait for other hosts.

    ``lost`` is what the last look found: ``{task: what is wrong with it}``.

    Args:
        hosts: the addresses of all hosts, by task.
        task: this host.
        timeout: seconds within which a host that no longer answers is found.
        stall: seconds that hosts which do answer may keep this one waiting.
    """

    def __init__(self, hosts: Sequence[str], task: int, timeout: float, stall: float):
        self._addresses = {other: address for other, address in enumerate(hosts) if other != task}
        self._timeout, self._stall = timeout, stall
        self._calls: queue.Queue[Optional[_Call]] = queue.Queue()
        self._busy: Optional[_Call] = None
        self.lost: Dict[int, str] = {}
        self._given_up = ""
        threading.Thread(target=_work, args=(self._calls,), name="hier_allreduce-waiting", daemon=True).start()
        self._end = weakref.finalize(self, self._calls.put, None)

    @property
    def stuck(self) -> bool:
        """Whether a call was given up, and still waits."""
        return self._busy is not None and not self._busy.done.is_set()

    def call(
        self,
        function: Callable[[], Any],
        hosts: Optional[Iterable[int]] = None,
        told: Callable[[], str] = str,
        left: Callable[[], Collection[int]] = tuple,
    ) -> Any:
        """What ``function()`` returns, or raises.

        Args:
            function: it runs in another thread.
            hosts: those that it waits for; all of them by default.
            told: asked now and then what a host has said for which the call cannot end; by default, nothing.
            left: asked, if a host is gone, which ones have said that they leave; by default, none.

        Raises:
            ClusterError: a host is gone or silent, has said that it does not come, or all answer and ``stall`` has
                passed. The call is given up.
        """
        if self.stuck:
            raise ClusterError(self._given_up)
        if not self._end.alive:
            return function()
        self._busy = call = _Call(function)
        self._given_up = f"an earlier run was interrupted, and still waits for other hosts. {START_AGAIN}"  # by Ctrl-C
        self._calls.put(call)
        end = time.monotonic() + self._stall
        while not call.done.wait(self._timeout / 6):
            found = self.faults(hosts)
            # in this order: a host that is gone may have said why before
            words = told() or self.message(found, left)
            if not words and time.monotonic() > end:
                words = (
                    f"waited {self._stall:g} s for hosts {sorted(hosts or self._addresses)}, which all answer: one of"
                    " them is stuck, or makes other steps than this host; start all hosts again"
                )
            if words and not call.done.is_set():
                self._given_up = words
                raise ClusterError(words)
        self._busy = None
        return call.result()

    def close(self) -> None:
        """End the waiting thread, as soon as it waits for nothing; later calls run in the thread that makes them."""
        self._end()

    def faults(self, hosts: Optional[Iterable[int]] = None) -> Dict[int, str]:
        """Which hosts are not alive now, ``{task: what is wrong}``; a silent one is asked twice."""
        asked = {task: self._addresses[task] for task in (self._addresses if hosts is None else hosts)}
        found = alive.faults(asked, self._timeout / 6)
        silent = {task: asked[task] for task, words in found.items() if words == alive.SILENT}
        if silent:
            again = alive.faults(silent, self._timeout / 6)
            found = {task: words for task, words in found.items() if task not in silent or task in again}
        self.lost = found
        return found

    def message(self, found: Dict[int, str], left: Callable[[], Collection[int]]) -> str:
        """What to tell people about :meth:`faults`; nothing if there are none.

        Hosts that have ``left`` did so because of another one: they are named only where there is no other.
        """
        if not found:
            return ""
        gone = left()
        causes = {task: words for task, words in found.items() if task not in gone} or found
        named = "; ".join(f"host {task} ({self._addresses[task]}) {words}" for task, words in causes.items())
        return f"{named}. {START_AGAIN}"


def _work(calls: queue.Queue[Optional[_Call]]) -> None:
    for call in iter(calls.get, None):
        call.run()
        del call  # what it holds, a session and its graph, need not stay until the next one
