"""The processes of a run: all that the program has started, also those that have left its session.

On Linux, orphans become children of this process, so that nobody is lost. Elsewhere an orphan is
found as long as it is in the program's process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import Any, List, Set

MERCY = 5.0  # seconds between SIGTERM and SIGKILL, and for the end after it
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h has this number


def adopt_orphans() -> Set[int]:
    """Become the parent of all orphans below; return the children that are there before."""
    if sys.platform == "linux":
        # An old C library may lack the call; then orphans are found by their process group only.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    import psutil  # an extra: `tune` has looked for it

    return {child.pid for child in psutil.Process().children(recursive=True)}


def end(process: Any, strangers: Set[int]) -> None:
    """End all processes of a run: SIGTERM, and SIGKILL after five seconds.

    Args:
        process: the program, in a process group of its own.
        strangers: the children of this process that are not of the run.
    """
    for ending in (signal.SIGTERM, signal.SIGKILL):
        for member in _members(process, strangers):
            with contextlib.suppress(OSError):
                os.kill(member, ending)
        # psutil.wait_procs would wait for zombies too, which nobody may reap in a container.
        deadline = time.monotonic() + MERCY
        while time.monotonic() < deadline:
            process.poll()
            if not _members(process, strangers):
                return
            time.sleep(0.02)


def _members(process: Any, strangers: Set[int]) -> List[int]:
    """Return the living processes of a run; adopted ones that have ended are reaped."""
    import psutil

    below = {child.pid for child in psutil.Process().children(recursive=True)} - strangers
    members = []
    for running in psutil.process_iter():
        # Any of them may end in between, and those of other users cannot be looked at.
        with contextlib.suppress(psutil.Error, OSError):
            is_member = running.pid in below or os.getpgid(running.pid) == process.pid
            has_ended = is_member and running.status() == psutil.STATUS_ZOMBIE
            if is_member and not has_ended:
                members.append(running.pid)
            if has_ended and running.pid != process.pid and running.ppid() == os.getpid():
                os.waitpid(running.pid, os.WNOHANG)
    return members
