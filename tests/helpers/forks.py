"""Python programs in forked processes, which start in 0.1 seconds.

TensorFlow is imported already in the process that they are forked from.

test process ──→ fork server, which imports TensorFlow ──→ a process for each program or host
"""

import faulthandler
import functools
import multiprocessing
import os
import sys
import tempfile
import traceback
import types
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple
from unittest import mock

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
    forking.set_forkserver_preload(["helpers.cluster_child", "pytest"])
    path = os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")]))
    # the server looks for its modules there: it does not have this process's sys.path
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return forking


def run_forked(program, *arguments, folder):
    """Run a program's text in ``folder`` as ``python -c PROGRAM ARGUMENTS`` would.

    It cannot read a keyboard.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out, err = os.path.join(scratch, "out"), os.path.join(scratch, "err")
        process = context().Process(
            target=_child, args=(program, arguments, str(folder), dict(os.environ), out, err)
        )
        process.start()
        process.join(SECONDS + 30)
        process.kill()
        process.join()
        texts = [Path(name).read_text(encoding="utf-8", errors="replace") for name in (out, err)]
        return Finished(process.exitcode, *texts)


def _child(program, arguments, folder, environment, out, err):
    for number, name, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY),
        (2, err, os.O_WRONLY),
    ):
        file = os.open(name, mode | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)  # C++'s output goes there too
        os.close(file)
    os.environ.update(environment)
    os.chdir(folder)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = vars(sys)["__stdout__"] = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    vars(sys)["__stderr__"] = sys.stderr
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(program, "<string>", "exec"), vars(main))
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
