"""Free ports for tests: each pytest-xdist worker draws from its range."""

import itertools
import os
import re
import socket

# Below the ports that Linux gives to outgoing connections (32768 and above): none of those takes a drawn port.
FIRST, PER_WORKER, WORKERS = 10000, 2000, 11


def _range():
    """Return all ports of this worker, starting at another one in each process."""
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or WORKERS - 1)
    first = FIRST + PER_WORKER * (worker % WORKERS)
    start = os.getpid() * 37 % PER_WORKER
    return [first + (start + k) % PER_WORKER for k in range(PER_WORKER)]


_PORTS = itertools.cycle(_range())


def _is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_addresses(count):
    """Return ``count`` different loopback addresses; no port is drawn twice in some minutes, nor by two workers."""
    return [f"127.0.0.1:{port}" for port in itertools.islice(filter(_is_free, _PORTS), count)]
