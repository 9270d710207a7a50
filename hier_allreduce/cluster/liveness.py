"""Whether other hosts' TensorFlow servers are alive, by TCP and HTTP/2 alone; no TensorFlow here.

A gRPC server greets every connection with its HTTP/2 settings, from a thread of its own, whatever its process computes
at the time. So a host that trains, saves or evaluates answers at once; one whose process has ended refuses the
connection; one that is frozen, or whose machine is gone, stays silent.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Callable, Dict, List, Mapping, Sequence, Tuple

from ..errors import ClusterError

# the client's half of HTTP/2's greeting: the preface, then an empty SETTINGS frame (RFC 7540, section 3.5)
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"

ALIVE = ""
GONE = "has no process that listens: it ended, or never started"
SILENT = "does not answer: its process is frozen, or its machine or network is down"


def split_address(address: str) -> Tuple[str, int]:
    """``"10.0.0.1:2222"`` → ``("10.0.0.1", 2222)``; an IPv6 address stands in brackets.

    Raises:
        ClusterError: there is no port, or none between 1 and 65535.
    """
    host, colon, port = str(address).rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterError(f"{address!r} is not an address: expected HOST:PORT, such as '10.0.0.1:2222'")
    return host.strip("[]"), int(port)


def faults(addresses: Mapping[int, str], seconds: float) -> Dict[int, str]:
    """Which hosts are not alive: ``{task: what is wrong with it}``, asked all at once.

    Args:
        addresses: ``{task: "host:port"}``.
        seconds: how long an answer may take.
    """
    found = dict.fromkeys(addresses, SILENT)

    def ask(task: int) -> None:
        found[task] = _fault(addresses[task], seconds)

    if sys.is_finalizing():  # a session is closed that nobody closed before: no other thread runs any more
        for task in addresses:
            ask(task)
    else:
        _at_once(ask, list(addresses), seconds)
    return {task: found[task] for task in sorted(found) if found[task] != ALIVE}


def _at_once(ask: Callable[[int], None], tasks: Sequence[int], seconds: float) -> None:
    # looking up a name has no time limit: that thread is left to itself
    asking = [threading.Thread(target=ask, args=(task,), daemon=True) for task in tasks]
    end = time.monotonic() + seconds
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(max(0.0, end - time.monotonic()))


def _fault(address: str, seconds: float) -> str:
    try:
        with socket.create_connection(split_address(address), seconds) as connection:
            connection.sendall(_GREETING)
            return ALIVE if connection.recv(1) else GONE
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return GONE
    except (socket.timeout, TimeoutError):
        return SILENT
    except (OSError, UnicodeError) as error:  # a name that is none is a UnicodeError
        return f"cannot be reached: {getattr(error, 'strerror', None) or error}"


def refuse_taken(address: str) -> None:
    """Check that a server can listen on ``address``'s port.

    Raises:
        ClusterError: another process listens there, or the port is not for this user.
    """
    _, port = split_address(address)
    with socket.socket() as probe:
        if sys.platform != "win32":  # there it would let two processes listen
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection of an earlier run may linger
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"port {port} of this host ({address}) cannot be listened on: {error.strerror}; end the process that"
                " has it (an earlier run?), or give this host another port in every host's list"
            ) from None


def free_addresses(count: int) -> List[str]:
    """``count`` different addresses of this machine on which nobody listened a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()
