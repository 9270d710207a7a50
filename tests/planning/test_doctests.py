"""The examples in the docstrings of planning are right."""

import doctest
import importlib
import pkgutil

import pytest

from hier_allreduce import planning

MODULES = [module.name for module in pkgutil.iter_modules(planning.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(f"hier_allreduce.planning.{name}")
    failed, _ = doctest.testmod(module)
    assert failed == 0
