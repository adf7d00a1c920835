"""Directions of recorded columns: whether high or low values are better. They are declared, never guessed."""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from fedstrata.base.errors import unknown

Mode = Literal["auto", "min", "max"]
Direction = Literal["min", "max", "none"]  # "none": neither end is better


class Column(NamedTuple):
    """How two values of a column compare.

    Args:
        direction: "max" where high values are better, "min" where low ones are, "none" where neither.
        of_problem: whether values are comparable only within one problem, such as the objective.
    """

    direction: Direction
    of_problem: bool = False


# The columns that the library's problems, metrics and histories record; `{}` stands for a number. Columns of one
# algorithm, experiment or user are declared where they are made: by `fs.Metric`, or in a method `modes`.
COLUMNS = {
    **dict.fromkeys(("round", "samples", "regularizer"), Column("none")),
    **dict.fromkeys(("bytes_up", "bytes_down", "seconds"), Column("min")),
    **dict.fromkeys(("objective", "loss", "upper", "lower_residual"), Column("min", of_problem=True)),
    **dict.fromkeys(("stationarity", "stationarity_{}", "subdifferential_distance"), Column("min", of_problem=True)),
    **dict.fromkeys(("mse", "mean_loss", "worst_group_loss"), Column("min")),
    **dict.fromkeys(("eq_opp", "eq_odds", "demographic_parity"), Column("min")),  # gaps between groups
    **dict.fromkeys(("accuracy", "worst_group_accuracy", "hoyer", "zeros"), Column("max")),
    **dict.fromkeys(("auc", "mean_local_auc", "ap", "pauc_{}", "pauc_raw_{}", "tpauc_{}_{}"), Column("max")),
}
_NUMBER = r"[0-9.]+(?:e[+-]?[0-9]+)?"
_PATTERNS = [(re.compile(re.escape(name).replace(r"\{\}", _NUMBER)), found) for name, found in COLUMNS.items()]


def column(name: str, declared: Mapping[str, Direction] | None = None) -> Column | None:
    """The declaration of a column, with or without the name of a split in front; None without a declaration.

    Args:
        name: the column.
        declared: directions by name; they take precedence over the library's.

    >>> column("test/tpauc_0.5_0.3"), column("my_recall"), column("my_recall", {"my_recall": "max"})
    (Column(direction='max', of_problem=False), None, Column(direction='max', of_problem=False))
    """
    parts = name.split("/")
    ours = next((found for pattern, found in _PATTERNS if pattern.fullmatch(parts[-1])), None)
    tails = ("/".join(parts[start:]) for start in range(len(parts)))
    theirs: Direction | None = next((declared[tail] for tail in tails if declared and tail in declared), None)
    return ours if theirs is None else Column(theirs, ours is not None and ours.of_problem)


def sign(name: str, mode: Mode = "auto", declared: Mapping[str, Direction] | None = None) -> int:
    """+1 where the column is to be maximised, -1 where it is to be minimised.

    Args:
        name: the column.
        mode: "max" or "min"; "auto" reads the declared direction and raises a `ValueError` without one.
        declared: directions by name; they take precedence over the library's.

    >>> sign("test/accuracy"), sign("objective"), sign("my_recall", "max")
    (1, -1, 1)
    """
    if mode not in get_args(Mode):
        raise unknown("mode", str(mode), get_args(Mode))
    found = column(name, declared)
    chosen = mode if mode != "auto" else "unknown" if found is None else found.direction
    if chosen not in ("min", "max"):
        why = "has no better end" if chosen == "none" else "does not declare which end is better"
        raise ValueError(f'column {name!r} {why}: give mode="max" or mode="min"')
    return 1 if chosen == "max" else -1


def is_gain(name: str, declared: Mapping[str, Direction] | None = None) -> bool:
    """Whether a column is declared to be better when high."""
    found = column(name, declared)
    return found is not None and found.direction == "max"


def checked(direction: Any, where: str) -> Direction:
    """Return a declared direction; raise a `ValueError` for any other word."""
    if direction not in get_args(Direction):
        raise ValueError(f'{where}: the direction {direction!r} must be "max", "min" or "none"')
    return direction
