"""The examples in the papers' docstrings are true; they are outside the folders that pytest looks through."""

import doctest
import importlib
import pkgutil

import pytest

from fedstrata.experiments.reproduction import papers

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in papers.modules()
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.failed == 0


def test_every_module_of_every_paper_is_looked_at():
    assert {name.split(".")[1] for name in MODULES} == {*papers.folders()} - {"hospitals"}  # which is one file
