"""The checker of YAML files: unknown, missing and invalid keys, with the file, the key and what to write."""

import pytest

from hier_allreduce import presets
from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.presets import Field, check

FIELDS = {
    "speed": Field(presets.bytes_per_second, required="the bytes/s of a link"),
    "latency": Field(presets.seconds),
    "model": Field(presets.text_or_nothing),
    "links": Field(presets.mapping_of(presets.bytes_per_second)),
    "part": Field(presets.mapping({"delay": Field(presets.seconds)})),
    "free": Field(),
}


def test_values_are_returned_as_their_readers_read_them():
    values = {"speed": "1e9", "model": None, "links": {"a": 2e9}, "part": {"delay": 1e-6}, "free": [1]}
    assert check(values, FIELDS, "f.yaml") == {
        "speed": 1e9,
        "model": "",
        "links": {"a": 2e9},
        "part": {"delay": 1e-6},
        "free": [1],
    }
    assert check({"speed": 1e9, "links": None, "part": None}, FIELDS, "")["links"] == {}


@pytest.mark.parametrize(
    "values, message",
    [
        ({"speeds": 1e9}, "f.yaml: 'speeds' is unknown; did you mean 'speed'? there are speed, latency"),
        ({"latency": 1e-6}, "f.yaml: speed is missing: the bytes/s of a link"),
        ({"speed": 12}, "f.yaml: speed: expected bytes/s from 1e6 to 1e15 (12 GB/s are 12e9), not 12"),
        ({"speed": 1e9, "latency": 10}, "f.yaml: latency: expected seconds above 0, up to 1 (10 µs are 10e-6), not 10"),
        ({"speed": 1e9, "latency": True}, "f.yaml: latency: expected seconds above 0, up to 1"),
        ({"speed": 1e9, "model": 7}, "f.yaml: model: expected a name, in quotes if it is a number, not 7"),
        ({"speed": 1e9, "links": {"a": "x"}}, "f.yaml: links: a: expected bytes/s"),
        ({"speed": 1e9, "links": 3}, "f.yaml: links: expected `key: value` lines, not 3"),
        ({"speed": 1e9, "part": {"dely": 1}}, "f.yaml: part: 'dely' is unknown; did you mean 'delay'?"),
    ],
)
def test_an_invalid_file_is_an_error_that_names_file_and_key(values, message):
    with pytest.raises(HierAllreduceError) as caught:
        check(values, FIELDS, "f.yaml")
    assert str(caught.value).startswith(message)


LAUGHS = "\n".join([f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" if n else "a0: &a0 [x]" for n in range(9)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS + "\nalgorithm: *a8", "more than 100000 values"),
        ("groups: &x [*x]", "a value that contains itself"),
        ("groups: " + "[" * 9999, "nested too deeply"),
        ("mains: 0x" + "f" * 5000, "a number of more than 1000 digits"),
        ("mains: " + "9" * 5000, "a number of more than 1000 digits"),
        ("mains: !!timestamp x", "not readable as YAML: "),
        ("mains: !!int ''", "not readable as YAML: "),
        ("mains: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
    ids=["aliases of aliases", "itself", "deep", "hexadecimal", "digits", "a date", "a number", "code"],
)
def test_yaml_that_python_cannot_hold_or_print_is_refused(tmp_path, text, words):
    (tmp_path / "f.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(HierAllreduceError) as caught:
        presets.read_yaml(tmp_path / "f.yaml")
    assert str(tmp_path / "f.yaml") in str(caught.value) and words in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(HierAllreduceError, match=r"x\.txt' cannot be written: No such file or directory"):
        presets.write_text(str(tmp_path / "nowhere" / "x.txt"), "x")


def test_a_yaml_text_may_use_aliases():
    assert presets.parse_yaml("a: &x [1, 2]\nb: *x\nc: {<<: {d: 3}}") == {"a": [1, 2], "b": [1, 2], "c": {"d": 3}}
    assert presets.parse_yaml("") is None


def test_many_brackets_that_are_not_nested_are_read():
    assert presets.parse_yaml("a: [" + "[], {}, " * 600 + "]") == {"a": [[], {}] * 600}
