"""How the hosts of one job begin and end a session together.

::

    host 0   facts ──► its board                    steps …   "left by host 0" ──► board of host 1
    host 1   facts ──► its board   reads host 0's   steps …   "left by host 1" ──► board of host 0

What differs is an error on both, before the first step. A host that fails in a step says so on the others' boards.
"""

from __future__ import annotations

import functools
import json
import time
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set

from ..errors import ClusterError
from .kv_store import KeyValueStore
from .watchdog import START_AGAIN, Watchdog

POLL = 0.1  # seconds between two looks at hosts that are still starting
_LISTED = 5  # so many differences does an error name


class TimeLimits(NamedTuple):
    """Seconds: until a host that is gone is found out, for all hosts to be there, for one that is alive to come."""

    gone: float
    start: float
    stall: float


class Rendezvous:
    """One session's beginning and end, on all hosts.

    Attributes:
        steps: with the other hosts, that this one has begun; broadcasts are some too.
        moment: seconds to wait for the others' words after an error.
    """

    def __init__(
        self, hosts: Sequence[str], task: int, patience: TimeLimits, watch: Watchdog, board: KeyValueStore, number: int
    ):
        """Nothing is written or read yet.

        Args:
            hosts: the addresses of all hosts, by task.
            task: which of them this process is.
            patience: how long to wait for what.
            watch: over the hosts.
            board: of the hosts.
            number: so many sessions this process has had before.
        """
        self._hosts, self._task, self._patience = hosts, task, patience
        self._watch, self._board, self._number = watch, board, number
        self._others = [other for other in range(len(hosts)) if other != task]
        self._met: Set[int] = set()  # hosts that have answered once
        self._left = False
        self.steps = 0
        self.moment = patience.gone / 4

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Wait for all hosts; return if their facts are the same as these.

        Raises:
            ClusterError: a host's are not, one is missing, or this host's own server does not answer.
        """
        text = json.dumps(facts)
        self._put_up(text)
        end = time.monotonic() + self._patience.start
        mine, waiting = json.loads(text), list(self._others)
        while waiting:
            away = self._away(waiting)
            for task in [task for task in waiting if task not in away]:
                theirs = self._watch.call(functools.partial(self._board.read, task, self._topic("facts")), [task])
                if theirs is not None:
                    waiting.remove(task)
                    self._compare(task, mine, json.loads(theirs))
            told = self._said(self._topic("refused"))
            if told:
                self._refuse(told, self._met)
            if waiting and time.monotonic() > end:
                named = [f"host {t} ({self._hosts[t]}) {away.get(t, 'has not built its graph')}" for t in waiting]
                self._leave(self.moment, self._met)
                raise ClusterError(
                    f"after {self._patience.start:g} s not all hosts are there: {'; '.join(named)}. Start it, or"
                    " correct the list of hosts on every host"
                )
            time.sleep(POLL if waiting else 0)

    def _put_up(self, text: str) -> None:
        """Let the others read this host's facts; its server may have to start first, however short the start is."""
        end = time.monotonic() + max(self._patience.gone, self._patience.start)
        while not self._board.write(self._task, self._topic("facts"), text):
            if time.monotonic() > end:
                raise ClusterError(
                    f"this host's own server ({self._hosts[self._task]}) does not answer; start the process again"
                )
            time.sleep(POLL)

    def _compare(self, task: int, mine: Dict[str, Any], theirs: Dict[str, Any]) -> None:
        own = self._task
        if list(differences({**mine, "task": task}, theirs)):
            # it may wait at another address for this host, and never find out by itself
            self._write([task], "refused", self._difference(own, theirs, mine))
            # those who are late would wait for a host that is gone; if lists differ, nobody may ever be there
            late = self._others if mine["hosts"] == theirs["hosts"] else self._met
            self._refuse(self._difference(task, mine, theirs), late)

    def _difference(self, task: int, mine: Dict[str, Any], theirs: Dict[str, Any]) -> str:
        """What the host that ``mine`` is of has to say about host ``task``."""
        found = list(differences({**mine, "task": theirs["task"]}, theirs))
        if theirs["task"] != task:
            found.insert(0, f"it takes itself for host {theirs['task']}")
        more = [f"and {len(found) - _LISTED} more"] * (len(found) > _LISTED)
        return (
            f"host {task} ({self._hosts[task]}) differs from this host ({mine['task']}):"
            f" {'; '.join(found[:_LISTED] + more)}. All hosts must run the same program with the same settings, and the"
            " same SciPy if it plans from links"
        )

    def _refuse(self, words: str, hosts: Iterable[int]) -> None:
        self._leave(self._patience.gone, hosts)
        raise ClusterError(words)

    def tell(self, words: str) -> None:
        """Say to all others, for their :meth:`told`, why this host's step has failed."""
        self._write(self._others, "failed", f"host {self._task} ({self._hosts[self._task]}) {words}")

    def _write(self, hosts: Sequence[int], topic: str, words: str) -> None:
        """Put words up on other hosts' boards, again and again for a moment if one that lives is slow to take them."""
        untold, end = list(hosts), time.monotonic() + self.moment
        while untold:
            away = self._away(untold)
            untold = [t for t in untold if t not in away and not self._board.write(t, self._topic(topic), words)]
            if time.monotonic() > end:
                break
            time.sleep(POLL if untold else 0)

    def told(self, also_same: bool = False) -> str:
        """What another host has said for which this one's run cannot end; nothing if there is nothing.

        A host that has left in the same run may have been at the end of its data, as this one may be soon; with
        ``also_same``, when this one's run has failed, that is told too.
        """
        words = self._said(self._topic("failed"))
        for task in self._others:
            address, own = self._hosts[task], self.steps
            left = self._said(self._left_by(task))
            if not words and left is not None and int(left) < own + also_same:
                when, where = ("in", "still in it") if int(left) == own else ("after", f"in run {own}")
                words = (
                    f"host {task} ({address}) has left its session {when} run {left} with the other hosts (broadcasts"
                    f" count too), and this host is {where}: all must make the same steps, as many"
                )
        return f"{words}. {START_AGAIN}" if words else ""

    def left(self) -> List[int]:
        """The hosts that have said here that they leave."""
        return [task for task in self._others if self._said(self._left_by(task))]

    def leave_after_error(self) -> None:
        """Say that this host needs the others no more; wait a moment for those that are not lost to say so too."""
        self._leave(self.moment)

    def leave_at_end(self) -> None:
        """The same, with the patience that a host which saves or evaluates at the end asks for."""
        self._leave(self._patience.stall)

    def _leave(self, seconds: float, hosts: Optional[Iterable[int]] = None) -> None:
        """Tell ``hosts`` that this one leaves, and wait until they all have said so too, or have come and gone.

        They may still look at this process until then: one that ends early would be taken for the cause of what others
        are about to find.
        """
        if self._left:
            return
        self._left = True
        waiting = [task for task in self._others if task not in self._watch.lost] if hosts is None else list(hosts)
        untold, end = set(waiting), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            away = self._away(waiting)
            for task in untold - set(away):
                if self._board.write(task, self._left_by(self._task), str(self.steps)):
                    self._board.close(task)
                    untold.remove(task)
            settled = {task for task in waiting if task not in untold - set(away) and self._said(self._left_by(task))}
            waiting = [task for task in waiting if task not in settled and not (task in away and task in self._met)]
            time.sleep(POLL if waiting else 0)

    def close(self) -> None:
        """Close what is open on this host's server. Another host may be gone, and closing would wait for it."""
        self._board.close(self._task)

    def _said(self, topic: str) -> Optional[str]:
        """What another host has written here."""
        return self._board.read(self._task, topic)

    def _away(self, hosts: Sequence[int]) -> Dict[int, str]:
        found = self._watch.faults(hosts)
        self._met.update(set(hosts) - set(found))
        return found

    def _left_by(self, task: int) -> str:
        # by address: where lists differ, numbers do too
        return self._topic(f"left by {self._hosts[task]}")

    def _topic(self, name: str) -> str:
        return f"{name}/{self._number}"


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What two nested mappings do not have in common, in words."""
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        place = f"{path}, {key}" if path else str(key)
        if key not in mine or key not in theirs:
            value = mine.get(key, theirs.get(key))
            yield f"{place}: only {'there' if key in theirs else 'here'}" + f" ({value})" * isinstance(value, str)
        elif isinstance(mine[key], dict) and isinstance(theirs[key], dict):
            yield from differences(mine[key], theirs[key], place)
        elif mine[key] != theirs[key]:
            yield f"{place}: {theirs[key]} there, {mine[key]} here"
