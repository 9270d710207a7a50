"""Jobs of several hosts for tests: real processes and servers on loopback.

They end with their test.
"""

import contextlib
import functools
import itertools
import os
import re
import socket

from helpers import cluster_child, forks

SECONDS = cluster_child.SECONDS + 30  # for anything that should happen

# below the ports that Linux gives to outgoing connections; each worker of pytest-xdist has others
_WORKER = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 10) % 11
_PORTS = itertools.cycle(
    10000 + 2000 * _WORKER + (os.getpid() * 37 + k) % 2000 for k in range(2000)
)


def _is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_addresses(count):
    """Return ``count`` different loopback addresses.

    No port is drawn twice in some minutes, nor by two workers.
    """
    return [f"127.0.0.1:{port}" for port in itertools.islice(filter(_is_free, _PORTS), count)]


class Host:
    """The process of one host, and the messages that it has sent to the test."""

    def __init__(self, *arguments):
        context = forks.context()
        self._arguments = arguments
        self._line, theirs = context.Pipe()
        self.process = context.Process(
            target=cluster_child.main, args=(*arguments, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def kill(self):
        """End the process, and wait until it has ended."""
        self.process.kill()
        self.process.join(SECONDS)

    @contextlib.contextmanager
    def again(self):
        """Kill this host, and start another process that runs the same."""
        self.kill()
        other = Host(*self._arguments)
        try:
            yield other
        finally:
            other.kill()

    def receive(self, kind):
        """Return the content of the next message of a kind; fail if the host ends before it."""
        while True:
            found, content = self._message()
            if found == kind:
                return content
            assert found == "at", (found, content)

    next = functools.partialmethod(receive, "at")  # a point
    facts = functools.partialmethod(receive, "facts")
    error = functools.partialmethod(receive, "error")

    def until(self, point):
        """Wait until the host has reached a point."""
        while self.next() != point:
            pass

    def go_on(self):
        """Let a host that waits for the test go on, if it has not ended."""
        with contextlib.suppress(BrokenPipeError):
            self._line.send("go on")

    def _message(self):
        if not self._line.poll(SECONDS):
            return "silent", f"nothing for {SECONDS} s"
        try:
            return self._line.recv()
        except EOFError:
            self.process.join(SECONDS)
            return "died", self.process.exitcode


@contextlib.contextmanager
def job(scenario, hosts, each=None, devices=2, timeout=30.0, **options):
    """Run a scenario of cluster_child on some hosts, which are killed at the end.

    Args:
        each: ``{task: options}`` for some hosts only.
        devices: the number of towers of each host.
        timeout: of each host's Cluster.
        options: the scenario's, for all hosts; ``"cluster"`` has more arguments of their Cluster.
    """
    addresses = free_addresses(hosts)
    started = []
    try:
        for task in range(hosts):
            host_options = {**options, **(each or {}).get(task, {})}
            host_options.setdefault("towers", devices)
            arguments = {"hosts": addresses, "task": task, "timeout": timeout}
            arguments.update(host_options.pop("cluster", {}))
            started.append(Host(scenario, arguments, host_options))
        yield started
    finally:
        for host in started:
            host.kill()
