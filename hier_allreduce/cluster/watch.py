"""Waiting for other hosts without hanging: a thread waits in TensorFlow, the caller probes the hosts. No TensorFlow.

::

    caller    wait(step) ──► probe all hosts every timeout/6 s ──► the result, or a ClusterError that names a host
                    │                                              ▲
    a thread        └──► step() blocks in a collective ────────────┘

A collective cannot tell a host that saves from one that is dead, and neither can a time limit on it. A gRPC server can:
it answers a new connection with its HTTP/2 settings, from a thread that nothing else uses, whatever its process
computes. A process that has ended refuses the connection. One that is frozen, or whose machine is down, stays silent.
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
GONE = "is not listening: its process has ended (by an error, or after fewer steps than here), or never started"
SILENT = "does not answer: its process is frozen, or its machine or network is down"

# the client's connection preface, then an empty SETTINGS frame (RFC 7540, section 3.5)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_PAUSE = 0.1  # seconds between two looks at a host that is expected to change


class Watch:
    """The other hosts of a job, and the calls that wait for them.

    Args:
        hosts: H addresses.
        task: the index of this host.
        timeout: seconds within which all hosts end after one of them.

    Attributes:
        period: seconds between two probes, and for the answer to one.
        stuck: why a call was abandoned that still waits; empty if none does.
    """

    def __init__(self, hosts: Sequence[str], task: int, timeout: float):
        self._addresses = {other: address for other, address in enumerate(hosts) if other != task}
        self.period, self.stuck = timeout / 6, ""

    def wait(self, function: Callable[[], Any], seconds: float, doing: str) -> Any:
        """Return or raise the result of ``function()``, which waits for the other hosts.

        Args:
            function: called in another thread.
            seconds: for which live hosts may keep it waiting.
            doing: why it waits, for the error.

        Raises:
            ClusterError: a host is gone or silent; or all answer, but ``seconds`` have passed. The call is abandoned.
        """
        if self.stuck:
            raise ClusterError(self.stuck)
        call: futures.Future = futures.Future()
        end = time.monotonic() + seconds
        # A daemon: a call that is stuck in a collective must not keep the interpreter from exiting.
        threading.Thread(target=_complete, args=(call, function), daemon=True).start()
        self.stuck = f"an earlier run was interrupted and still waits for other hosts. {START_AGAIN}"  # by Ctrl-C
        while not futures.wait([call], min(self.period, max(0.0, end - time.monotonic()))).done:
            message = self.fault()
            if not message and time.monotonic() > end:
                message = (
                    f"waited {seconds:g} s for the other hosts {doing}; all of them answer, but one is stuck, runs"
                    f" another number of steps, or has another list of hosts than {list(self._addresses.values())}"
                )
            if message and not call.done():
                self.stuck = f"{message}. {START_AGAIN}"
                self.linger()
                raise ClusterError(self.stuck)
        self.stuck = ""
        return call.result()

    def linger(self) -> None:
        """Wait for as long as others may need to find the same fault: they would take this host for its cause."""
        time.sleep(2 * self.period)

    def fault(self, seconds: float = 0.0) -> str:
        """Return which hosts are gone or silent; empty if none is, even after ``seconds``.

        A silent host is probed twice.
        """
        end = time.monotonic() + seconds
        while True:
            faults = _probe_all(self._addresses, self.period)
            if SILENT in faults.values():
                faults = _probe_all({task: self._addresses[task] for task in faults}, self.period)
            if faults or time.monotonic() > end:
                return "; ".join(
                    f"host {task} ({self._addresses[task]}) {fault}"
                    for task, fault in faults.items()
                )
            time.sleep(_PAUSE)

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
                self.linger()
                raise ClusterError(
                    f"after {seconds:g} s not all hosts are there: {fault}. Start it, or correct the list of hosts"
                )
            time.sleep(_PAUSE)


def _complete(call: futures.Future, function: Callable[[], Any]) -> None:
    try:
        call.set_result(function())
    except BaseException as error:  # raised again in the thread that waits for the call
        call.set_exception(error)
        del call  # breaks the cycle call → error → traceback → this frame → call


def _probe_all(addresses: Dict[int, str], seconds: float) -> Dict[int, str]:
    """Probe hosts at once; return ``{task: fault}`` of all that do not answer within ``seconds``."""
    states = dict.fromkeys(addresses, SILENT)

    def note(task: int) -> None:
        states[task] = probe(addresses[task], seconds)

    # The look-up of a name has no time limit, so a thread that takes longer is abandoned.
    threads = [threading.Thread(target=note, args=(task,), daemon=True) for task in addresses]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {task: state for task, state in sorted(states.items()) if state}


def probe(address: str, seconds: float) -> str:
    """Return the fault of a host's server, empty if it answers within ``seconds``."""
    try:
        with socket.create_connection(split_address(address), seconds) as connection:
            connection.sendall(_PREFACE)
            return "" if connection.recv(1) else GONE
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return GONE
    except (socket.timeout, TimeoutError):
        return SILENT
    except (OSError, UnicodeError) as error:  # an invalid name is a UnicodeError
        return f"cannot be reached: {getattr(error, 'strerror', None) or error}"
