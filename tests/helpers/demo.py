"""``hier-allreduce demo`` and other commands in processes of their own."""

import subprocess
import sys

from helpers.forks import Finished, run_forked

FORKED_HOSTS = "from helpers import forks; forks.fork_hosts()"  # code before a command that launches hosts

_RUN = "from hier_allreduce.cli import main; sys.exit(main(sys.argv[1:]))"


def forked_command(folder, *arguments, code="pass"):
    """Run a command after ``code`` in a forked process: ``(exit status, output, errors)``."""
    return run_forked(f"import sys; {code}; {_RUN}", *arguments, folder=folder)


def demo(folder, *options, code="pass"):
    """Run the demo after ``code`` in a forked process: ``(exit status, output, errors)``."""
    return forked_command(folder, "demo", *options, code=code)


def cold_demo(folder, *options, code="pass"):
    """Run the demo after ``code`` in a process that imports everything itself: ``(exit status, output, errors)``."""
    command = [sys.executable, "-c", f"import sys\n{code}\n{_RUN}", "demo", *options]
    done = subprocess.run(command, cwd=str(folder), timeout=280, stdin=subprocess.DEVNULL, capture_output=True)
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())
