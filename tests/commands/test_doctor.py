"""``doctor``: known problems, each with its remedy, and measured copies."""

import json

import pytest

from hier_allreduce.commands.doctor import command as doctor

GPU = {"name": "/device:GPU:0", "model": "RTX 4090", "bytes": 1 << 34, "peers": []}
SEEN = {"version": "2.21.0", "cuda": True, "gpus": [GPU, {**GPU, "name": "/device:GPU:1"}]}
PACKAGES = {"tensorflow": "2.21.0"}


@pytest.mark.parametrize(
    ("packages", "seen", "driver", "line"),
    [
        (
            {**PACKAGES, "tensorflow-cpu": "2.21.0"},
            SEEN,
            [],
            "overwrite each other's files: uninstall all",
        ),
        (
            {**PACKAGES, "tensorpack": "0.11", "keras": "3.1"},
            SEEN,
            [],
            "pip install tf_keras, and set TF_USE_LEGACY",
        ),
        (
            {**PACKAGES, "tensorpack": "0.11", "keras": "3.1", "tf_keras": "2.21"},
            SEEN,
            [],
            "Keras 2: set TF_USE_LEGACY",
        ),
        (
            PACKAGES,
            {**SEEN, "gpus": []},
            ["RTX 4090, 550"],
            "does not use 1 GPU: see tensorflow.org/install",
        ),
        (PACKAGES, SEEN, [], "no peer access from /device:GPU:0, /device:GPU:1 to all others"),
    ],
)
def test_problems_have_remedies(packages, seen, driver, line, monkeypatch):
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    assert any(line in text for text in doctor.remedies(packages, seen, driver, None))


@pytest.mark.parametrize(
    "source, line",
    [
        (
            "raise ImportError('no libcudart')",
            "1. TensorFlow cannot be used, install one that fits this processor and",
        ),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGILL)",
            "this processor and Python: it ended with SIGILL",
        ),
        ("import sys\nsys.exit(3)", "this processor and Python: it ended with status 3"),
        (
            "raise ImportError(\"No module named 'tensorflow'\")",
            "1. TensorFlow is missing; only plan works. The rest",
        ),
    ],
)
def test_a_tensorflow_that_cannot_be_imported_is_the_first_problem(
    run, monkeypatch, tmp_path, source, line
):
    (tmp_path / "tensorflow.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, out, _ = run("doctor")
    assert status == 1 and line in out


def test_a_good_machine_has_no_problems():
    seen = {**SEEN, "gpus": [{**GPU, "peers": [1]}, {**GPU, "peers": [0]}]}
    assert doctor.remedies(PACKAGES, seen, ["RTX 4090, 550"] * 2, None) == []


def test_doctor_measures_cpu_devices_and_prints_json(run):
    status, out, err = run("doctor", "--measure", "--devices", "/cpu:0,/cpu:1", "--json")
    found = json.loads(out)
    assert (
        status == bool(found["todo"])
        and err == "asking TensorFlow for its devices …\nmeasuring copies …\n"
    )
    assert found["tensorflow"]["version"] and found["packages"]["numpy"]
    assert [copies["differ"] for copies in found["measured"]["copies"]] == [0, 0]


def test_errors_have_one_line(fails):
    assert "--devices and -o go with --measure" in fails("doctor", "--devices", "/gpu:0,/gpu:1")
    for devices, words in [
        (
            "/gpu:0,/gpu:0",
            "'/gpu:0,/gpu:0': expected two or more different devices, such as /gpu:0,/gpu:1",
        ),
        ("/cpu:0", "'/cpu:0': expected two or more different devices"),
        ("banana,/cpu:0", "'banana' is no device such as /gpu:0 or /cpu:1"),
    ]:
        assert words in fails("doctor", "--measure", "--devices", devices)


def test_gpus_that_tensorflow_does_not_see_are_an_error(run):
    status, out, err = run("doctor", "--measure", "--devices", "/gpu:98,/gpu:99")
    assert (status, out) == (2, "")
    assert err.endswith(
        "doctor: --measure: TensorFlow sees 0 GPUs; name --devices such as /cpu:0,/cpu:1\n"
    )
