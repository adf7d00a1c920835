"""All algorithms: one file per method, one folder per family. They are found by subclass, never listed."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from fedstrata.base.plugins import plugins
from fedstrata.core.algorithm import Algorithm


def families() -> dict[str, dict[str, type[Algorithm]]]:
    """The library's algorithms by family and name.

    >>> sorted(families())
    ['average', 'bilevel', 'fair', 'nested', 'pairwise', 'regularized']
    """
    folders = [m.name for m in pkgutil.iter_modules(__path__) if m.ispkg]
    return {folder: _methods(f"{__name__}.{folder}") for folder in sorted(folders)}


def known() -> dict[str, type[Algorithm]]:
    """Every algorithm by name: the library's, and those of installed packages (`fedstrata.algorithms` entry points).

    >>> "FedAvg" in known()
    True
    """
    ours = {name: cls for members in families().values() for name, cls in members.items()}
    theirs = {n: c for n, c in plugins("fedstrata.algorithms").items() if isinstance(c, type) and n not in ours}
    return dict(sorted({**ours, **theirs}.items()))


def public_classes(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a family's folder: any public class that one of its files defines."""

    def find(name: str) -> Any:
        for module in _modules(package):
            found = getattr(module, name, None)
            if isinstance(found, type) and found.__module__ == module.__name__ and not name.startswith("_"):
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def _methods(package: str) -> dict[str, type[Algorithm]]:
    """The algorithms of a folder: subclasses with a state, without base classes."""
    classes = [cls for module in _modules(package) for cls in vars(module).values() if isinstance(cls, type)]
    own = [c for c in classes if issubclass(c, Algorithm) and c.__module__.startswith(package) and hasattr(c, "State")]
    return {cls.__name__: cls for cls in sorted(own, key=lambda c: c.__name__)}


def _modules(package: str) -> list[Any]:
    folder = importlib.import_module(package)
    return [importlib.import_module(f"{package}.{m.name}") for m in pkgutil.iter_modules(folder.__path__)]


def __getattr__(name: str) -> Any:
    found = None if name.startswith("_") else known().get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return [*known(), *families(), "families", "known"]
