"""Experiments by name, one file each: data, problem and settings. Nothing is loaded before `build`."""

import importlib
import pkgutil
from typing import Any

from fedstrata.errors import unknown
from fedstrata.experiments.base import Experiment, Setup

__all__ = ["Experiment", "Setup", "available", "get", "reproductions"]


def available() -> dict[str, Experiment]:
    """Every experiment: each file of this folder that defines `EXPERIMENT`.

    >>> "digits" in available()
    True
    """
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    found = [module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")]
    return {experiment.name: experiment for experiment in sorted(found, key=lambda e: e.name)}


def get(name: str) -> Experiment:
    """The experiment of that name: `get("digits").run("FedAvg", rounds=50)`."""
    known, wanted = available(), name.replace("-", "_")
    if wanted not in known:
        raise unknown("experiment", name, known)
    return known[wanted]


def reproductions() -> dict[str, Any]:
    """Papers whose figures and claims can be reproduced, by key: each file here that defines `REPRODUCTION`."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    found = [module.REPRODUCTION for module in modules if hasattr(module, "REPRODUCTION")]
    return {reproduction.paper: reproduction for reproduction in found}
