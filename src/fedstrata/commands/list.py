"""Show what there is: problems, algorithms, experiments and data sets.

examples:
  fedstrata list                    everything
  fedstrata list algorithms         one kind
  fedstrata list data --json        for programs
"""

import argparse
from typing import Any

from fedstrata.commands.output import print_json, print_table
from fedstrata.commands.parsing import json_option
from fedstrata.errors import unknown

_TITLES = {
    "problems": "Problems: what can be minimised",
    "algorithms": "Algorithms (fedstrata explain NAME)",
    "experiments": "Experiments (fedstrata run NAME)",
    "data": "Data sets (fedstrata data fetch NAME)",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help="problems, algorithms, experiments or data; without it all four")
    json_option(parser, '{"KIND": [{"name", "summary", ...}]}, a key per kind asked for')


def execute(options: argparse.Namespace) -> int:
    if options.kind is not None and options.kind not in _TITLES:
        raise unknown("kind of thing to list", options.kind, _TITLES)
    found = {kind: _entries(kind) for kind in ([options.kind] if options.kind else _TITLES)}
    if options.json:
        print_json(found)
        return 0
    for kind, entries in found.items():
        extra = [k for k in (entries[0] if entries else {}) if k not in ("name", "summary")]
        rows = [[e["name"], *(e[k] for k in extra), e["summary"]] for e in entries]
        print_table(_TITLES[kind], ["name", *extra, "summary"], rows)
    return 0


def _entries(kind: str) -> list[dict[str, Any]]:
    return {"problems": _problems, "algorithms": _algorithms, "experiments": _experiments, "data": _data}[kind]()


def _problems() -> list[dict[str, Any]]:
    import importlib
    import pkgutil

    import fedstrata.problems
    from fedstrata.commands.latex import readable
    from fedstrata.problems.base import Problem

    for module in pkgutil.iter_modules(fedstrata.problems.__path__):
        importlib.import_module(f"fedstrata.problems.{module.name}")
    todo, found = list(Problem.__subclasses__()), {}
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__module__.startswith("fedstrata.problems") and hasattr(cls, "Oracle"):  # not what several share
            found[cls.__name__] = readable((cls.__doc__ or "").strip().split("\n")[0])
    return [{"name": name, "summary": summary} for name, summary in sorted(found.items())]


def _algorithms() -> list[dict[str, Any]]:
    from fedstrata.algorithms import known
    from fedstrata.commands.latex import readable

    family = lambda cls: cls.__module__.split(".")[2]
    first = lambda cls: readable((cls.__doc__ or "").strip().split("\n")[0])
    return [{"name": name, "problems": family(cls), "summary": first(cls)} for name, cls in known().items()]


def _experiments() -> list[dict[str, Any]]:
    from fedstrata import experiments

    return [{"name": e.name, "summary": e.summary} for e in experiments.available().values()]


def _data() -> list[dict[str, Any]]:
    from fedstrata.data.sources import available, where

    return [{"name": s.name, "state": where(s.name), "summary": s.title} for s in available().values()]
