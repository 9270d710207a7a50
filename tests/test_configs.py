"""YAML files: an error names the file, the key, and a right value."""

import pytest

from hier_allreduce import HierAllreduceError, configs
from hier_allreduce.configs import check

READERS = {
    "speed": configs.bytes_per_second,
    "latency": configs.seconds,
    "model": configs.text_or_nothing,
    "links": configs.mapping_of(configs.bytes_per_second),
    "inner": configs.mapping({"delay": configs.seconds}),
    "free": configs.anything,
}


def test_values_are_returned_as_their_readers_read_them():
    values = {
        "speed": "1e9",
        "model": None,
        "links": {"a": 2e9},
        "inner": {"delay": 1e-6},
        "free": [1],
    }
    assert check(values, READERS, "f.yaml") == {**values, "speed": 1e9, "model": ""}
    assert check({"links": None, "inner": None}, READERS, "") == {"links": {}, "inner": {}}


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"speeds": 1e9},
            "f.yaml: 'speeds' is unknown; did you mean 'speed'? there are speed, latency",
        ),
        (
            {"speed": 12},
            "f.yaml: speed: expected bytes/s from 1e6 to 1e15 (12 GB/s are 12e9), not 12",
        ),
        ({"speed": 1e400}, "f.yaml: speed: expected bytes/s"),
        (
            {"latency": 10},
            "f.yaml: latency: expected seconds from 0 to 1 (10 µs are 10e-6), not 10",
        ),
        ({"latency": True}, "f.yaml: latency: expected seconds from 0 to 1"),
        ({"model": 7}, "f.yaml: model: expected a name, in quotes if it is a number, not 7"),
        ({"links": {"a": "x"}}, "f.yaml: links: a: expected bytes/s"),
        ({"links": 3}, "f.yaml: links: expected `key: value` lines, not 3"),
        ({"inner": {"dely": 1}}, "f.yaml: inner: 'dely' is unknown; did you mean 'delay'?"),
    ],
)
def test_an_invalid_value_is_an_error_that_names_file_and_key(values, message):
    with pytest.raises(HierAllreduceError) as caught:
        check(values, READERS, "f.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "text, words",
    [
        ("groups: " + "[" * 9999, "not readable as YAML: "),
        ("mains: !!timestamp x", "not readable as YAML: "),
        ("mains: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("main: 0\nsparse: dense\nmain: 1", "the key 'main' is there twice; keep one of them"),
        ("links:\n  SYS: 9e9\n  SYS: 8e9", "the key 'SYS' is there twice"),
        ("4", "expected `key: value` lines, not int"),
        ("", "expected `key: value` lines, not NoneType"),
    ],
    ids=["deep", "a date", "code", "a key twice", "an inner key twice", "a number", "empty"],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, text, words):
    (tmp_path / "f.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(HierAllreduceError) as caught:
        configs.read_yaml(tmp_path / "f.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'f.yaml'}: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_yaml_text_may_use_aliases():
    assert configs.parse_yaml("a: &x [1, 2]\nb: *x\nc: {<<: {d: 3, e: 4}, e: 5}") == {
        **{"a": [1, 2], "b": [1, 2]},
        "c": {"d": 3, "e": 5},
    }
