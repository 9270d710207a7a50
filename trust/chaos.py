"""Several hosts on loopback that are killed, frozen, late or cut off at random moments.

::

    round ─► 2 to 4 hosts train ─► disturbance ─► how every host ends ─► restart from the checkpoint ─► losses

Every survivor must end within the time limit, with an error that names the host; every checkpoint must be whole; and
after a restart the losses must be those of an undisturbed run.

::

    python -m trust.chaos --seconds 1800 --seed 1
    python -m trust.chaos --round 17 --seed 1         one round again
"""

import concurrent.futures
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter

import numpy as np
import tensorflow as tf
from helpers import clusters
from helpers.ports import free_addresses

from hier_allreduce.cluster import launch

from . import chaos_host
from .reporting import Finding, parse, report, until

TIMEOUT, START_TIMEOUT = 21.0, 30.0  # seconds, of each cluster; a third of it is enough for a busy machine to answer
_SLACK = 15.0  # seconds for a busy machine, on top of a time limit
_SECONDS = chaos_host.SECONDS + 30
DISTURBANCES = (
    "killed in a step",
    "killed while saving",
    "killed while restoring",
    "killed before the first step",
    "frozen in a step",
    "frozen for a moment",
    "cut off",
    "late",
    "killed under launch --restarts",
)
_starting = threading.Lock()


class Host(clusters.Host):
    """The process of one host."""

    main = staticmethod(chaos_host.main)

    def __init__(self, *arguments):
        with _starting:
            super().__init__(*arguments)
        self.ended, self.seconds = None, 0.0

    def until(self, place):
        """Wait until the host has reached a place; return False if it has ended before."""
        while not self.ended:
            message = self._receive(_SECONDS)
            if message == ("at", place):
                return True
            if message[0] != "at":
                self.ended = message
        return False

    def end(self, began):
        """Return ``("losses", …)``, ``("error", text)``, ``("died", status)`` or ``("silent", …)``; note when."""
        while not self.ended:
            message = self._receive(_SECONDS)
            self.ended = None if message[0] == "at" else message
        self.seconds = time.monotonic() - began
        return self.ended

    def send(self, number):
        """Send a signal to the process."""
        if self.process.is_alive():
            os.kill(self.process.pid, number)


def run_job(count, folder, update, disturb=None, each=None):
    """Start ``count`` hosts from the latest checkpoint; return the hosts, all ended, and the first step.

    Args:
        count: the number of hosts.
        folder: of the checkpoints.
        update: the update of the towers, or None for one written by hand.
        disturb: called with the hosts while they run; returns when the disturbance was.
        each: ``{task: options}`` of single hosts.
    """
    first, addresses, hosts = latest_step(folder), free_addresses(count), []
    try:
        for task in range(count):
            arguments = {"hosts": addresses, "task": task, "devices_per_host": 2}
            arguments.update(timeout=TIMEOUT, start_timeout=START_TIMEOUT)
            options = {"folder": folder, "first": first, "update": update, "log": f"{folder}/host{task}.log"}
            options.update((each or {}).get(task, {}))
            hosts.append(Host(arguments, options))
        began = (disturb(hosts) if disturb else None) or time.monotonic()
        for host in sorted(hosts, key=lambda host: host.ended is None):
            host.end(began)
    finally:
        for host in hosts:
            host.process.kill()
            host.process.join(_SECONDS)
    return hosts, first


def latest_step(folder):
    """Return the step of the latest checkpoint, 0 without one."""
    path = tf.train.latest_checkpoint(folder)
    return int(path.rpartition("-")[2]) if path else 0


def torn(folder):
    """Return why a checkpoint that is listed cannot be read in full, "" if all can."""
    state = tf.train.get_checkpoint_state(folder)
    for path in state.all_model_checkpoint_paths if state else ():
        try:
            reader = tf.train.load_checkpoint(path)
            for name in reader.get_variable_to_shape_map():
                reader.get_tensor(name)
        except Exception as error:
            return f"{path}: {type(error).__name__}: {error}"
    return ""


# ---- disturbances ----------------------------------------------------------------------------------


