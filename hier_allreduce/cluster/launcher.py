"""All hosts of a job as processes on this machine: for trying things out, and for tests. Plain Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from queue import Queue
from typing import IO, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ..errors import ClusterError
from .liveness import free_addresses

_GRACE = 10.0  # seconds between asking a process to end and ending it
_END = b"\0" + os.urandom(16).hex().encode() + b"\n"  # no program says this


def launch(
    hosts: int, command: Sequence[str], write: Callable[[str], Any], addresses: Optional[Sequence[str]] = None
) -> int:
    """Run ``command`` once for each host and wait; when one fails, stop the others.

    Each gets its TF_CONFIG, which :meth:`hier_allreduce.Cluster.from_environment` reads. Not on Windows.

    Args:
        hosts: how many.
        command: the program and its arguments, the same for all.
        write: takes each line of their output and errors, with the host before it.
        addresses: as many as hosts; without them, free ports of loopback.

    Returns:
        0, or the exit status of the first that failed; 128 and the signal's number, as shells count, if that ended it.

    Raises:
        ClusterError: no hosts, a program that cannot be started, or Windows.
        Exception: what ``write`` raised; the hosts are stopped.
    """
    if hosts < 1:
        raise ClusterError(f"{hosts} hosts: expected 1 or more")
    if sys.platform == "win32":  # it has no groups of processes: what a host had started would live on
        raise ClusterError(
            "hosts cannot be started on Windows: use Linux, macOS or WSL, or start the program once for each host"
            " yourself, with its TF_CONFIG (docs/cluster.md)"
        )
    addresses = addresses or free_addresses(hosts)
    ended: Queue[Tuple[int, Union[int, Exception]]] = Queue()  # a host's exit status, or what ``write`` raised
    lines = threading.Lock()
    processes: List[subprocess.Popen] = []
    pipes: List[Tuple[IO[bytes], IO[bytes]]] = []
    with _exiting_by_signals():
        try:
            for task in range(hosts):
                pipes.append(_pipe())
                processes.append(_started(command, _environment(addresses, task), pipes[-1][1]))
            for task, (process, (output, end)) in enumerate(zip(processes, pipes)):
                said = threading.Event()  # all that the process itself had to say
                _thread(_pass_on, task, output, write, lines, said, ended)
                _thread(_wait, task, process, end, said, ended)
            for _ in processes:
                task, status = ended.get()
                if isinstance(status, Exception):
                    raise status
                if status:
                    with lines:
                        others = "; the others are stopped" if hosts > 1 else ""
                        write(f"[host {task}] ended with exit status {status}{others}\n")
                    return status
            return 0
        finally:
            _stop(processes)


@contextlib.contextmanager
def _exiting_by_signals() -> Iterator[None]:
    """While this lasts, what ends this process ends the hosts first: in sessions of their own, they would go on."""
    found = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
    numbers = [number for number in found if number and is_main and signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _environment(addresses: Sequence[str], task: int) -> Dict[str, str]:
    config = {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": task}}
    return {"PYTHONUNBUFFERED": "1", **os.environ, "TF_CONFIG": json.dumps(config)}


def _pipe() -> Tuple[IO[bytes], IO[bytes]]:
    """The end to read from and the end to write to, unbuffered."""
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb", 0)


def _started(command: Sequence[str], environment: Dict[str, str], output: IO[bytes]) -> subprocess.Popen:
    try:
        # a session of its own, so that what the program starts ends with it
        return subprocess.Popen(
            list(command), env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise ClusterError(f"{command[0]} cannot be started: {error.strerror}") from None


def _thread(function: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _pass_on(
    task: int, output: IO[bytes], write: Callable[[str], Any], lines: Any, said: threading.Event, ended: Any
) -> None:
    try:
        with output:
            for line in output:
                words, own_end, _ = line.partition(_END)
                if words:
                    with lines:
                        write(f"[host {task}] {words.decode(errors='replace').rstrip()}\n")
                if own_end:
                    said.set()
    except Exception as error:  # it is raised again where all hosts are waited for
        ended.put((task, error))
    finally:
        said.set()


def _wait(task: int, process: subprocess.Popen, end: IO[bytes], said: threading.Event, ended: Any) -> None:
    """Its last words are those before this mark; what it has started may keep the pipe open for longer."""
    status = process.wait()
    with contextlib.suppress(BrokenPipeError), end:  # nobody reads any more
        end.write(_END)
    said.wait()
    ended.put((task, 128 - status if status < 0 else status))


def _stop(processes: Sequence[subprocess.Popen]) -> None:
    """End the processes and whatever they have started."""
    if sys.platform == "win32":  # where none is started
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
