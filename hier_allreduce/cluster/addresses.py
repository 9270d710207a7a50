"""Addresses of hosts, ``"HOST:PORT"``: parsing, checking and finding them. No TensorFlow."""

from __future__ import annotations

import socket
import sys
from typing import List, Tuple

from ..errors import ClusterError


def split_address(address: str) -> Tuple[str, int]:
    """Split ``"10.0.0.1:2222"`` into ``("10.0.0.1", 2222)``; an IPv6 address is written in brackets.

    Raises:
        ClusterError: the port is missing or not between 1 and 65535, or the address is a URL.
    """
    host, colon, port = str(address).rpartition(":")
    if not (colon and host and "/" not in host and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ClusterError(f"{address!r} is not an address: expected HOST:PORT, such as '10.0.0.1:2222'")
    return host.strip("[]"), int(port)


def refuse_taken(address: str) -> None:
    """Check that a server can listen on the port of ``address``.

    Raises:
        ClusterError: another process listens on the port, or this user may not.
    """
    _, port = split_address(address)
    with socket.socket() as probe:
        # Connections of an earlier run may linger on the port. On Windows the option would let two processes listen.
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ClusterError(
                f"cannot listen on port {port} of this host ({address}): {error.strerror}; end the process that uses"
                " it (an earlier run?), or give this host another port in every host's list"
            ) from None


def free_addresses(count: int) -> List[str]:
    """Return ``count`` different loopback addresses whose ports were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()