def _strike(rng, who, place, how, most=0.05):
    """Return a function that sends a signal to a host a moment after it has reached a place."""

    def disturb(hosts):
        if hosts[who].until(place):
            time.sleep(rng.uniform(0, most))
            hosts[who].send(how)
        began = time.monotonic()
        if how == signal.SIGSTOP:  # it would never end
            for host in hosts:
                if host is not hosts[who]:
                    host.end(began)
            hosts[who].send(signal.SIGKILL)
        return began

    return disturb


def _freeze_for_a_moment(rng, who, step):
    def disturb(hosts):
        if hosts[who].until(step):
            hosts[who].send(signal.SIGSTOP)
            time.sleep(rng.uniform(0.05, TIMEOUT / 20))
            hosts[who].send(signal.SIGCONT)

    return disturb


def disturbed(kind, rng, count, folder, update):
    """Run a job with a disturbance; return its hosts, the first step, and the host that ends, None if none has to."""
    who, step = rng.randrange(count), rng.randrange(chaos_host.STEPS - 1)
    if kind == "killed in a step":
        return (*run_job(count, folder, update, _strike(rng, who, step, signal.SIGKILL)), who)
    if kind == "frozen in a step":
        return (*run_job(count, folder, update, _strike(rng, who, step, signal.SIGSTOP)), who)
    if kind == "killed while saving":
        return (*run_job(count, folder, update, _strike(rng, 0, "saving", signal.SIGKILL, 0.03)), 0)
    if kind == "killed before the first step":
        return (*run_job(count, folder, update, _strike(rng, who, "built", signal.SIGKILL, 1.0)), who)
    if kind == "killed while restoring":
        run_job(count, folder, update, _strike(rng, who, chaos_host.SAVED_EVERY, signal.SIGKILL))
        place = "restoring" if latest_step(folder) else "built"
        return (*run_job(count, folder, update, _strike(rng, 0, place, signal.SIGKILL, 0.03)), 0)
    if kind == "frozen for a moment":
        return (*run_job(count, folder, update, _freeze_for_a_moment(rng, who, step)), None)
    if kind == "late":
        return (*run_job(count, folder, update, each={who: {"late": rng.uniform(0.5, 3)}}), None)
    cut = {"cut_at": step, "cut_after": rng.uniform(0, 0.1)}
    return (*run_job(count, folder, update, each={who: cut}), None)


def launched(rng, count, folder, update, expected, counts):
    """Let ``launch`` start the hosts again after one was killed; return what is wrong with the last try's losses."""
    who, step = str(rng.randrange(count)), str(rng.randrange(chaos_host.STEPS - 1))
    command, lines = [sys.executable, "-m", "trust.chaos_host", folder, json.dumps(update), who, step], []
    status = launch(count, command, lines.append, restarts=2)
    sent = re.findall(r'^\[host (\d)\] \["(from|losses)", (.*)\]$', "".join(lines), re.MULTILINE)
    last = {(int(host), kind): json.loads(text) for host, kind, text in sent}
    restarts = sum(line.startswith("all hosts are started again") for line in lines)
    counts["restarts by launch"] += restarts
    counts["  from a checkpoint"] += bool(last[0, "from"])
    faults = [f"status {status} after {restarts} restarts"] if (status, restarts) != (0, 1) else []
    for task in range(count):
        losses, wanted = last.get((task, "losses"), []), expected[task][last[task, "from"] :]
        if len(losses) != len(wanted) or not np.allclose(losses, wanted, rtol=1e-5):
            faults.append(f"host {task} has the losses {losses} instead of {wanted}")
    return faults


# ---- a round ---------------------------------------------------------------------------------------


