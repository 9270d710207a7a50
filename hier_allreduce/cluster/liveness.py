"""A liveness probe for other hosts' TensorFlow servers, by TCP and HTTP/2 alone. No TensorFlow.

A gRPC server answers every new connection with its HTTP/2 settings. It does so from a thread of its own, whatever its
process computes at the time::

    host that trains, saves or evaluates             answers at once
    host whose process has ended                     refuses the connection
    host that is frozen, or whose machine is gone    stays silent
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Callable, Dict, Mapping, Sequence

from .addresses import split_address

# the client's connection preface, then an empty SETTINGS frame (RFC 7540, section 3.5)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

ALIVE = ""
GONE = "is not listening: its process ended or never started"
SILENT = "does not answer: its process is frozen, or its machine or network is down"


def faults(addresses: Mapping[int, str], seconds: float) -> Dict[int, str]:
    """Probe all hosts at once; return ``{task: fault}`` of those that are not alive.

    Args:
        addresses: ``{task: "host:port"}``.
        seconds: how long to wait for an answer.
    """
    states = dict.fromkeys(addresses, SILENT)

    def probe(task: int) -> None:
        states[task] = _probe(addresses[task], seconds)

    if sys.is_finalizing():  # an unclosed session is closed as the interpreter exits: no thread can start any more
        for task in addresses:
            probe(task)
    else:
        _in_threads(probe, list(addresses), seconds)
    return {task: states[task] for task in sorted(states) if states[task] != ALIVE}


def _in_threads(probe: Callable[[int], None], tasks: Sequence[int], seconds: float) -> None:
    # Looking up a host name has no time limit, so a thread that takes longer is abandoned.
    threads = [threading.Thread(target=probe, args=(task,), daemon=True) for task in tasks]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _probe(address: str, seconds: float) -> str:
    try:
        with socket.create_connection(split_address(address), seconds) as connection:
            connection.sendall(_PREFACE)
            return ALIVE if connection.recv(1) else GONE
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return GONE
    except (socket.timeout, TimeoutError):
        return SILENT
    except (OSError, UnicodeError) as error:  # an invalid host name is a UnicodeError
        return f"cannot be reached: {getattr(error, 'strerror', None) or error}"
