"""The folders of reproductions, outside the library, found by name or by path.

A paper is a folder whose `__init__.py` defines `REPRODUCTION`, or the experiments of one (`EXPERIMENT`, or several in
`EXPERIMENTS`). Its files import each other relatively, so that it can be loaded from any place.
"""

import ast
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from fedstrata.base.errors import unknown
from fedstrata.base.plugins import defined, load_file, plugins, reported
from fedstrata.experiments.base import Experiment
from fedstrata.experiments.reproduction import Reproduction

PARENT = "fedstrata_papers"  # the parent package of papers that are loaded by name
DEFINES = {"REPRODUCTION", "EXPERIMENT", "EXPERIMENTS"}
WHERE = (
    "Papers are not part of the installed package: they are in the folder papers/ of FedStrata's source repository. "
    "Run the command inside a checkout of it, set FEDSTRATA_PAPERS to that folder, or give the path of a paper: "
    "`fedstrata reproduce path/to/papers/fedx`."
)


def places() -> list[Path]:
    """The folders that may hold papers, the first to be searched in front.

    They are those of $FEDSTRATA_PAPERS, `papers` in the current folder and in those above it, and `papers` of the
    checkout that this library is imported from.
    """
    named = [Path(part) for part in os.environ.get("FEDSTRATA_PAPERS", "").split(os.pathsep) if part]
    here = Path.cwd()
    above = [folder / "papers" for folder in (here, *here.parents)]
    source = Path(__file__).resolve().parents[3]
    checkout = [source.parent / "papers"] if source.name == "src" else []
    found = [place.resolve() for place in (*named, *above, *checkout) if place.is_dir()]
    return list(dict.fromkeys(found))


def folders() -> dict[str, Path]:
    """The folders of papers by name, from all `places`; the first of each name counts."""
    inside = [each for place in places() for each in sorted(place.iterdir()) if is_paper(each)]
    return {folder.name: folder for folder in reversed(inside)}


def is_paper(folder: Path) -> bool:
    """Whether a folder is a paper. Its `__init__.py` is parsed, not run: any folder may be called papers.

    Args:
        folder: the folder.
    """
    init = folder / "__init__.py"
    try:
        tree = ast.parse(init.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return False
    return bool(DEFINES & {name for statement in tree.body for name in _names(statement)})


def _names(statement: ast.stmt) -> Iterable[str]:
    """The names that a top-level statement defines."""
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def load(words: str) -> ModuleType:
    """The package of a paper, or one of its modules: `load("fedx")`, `load("fedx.rates")`.

    Args:
        words: the name of the paper's folder, and after a dot that of a module in it.
    """
    name, _, part = words.partition(".")
    known = folders()
    if name not in known:
        raise unknown("paper", name, known)
    package = load_folder(known[name])
    return importlib.import_module(f"{package.__name__}.{part}") if part else package


def load_folder(folder: str | Path) -> ModuleType:
    """The package of the paper in a folder.

    Its name is that of the folder, because names with the path in them would differ between machines. A second
    folder of the same name gets another one.

    Args:
        folder: the folder.
    """
    folder = Path(folder).resolve()
    parent = sys.modules.setdefault(PARENT, ModuleType(PARENT))
    parent.__path__ = []
    name = f"{PARENT}.{folder.name}"
    taken = sys.modules.get(name)
    if taken is not None and Path(str(taken.__file__)).parent != folder:
        return load_file(folder)
    return load_file(folder, name)


def modules() -> list[ModuleType]:
    """All papers: those found in folders, and those of installed packages (entry points `fedstrata.papers`).

    One that cannot be imported is left out with a warning.
    """
    out: list[ModuleType] = []
    for folder in dict(sorted(folders().items())).values():
        with reported(f"the paper in {folder}"):
            out.append(load_folder(folder))
    return out


def reproductions() -> dict[str, Reproduction]:
    """The papers whose figures and claims can be reproduced, by the name on the command line."""
    installed = plugins("fedstrata.papers")
    found = [each for module in modules() for each in defined(module, "REPRODUCTION")]
    for value in installed.values():
        found += [value] if isinstance(value, Reproduction) else defined(value, "REPRODUCTION")
    named = {each.paper: each for each in reversed(found)}  # the first of a name counts
    return dict(sorted(named.items()))


def experiments() -> list[Experiment]:
    """The experiments of all papers."""
    installed = [value for value in plugins("fedstrata.papers").values() if isinstance(value, ModuleType)]
    return [each for module in (*modules(), *installed) for each in defined(module, "EXPERIMENT")]


def find(words: str) -> Reproduction:
    """The reproduction of a paper, by its name or by the path of its folder.

    Args:
        words: `fed-dr-scgd`, or a path such as `papers/fed_dr_scgd`.
    """
    known = reproductions()
    if words in known:
        return known[words]
    if (Path(words) / "__init__.py").is_file():
        found = defined(load_folder(words), "REPRODUCTION")
        if not found:
            raise ValueError(f"{words}: its __init__.py does not define REPRODUCTION")
        return found[0]
    if Path(words).exists() or os.sep in words:
        raise ValueError(f"{words}: there is no folder with an __init__.py that defines REPRODUCTION")
    if not known:
        raise ValueError(f"unknown paper {words!r}. {WHERE}")
    if any(words.replace("-", "_") == each.name for each in experiments()):
        raise ValueError(f"{words} is an experiment without a paper's figures; run it with `fedstrata run {words}`")
    raise unknown("paper", words, known)
