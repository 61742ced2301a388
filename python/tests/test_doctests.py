"""Runs the examples in docstrings."""
import doctest
import importlib

import pytest

MODULES = ["cache", "planning", "programs", "lm.sizing", "lm.history"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    if name.startswith("lm."):
        pytest.importorskip("mlx_lm")
    result = doctest.testmod(importlib.import_module(f"flatkv.{name}"))
    assert result.attempted > 0 and result.failed == 0
