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
from typing import Any, Callable, Dict, Sequence

from ..errors import ClusterError
from .environment import split_address

START_AGAIN = "Start all hosts again, from the last checkpoint"
GONE = (
    "is not listening: its process has ended (by an error, or after fewer steps than here), or"
    " never started, or another program has its port"
)
SILENT = "does not answer: its process is frozen, or its machine or network is down"
_INTERRUPTED = "an earlier run was interrupted and still waits for other hosts"

# The client's connection preface, then an empty SETTINGS frame (RFC 7540, section 3.5).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
# A server's SETTINGS frame begins with its length, of three bytes, then its type and no flags.
_SETTINGS = b"\4\0"
# Seconds between two looks at a host that is expected to change.
_PAUSE = 0.1


class HealthCheck:
    """The health of the other hosts of a job, and the calls that wait for them."""

    def __init__(self, hosts: Sequence[str], task: int, timeout: float):
        self.timeout = timeout  # seconds within which all hosts end after one of them
        self.interval = timeout / 6  # seconds between two heartbeats, and for the answer to one
        self._address_by_task = {k: address for k, address in enumerate(hosts) if k != task}
        # Whether a call waits: also one that was abandoned, or interrupted by Ctrl-C.
        self.is_waiting = False
        self._fault = _INTERRUPTED  # or why the call that still waits was abandoned

    def wait(self, function: Callable[[], Any], seconds: float, doing: str) -> Any:
        """Return or raise the result of ``function()``, which waits for the other hosts.

        Args:
            seconds: for which live hosts may keep it waiting.
            doing: why it waits, for the error.

        Raises:
            ClusterError: a host is gone or silent; or all answer, but ``seconds`` have passed. The
                call is abandoned. Or an earlier call was, and still waits.
        """
        if self.is_waiting:
            raise ClusterError(f"{self._fault}. {START_AGAIN}")
        call: futures.Future = futures.Future()
        end = time.monotonic() + seconds
        # A call that is stuck must not keep the interpreter from exiting.
        thread = threading.Thread(target=_complete, args=(call, function), daemon=True)
        thread.start()
        self.is_waiting = True
        while True:
            # The next heartbeat is at the end at the latest, so that no call waits longer.
            pause = min(self.interval, max(0.0, end - time.monotonic()))
            if futures.wait([call], pause).done:
                break
            fault = self.fault()
            if not fault and time.monotonic() > end:
                fault = (
                    f"waited {seconds:g} s for the other hosts {doing}; all of them answer, but one"
                    " is stuck, runs another number of steps, or has another list of hosts than"
                    f" {list(self._address_by_task.values())}"
                )
            # The call may have ended while the hosts were asked.
            if fault and not call.done():
                self._fault = fault
                self.let_others_find_it()
                raise ClusterError(f"{fault}. {START_AGAIN}")
        self.is_waiting = False
        return call.result()

    def let_others_find_it(self) -> None:
        """Sleep for as long as the other hosts may need to find the same fault.

        If this host ended at once, they would find it gone, and name it as the cause.
        """
        time.sleep(2 * self.interval)

    def fault(self) -> str:
        """Return which hosts are gone or silent; empty if none is."""
        fault_by_task = self._faults(self._address_by_task)
        # A host under load may be late once, and the look-up of a name may fail once.
        if set(fault_by_task.values()) - {GONE}:
            time.sleep(self.interval / 2)
            fault_by_task = self._faults({k: self._address_by_task[k] for k in fault_by_task})
        return "; ".join(
            f"host {task} ({self._address_by_task[task]}) {fault}"
            for task, fault in fault_by_task.items()
        )

    def _faults(self, address_by_task: Dict[int, str]) -> Dict[int, str]:
        """Ask hosts at once; return ``{task: fault}`` of hosts without an answer in time."""
        fault_by_task = dict.fromkeys(address_by_task, SILENT)

        def ask(task: int) -> None:
            fault_by_task[task] = heartbeat(address_by_task[task], self.interval)

        # The look-up of a name has no time limit, so a thread that takes longer is abandoned.
        threads = []
        for task in address_by_task:
            threads.append(threading.Thread(target=ask, args=(task,), daemon=True))
        end = time.monotonic() + self.interval
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return {task: fault for task, fault in sorted(fault_by_task.items()) if fault}

    def wait_for_servers(self, seconds: float) -> None:
        """Wait until all hosts listen: a step that needs a host that never did would hang for ever.

        Raises:
            ClusterError: hosts are missing after ``seconds``; they are named.
        """
        end = time.monotonic() + seconds
        while True:
            fault = self.fault()
            if not fault:
                return
            if time.monotonic() > end:
                self.let_others_find_it()
                raise ClusterError(f"after {seconds:g} s not all hosts are there: {fault}")
            time.sleep(_PAUSE)


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
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return GONE
    except (socket.timeout, TimeoutError):
        return SILENT
    except (OSError, UnicodeError) as error:  # an invalid name is a UnicodeError
        return f"cannot be reached: {error}"
