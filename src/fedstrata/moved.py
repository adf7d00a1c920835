"""Old names and modules. They work for one release, with a warning that has the new name."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Old name in `fs` -> (module, name there).
NAMES = {
    "cohort": ("fedstrata.engine", "participation"),
    "Scaffold": ("fedstrata", "SCAFFOLD"),
    "ScaffoldServerProx": ("fedstrata", "SCAFFOLDServerProx"),
}

# Old module -> new module.
MODULES = {
    "fedstrata.algorithm": "fedstrata.core.algorithm",
    "fedstrata.clock": "fedstrata.base.clock",
    "fedstrata.directions": "fedstrata.base.directions",
    "fedstrata.errors": "fedstrata.base.errors",
    "fedstrata.fairness": "fedstrata.metrics.fairness",
    "fedstrata.figures": "fedstrata.base.figures",
    "fedstrata.hypergradients": "fedstrata.problems.hypergradients",
    "fedstrata.linear_programs": "fedstrata.solvers.linear_program",
    "fedstrata.memory": "fedstrata.core.memory",
    "fedstrata.placement": "fedstrata.core.placement",
    "fedstrata.problems.pair_losses": "fedstrata.problems.pairwise.pair_losses",
    "fedstrata.runtime": "fedstrata.simulate",
    "fedstrata.runtime.checkpoint": "fedstrata.engine.checkpoint",
    "fedstrata.runtime.estimate": "fedstrata.simulate.estimate",
    "fedstrata.runtime.flower": "fedstrata.deploy.flower",
    "fedstrata.runtime.flower.client": "fedstrata.deploy.flower.client_app",
    "fedstrata.runtime.flower.server": "fedstrata.deploy.flower.server_app",
    "fedstrata.runtime.processes": "fedstrata.simulate.multiprocess",
    "fedstrata.runtime.profile": "fedstrata.simulate.profile",
    "fedstrata.runtime.result": "fedstrata.simulate.result",
    "fedstrata.runtime.run": "fedstrata.simulate.run",
    "fedstrata.runtime.tune": "fedstrata.simulate.tune",
    "fedstrata.transport": "fedstrata.engine",
    "fedstrata.transport.cohort": "fedstrata.engine.participation",
    "fedstrata.transport.ledger": "fedstrata.engine.ledger",
    "fedstrata.transport.privacy": "fedstrata.engine.privacy",
    "fedstrata.transport.secure_sum": "fedstrata.deploy.secure_sum",
    "fedstrata.vector": "fedstrata.core.vector",
}

# Names that moved elsewhere than the rest of their module: (old module, name) -> new module.
ELSEWHERE = dict.fromkeys(
    [
        ("fedstrata.algorithm", name)
        for name in ("real", "per_round", "Range", "reals", "with_values", "hyperparameters")
    ],
    "fedstrata.core.hyperparameters",
)


def by_old_name(name: str) -> Any:
    """The object with an old name of `fs`, with a warning that has the new one."""
    home, inside = NAMES[name]
    new = f"fs.{inside}"
    warnings.warn(
        f"fs.{name} is now {new}; the old name will be removed in the next release", DeprecationWarning, stacklevel=3
    )
    return getattr(importlib.import_module(home), inside, None) or importlib.import_module(f"{home}.{inside}")


class _Alias(ModuleType):
    """A module at its old place. Its attributes come from the new module, with a warning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        new = ELSEWHERE.get((self.__name__, name), MODULES[self.__name__])
        found = getattr(importlib.import_module(new), name)
        warnings.warn(
            f"{self.__name__}.{name} is now {new}.{name}; the old place will be removed in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return found


class _Package(ModuleType):
    """The package `fedstrata`. An import of an old module does not replace a public name, such as `fs.fairness`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, _Alias) and name in dir(self)):
            super().__setattr__(name, value)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in MODULES:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module(MODULES[module.__name__])  # a module that no longer exists fails at its import


def install() -> None:
    """Let old modules be imported. Real modules take precedence: this finder is the last."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    sys.modules["fedstrata"].__class__ = _Package
