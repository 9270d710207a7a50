"""One host of trust.chaos: trains, saves, restores, and at times cuts its own connections.

It sends pairs: ``("at", place)`` on the way; ``("losses", …)``, ``("error", text)`` at the end. Under ``launch`` it
prints them, and one host dies once::

    hier-allreduce launch -n 2 --restarts 1 -- python -m trust.chaos_host FOLDER UPDATE HOST STEP
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time

import tensorflow as tf
from helpers.cluster_child import Job

from hier_allreduce import Cluster, HierAllreduceError

tf1 = tf.compat.v1
STEPS, SAVED_EVERY = 12, 3
SECONDS = 150  # a host that takes longer ends and prints where it was
_PACE = 0.02  # seconds between steps, so that a disturbance meets one of them


def main(arguments, options, line):
    """Train from the latest checkpoint in ``options["folder"]`` to the last step."""
    log = os.open(options["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)  # also what TensorFlow's C++ writes
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        line.send(("losses", train(Cluster(**arguments), options, line)))
    except (HierAllreduceError, tf.errors.OpError) as error:
        line.send(("error", f"{type(error).__name__}: {error}"))


def train(cluster, options, line):
    """Return the losses of the steps from ``options["first"]`` on."""
    first, losses = options["first"], []
    model = os.path.join(options["folder"], "model")
    with tf.Graph().as_default():
        job = Job(cluster, {"update": options["update"]})
        line.send(("at", "built"))
        time.sleep(options.get("late", 0.0))
        with cluster.session() as session:
            session.run(tf1.global_variables_initializer())
            if cluster.is_chief and first:
                line.send(("at", "restoring"))
                job.saver.restore(session, f"{model}-{first}")
                line.send(("at", "restored"))
            session.run(job.broadcast)
            if not first:
                session.run(job.copy)
            for step in range(first, STEPS):
                time.sleep(_PACE)
                if step == options.get("cut_at"):
                    threading.Timer(options["cut_after"], _cut).start()
                losses.append(float(session.run([job.loss, job.step], job.feed(step))[0]))
                line.send(("at", step))
                if cluster.is_chief and (step + 1) % SAVED_EVERY == 0:
                    line.send(("at", "saving"))
                    job.saver.save(session, model, step + 1)
                    line.send(("at", "saved"))
    return losses


def _cut():
    """Shut down all TCP connections of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.getpeername()  # a listening socket has none
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


class _Printed:
    """Prints what a host sends; kills the process when it has run a step for the first time."""

    def __init__(self, folder, step):
        self._killed, self._step = os.path.join(folder, "killed"), step

    def send(self, message):
        print(json.dumps(message), flush=True)
        if message == ("at", self._step) and not os.path.exists(self._killed):
            open(self._killed, "w", encoding="utf-8").close()
            os.kill(os.getpid(), signal.SIGKILL)


def launched(folder, update, who, step):
    """Train as a host of ``launch``; host ``who`` dies after a step of its first try."""
    cluster = Cluster.from_environment(devices_per_host=2, timeout=21.0)
    line = _Printed(folder, int(step) if cluster.task == int(who) else None)
    path = tf.train.latest_checkpoint(folder)
    options = {"folder": folder, "first": int(path.rpartition("-")[2]) if path else 0, "update": json.loads(update)}
    line.send(("from", options["first"]))
    line.send(("losses", train(cluster, options, line)))


if __name__ == "__main__":
    launched(*sys.argv[1:])
