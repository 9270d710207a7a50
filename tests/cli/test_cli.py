"""The command line where a shell hands it something unusual for its standard streams."""

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "hier_allreduce.cli"]


def run(redirected, *arguments):
    """What a shell gives back for the command with ``redirected`` behind it: exit status, output, errors."""
    done = subprocess.run(["sh", "-c", f'"$@" {redirected}', "sh", *COMMAND, *arguments], capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_full_disk_is_one_line():
    assert run("> /dev/full", "topo", "dgx-1v") == (
        2,
        "",
        "hier-allreduce topo: [Errno 28] No space left on device\n",
    )


def test_without_standard_streams_nothing_breaks():
    assert run(">&-", "topo", "dgx-1v") == (0, "", "")
    assert run("<&-", "topo", "-") == (2, "", "hier-allreduce topo: -: standard input is closed\n")


def test_auto_is_the_planners_own_choice():
    assert run("", "plan", "p3.8xlarge", "--algorithm", "auto") == run("", "plan", "p3.8xlarge")
