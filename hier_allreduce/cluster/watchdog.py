"""Waiting for other hosts without hanging: one thread waits, another probes. No TensorFlow.

::

    calling thread   call(step) ──► probe the hosts every timeout/6 s ──► result, or a ClusterError that names a host
                          │                                             ▲
    waiting thread        └──► step(): blocks in a collective ──────────┘

A collective cannot tell a host that saves a checkpoint from one that is dead, and neither can a time limit on it. So
the wait itself has no such limit: it goes on as long as every host answers the probe of ``liveness``.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from concurrent.futures import Future, wait
from typing import Any, Callable, Collection, Dict, Iterable, Optional, Sequence

from ..errors import ClusterError
from . import liveness

START_AGAIN = "Start all hosts again, from the last checkpoint"

_Calls = queue.Queue  # of (future, function), or None at the end


class Watchdog:
    """A thread for calls that wait for other hosts; a call is given up when a host has failed.

    Attributes:
        timeout: seconds within which a host that no longer answers is detected.
        stall: seconds that hosts which do answer may keep this one waiting.
        lost: the result of the latest probe, ``{task: fault}``.
        cause: which host made this one give up a call; empty if none did.
    """

    def __init__(self, hosts: Sequence[str], task: int, timeout: float, stall: float):
        """Start the waiting thread of host ``task``; ``hosts`` are the addresses of all."""
        self._addresses = {other: address for other, address in enumerate(hosts) if other != task}
        self.timeout, self.stall = timeout, stall
        self._calls: _Calls = queue.Queue()
        self._pending: Optional[Future] = None
        self._given_up = ""  # why the pending call was given up
        self.lost: Dict[int, str] = {}
        self.cause = ""
        # A daemon: a call that is stuck in a collective must not keep the interpreter from exiting.
        threading.Thread(target=_work, args=(self._calls,), name="hier_allreduce-waiting", daemon=True).start()
        self._stop_thread = weakref.finalize(self, self._calls.put, None)

    @property
    def stuck(self) -> bool:
        """Whether a call was given up and is still waiting."""
        return self._pending is not None and not self._pending.done()

    def call(
        self,
        function: Callable[[], Any],
        hosts: Optional[Iterable[int]] = None,
        peer_failure: Callable[[], str] = str,
        departed: Callable[[], Collection[int]] = tuple,
    ) -> Any:
        """Return or raise what ``function()`` does; it runs in the waiting thread.

        Args:
            function: what to call.
            hosts: the tasks that it waits for; all others by default.
            peer_failure: polled for a host's report that the call cannot complete; by default there is none.
            departed: asked which hosts have announced that they leave, if one is gone; by default none have.

        Raises:
            ClusterError: a host is gone, silent or has reported a failure, or all answer and ``stall`` seconds have
                passed. The call is given up.
        """
        if self.stuck:
            raise ClusterError(self._given_up)
        if not self._stop_thread.alive:
            return function()
        call: Future = Future()
        self._pending = call
        # what later calls raise if Ctrl-C interrupts this one
        self._given_up = f"an earlier run was interrupted and still waits for other hosts. {START_AGAIN}"
        self._calls.put((call, function))
        end = time.monotonic() + self.stall
        while not wait([call], self.timeout / 6).done:
            faults = self.faults(hosts)
            # in this order: a host that is gone may have reported the reason before
            cause = peer_failure() or self.fault(faults, departed)
            message = f"{cause}. {START_AGAIN}" if cause else ""
            if not message and time.monotonic() > end:
                message = (
                    f"waited {self.stall:g} s for hosts {sorted(hosts or self._addresses)}, which all answer: one of"
                    " them is stuck, or runs other steps than this host; start all hosts again"
                )
            if message and not call.done():
                self.cause, self._given_up = cause, message
                raise ClusterError(message)
        self._pending = None
        return call.result()

    def close(self) -> None:
        """End the waiting thread as soon as it is idle; later calls run in the thread that makes them."""
        self._stop_thread()

    def faults(self, hosts: Optional[Iterable[int]] = None) -> Dict[int, str]:
        """Probe hosts, all others by default; return ``{task: fault}``. A silent host is probed twice."""
        addresses = {task: self._addresses[task] for task in (self._addresses if hosts is None else hosts)}
        faults = liveness.faults(addresses, self.timeout / 6)
        silent = {task: addresses[task] for task, fault in faults.items() if fault == liveness.SILENT}
        if silent:
            again = liveness.faults(silent, self.timeout / 6)
            faults = {task: fault for task, fault in faults.items() if task not in silent or task in again}
        self.lost = faults
        return faults

    def fault(self, faults: Dict[int, str], departed: Callable[[], Collection[int]]) -> str:
        """Return which hosts of :meth:`faults` are the cause of an error, and how; empty if there are none.

        Hosts that have ``departed`` did so because of another host: they are named only if there is no other.
        """
        if not faults:
            return ""
        left = departed()
        causes = {task: fault for task, fault in faults.items() if task not in left} or faults
        return "; ".join(f"host {task} ({self._addresses[task]}) {fault}" for task, fault in causes.items())


def _work(calls: _Calls) -> None:
    for call, function in iter(calls.get, None):
        _complete(call, function)
        del call, function  # they hold a session and its graph, which need not live until the next call


def _complete(call: Future, function: Callable[[], Any]) -> None:
    try:
        call.set_result(function())
    except BaseException as error:  # raised again in the thread that waits for the call
        call.set_exception(error)
        del call  # breaks the cycle call → error → traceback → this frame → call
