from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import rl_models

MODULES = [f"rl_models.{module.name}" for module in pkgutil.iter_modules(rl_models.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_name_is_there():
    assert all(hasattr(rl_models, name) for name in rl_models.__all__)
