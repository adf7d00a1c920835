"""Checks of a history: the values of an axis and the numbers of a column."""

from typing import Any

import numpy as np


def scalar(value: Any) -> Any:
    """An axis value as a plain Python value, so that it prints and compares as the user typed it."""
    if isinstance(value, np.generic) or getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, str | int | float | bool | None) or value != value:
        raise TypeError(f"History: an axis value must be a number, a string or None, got {value!r}")
    return value


def column(name: str, values: Any) -> np.ndarray:
    """A column in int64 or float64: wide enough for every input, and exact in every file format."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"History: column {name!r} must hold numbers, got dtype {array.dtype}")
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def find(axis: str, values: list, wanted: Any) -> int:
    """The index of `wanted` on an axis; floats that were rounded to float32 still match."""
    wanted = scalar(wanted)
    if wanted in values:
        return values.index(wanted)
    for i, value in enumerate(values):
        if isinstance(value, float) and isinstance(wanted, float) and np.isclose(value, wanted, rtol=1e-6, atol=0):
            return i
    raise ValueError(f"History.select: axis {axis!r} has no value {wanted!r}; it has {values}")


def check(axes: dict[str, list], columns: dict[str, np.ndarray], per_client: dict[str, np.ndarray]) -> None:
    """Raise unless names are unique and every column has shape `(*axes, T)`, per-client ones `(*axes, T, clients)`."""
    if not axes or list(axes)[-1] != "seed":
        raise ValueError(f"History: the last axis must be 'seed', got axes {list(axes)}")
    for name, values in axes.items():
        if not values or len({*map(repr, values)}) != len(values):
            raise ValueError(f"History: axis {name!r} needs at least one value and no value twice, got {values}")
    if "round" not in columns or not columns["round"].ndim:
        raise ValueError(f"History: a 'round' column with one entry per recorded round is needed, got {list(columns)}")
    names = [*axes, *columns, *per_client]
    if taken := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"History: names used twice among axes, columns and per_client: {taken}")
    shape = (*(len(values) for values in axes.values()), columns["round"].shape[-1])
    for group, extra, wanted in ((columns, 0, f"{shape}"), (per_client, 1, f"{shape} plus one client axis")):
        for name, values in group.items():
            if values.ndim != len(shape) + extra or values.shape[: len(shape)] != shape:
                raise ValueError(f"History: column {name!r} has shape {values.shape}, expected {wanted}")
