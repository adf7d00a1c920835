"""Inputs of a prediction: arrays and data frames as numbers, or an error that names the row and the column."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstrata.data.frames import is_frame, numbers


def as_batch(x: Any, one: Sequence[int] | None, where: str) -> np.ndarray:
    """One row per example, all of them finite numbers.

    Args:
        x: an array or a data frame.
        one: the shape of an example, where it is known.
        where: the caller, for errors.
    """
    frame = x if is_frame(x) else None
    array = numbers(frame, where) if frame is not None else _array(x, where)
    if not array.ndim or not len(array):
        raise ValueError(f"{where}: x must be a batch of at least one example, got shape {array.shape}")
    if one is not None and array.shape == tuple(one) and array.size > 1:
        raise ValueError(f"{where}: x is one example, of shape {array.shape}; a batch of one is x[None]")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _not_finite(array, frame, where)
    return array


def _not_finite(array: np.ndarray, frame: Any, where: str) -> ValueError:
    """The error for the first entry that is not finite, by the names of its row and column."""
    bad = ~np.isfinite(array)
    row, *column = (int(i[0]) for i in np.nonzero(bad))
    if frame is not None:
        at = f"row {frame.index[row]!r}, column {frame.columns[column[0]]!r}"
    else:
        at = f"row {row}" + (f", column {', '.join(map(str, column))}" if column else "")
    count = int(bad.reshape(len(array), -1).any(axis=1).sum())
    return ValueError(
        f"{where}: {at} is {array[(row, *column)]} ({count} of {len(array)} rows have NaN or infinity); leave such "
        "rows out, or fill them in as the training data were"
    )


def _array(x: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(x)
    except ValueError:
        raise ValueError(f"{where}: x has rows of different lengths") from None
    if array.dtype.kind == "O" and array.ndim:  # numbers of several kinds, such as 1.5 beside True
        try:
            return array.astype(np.float64)
        except (TypeError, ValueError):
            pass
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        what = f"dtype {array.dtype}" if array.ndim else f"a {type(x).__name__}"
        raise TypeError(f"{where}: x must hold numbers, one row per example, got {what}")
    return array
