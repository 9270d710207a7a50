"""``hier-allreduce demo``, and other programs that end with the command."""

import subprocess
import sys

from helpers.forks import Finished, run_forked

_RUN = "from hier_allreduce.cli import main; sys.exit(main(sys.argv[1:]))"


def demo(folder, *options, code="pass"):
    """Run the demo after ``code`` in a forked process: ``(exit status, output, errors)``."""
    return run_forked(f"import sys; {code}; {_RUN}", "demo", *options, folder=folder)


def cold_demo(folder, *options):
    """Run the demo as people do, in a process that imports everything itself: ``(exit status, output, errors)``."""
    command = [sys.executable, "-c", f"import sys; {_RUN}", "demo", *options]
    done = subprocess.run(command, cwd=str(folder), timeout=280, stdin=subprocess.DEVNULL, capture_output=True)
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())
