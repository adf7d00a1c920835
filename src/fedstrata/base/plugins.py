"""Code from outside the library: entry points of installed packages, objects by import path, and single files."""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fedstrata.base.errors import did_you_mean


class PluginWarning(UserWarning):
    """Code from outside the library could not be used. Commands continue without it."""


def plugins(group: str) -> dict[str, Any]:
    """The objects that installed packages register under an entry point group, by name.

    An entry point that cannot be imported is left out with a `PluginWarning`: a broken package must not break every
    command. Of two with the same name the first one counts.

    Args:
        group: `fedstrata.algorithms`, `fedstrata.experiments`, `fedstrata.data` or `fedstrata.papers`.

    Returns:
        What each entry point refers to: an object, or a module.
    """
    return dict(_loaded(group, tuple(sys.path)))


@functools.lru_cache
def _loaded(group: str, path: tuple[str, ...]) -> dict[str, Any]:
    """As `plugins`; looking through the installed packages takes long, and they change only with the search path."""
    found: dict[str, Any] = {}
    for entry in sorted(entry_points(group=group), key=lambda e: e.name):
        if entry.name in found:
            continue
        with reported(f"entry point {entry.name} = {entry.value} of {group}"):
            found[entry.name] = entry.load()
    return found


def plugins_of(group: str, kind: type, attribute: str) -> list[Any]:
    """The objects of one class that installed packages register.

    An entry point refers to an object of this class, or to a module with one in `attribute` or several in the plural
    of it (`SOURCE`, `SOURCES`). Anything else is left out with a `PluginWarning`.

    Args:
        group: the entry point group.
        kind: the class of the objects.
        attribute: the name under which a module has one.
    """
    out = []
    for name, value in plugins(group).items():
        found = [value] if isinstance(value, kind) else defined(value, attribute)
        right = [each for each in found if isinstance(each, kind)]
        if len(right) < max(len(found), 1):
            wanted = f"a {kind.__name__}, or a module that defines {attribute}"
            _warn(f"entry point {name} of {group} must be {wanted}; it is {value!r}")
        out += right
    return out


def defined(module: Any, attribute: str) -> list[Any]:
    """What a module defines under a name and under its plural.

    Args:
        module: the module.
        attribute: the name, such as `EXPERIMENT`; the plural is `EXPERIMENTS`.
    """
    one = [getattr(module, attribute)] if hasattr(module, attribute) else []
    return [*one, *getattr(module, f"{attribute}S", ())]


@contextlib.contextmanager
def reported(what: str) -> Any:
    """Turn an error of outside code into a `PluginWarning`.

    Args:
        what: the plugin, for the message.
    """
    try:
        yield
    except Exception as error:
        _warn(f"{what} is left out: {type(error).__name__}: {error}")


def from_path(words: str) -> Any:
    """The object that `package.module:Name` or `file.py:Name` refers to.

    >>> from_path("fedstrata.base.errors:unknown").__name__
    'unknown'

    Args:
        words: a module, searched in the current folder first and then among the installed packages, or a Python file;
            a colon; and the name of an object in it.
    """
    module, _, name = words.rpartition(":")
    if not module or not name:
        raise ValueError(f"{words!r} must have the form package.module:Name or file.py:Name")
    home = load_file(module) if module.endswith(".py") else _imported(module, words)
    if not hasattr(home, name):
        hint = did_you_mean(name, vars(home))
        raise ValueError(f"{words}: {module} has no {name!r}{f'; {hint}' if hint else ''}")
    return getattr(home, name)


def _imported(module: str, words: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{words}: there is no module {error.name!r} here or among the installed packages") from error


def load_file(path: str | Path, name: str | None = None) -> ModuleType:
    """A Python file as a module, or a folder with an `__init__.py` as a package.

    The same path is loaded once. Inside a folder relative imports work, whatever the package is called.

    Args:
        path: the file or the folder.
        name: what the module is called; by default the file's name with a digest of its path.
    """
    path = Path(path).resolve()
    init = path / "__init__.py" if path.is_dir() else path
    if not init.is_file():
        raise FileNotFoundError(f"{path}: there is no such Python file or folder with an __init__.py")
    name = f"fedstrata_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}" if name is None else name
    if name in sys.modules:
        return sys.modules[name]
    where = [str(path)] if path.is_dir() else None
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=where)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for loaded in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
            del sys.modules[loaded]
        raise
    return module


def _warn(message: str) -> None:
    warnings.warn(message, PluginWarning, stacklevel=3)
