"""List recommended methods, problems, algorithms, experiments, data sets and public names.

examples:
  fedstrata list                    everything
  fedstrata list start              which method to try first for which problem
  fedstrata list algorithms         one kind
  fedstrata list data --json        for programs
"""

import argparse
from typing import Annotated, Any, get_args, get_origin

from fedstrata.base.errors import unknown
from fedstrata.cli.output import print_json, print_table
from fedstrata.cli.parsing import json_option

_TITLES = {
    "start": "Start here: methods to try first (fedstrata explain NAME)",
    "problems": "Problems: what can be minimised",
    "algorithms": "Algorithms (fedstrata explain NAME); * marks those to start with",
    "experiments": "Experiments (fedstrata run NAME)",
    "data": "Data sets (fedstrata data fetch NAME)",
    "names": "Library (import fedstrata as fs)",
}

# Problem -> method -> when to choose it. The reasons with numbers are in the guides of the problems.
START: dict[str, dict[str, str]] = {
    "Average": {
        "FedAvg": "clients are alike, or bytes matter most: one vector each way",
        "SCAFFOLD": "clients differ: no drift with constant steps, at twice the bytes",
    },
    "Regularized": {
        "FedNMap": "reaches the optimum with constant steps although clients differ; one vector up",
    },
    "Nested": {
        "TrackedSCGD": "one expectation over all clients, large batches: exact although clients differ",
        "SMVR": "the same with very noisy batches",
        "TrackedMFCGD": "an expectation at each client (robust, maml), large batches: exact",
        "ComFedL": "the same with noisy batches, or inner levels of many numbers",
    },
    "Bilevel": {
        "FedBiO": "noisy batches: as good as TrackedBiO, at half the bytes",
        "TrackedBiO": "large batches, many local steps, clients that differ: exact with constant steps",
        "FedNest": 'one lower variable for all clients (lower_level="global")',
    },
    "Fair": {
        "FedMinMax": "the worst group's loss should be small",
        "QFFL": "clients should have similar losses; q sets how much that counts",
    },
    "Pairwise": {
        "FedX2": "partial AUC and average precision over pairs of different clients",
        "FedX1": "the AUC over pairs of different clients; fewer bytes than FedX2",
        "CODASCA": "the AUC with the square loss; no scores of examples leave a client",
    },
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help=f"{', '.join(_TITLES)}; without it all")
    json_option(parser, '{"KIND": [{"name", "summary", ...}]}, a key for each kind')


def execute(options: argparse.Namespace) -> int:
    if options.kind is not None and options.kind not in _TITLES:
        raise unknown("kind of thing to list", options.kind, _TITLES)
    found = {kind: _FIND[kind]() for kind in ([options.kind] if options.kind else _TITLES)}
    if options.json:
        print_json(found)
        return 0
    for kind, entries in found.items():
        _show(kind, entries)
    return 0


def _show(kind: str, entries: list[dict[str, Any]]) -> None:
    """A table; its first column is what entries are grouped by, written once for each group."""
    group = _GROUPS.get(kind)
    extra = [k for k in (entries[0] if entries else {}) if k not in ("name", "summary", "start", group)]
    rows, last = [], None
    for entry in entries:
        name = f"{entry['name']} *" if entry.get("start") else entry["name"]
        row = [name, *(entry[k] for k in extra), entry["summary"]]
        if group is not None:
            row = ["" if entry[group] == last else entry[group], *row]
            last = entry[group]
        rows.append(row)
    print_table(_TITLES[kind], [*([] if group is None else [group]), "name", *extra, "summary"], rows)


def _start() -> list[dict[str, Any]]:
    return [{"problem": p, "name": n, "summary": why} for p, methods in START.items() for n, why in methods.items()]


def _problems() -> list[dict[str, Any]]:
    import importlib
    import pkgutil

    import fedstrata.problems
    from fedstrata.problems.base import Problem

    for module in pkgutil.walk_packages(fedstrata.problems.__path__, "fedstrata.problems."):
        importlib.import_module(module.name)
    todo, found = list(Problem.__subclasses__()), {}
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if cls.__module__.startswith("fedstrata.problems") and hasattr(cls, "Oracle"):  # not a common base class
            found[cls.__name__] = _summary(cls)
    return [{"name": name, "summary": summary} for name, summary in sorted(found.items())]


def _algorithms() -> list[dict[str, Any]]:
    """By family, in the order of `START`; those of installed packages come last."""
    from fedstrata.algorithms import families, known

    ours = families()
    order = [*dict.fromkeys([*(problem.lower() for problem in START), *ours])]
    first = {name for methods in START.values() for name in methods}
    listed = {name for members in ours.values() for name in members}
    groups = {family: ours[family] for family in order if family in ours}
    groups["installed"] = {name: cls for name, cls in known().items() if name not in listed}
    return [
        {"problems": family, "name": name, "start": name in first, "summary": _summary(cls)}
        for family, members in groups.items()
        for name, cls in members.items()
    ]


def _experiments() -> list[dict[str, Any]]:
    from fedstrata import experiments

    return [{"name": e.name, "summary": e.summary} for e in experiments.available().values()]


def _data() -> list[dict[str, Any]]:
    from fedstrata.data.sources import available, where

    return [{"name": s.name, "state": where(s.name), "summary": s.title} for s in available().values()]


def _names() -> list[dict[str, Any]]:
    import fedstrata
    from fedstrata.public import PUBLIC

    out = []
    for purpose, modules in PUBLIC.items():
        names = [name.split(" as ")[-1] for listed in modules.values() for name in listed]
        out += [{"purpose": purpose, "name": n, "summary": _summary(getattr(fedstrata, n))} for n in names]
    return out


def _summary(thing: Any) -> str:
    """The first paragraph of a docstring, without LaTeX; of a placement, who sees it."""
    from fedstrata.base.docstrings import read
    from fedstrata.cli.explanation import reveals
    from fedstrata.cli.latex import readable

    if get_origin(thing) is Annotated:
        return reveals(get_args(thing)[1])
    return readable(read(thing.__doc__ or "").summary)


_FIND = {
    "start": _start,
    "problems": _problems,
    "algorithms": _algorithms,
    "experiments": _experiments,
    "data": _data,
    "names": _names,
}
_GROUPS = {"start": "problem", "algorithms": "problems", "names": "purpose"}
