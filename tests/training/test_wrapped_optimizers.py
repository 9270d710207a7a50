"""Attributes of users' objects that are replaced for a while."""

import pytest

from hier_allreduce.training import patched


class Optimizer:
    def get_slot(self):
        return "the class's"


def test_a_patched_method_is_the_classs_again():
    optimizer = Optimizer()
    with patched(optimizer, "get_slot", lambda: "patched"):
        assert optimizer.get_slot() == "patched"
    assert optimizer.get_slot() == "the class's" and not vars(optimizer)


def test_a_patched_attribute_is_restored_after_an_error():
    optimizer = Optimizer()
    optimizer.get_slot = mine = lambda: "the object's"
    with pytest.raises(RuntimeError), patched(optimizer, "get_slot", None):
        raise RuntimeError
    assert optimizer.get_slot is mine


def test_patches_of_one_attribute_nest():
    optimizer = Optimizer()
    with patched(optimizer, "get_slot", lambda: "outer"):
        with patched(optimizer, "get_slot", lambda: "inner"):
            assert optimizer.get_slot() == "inner"
        assert optimizer.get_slot() == "outer"
    assert not vars(optimizer)
