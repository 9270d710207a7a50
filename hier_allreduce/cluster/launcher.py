"""All hosts of a job as processes of this machine, for trials and tests. No TensorFlow.

::

    launch ─┬─► host 0, TF_CONFIG with index 0 ──► its lines, each after "[host 0] " ─┐
            └─► host 1, TF_CONFIG with index 1 ──► its lines, each after "[host 1] " ─┴─► write

When one host fails, the others are stopped, with all processes that they have started. With ``restarts``, all hosts are
then started again: TensorFlow cannot replace a host of a running job.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from queue import Queue
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ..errors import ClusterError
from .addresses import free_addresses
from .polling import POLL

_GRACE = 10.0  # seconds between asking a process to end and killing it
_End = Tuple[int, Union[int, Exception]]  # a host, and its exit status or the exception that ``write`` raised
_PIPE_BYTES = 1 << 20  # at least what a pipe holds: Linux lets ordinary users have no larger one


def launch(hosts: int, command: Sequence[str], write: Callable[[str], Any], restarts: int = 0) -> int:
    """Run ``command`` once for each host, on free ports of loopback, and wait; when one fails, stop the others.

    Each gets its TF_CONFIG, which :meth:`hier_allreduce.Cluster.from_environment` reads. Not on Windows.

    Args:
        hosts: number of hosts.
        command: the program and its arguments, the same for all.
        write: receives each line of their output and errors, after the host's number.
        restarts: how often all hosts are started again after one has failed. Programs restore their last checkpoint.

    Returns:
        0, or the exit status of the first host that failed in the last try: as in shells, 128 plus the number of the
        signal that ended it.

    Raises:
        ClusterError: no hosts, a program that cannot be started, or Windows.
        Exception: what ``write`` raised; the hosts are stopped.
    """
    if hosts < 1:
        raise ClusterError(f"{hosts} hosts: expected 1 or more")
    if sys.platform == "win32":  # without process groups, what a host has started would live on
        raise ClusterError(
            "hosts cannot be started on Windows: use Linux, macOS or WSL, or start the program once for each host,"
            """ with TF_CONFIG='{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": n}}'"""
        )
    lock = threading.Lock()

    def write_line(text: str) -> None:
        with lock:
            write(text)

    with _exiting_by_signals():
        status = _run(hosts, command, write_line)
        for number in range(1, restarts + 1):
            if status:
                write_line(f"all hosts are started again: restart {number} of {restarts}\n")
                status = _run(hosts, command, write_line)
        return status


def _run(hosts: int, command: Sequence[str], write_line: Callable[[str], None]) -> int:
    """Run the hosts once; return 0, or the exit status of the first one that failed."""
    addresses = free_addresses(hosts)
    ends: Queue[_End] = Queue()
    processes: List[_HostProcess] = []
    try:
        with _holding_signals() as before:
            for task in range(hosts):
                started = _start_process(command, _environment(addresses, task), before)
                processes.append(_HostProcess(task, started))
        for process in processes:
            threading.Thread(target=process.pump, args=(write_line, ends), daemon=True).start()
        for _ in processes:
            task, result = ends.get()
            if isinstance(result, Exception):
                raise result
            if result:
                others = "; the others are stopped" if hosts > 1 else ""
                write_line(f"[host {task}] ended with exit status {result}{others}\n")
                return result
        return 0
    finally:
        _stop(processes)


class _HostProcess:
    """The process of one host, and the pipe with its output."""

    def __init__(self, task: int, process: subprocess.Popen):
        assert process.stdout is not None
        self._task, self._process, self._pipe = task, process, process.stdout
        self._line = b""  # the beginning of a line whose end has not been read yet

    def pump(self, write_line: Callable[[str], None], ends: Queue[_End]) -> None:
        """Pass the output on line by line, and report the process's end once all its lines are out."""
        try:
            with self._pipe:
                while self._process.poll() is None and self._pass_on(write_line, POLL):
                    pass
                status = self._process.wait()
                # What the process wrote is in the pipe now, which one read empties.
                more = self._pass_on(write_line, 0.0)
                if self._line:
                    write_line(self._marked(self._line))
                    self._line = b""
                ends.put((self._task, 128 - status if status < 0 else status))
                while more:  # what it has started may hold the pipe open for longer
                    more = self._pass_on(write_line, None)
        except Exception as error:  # raised again in launch()
            ends.put((self._task, error))

    def _pass_on(self, write_line: Callable[[str], None], timeout: Optional[float]) -> bool:
        """Read once, if there is output within ``timeout`` seconds; return False at its end."""
        if not select.select([self._pipe], [], [], timeout)[0]:
            return True
        chunk = self._pipe.read(_PIPE_BYTES)
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            write_line(self._marked(line))
        return bool(chunk)

    def _marked(self, line: bytes) -> str:
        return f"[host {self._task}] {line.decode(errors='replace').rstrip()}\n"

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and to all that it has started."""
        if sys.platform == "win32":  # launch raises an error there
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, for ``seconds`` at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


@contextlib.contextmanager
def _exiting_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit, which stops the hosts."""
    # Otherwise the hosts, which are in sessions of their own, would live on.
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    is_main = threading.current_thread() is threading.main_thread()  # other threads cannot set handlers
    numbers = [getattr(signal, name) for name in names if is_main]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _holding_signals() -> Iterator[Any]:
    """Hold signals back; yield the mask of before. A host that is started but not yet in the list would live on."""
    if sys.platform == "win32":  # launch raises an error there
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(addresses: Sequence[str], task: int) -> Dict[str, str]:
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": task}}
    return {"PYTHONUNBUFFERED": "1", **os.environ, "TF_CONFIG": json.dumps(config)}


def _start_process(command: Sequence[str], environment: Dict[str, str], signals: Any) -> subprocess.Popen:
    def take_signals() -> None:  # the process would inherit that they are held back
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)

    try:
        return subprocess.Popen(
            list(command),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            preexec_fn=take_signals,
            start_new_session=True,  # a process group of its own, so that what the program starts ends with it
        )
    except OSError as error:
        raise ClusterError(f"{command[0]} cannot be started: {error.strerror}") from None


def _stop(processes: Sequence[_HostProcess]) -> None:
    """End the processes and all that they have started."""
    if sys.platform == "win32":  # where none is started
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            process.signal_group(number)
        for process in processes:
            process.wait(_GRACE)
