"""Jobs of several hosts for tests: real processes and servers on loopback, every wait bounded.

The processes are forked from one that has imported TensorFlow (see forks.py), and end with
their test, whatever it does.
"""

import contextlib

from helpers import cluster_child, forks, ports

SECONDS = cluster_child.SECONDS + 30  # for anything that should happen
TIMEOUT = 21.0  # of clusters in which a host dies or freezes; even a third of it is enough for a live host to answer


class Host:
    """The process of one host, and what it has sent to the test; ``main(*arguments, line)`` runs in it."""

    main = staticmethod(cluster_child.main)

    def __init__(self, *arguments):
        context = forks.context()
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=self.main, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def until(self, place):
        """Wait until the host has reached a place."""
        while True:
            message = self._receive(SECONDS)
            if message == ("at", place):
                return
            assert message[0] == "at", message

    def go_on(self):
        """Let a host that waits for the test go on, if it has not ended."""
        with contextlib.suppress(BrokenPipeError):
            self._line.send("go on")

    def end(self):
        """Return ``("facts", …)``, ``("error", text)`` or ``("died", exit status)``."""
        while True:
            message = self._receive(SECONDS)
            if message[0] != "at":
                return message

    def facts(self):
        """Return the host's facts; fail if it ended in another way."""
        kind, facts = self.end()
        assert kind == "facts", facts
        return facts

    def error(self):
        """Return the text of the host's error; fail if it ended in another way."""
        kind, text = self.end()
        assert kind == "error", text
        return text

    def _receive(self, seconds):
        if not self._line.poll(seconds):
            return "silent", f"nothing for {seconds} s"
        try:
            return self._line.recv()
        except EOFError:
            self.process.join(SECONDS)
            return "died", self.process.exitcode


@contextlib.contextmanager
def job(scenario, hosts, each=None, addresses=None, devices=2, timeout=30.0, **options):
    """Start a job; the hosts are killed at the end.

    Args:
        scenario: a function of cluster_child.
        hosts: the number of hosts.
        each: ``{task: options}`` for some hosts only; ``"cluster"`` in it are arguments of its Cluster.
        addresses: of the hosts; by default free ports of loopback.
        devices: of each host.
        timeout: of the cluster.
        options: the scenario's, for all hosts.
    """
    addresses = addresses or ports.free_addresses(hosts)
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
