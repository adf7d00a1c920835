"""FedStrata: federated optimisation of objectives that are not a plain average of losses.

Names are imported when they are first used, so that the command line starts at once. `__init__.pyi` lists them, for
people, type checkers and this file alike.
"""

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


@cache
def _names() -> dict[str, str]:
    """Public name -> module, read from the imports of `__init__.pyi`."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name not in _names():
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
    home, inside = _names()[name], None
    if home != __name__:
        inside = getattr(importlib.import_module(home), name, None)
    value = importlib.import_module(f"{home}.{name}") if inside is None else inside
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_names())
