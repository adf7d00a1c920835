"""Experiments by name, one file each: data, problem and settings. Nothing is loaded before `build`."""

import importlib
import os
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata.base.errors import unknown
from fedstrata.base.plugins import defined, load_file, plugins_of
from fedstrata.experiments.base import Experiment, Setup

if TYPE_CHECKING:
    from fedstrata.experiments.reproduction import Reproduction

__all__ = ["Experiment", "Setup", "available", "get", "reproductions"]


def available() -> dict[str, Experiment]:
    """Every experiment by name.

    The library's are the files of this folder that define `EXPERIMENT`. Those of papers and of installed packages
    (entry points `fedstrata.experiments`) are added; where names are the same, the library's counts.

    >>> "digits" in available()
    True
    """
    from fedstrata.experiments.reproduction import papers

    theirs = [*papers.experiments(), *plugins_of("fedstrata.experiments", Experiment, "EXPERIMENT")]
    found = {experiment.name: experiment for experiment in reversed(theirs)} | _ours()
    return dict(sorted(found.items()))


def get(name: str) -> Experiment:
    """The experiment of that name: `get("digits").run("FedAvg", rounds=50)`.

    Args:
        name: a name of `available`, or the path of a Python file (or of a folder with an `__init__.py`) that defines
            `EXPERIMENT`.
    """
    if name.endswith(".py") or os.sep in name:
        return _from_file(name)
    wanted, ours = name.replace("-", "_"), _ours()
    if wanted in ours:  # papers and plugins are not loaded then
        return ours[wanted]
    known = available()
    if wanted not in known:
        raise unknown("experiment", name, known)
    return known[wanted]


def reproductions() -> "dict[str, Reproduction]":
    """The papers whose figures and claims can be reproduced, by name; none if their folder is not found."""
    from fedstrata.experiments.reproduction import papers

    return papers.reproductions()


def _ours() -> dict[str, Experiment]:
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if not m.ispkg]
    found = [module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")]
    return {experiment.name: experiment for experiment in found}


def _from_file(path: str) -> Experiment:
    if not Path(path).exists():
        raise ValueError(f"{path}: there is no such file")
    found = [each for each in defined(load_file(path), "EXPERIMENT") if isinstance(each, Experiment)]
    if len(found) != 1:
        raise ValueError(
            f"{path} must define one experiment: EXPERIMENT = Experiment(...) (from fedstrata.experiments)"
        )
    return found[0]
