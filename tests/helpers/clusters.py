"""Jobs of several hosts for tests: real processes and servers on loopback, which end with their test."""

import contextlib
import functools
import itertools
import os
import re
import socket

from helpers import cluster_child, forks

SECONDS = cluster_child.SECONDS + 30  # for anything that should happen
TIMEOUT = 12.0  # of clusters in which a host dies or freezes; a live host answers within a sixth of it


# below the ports that Linux gives to outgoing connections, and others for each worker of pytest-xdist
_WORKER = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 10) % 11
_PORTS = itertools.cycle(10000 + 2000 * _WORKER + (os.getpid() * 37 + k) % 2000 for k in range(2000))


def _is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_addresses(count):
    """Return ``count`` different loopback addresses; no port is drawn twice in some minutes, nor by two workers."""
    return [f"127.0.0.1:{port}" for port in itertools.islice(filter(_is_free, _PORTS), count)]


class Host:
    """The process of one host, and the messages that it has sent to the test."""

    def __init__(self, *arguments):
        context = forks.context()
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=cluster_child.main, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def next(self):
        """Return the next point; fail if the host has ended."""
        message = self._receive()
        assert message[0] == "at", message
        return message[1]

    def until(self, point):
        """Wait until the host has reached a point."""
        while self.next() != point:
            pass

    def go_on(self):
        """Let a host that waits for the test go on, if it has not ended."""
        with contextlib.suppress(BrokenPipeError):
            self._line.send("go on")

    def end(self, kind):
        """Return the host's facts, or the text of its error; fail if it ended in another way."""
        message = self._receive()
        while message[0] == "at":
            message = self._receive()
        assert message[0] == kind, message
        return message[1]

    facts = functools.partialmethod(end, "facts")
    error = functools.partialmethod(end, "error")

    def _receive(self):
        if not self._line.poll(SECONDS):
            return "silent", f"nothing for {SECONDS} s"
        try:
            return self._line.recv()
        except EOFError:
            self.process.join(SECONDS)
            return "died", self.process.exitcode


@contextlib.contextmanager
def job(scenario, hosts, each=None, devices=2, timeout=30.0, **options):
    """Start a job; the hosts are killed at the end.

    Args:
        scenario: the name of a function of cluster_child.
        hosts: the number of hosts.
        each: ``{task: options}`` for some hosts only.
        devices: of each host.
        timeout: of the cluster.
        options: the scenario's, for all hosts; ``"cluster"`` has further arguments of their Cluster.
    """
    addresses = free_addresses(hosts)
    started = []
    try:
        for task in range(hosts):
            host_options = {**options, **(each or {}).get(task, {})}
            arguments = {"hosts": addresses, "task": task, "devices_per_host": devices, "timeout": timeout}
            arguments.update(host_options.pop("cluster", {}))
            started.append(Host(scenario, arguments, host_options))
        yield started
    finally:
        for host in started:
            host.process.kill()
            host.process.join(SECONDS)
