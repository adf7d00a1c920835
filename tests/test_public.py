"""Every public function and class documents its parameters in an `Args:` section: all of them, and no others."""

import inspect
import re
from types import ModuleType
from typing import Any

import pytest

import fedstrata as fs

MODULES = ("data", "models", "losses", "pair_losses", "prox", "metrics", "fairness", "participation", "hypergradients")
# Classes whose methods users call; of other classes the docstring of the class is enough.
WITH_METHODS = ("Federation", "Result", "data.Split", "models.TrainedModel", "report.History", "report.Comparison")


def _of_module(name: str, module: ModuleType) -> dict[str, Any]:
    """The public functions and classes that are defined in a module or, for a package, below it."""
    found = {key: getattr(module, key) for key in dir(module) if not key.startswith("_")}
    inside = lambda value: getattr(value, "__module__", "").startswith(module.__name__)
    return {f"{name}.{key}": value for key, value in found.items() if inside(value)}


def _public() -> dict[str, Any]:
    import fedstrata.report

    found = {name: getattr(fs, name) for name in dir(fs) if not isinstance(getattr(fs, name), ModuleType)}
    for name in MODULES:
        found |= _of_module(name, getattr(fs, name))
    found |= _of_module("report", fedstrata.report)
    for name in WITH_METHODS:
        owner = found[name]
        methods = [key for key in vars(owner) if not key.startswith("_") and callable(getattr(owner, key))]
        found |= {f"{name}.{key}": getattr(owner, key) for key in methods}
    return found


def _parameters(value: Any) -> list[str]:
    """The parameters of a call, in order; none for what is not documented by its parameters."""
    if not (inspect.isfunction(value) or inspect.ismethod(value) or inspect.isclass(value)):
        return []  # aliases of types, constants
    if inspect.isclass(value) and issubclass(value, (BaseException, fs.Oracle)) and value is not fs.Oracle:
        return []  # oracles are made by `Problem.oracle`; `fs.Oracle` documents their fields
    try:
        # A function that takes the options of `fs.run` shows them all, and documents them as **options.
        parameters = list(inspect.signature(getattr(value, "__wrapped__", value)).parameters.values())
    except ValueError:
        return []
    if [p.kind for p in parameters] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return []  # abstract: whatever a subclass takes
    return [p.name for p in parameters if p.name != "self"]


def documented(text: str) -> list[str]:
    """The names in the `Args:` section of a docstring in Google's style.

    >>> documented("One line.\\n\\nArgs:\\n    x: a\\n        point.\\n    *more: others.\\n\\nReturns:\\n    y")
    ['x', 'more']
    """
    lines = inspect.cleandoc(text).splitlines()
    if "Args:" not in lines:
        return []
    names: list[str] = []
    for line in lines[lines.index("Args:") + 1 :]:
        if line and not line.startswith(" "):
            break
        if entry := re.match(r" {4}\*{0,2}(\w+): \S", line):
            names.append(entry[1])
        elif line and not line.startswith(" " * 8):
            names.append(f"not an entry: {line.strip()}")
    return names


PUBLIC = _public()


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if _parameters(value)])
def test_docstring_names_exactly_its_parameters(name: str) -> None:
    value = PUBLIC[name]
    assert sorted(documented(value.__doc__ or "")) == sorted(_parameters(value))


@pytest.mark.parametrize("name", [name for name, v in PUBLIC.items() if inspect.isclass(v) or inspect.isfunction(v)])
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = PUBLIC[name]
    inherited = [base.__doc__ for base in value.__mro__[1:]] if inspect.isclass(value) else []
    assert value.__doc__
    assert value.__doc__ not in inherited
