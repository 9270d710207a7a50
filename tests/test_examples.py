"""The programs of examples/ run for a few steps on logical CPU devices, and train."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
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
    done = run_forked(
        (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"), *map(str, arguments), folder=folder
    )
    assert done.status == 0, done.err[-3000:]
    return done.out + done.err


def losses(text):
    """Return the numbers with three digits after the point."""
    return [float(number) for number in re.findall(r"\b\d+\.\d{3}\b", text)]


TRAINED = [
    ("keras_mirrored", ("--devices", 3, "--epochs", 2, "--examples", 720), "3 replicas", 0.9, ""),
    ("custom_loop", ("--devices", 3, "--steps", 10), "3 replicas", 0.5, "all replicas are equal"),
    ("towers", ("--devices", 3, "--steps", 25), "3 towers", 0.7, "all towers are equal"),
    (
        "sparse_embeddings",
        ("--devices", 3, "--steps", 60),
        "3 towers",
        0.85,
        "all towers are equal",
    ),
]


@pytest.mark.parametrize(
    "name, arguments, head, factor, equal", TRAINED, ids=[row[0] for row in TRAINED]
)
def test_programs_train_on_three_devices(name, arguments, head, factor, equal, tmp_path):
    if "replicas" in head and not IS_TF2:
        pytest.skip("TensorFlow 2 only")
    out = run(name, *arguments, folder=tmp_path)
    first, last = losses(out[out.index(head) :])
    assert last < factor * first and equal in out
    if name == "sparse_embeddings":
        ((rows, table),) = re.findall(r"gradients: (\d+ \d+ \d+) of (\d+)", out)
        assert 0 < max(map(int, rows.split())) < 0.01 * int(table)


def test_tensorpack_trains_a_resnet(tmp_path):
    if IS_TF2:
        pytest.importorskip("tf_keras")
    arguments = ("--devices", 2, "--steps", 2, "--blocks", 1, "--channels", 4, "--batch", 4)
    out = run("tensorpack_resnet", *arguments, folder=tmp_path)
    # towers that differ would have ended it with an error
    assert "Training has finished!" in out, out[-2000:]


def test_tf_cnn_benchmarks_gets_our_allreduce(tmp_path):
    (tmp_path / "batch_allreduce.py").write_text(BATCH_ALLREDUCE, encoding="utf-8")
    (tmp_path / "tf_cnn_benchmarks.py").write_text(BENCHMARK, encoding="utf-8")
    out = run("tf_cnn_benchmarks", str(tmp_path), folder=tmp_path)
    assert "[6. 6.] [6. 6.]" in out and "CPU:2" in out.upper()


def test_two_hosts_end_with_the_same_weights(tmp_path):
    """In cold processes, as people start them."""
    command = [sys.executable, str(EXAMPLES / "two_hosts.py"), "--steps", "20"]
    done = subprocess.run(
        command, cwd=str(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280
    )
    out = done.stdout.decode()
    assert done.returncode == 0, out[-3000:]
    sums = re.findall(r"squares: ([\d.]+)", out)  # processes may write at once
    assert len(sums) >= 2 and len(set(sums)) == 1, out[-3000:]


def test_two_hosts_without_scikit_learn_say_so_once(tmp_path):
    program = f"""if True:
        import runpy, sys
        sys.modules["sklearn"] = None
        runpy.run_path({str(EXAMPLES / "two_hosts.py")!r}, run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=str(tmp_path), stderr=subprocess.PIPE, timeout=280
    )
    words = "the digits are in scikit-learn: python -m pip install scikit-learn"
    assert done.returncode == 1 and done.stderr.decode().splitlines() == [words]


def test_digits_train_as_on_one_device(tmp_path):
    out = run("digits", "--devices", 3, "--epochs", 2, folder=tmp_path)
    assert out.count(" ok\n") == 4 and "FAILED" not in out
    assert "planned = executed" in out


def test_algorithms_of_ones_own_are_run(tmp_path):
    out = run("algorithms", "--devices", 6, folder=tmp_path)
    assert out.count(": all towers have the sum\n") == 5


def test_every_example_begins_with_its_command_and_is_listed():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(programs) == 9
    for name in programs:
        head = (EXAMPLES / name).read_text(encoding="utf-8")[:800]
        assert f"python examples/{name}" in head and f"]({name})" in listed
