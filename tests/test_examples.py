"""The programs of examples/ run for a few steps on logical CPU devices, and train."""

import re
import sys
from pathlib import Path

import pytest
from helpers.demo import FORKED_HOSTS, forked_command
from helpers.forks import run_forked
from helpers.graphs import IS_TF2

EXAMPLES = Path(__file__).parents[1] / "examples"

# a stand-in with the names that the example uses; the real module belongs to another project
BATCH_ALLREDUCE = """
class BatchAllReduceAlgorithm:
    def batch_all_reduce(self, all_device_tensors):
        return self._do_batch_all_reduce(all_device_tensors)


def algorithm_from_params(params):
    raise AssertionError("not replaced")
"""
BENCHMARK = """
import batch_allreduce
import tensorflow as tf

tf1 = tf.compat.v1
tf1.disable_eager_execution()
rows = []
for k in range(3):
    with tf.device(f"/cpu:{k}"):
        rows.append([tf.constant([1.0 + k, 2.0]) + 0])
(first, _, last) = batch_allreduce.algorithm_from_params(None).batch_all_reduce(rows)
with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 3})) as session:
    print(session.run(first[0]), session.run(last[0]), last[0].device)
"""


def run(name, *arguments, folder):
    """Return what an example prints, run as ``python examples/NAME.py ARGUMENTS``."""
    done = run_forked((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), *map(str, arguments), folder=folder)
    assert done.status == 0, done.err[-3000:]
    return done.out + done.err


def losses(text):
    """Return the numbers with three digits after the point."""
    return [float(number) for number in re.findall(r"\b\d+\.\d{3}\b", text)]


@pytest.mark.tf2
def test_keras_trains_under_mirrored_strategy(tmp_path):
    out = run("keras_mirrored", "--devices", 3, "--epochs", 2, "--examples", 720, folder=tmp_path)
    first, second = losses(out[out.index("3 replicas") :])
    assert second < 0.9 * first


@pytest.mark.tf2
def test_a_loop_of_ones_own_keeps_replicas_equal(tmp_path):
    out = run("custom_loop", "--devices", 3, "--steps", 10, folder=tmp_path)
    first, last = losses(out[out.index("3 replicas") :])
    assert last < 0.5 * first
    assert "all replicas are equal" in out


def test_towers_train_with_a_sharded_optimizer(tmp_path):
    out = run("towers", "--devices", 3, "--steps", 25, folder=tmp_path)
    first, last = losses(out[out.index("3 towers") :])
    assert last < 0.7 * first
    assert "all towers are equal" in out


def test_embeddings_train_with_sparse_gradients(tmp_path):
    out = run("sparse_embeddings", "--devices", 3, "--steps", 60, folder=tmp_path)
    first, last = losses(out[out.index("3 towers") :])
    assert last < 0.85 * first
    rows, table = re.search(r"gradients: (\d+ \d+ \d+) of (\d+)", out).groups()
    assert 0 < max(map(int, rows.split())) < 0.01 * int(table)
    assert "all towers are equal" in out


def test_tensorpack_trains_a_resnet(tmp_path):
    if IS_TF2:
        pytest.importorskip("tf_keras")
    arguments = ("--devices", 2, "--steps", 2, "--blocks", 1, "--channels", 4, "--batch", 4)
    out = run("tensorpack_resnet", *arguments, folder=tmp_path)
    assert re.search(r"replica_drift: 0\b", out), out[-2000:]
    assert "Training has finished!" in out


def test_tf_cnn_benchmarks_gets_our_allreduce(tmp_path):
    (tmp_path / "batch_allreduce.py").write_text(BATCH_ALLREDUCE, encoding="utf-8")
    (tmp_path / "tf_cnn_benchmarks.py").write_text(BENCHMARK, encoding="utf-8")
    out = run("tf_cnn_benchmarks", str(tmp_path), folder=tmp_path)
    assert "[6. 6.] [6. 6.]" in out and "CPU:2" in out.upper()


def two_hosts(folder, *options, before="", launch=()):
    """Return the lines of the example's hosts; ``before`` is run before it."""
    program = before + (EXAMPLES / "two_hosts.py").read_text(encoding="utf-8")
    host = [sys.executable, "-c", program, "--devices", "2", "--steps", "30", *options]
    status, out, err = forked_command(folder, "launch", "-n", "2", *launch, "--", *host, code=FORKED_HOSTS)
    assert status == 0, out + err
    return out


def curve(out, host):
    return re.findall(rf"\[host {host}\] step (\d+): loss (\S+)", out)


KILLED = """
import os, tensorflow as tf
save = tf.compat.v1.train.Saver.save
def save_and_die(self, *args, **kwargs):
    first = not tf.train.latest_checkpoint("saved")
    save(self, *args, **kwargs)
    if first:
        os.kill(os.getpid(), 9)
tf.compat.v1.train.Saver.save = save_and_die
"""


def test_two_hosts_end_with_the_same_weights(tmp_path):
    """The chief is killed once it has saved its first checkpoint, after step 10."""
    once = two_hosts(tmp_path)
    assert len(set(re.findall(r"squares: (\S+)", once))) == 1 and once.count("squares: ") == 2
    for host in (0, 1):
        (_, first), *_, (_, last) = curve(once, host)
        assert float(last) < 0.8 * float(first)
    again = two_hosts(tmp_path, "--checkpoints", "saved", before=KILLED, launch=["--restarts", "2"])
    assert "[host 0] ended with exit status 137" in again and "restart 1 of 2" in again and "restart 2" not in again
    assert [step for step, _ in curve(again, 0)] == ["1", "10", "20", "30"]
    assert curve(again, 0) == curve(once, 0)
    assert set(re.findall(r"squares: (\S+)", again)) == set(re.findall(r"squares: (\S+)", once))


def test_algorithms_of_ones_own_are_run(tmp_path):
    out = run("algorithms", "--devices", 6, folder=tmp_path)
    assert out.count(": all towers have the sum\n") == 4


def test_every_example_begins_with_its_command_and_is_listed():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(programs) == 8
    for name in programs:
        head = (EXAMPLES / name).read_text(encoding="utf-8")[:800]
        assert f"python examples/{name}" in head and f"]({name})" in listed
