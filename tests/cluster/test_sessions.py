"""What the sessions of two hosts compare before they run, as programs of users see it."""

import os
from concurrent import futures

from helpers.clusters import free_addresses
from helpers.forks import context, run_forked

CLUSTER = """
import sys
import tensorflow as tf
from hier_allreduce import Cluster, ClusterError, allreduce_grads

tf1 = tf.compat.v1
tf1.disable_eager_execution()
devices = ["/cpu:0", "/cpu:1"]
cluster = Cluster(sys.argv[2:], int(sys.argv[1]))
config = tf1.ConfigProto(device_count={"CPU": len(devices)})
own = f"./host{cluster.task}"
"""

TRAINING = """
w = tf1.get_variable("w", initializer=[1.0, 2.0], use_resource=True)
x = tf1.placeholder_with_default([1.0, 2.0], [2])
rows = allreduce_grads([[x], [x]], devices, cluster=cluster)
trained = tf.identity(tf1.assign_add(w, rows[1][0]), name="trained")
saver = tf1.train.Saver()
"""


def printed(program, folder):
    """Run the text of a program on two hosts; return what each has printed."""
    context()  # Threads would start one fork server each.
    addresses = free_addresses(2)

    def host(task):
        finished = run_forked(CLUSTER + program, str(task), *addresses, folder=folder)
        assert finished.status == 0, finished.err
        return finished.out.strip()

    with futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(host, range(2)))


def test_another_number_of_variables_is_an_error_before_the_first_step(tmp_path):
    program = """
if cluster.task == 1:
    tf1.get_variable("extra", [3])
try:
    cluster.session(config=config)
except ClusterError as error:
    print(error)
"""
    error, other = printed(TRAINING + program, tmp_path)
    assert error.startswith("host 1 (127.0.0.1:"), error
    words = "trainable variables to compare"
    assert f"{words}: 2 there; {words}: 1 here" in error, error
    assert f"{words}: 1 there; {words}: 2 here" in other, other


def test_a_step_may_run_before_any_variable_has_a_value(tmp_path):
    program = """
with cluster.session(config=config) as session:
    print(session.run(rows[1][0]))
"""
    assert printed(TRAINING + program, tmp_path) == ["[4. 8.]"] * 2


def test_a_host_that_has_waited_in_vain_may_try_again(tmp_path):
    os.mkfifo(str(tmp_path / "tried"))
    impatient = """
options = {"timeout": 6.0, "start_timeout": 0.1, "stall_timeout": 30.0}
cluster = Cluster(cluster.hosts, cluster.task, **options)
"""
    program = """
if cluster.task == 1:
    open("tried").read()
tries = []
while not tries or "not all hosts are there" in tries[-1]:
    try:
        with cluster.session(config=config) as session:
            tries.append(str(session.run(rows[1][0])))
    except ClusterError as error:
        tries.append(str(error))
        if len(tries) == 1 and cluster.task == 0:
            open("tried", "w").close()
print(tries[-1])
"""
    assert printed(impatient + TRAINING + program, tmp_path) == ["[4. 8.]"] * 2


def test_a_variable_made_after_the_first_session_is_compared_in_the_next_one(tmp_path):
    program = """
with cluster.session(config=config) as session:
    session.run(w.initializer)
    session.run(trained)
late = tf1.get_variable("late", initializer=float(cluster.task))
try:
    with cluster.session(config=config) as session:
        session.run([w.initializer, late.initializer])
        session.run(trained)
except ClusterError as error:
    print(error)
"""
    for error in printed(TRAINING + program, tmp_path):
        words = "after 0 steps the hosts' weights are different: 1 of 2 variables"
        assert error.startswith(words), error
        assert "late among them" in error, error


def test_a_finalized_graph_without_an_all_reduce_can_run(tmp_path):
    program = """
with tf.Graph().as_default() as evaluation:
    v = tf1.get_variable("v", initializer=1.5)
    evaluation.finalize()
with cluster.session(evaluation, config) as session:
    session.run(v.initializer)
    print(session.run(v))
"""
    assert printed(program, tmp_path) == ["1.5"] * 2


def test_a_graph_that_was_trained_and_imported_trains_on(tmp_path):
    """In the same process, and in another one that adds an all-reduce, which gets a new number."""
    program = """
with cluster.session(config=config) as session:
    session.run(w.initializer)
    print(session.run(trained))
    saver.save(session, own, write_state=False)
with tf.Graph().as_default():
    saver = tf1.train.import_meta_graph(own + ".meta")
    with cluster.session(config=config) as session:
        saver.restore(session, own)
        print(session.run("trained:0"))
"""
    assert printed(TRAINING + program, tmp_path) == ["[ 5. 10.]\n[ 9. 18.]"] * 2
    program = """
saver = tf1.train.import_meta_graph(own + ".meta")
y = tf1.placeholder_with_default([1.0, 2.0, 3.0], [3])
more = allreduce_grads([[y], [y]], devices, cluster=cluster)
with cluster.session(config=config) as session:
    saver.restore(session, own)
    print(*session.run(["trained:0", more[0][0]]))
"""
    assert printed(program, tmp_path) == ["[ 9. 18.] [ 4.  8. 12.]"] * 2
