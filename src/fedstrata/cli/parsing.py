"""Words of a command line as values. An invalid word raises `Mistake`, which is shown in one line."""

import argparse
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Union, get_args, get_origin

from fedstrata.base.errors import unknown


class Mistake(ValueError):
    """The command line has a mistake."""


class Parser(argparse.ArgumentParser):
    """argparse with laid-out help, no abbreviations, and errors that are raised instead of printed with the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise Mistake(f"{message} (see `{self.prog} --help`)")

    def option_names(self) -> list[str]:
        """Every option, for answering unknown ones."""
        return list(self._option_string_actions)


def json_option(parser: argparse.ArgumentParser, shape: str) -> None:
    """Add the --json option.

    Args:
        parser: the command's.
        shape: what is printed.
    """
    parser.add_argument("--json", action="store_true", help=f"print JSON: {shape}")


def whole(low: int) -> Callable[[str], int]:
    """A whole number of at least `low`.

    Args:
        low: the smallest value.
    """

    def read(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{word!r} must be a whole number >= {low}")
        return value

    return read


def seconds(word: str) -> float:
    """A time of at least zero.

    Args:
        word: a number.
    """
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} must be a number of seconds >= 0")
    return value


def mesh(word: str) -> int | str:
    """A number of devices, or "all".

    Args:
        word: a whole number, or all.
    """
    return word if word == "all" else whole(1)(word)


def batch(word: str) -> int | str:
    """Examples per step, or "all".

    Args:
        word: a whole number, or all.
    """
    return "all" if word == "all" else whole(1)(word)


def seeds(word: str) -> int | list[int]:
    """How many seeds, or which: `3`, or `4,5,6`.

    Args:
        word: a whole number, or several with commas.
    """
    return [whole(0)(part) for part in word.split(",") if part] if "," in word else whole(1)(word)


def assignments(words: Iterable[str], option: str) -> dict[str, str]:
    """`name=value` words as a dictionary.

    >>> assignments(["step_size=0.1", "mu=1"], "--set")
    {'step_size': '0.1', 'mu': '1'}

    Args:
        words: each `name=value`.
        option: what they were given with, for messages.
    """
    out: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise Mistake(f"{option} {word}: expected name=value, for example {option} step_size=0.1")
        if name in out:
            raise Mistake(f"{option} {word}: {name} was set to {out[name]} already")
        out[name] = value
    return out


def typed(word: str, kind: Any, where: str) -> Any:
    """A word as a value of an annotated type.

    >>> typed("0.5", float, "--set x"), typed("3", int, "--set n"), typed("none", float | None, "--set y")
    (0.5, 3, None)

    Args:
        word: the value.
        kind: the type.
        where: what it was given with, for messages.
    """
    if get_origin(kind) in (Union, types.UnionType):
        if word.lower() == "none" and type(None) in get_args(kind):
            return None
        kind = next(k for k in get_args(kind) if k is not type(None))
    if kind is bool:
        choices = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if word.lower() not in choices:
            raise Mistake(f"{where}: {word!r} must be true or false")
        return choices[word.lower()]
    if kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            raise Mistake(f"{where}: {word!r} must be a {'whole ' if kind is int else ''}number") from None
    if get_origin(kind) is Callable or kind is Callable:
        return _optimizer(word)
    if kind is str:
        return word
    raise Mistake(f"{where}: a value of type {kind} cannot be given on the command line; use the library for that")


def typed_all(words: Mapping[str, str], kinds: Mapping[str, Any], option: str, what: str) -> dict[str, Any]:
    """Every word in its type. The error for an unknown name suggests the nearest.

    Args:
        words: values by name.
        kinds: types by name.
        option: what they were given with, for messages.
        what: what the names are, for messages.
    """
    for name in words:
        if name not in kinds:
            raise unknown(what, name, kinds)
    return {name: typed(word, kinds[name], f"{option} {name}") for name, word in words.items()}


def numbers(word: str, where: str) -> list[float]:
    """`0.1,0.01` as numbers.

    Args:
        word: numbers with commas.
        where: what they were given with, for messages.
    """
    return [typed(part, float, where) for part in word.split(",") if part]


def _optimizer(name: str) -> Any:
    """An optax optimizer by its name: those functions of optax whose first argument is the learning rate."""
    import inspect

    import optax

    found = {}
    for known, function in vars(optax).items():
        if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "learning_rate":
            found[known] = function
    if name not in found:
        raise unknown("optax optimizer", name, found)
    return found[name]
