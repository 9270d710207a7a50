"""The protocol by which the hosts of one job begin and end a session together.

::

    host 0   publish facts ─┐                     ┌─ steps … ─ announce departure ─┐
                            ├─ compare all facts ─┤                                ├─ wait for the others' departure
    host 1   publish facts ─┘                     └─ steps … ─ announce departure ─┘

A difference is an error on both hosts, before the first step. A host that fails in a step reports that to the others.
Hosts talk through entries of their key-value stores; S is the number of the session in its process::

    key                  on whose server    put there by                     text
    facts/S              its own            every host                       its facts, as JSON
    refused/S            another host's     a host whose facts differ        the difference, for an error
    failed/S             all others'        a host whose step has failed     the reason, for an error
    left by ADDRESS/S    all others'        a host that leaves its session   the number of steps it has begun, and
                                                                             why it cannot go on, "" at its end
"""

from __future__ import annotations

import functools
import json
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set

from ..errors import ClusterError
from .kv_store import KeyValueStore
from .polling import attempts
from .watchdog import Watchdog

_LISTED = 5  # differences that an error message lists
_FACTS, _REFUSED, _FAILED = "facts", "refused", "failed"


class _Departure(NamedTuple):
    """What a host announces when it leaves its session."""

    steps: int  # that it has begun
    cause: str  # which other host made it leave; empty if none did


