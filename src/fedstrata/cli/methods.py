"""The methods of a run: algorithms by name, with the hyper-parameters of the command line."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from fedstrata.base.errors import unknown
from fedstrata.base.plugins import from_path
from fedstrata.cli.parsing import Mistake, typed

if TYPE_CHECKING:
    from fedstrata.core.algorithm import Algorithm
    from fedstrata.experiments import Experiment


def find(word: str) -> "type[Algorithm]":
    """The class of an algorithm.

    Args:
        word: a name that `fedstrata list algorithms` shows, or `package.module:Class` (also `file.py:Class`) for a
            class that is not in the library.
    """
    from fedstrata.algorithms import known
    from fedstrata.core.algorithm import Algorithm

    if ":" not in word:
        if word not in known():
            raise unknown("algorithm", word, known())
        return known()[word]
    found = from_path(word)
    if not (isinstance(found, type) and issubclass(found, Algorithm) and hasattr(found, "State")):
        raise Mistake(f"{word} is not an algorithm: a subclass of fs.Algorithm with a State is needed")
    return found


def chosen(
    experiment: "Experiment", words: Sequence[str] | None, values: Mapping[str, str], sweep: Mapping[str, list[float]]
) -> dict[str, tuple["Algorithm", dict[str, list[float]]]]:
    """Each method with its part of the sweep. Checks names and types.

    Args:
        experiment: what the methods run on; it has default hyper-parameters.
        words: methods for `find`; the experiment's where none are given.
        values: hyper-parameters as words. `step_size=0.1` sets every method that has a step_size,
            `FedAvg.step_size=0.1` only that of FedAvg.
        sweep: values of hyper-parameters, with names of the same form.
    """
    from fedstrata.core.hyperparameters import reals

    classes: dict[str, type[Algorithm]] = {}
    for cls in map(find, words or experiment.methods):
        if cls.__name__ in classes:
            raise Mistake(f"--algorithm {cls.__name__} is given twice; compare settings of one method with --sweep")
        classes[cls.__name__] = cls
    _check_names({"--set": values, "--sweep": sweep}, classes)
    methods = {}
    for name, cls in classes.items():
        kinds = get_type_hints(cls)
        mine = {key: typed(value, kinds[key], f"--set {key}") for key, value in _concerning(cls, values).items()}
        swept = _concerning(cls, sweep)
        first = {key: v[0] for key, v in swept.items() if key in reals(cls)}  # needs no other value then
        methods[name] = experiment.algorithm(cls, **{**mine, **first}), swept
    return methods


def _fields(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _concerning(cls: "type[Algorithm]", given: Mapping[str, Any]) -> dict[str, Any]:
    """The values for this method; one with its name in front takes precedence over one for all."""
    own = {key.partition(".")[2]: value for key, value in given.items() if key.partition(".")[0] == cls.__name__}
    everyones = {key: value for key, value in given.items() if key in _fields(cls)}
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
