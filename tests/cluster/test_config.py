"""The description of a cluster, read without TensorFlow: TF_CONFIG and YAML files."""

import gc
import json

import pytest

from hier_allreduce import ClusterError, HierAllreduceError
from hier_allreduce.cluster.config import from_tf_config, read_config


@pytest.mark.parametrize(
    ("jobs", "task", "expected"),
    [
        ({"worker": ["a:1", "b:2"]}, ("worker", 0), (["a:1", "b:2"], 0)),
        ({"worker": ["a:1", "b:2"]}, ("worker", 1), (["a:1", "b:2"], 1)),
        ({"worker": ["b:2", "c:3"], "chief": ["a:1"]}, ("chief", 0), (["a:1", "b:2", "c:3"], 0)),
        ({"worker": ["b:2", "c:3"], "chief": ["a:1"]}, ("worker", "1"), (["a:1", "b:2", "c:3"], 2)),
    ],
)
def test_tf_config_names_all_hosts_and_this_one(jobs, task, expected):
    text = json.dumps({"cluster": jobs, "task": dict(zip(("type", "index"), task))})
    assert from_tf_config(text) == expected


@pytest.mark.parametrize("text", ["", " \n", "{}", '{"cluster": {}, "task": {}}', '{"cluster": {"worker": []}}'])
def test_without_tf_config_there_is_one_host(text):
    hosts, task = from_tf_config(text)
    assert (len(hosts), task) == (1, 0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "expected"),
        ("[]", "expected"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e999}}', "expected"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1.7}}', "WHOLE NUMBER"),
        ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": true}}', "WHOLE NUMBER"),
        ('{"cluster": null}', "expected"),
        ("[" * 99999, "expected"),
        ('{"cluster": {"worker": ["a:1"]}}', "expected"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}', "this process in the list"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "this process in the list"),
        ('{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "worker", "index": 0}}', "'ps'"),
    ],
)
def test_an_invalid_tf_config_is_refused(config, words):
    gc.collect()  # Python 3.7 ends if what other tests left is collected where deep brackets have filled the stack
    with pytest.raises(ClusterError, match=words):
        from_tf_config(config)


def test_a_file_describes_a_cluster():
    assert read_config("loopback-2x4")["devices_per_host"] == 4
    assert len(read_config("example-4x8", 3)["hosts"]) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hosts: [a:1]\ndevices: 4\n", "'devices' is unknown; did you mean 'devices_per_host'"),
        ("hosts: [a:1]\n", "devices_per_host is missing"),
        ("hosts: [a]\ndevices_per_host: 1\n", "'a' is not an address"),
        ("hosts: [a:1]\ndevices_per_host: 1\ntimeout: 9\n", "'timeout' is unknown; there are hosts, devices_per_host"),
        ("hosts: 2\ndevices_per_host: 1\n", "hosts=2: expected a list of addresses"),
        ("hosts: {a:1: 0}\ndevices_per_host: 1\n", "expected a list of addresses"),
    ],
)
def test_an_invalid_file_is_refused_by_its_path_and_key(tmp_path, text, words):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(HierAllreduceError, match=words) as refused:
        read_config(str(path))
    assert str(path) in str(refused.value)
