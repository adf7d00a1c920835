"""FedStrata: federated optimisation of objectives that are not a plain average of losses.

Public names are imported on first use, so that the command line starts at once. `__init__.pyi` lists them for people,
type checkers and this file; `make stubs` generates it from `fedstrata.public`.
"""

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

from fedstrata import moved
from fedstrata.base.errors import did_you_mean

__version__ = "0.1.0"


@cache
def _names() -> dict[str, tuple[str, str]]:
    """Public name -> (module, name there), read from the imports of `__init__.pyi`."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name in moved.NAMES:
        return moved.by_old_name(name)
    if name not in _names():
        hint = did_you_mean(name, _names())
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}{f'; {hint}' if hint else ''}")
    home, inside = _names()[name]
    found = None if home == __name__ else getattr(importlib.import_module(home), inside, None)
    value = importlib.import_module(f"{home}.{inside}") if found is None else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_names())


moved.install()