class Rendezvous:
    """The start and the end of one session on all hosts.

    Attributes:
        steps: number of steps with the other hosts that this host has begun since they met; broadcasts count too.
        grace: seconds to wait for the other hosts' messages after an error.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        task: int,
        start_timeout: float,
        watchdog: Watchdog,
        kv_store: KeyValueStore,
        session: int,
    ):
        """Note the arguments; nothing is exchanged yet.

        Args:
            hosts: the addresses of all hosts, by task.
            task: the index of this process.
            start_timeout: seconds to wait for all hosts to join.
            watchdog: probes the other hosts; its time limits hold for other waits.
            kv_store: the stores of all hosts.
            session: number of sessions that this process has had before, the same on all hosts.
        """
        self._hosts, self._task, self._start_timeout, self._watchdog = hosts, task, start_timeout, watchdog
        self._kv_store, self._session = kv_store, session
        self._others = [other for other in range(len(hosts)) if other != task]
        self._answered: Set[int] = set()  # hosts that have been alive at least once
        self._leaving, self._cause = False, ""
        self.steps = -1  # the first one, in which the hosts only meet, does not count
        self.grace = watchdog.timeout / 4

    def barrier(self, facts: Mapping[str, Any]) -> None:
        """Wait until all hosts have published their facts, and check that these are equal.

        Raises:
            ClusterError: a host's facts differ, a host is missing, or this host's own server does not answer.
        """
        text = json.dumps(facts)
        self._publish(text)
        mine, waiting = json.loads(text), list(self._others)
        for _ in attempts(self._start_timeout):
            unreachable = self._unreachable(waiting)
            for task in [task for task in waiting if task not in unreachable]:
                theirs = self._watchdog.call(functools.partial(self._get, task, _FACTS), [task])
                if theirs is not None:
                    waiting.remove(task)
                    self._compare(task, mine, json.loads(theirs))
            refusal = self._get(self._task, _REFUSED)
            if refusal:
                self._refuse(refusal, self._answered)
            if not waiting:
                return
        missing = [f"{self._name(task)} {unreachable.get(task, 'has not built its graph')}" for task in waiting]
        self._leave(self.grace, self._answered)
        raise ClusterError(
            f"after {self._start_timeout:g} s not all hosts are there: {'; '.join(missing)}. Start it, or correct the"
            " list of hosts on every host"
        )

    def _publish(self, text: str) -> None:
        """Publish this host's facts. Its server may have to start first, however short ``start_timeout`` is."""
        for _ in attempts(max(self._watchdog.timeout, self._start_timeout)):
            if self._put(self._task, _FACTS, text):
                return
        raise ClusterError(
            f"this host's own server ({self._hosts[self._task]}) does not answer; start the process again"
        )

    def _compare(self, task: int, mine: Dict[str, Any], theirs: Dict[str, Any]) -> None:
        if not list(differences({**mine, "task": task}, theirs)):
            return
        # That host may wait for this one at another address, and never detect the difference by itself.
        refusal = self._difference(self._task, theirs, mine)
        self._send([task], _REFUSED, refusal)
        # Late hosts would otherwise wait for a host that is gone. But if the lists differ, some may never come.
        late = self._others if mine["hosts"] == theirs["hosts"] else self._answered
        self._refuse(self._difference(task, mine, theirs), late)

    def _difference(self, task: int, mine: Dict[str, Any], theirs: Dict[str, Any]) -> str:
        """Return the error message of the host with the facts ``mine`` about host ``task``."""
        lines = list(differences({**mine, "task": theirs["task"]}, theirs))
        if theirs["task"] != task:
            lines.insert(0, f"it was started as host {theirs['task']}")
        if len(lines) > _LISTED:
            lines[_LISTED:] = [f"and {len(lines) - _LISTED} more"]
        return (
            f"{self._name(task)} differs from this host ({mine['task']}): {'; '.join(lines)}. All hosts must run the"
            " same program with the same settings, and the same SciPy if it plans from links"
        )

    def _refuse(self, message: str, hosts: Iterable[int]) -> None:
        self._leave(self._watchdog.timeout, hosts)
        raise ClusterError(message)

    def report_failure(self, reason: str) -> None:
        """Tell all other hosts why this host's step has failed; they read it by :meth:`peer_failure`."""
        self._send(self._others, _FAILED, f"{self._name(self._task)} {reason}")

    def _send(self, tasks: Sequence[int], topic: str, text: str) -> None:
        """Put a message on other hosts' servers; a live one may be slow to take it."""
        pending = list(tasks)
        for _ in attempts(self.grace):
            lost = self._unreachable(pending)
            pending = [task for task in pending if task not in lost and not self._put(task, topic, text)]
            if not pending:
                return

    def _put(self, task: int, topic: str, text: str) -> bool:
        return self._kv_store.put(task, f"{topic}/{self._session}", text)

    def _get(self, task: int, topic: str) -> Optional[str]:
        return self._kv_store.get(task, f"{topic}/{self._session}")

    def peer_failure(self, step_failed: bool = False) -> str:
        """Return why the current step cannot complete, as another host has reported it; empty if none has.

        Args:
            step_failed: whether this host's step has failed. Then a host that left during the same step counts too;
                else that host may have reached the end of its data, as this one may do soon.
        """
        return self._get(self._task, _FAILED) or next(self._departure_reasons(step_failed), "")

    def _departure_reasons(self, step_failed: bool) -> Iterator[str]:
        departures = self._departures()
        # A host that left because of another one is not the cause, and knows it, however late this host is.
        yield from (departure.cause for departure in departures.values() if departure.cause)
        for task, (left_after, _) in departures.items():
            if left_after > self.steps or (left_after == self.steps and not step_failed):
                continue
            when, where = ("in", "still in it") if left_after == self.steps else ("after", f"in run {self.steps}")
            yield (
                f"{self._name(task)} has left its session {when} run {left_after} with the other hosts (broadcasts"
                f" count too), and this host is {where}: all hosts must run the same number of steps"
            )

    def departed(self) -> List[int]:
        """Return the hosts that have announced to this one that they leave."""
        return list(self._departures())

    def _departures(self) -> Dict[int, _Departure]:
        # by address: hosts whose lists differ number each other differently
        texts = {task: self._get(self._task, f"left by {self._hosts[task]}") for task in self._others}
        return {task: _Departure(*json.loads(text)) for task, text in texts.items() if text is not None}

    def _announce_departure(self, task: int) -> bool:
        """Tell a host that this one leaves; return False if its server does not answer."""
        departure = json.dumps(_Departure(self.steps, self._cause))
        told = self._put(task, f"left by {self._hosts[self._task]}", departure)
        if told:
            self._kv_store.close(task)
        return told

    def leave_after_error(self, cause: str) -> None:
        """Announce that this host leaves; wait a moment for the hosts that are not lost to do so too.

        Args:
            cause: which other host made it leave, for the errors of the others; empty if none did.
        """
        self._cause = cause
        self._leave(self.grace)

    def leave_at_end(self) -> None:
        """Announce that this host leaves; wait for the others as long as saving or evaluating may take them."""
        self._leave(self._watchdog.stall)

    def _leave(self, seconds: float, hosts: Optional[Iterable[int]] = None) -> None:
        """Announce to ``hosts`` that this one leaves, and wait until they have left too.

        A host that has answered before and is gone counts as one that has left. The hosts may probe this process until
        then: if it ended early, they would take it for the cause of what they are about to detect.
        """
        if self._leaving:
            return
        self._leaving = True
        waiting = [task for task in self._others if task not in self._watchdog.lost] if hosts is None else list(hosts)
        untold = set(waiting)
        for _ in attempts(seconds):
            unreachable = set(self._unreachable(waiting))
            untold -= {task for task in untold - unreachable if self._announce_departure(task)}
            left = set(self.departed()) - (untold - unreachable)
            settled = left | (unreachable & self._answered)
            waiting = [task for task in waiting if task not in settled]
            if not waiting:
                return

    def close(self) -> None:
        """Close what is open on this host's own server."""
        # Not on other servers: closing a session there would wait for a host that may be gone.
        self._kv_store.close(self._task)

    def _unreachable(self, hosts: Sequence[int]) -> Dict[int, str]:
        faults = self._watchdog.faults(hosts)
        self._answered.update(set(hosts) - set(faults))
        return faults

    def _name(self, task: int) -> str:
        return f"host {task} ({self._hosts[task]})"


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield ``"PATH, KEY: VALUE there, VALUE here"`` for each entry in which two mappings differ."""
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        place = f"{path}, {key}" if path else str(key)
        if key not in mine or key not in theirs:
            value = mine.get(key, theirs.get(key))
            shown = f" ({value})" if isinstance(value, str) else ""
            yield f"{place}: only {'there' if key in theirs else 'here'}{shown}"
        elif isinstance(mine[key], dict) and isinstance(theirs[key], dict):
            yield from differences(mine[key], theirs[key], place)
        elif mine[key] != theirs[key]:
            yield f"{place}: {theirs[key]} there, {mine[key]} here"
