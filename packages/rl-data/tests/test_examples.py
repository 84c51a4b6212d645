"""The examples in the docstrings."""

import doctest
import importlib
import pkgutil

import pytest

import rl_data

MODULES = [m.name for m in pkgutil.iter_modules(rl_data.__path__, "rl_data.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_give_what_they_show(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
