"""Python programs in forked processes: they start in 0.1 seconds, since TensorFlow is imported already.

    test process ──→ fork server: imports TensorFlow, does nothing else ──→ a process for each program
                                                                                     │ fork_hosts()
                                                                                     ▼
                                                        a process for each host that the program launches

A few tests start a cold process instead, as people do: an import that only works in a warm process would fail there.
"""

import faulthandler
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

SECONDS = 240  # a program that runs longer is ended; it says where it hung

_TESTS = str(Path(__file__).parents[1])


class Finished(NamedTuple):
    """The end of a program; ``out`` and ``err`` are text."""

    status: int
    out: str
    err: str


@functools.lru_cache(maxsize=1)
def context():
    """Return the multiprocessing context whose fork server has imported TensorFlow."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["helpers.cluster_child"])
    path = os.environ.get("PYTHONPATH")
    # the server looks for its modules there: it does not have this process's sys.path
    os.environ["PYTHONPATH"] = os.pathsep.join([_TESTS] + ([path] if path else []))
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return forking


def run_forked(program, *arguments, folder):
    """Run a program's text as ``python -c PROGRAM ARGUMENTS`` would, in ``folder``, without a keyboard."""
    with tempfile.TemporaryDirectory() as scratch:
        out, err = os.path.join(scratch, "out"), os.path.join(scratch, "err")
        process = context().Process(target=_child, args=(program, arguments, str(folder), dict(os.environ), out, err))
        process.start()
        process.join(SECONDS + 30)
        process.kill()
        process.join()
        texts = [Path(name).read_text(encoding="utf-8", errors="replace") for name in (out, err)]
        return Finished(process.exitcode, *texts)


def _child(program, arguments, folder, environment, out, err):
    for number, name, mode in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        file = os.open(name, mode | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)  # C++'s output goes there too
        os.close(file)
    os.environ.update(environment)
    os.chdir(folder)
    _begin(arguments)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(program, "<string>", "exec"), vars(main))
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _begin(arguments):
    """Give the process its arguments and a time limit, and Python the standard streams that the process has."""
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""


def fork_hosts():
    """Let ``launch`` fork its hosts from this process, which must not have used TensorFlow yet."""
    from hier_allreduce.cluster import launcher

    launcher._start_process = _start_host


def _start_host(command, environment, signals):
    faulthandler.cancel_dump_traceback_later()  # a host that was forked while it runs would wait for its thread
    try:
        return subprocess.Popen(
            command,
            preexec_fn=functools.partial(_host, command[1:], environment, signals),  # which never returns
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
    finally:
        faulthandler.dump_traceback_later(SECONDS, exit=True)


def _host(arguments, environment, signals):
    """Run ``-c PROGRAM …`` or ``-m MODULE …`` in a process that was forked, and end it."""
    os.closerange(3, 4096)  # one of them tells the parent that the process has started
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    os.environ.update(environment)
    option, program, *arguments = arguments
    _begin(arguments)
    status = 0
    try:
        if option == "-m":
            sys.modules.pop(program, None)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
