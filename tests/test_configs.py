"""YAML files: an error names the file, the key, and a right value."""

import numpy as np
import pytest

from hier_allreduce import HierAllreduceError, Strategy, configs


@pytest.mark.parametrize("value", [0, 7, np.int64(7), np.uint8(7)])
def test_a_whole_number_is_one_of_python_or_numpy(value):
    number = configs.whole_number(value, "main")
    assert number == value and type(number) is int


@pytest.mark.parametrize("value", [-1, np.int8(-1), True, np.bool_(True), 1.0, "7", None])
def test_anything_else_is_no_whole_number(value):
    with pytest.raises(HierAllreduceError, match=r"^main=.*: expected a whole number of 0 or more"):
        configs.whole_number(value, "main")


@pytest.mark.parametrize(
    "text, words",
    [
        ("groups: " + "[" * 9999, "recursion"),
        ("main: !!timestamp x", "NoneType"),
        ("mains: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("4", "must be a mapping, not int"),
        ("", "must be a mapping, not NoneType"),
        ("main: 0\nsparse: [dense\n", "line 3, column 1"),
    ],
    ids=["deep", "a date", "code", "a number", "empty", "no end"],
)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path, text, words):
    (tmp_path / "f.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(HierAllreduceError) as caught:
        Strategy.load(tmp_path / "f.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'f.yaml'}: ") and words in str(caught.value)
    assert "\n" not in str(caught.value)
