"""``hier-allreduce demo`` in a process of its own."""

import subprocess
import sys


def demo(folder, *options, code="pass"):
    """Run it after ``code``; (exit status, what it printed, what it complained about)."""
    program = f"import sys; {code}; from hier_allreduce.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "demo", *options]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=str(folder), timeout=280, **pipes)
    return done.returncode, done.stdout.decode(), done.stderr.decode()
