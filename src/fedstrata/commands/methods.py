"""The methods of a run: algorithms by name, with the hyper-parameters of the command line."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from fedstrata.commands.parsing import Mistake, typed
from fedstrata.errors import unknown

if TYPE_CHECKING:
    from fedstrata.algorithm import Algorithm
    from fedstrata.experiments import Experiment


def chosen(
    experiment: "Experiment", names: Sequence[str] | None, words: Mapping[str, str], sweep: Mapping[str, list[float]]
) -> dict[str, tuple["Algorithm", dict[str, list[float]]]]:
    """Each method with the part of the sweep that concerns it. Names and types are checked here.

    A word `step_size=0.1` sets every method that has a step_size, `FedAvg.step_size=0.1` only that of FedAvg.
    """
    from fedstrata.algorithm import reals
    from fedstrata.algorithms import known

    names = list(names or experiment.methods)
    for name in names:
        if name not in known():
            raise unknown("algorithm", name, known())
        if names.count(name) > 1:
            raise Mistake(f"--algorithm {name} is given twice; compare settings of one method with --sweep")
    _check_names({"--set": words, "--sweep": sweep}, {name: known()[name] for name in names})
    methods = {}
    for name in names:
        kinds = get_type_hints(known()[name])
        mine = {key: typed(value, kinds[key], f"--set {key}") for key, value in _concerning(name, words).items()}
        swept = _concerning(name, sweep)
        first = {key: v[0] for key, v in swept.items() if key in reals(known()[name])}  # needs no other value then
        algorithm = experiment.algorithm(name, **{**mine, **first})
        methods[name] = algorithm, swept
    return methods


def _fields(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _concerning(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given for this method; its own name in front beats a value for all."""
    from fedstrata.algorithms import known

    own = {key.partition(".")[2]: value for key, value in given.items() if key.partition(".")[0] == name}
    everyones = {key: value for key, value in given.items() if key in _fields(known()[name])}
    return {**everyones, **own}


def _check_names(options: Mapping[str, Mapping[str, Any]], classes: Mapping[str, Any]) -> None:
    for option, given in options.items():
        for key in given:
            owner, dot, field = key.partition(".")
            if dot and owner not in classes:
                raise unknown(f"algorithm of this run in {option} {key}:", owner, classes)
            concerned = [classes[owner]] if dot else list(classes.values())
            fields = {f for cls in concerned for f in _fields(cls)}
            if (field if dot else key) not in fields:
                names = ", ".join(cls.__name__ for cls in concerned)
                raise unknown(f"hyper-parameter of {names} in {option}:", field if dot else key, fields)