class Chaos:
    """Rounds with the losses of undisturbed runs to compare with."""

    def __init__(self, seed):
        self._seed, self._undisturbed, self._lock = seed, {}, threading.Lock()

    def losses(self, count, update):
        """Return the losses of ``count`` hosts that nothing disturbs: one list for each host."""
        with self._lock:
            if (count, update) not in self._undisturbed:
                folder = tempfile.mkdtemp(prefix="chaos")
                hosts, _ = run_job(count, folder, update)
                shutil.rmtree(folder)
                if any(host.ended[0] != "losses" for host in hosts):
                    raise RuntimeError(f"an undisturbed run has failed: {[host.ended for host in hosts]}")
                self._undisturbed[count, update] = [host.ended[1] for host in hosts]
            return self._undisturbed[count, update]

    def round(self, number):
        """Run a round; return its counts and findings."""
        rng = random.Random(f"{self._seed} {number}")
        count, update = rng.randint(2, 4), rng.choice((None, "replicated", "main"))
        kind = DISTURBANCES[number % len(DISTURBANCES)]
        folder, counts = tempfile.mkdtemp(prefix="chaos"), Counter()
        try:
            counts["rounds"] += 1
            counts[f"  {kind}"] += 1
            faults = self._faults(kind, rng, count, folder, update, counts)
        except Exception:
            faults = [traceback.format_exc()]
        shutil.rmtree(folder, ignore_errors=True)
        place = f"round {number}, {count} hosts, update={update}, {kind}"
        return counts, [Finding(place, number, fault) for fault in faults]

    def _faults(self, kind, rng, count, folder, update, counts):
        """Return what is wrong with one round."""
        expected = self.losses(count, update)
        if "launch" in kind:
            return launched(rng, count, folder, update, expected, counts)
        hosts, first, who = disturbed(kind, rng, count, folder, update)
        faults = _wrong_losses(hosts, first, expected)
        limit = (START_TIMEOUT if "before" in kind else TIMEOUT) + _SLACK
        for task, host in enumerate(hosts):
            counts["hosts"] += 1
            if host.ended[0] == "silent" or (host.ended[0] == "died" and task != who):
                with open(f"{folder}/host{task}.log", encoding="utf-8", errors="replace") as log:
                    faults.append(f"host {task} {host.ended}\n{log.read()[-1000:]}")
            if host.ended[0] == "error" and task != who:
                faults += _wrong_error(host, who, kind, limit, counts)
        if kind in ("late", "frozen for a moment"):
            faults += [f"host {task}: {host.ended}" for task, host in enumerate(hosts) if host.ended[0] != "losses"]
        faults += [torn(folder)] if torn(folder) else []
        counts["checkpoints read in full"] += latest_step(folder) // chaos_host.SAVED_EVERY
        again, first = run_job(count, folder, update)
        counts["restarts"] += 1
        counts["  from a checkpoint"] += bool(first)
        ended = [f"after the restart: {host.ended}" for host in again if host.ended[0] != "losses"]
        return faults + ended + _wrong_losses(again, first, expected)


def _wrong_losses(hosts, first, expected):
    return [
        f"host {task} has the losses {host.ended[1]} from step {first} on instead of {expected[task][first:]}"
        for task, host in enumerate(hosts)
        if host.ended[0] == "losses" and not np.allclose(host.ended[1], expected[task][first:], rtol=1e-5)
    ]


def _wrong_error(host, who, kind, limit, counts):
    """Return what is wrong with the error of a survivor: too late, or it names no host or another one."""
    text = host.ended[1]
    counts["  that survived and ended with an error"] += 1
    counts["  whose error names the host that is the cause"] += f"host {who} (" in text
    faults = [f"took {host.seconds:.0f} s: {text}"] if host.seconds > limit else []
    if who is not None and not (text.startswith("ClusterError: ") and f"host {who} (" in text):
        faults.append(f"does not name host {who}: {text}")
    return faults


def main(argv=None):
    """Run rounds until the time is over, and print the table."""
    args = parse(
        __doc__, argv, 1800, lambda parser: parser.add_argument("--round", type=int, help="run this round only")
    )
    began, chaos = time.monotonic(), Chaos(args.seed)
    workers = args.processes if args.round is None else 1

    def work(first):
        numbers = until(args.seconds) if args.round is None else [args.round]
        return [chaos.round(number * workers + first) for number in numbers]

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        rounds = [each for some in pool.map(work, range(workers)) for each in some]
    counts, findings = sum((own for own, _ in rounds), Counter()), [each for _, found in rounds for each in found]
    rows = [*counts.items(), ("findings", len(findings))]
    again = f"python -m trust.chaos --seed {args.seed} --round"
    return report(args, began, rows, findings, lambda finding: f"{again} {finding.seed}")


if __name__ == "__main__":
    sys.exit(main())
