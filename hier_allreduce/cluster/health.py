"""Waiting for other hosts without hanging: one thread waits in TensorFlow, the caller checks hosts.

::

    caller    wait(step) ──► a heartbeat of each host, six a timeout ──► the result, or an error
                  │                                                      ▲     that names a host
    a thread      └──► step() blocks in a collective ────────────────────┘

A collective cannot tell a host that saves from one that is dead, and neither can a time limit on
it. A gRPC server can: it answers a new connection with its HTTP/2 settings, from a thread that
nothing else uses, whatever its process computes. That answer is the heartbeat. A process that has
ended refuses the connection. One that is frozen, or whose machine is down, stays silent. Another
program on the port, such as a web server, gives another answer, and counts as none.

This module needs no TensorFlow.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent import futures
from functools import partial
from typing import Any, Callable, List

from ..errors import ClusterError
from .environment import Job, split_address

START_AGAIN = "Start all hosts again, from the last checkpoint"
GONE = (
    "is not listening: its process has ended (by an error, or after fewer steps than here), or"
    " never started, or another program has its port"
)
SILENT = "does not answer: its process is frozen, or its machine or network is down"

# The client's connection preface, then an empty SETTINGS frame (RFC 7540, section 3.5).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# A server's SETTINGS frame begins with its length, of three bytes, then its type and no flags.
_SETTINGS = b"\4\0"
# Seconds between two looks at a host that is expected to change.
_PAUSE = 0.1


class HealthCheck:
    """The health of the other hosts of a job, and the calls that wait for them."""

    def __init__(self, job: Job):
        self._job = job
        self._interval = job.timeout / 6  # seconds between heartbeats, and for the answer to one
        # Whether a call waits: also one that was abandoned, or interrupted by Ctrl-C.
        self.is_waiting = False

    def wait(self, function: Callable[[], Any], seconds: float) -> Any:
        """Return or raise the result of ``function()``, which waits for the other hosts.

        Live hosts may keep it waiting for ``seconds``.

        Raises:
            ClusterError: a host is gone or silent; or all answer, but ``seconds`` have passed. The
                call is abandoned. Or an earlier call still waits.
        """
        if self.is_waiting:
            raise ClusterError(f"an earlier run still waits for other hosts. {START_AGAIN}")
        end = time.monotonic() + seconds
        self.is_waiting = True
        call = _started(function)
        # The next heartbeat is at the end at the latest, so that no call waits longer.
        while not futures.wait([call], min(self._interval, end - time.monotonic())).done:
            fault = self.fault()
            if not fault and time.monotonic() > end:
                fault = (
                    f"waited {seconds:g} s for the other hosts; all of them answer, but one is"
                    " stuck, runs another number of steps, or has another list of hosts than"
                    f" {list(self._job.hosts)}"
                )
            # The call may have ended while the hosts were asked.
            if fault and not call.done():
                self.let_others_find_it()
                raise ClusterError(f"{fault}. {START_AGAIN}")
        self.is_waiting = False
        return call.result()

    def let_others_find_it(self) -> None:
        """Sleep for as long as the other hosts may need to find the same fault.

        If this host ended at once, they would find it gone, and name it as the cause.
        """
        time.sleep(2 * self._interval)

    def fault(self) -> str:
        """Return which hosts are gone or silent; empty if none is."""
        faults = self._faults()
        # A host under load may be late once, and the look-up of a name may fail once.
        if any(GONE not in fault for fault in faults):
            time.sleep(self._interval / 2)
            faults = self._faults()
        return "; ".join(faults)

    def _faults(self) -> List[str]:
        """Ask all other hosts at once; return the faults of those without an answer in time."""
        calls = {}
        for task, address in enumerate(self._job.hosts):
            if task != self._job.task:
                calls[task] = _started(partial(heartbeat, address, self._interval))
        # The look-up of a name has no time limit, so a call that takes longer is abandoned.
        futures.wait(calls.values(), self._interval)
        faults = []
        for task, call in calls.items():
            fault = call.result() if call.done() else SILENT
            if fault:
                faults.append(f"host {task} ({self._job.hosts[task]}) {fault}")
        return faults

    def wait_for_servers(self) -> None:
        """Wait until all hosts listen: a step that needs a host that never did would hang for ever.

        Raises:
            ClusterError: hosts are missing after ``start_timeout``; they are named.
        """
        end = time.monotonic() + self._job.start_timeout
        fault = self.fault()
        while fault:
            if time.monotonic() > end:
                self.let_others_find_it()
                waited = f"after {self._job.start_timeout:g} s not all hosts are there"
                raise ClusterError(f"{waited}: {fault}")
            time.sleep(_PAUSE)
            fault = self.fault()


def _started(function: Callable[[], Any]) -> futures.Future:
    """Return the future result of ``function()``, which begins in a thread.

    If it is stuck, it does not keep the interpreter from exiting.
    """
    call: futures.Future = futures.Future()
    threading.Thread(target=_complete, args=(call, function), daemon=True).start()
    return call


def _complete(call: futures.Future, function: Callable[[], Any]) -> None:
    """Set the result of ``function()``, or its error, which the thread that waits raises again."""
    try:
        call.set_result(function())
    except BaseException as error:
        call.set_exception(error)
        del call  # breaks the cycle call → error → traceback → this frame → call


def heartbeat(address: str, seconds: float) -> str:
    """Return the fault of a host's server; empty if it answers within ``seconds``."""
    try:
        with socket.create_connection(split_address(address), seconds) as connection:
            connection.sendall(_PREFACE)
            answer = connection.makefile("rb").read(5)
            return "" if answer[3:] == _SETTINGS else GONE
    except ConnectionError:
        return GONE
    except (OSError, UnicodeError) as error:  # an invalid name is a UnicodeError
        return f"{SILENT} ({error})"
