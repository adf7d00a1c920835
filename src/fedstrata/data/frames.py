"""Examples from pandas data frames and from .csv, .parquet and .npz files."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

READABLE = (".csv", ".npz", ".parquet")


def is_frame(value: Any) -> bool:
    """Whether it is a pandas DataFrame, found without importing pandas."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def numbers(frame: Any, where: str) -> np.ndarray:
    """A DataFrame as float64: true and false become 1 and 0, missing entries NaN."""
    text = [str(c) for c, dtype in zip(frame.columns, frame.dtypes, strict=True) if dtype.kind not in "biuf"]
    if text:
        raise TypeError(
            f"{where}: columns {', '.join(text)} are not numbers; choose those to use (features=[…], or "
            "frame[columns]), or encode them first (pandas.get_dummies)."
        )
    return frame.to_numpy(dtype=np.float64, na_value=np.nan)


def columns_of(
    frame: Any, label: str | None, features: Sequence[str] | None, drop: str | None, where: str
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """A pandas DataFrame as {"x": float32 columns, "y": labels} and the column names.

    Args:
        frame: the table.
        label: the column of the labels, if any.
        features: the columns of x; None: all but the label and `drop`.
        drop: the column of the clients, if any.
        where: the caller, for errors.
    """
    if not is_frame(frame):
        raise TypeError(f"{where}: a pandas DataFrame is needed, got a {type(frame).__name__} (files: from_files).")
    if isinstance(features, str):
        raise TypeError(f"{where}: features={features!r} is one string; give a list of columns, [{features!r}].")
    for what, name in (("client", drop), ("label", label)):
        if name is not None and np.ndim(name):
            raise TypeError(f"{where}: {what}={name!r} must name one column.")
    for name in [label, drop, *(features or [])]:
        if name is not None and name not in frame.columns:
            raise ValueError(f"{where}: there is no column {name!r}; there are {', '.join(map(str, frame.columns))}.")
    columns = list(features) if features is not None else [c for c in frame.columns if c not in (label, drop)]
    if not columns:
        raise ValueError(f"{where}: no feature columns are left beside {label!r} and {drop!r}.")
    examples = {"x": numbers(frame[columns], where).astype(np.float32)}
    if label is not None:
        y = frame[label]
        if y.dtype.kind not in "biuf":
            raise TypeError(
                f"{where}: label column {label!r} is not numbers; replace it by its codes, "
                f"frame[{label!r}].astype('category').cat.codes."
            )
        examples["y"] = y.to_numpy(dtype=np.float32, na_value=np.nan) if y.dtype.kind == "f" else y.to_numpy()
    return examples, tuple(str(c) for c in columns)


def list_files(path: str | PathLike[str] | Sequence[str | PathLike[str]], client: str | None, where: str) -> list[Path]:
    """The data files of a path, a folder or a list of paths: one with a client column, or one per client."""
    if not isinstance(path, str | PathLike | list | tuple):
        raise TypeError(f"{where}: give a path, a folder or a list of paths, not a {type(path).__name__}.")
    if isinstance(path, str | PathLike):
        folder = Path(path)
        if client is None and not folder.is_dir():
            raise ValueError(
                f"{where}: one file needs client='column', the client of each row; "
                "for one file per client pass a folder or a list of paths."
            )
        paths = sorted(p for p in folder.iterdir() if p.suffix in READABLE) if folder.is_dir() else [folder]
        if not paths:
            raise ValueError(f"{where}: the folder {folder} holds no {', '.join(READABLE)} file.")
    else:
        paths = [Path(p) for p in path]
        if not paths:
            raise ValueError(f"{where}: the list of files is empty.")
    for p in paths:
        if p.suffix and p.suffix not in READABLE:
            raise ValueError(f"{where}: {p} is none of {', '.join(READABLE)}.")
        if not p.is_file():
            raise FileNotFoundError(f"{where}: there is no file {p}.")
    if len({p.suffix for p in paths}) > 1:
        raise ValueError(f"{where}: files of one kind are needed, got {', '.join(sorted({p.suffix for p in paths}))}.")
    if client is not None and len(paths) != 1:
        raise ValueError(
            f"{where}: client={client!r} is for one file, got {len(paths)}; without it each file is a client."
        )
    return paths


def read_table(path: Path, where: str) -> Any:
    """A .csv or .parquet file as a DataFrame."""
    try:
        import pandas
    except ImportError as missing:
        raise ImportError(f"{where}: reading {path.suffix} needs pandas; install fedstrata[tables].") from missing
    return pandas.read_csv(path) if path.suffix == ".csv" else pandas.read_parquet(path)


def read_arrays(path: Path, label: str | None, client: str | None, where: str) -> tuple[dict[str, np.ndarray], Any]:
    """A .npz file as examples (the label becomes "y") and its client ids, if `client` is given."""
    with np.load(path, allow_pickle=False) as stored:
        arrays = dict(stored)
    for name in (label, client):
        if name is not None and name not in arrays:
            raise ValueError(f"{where}: {path} has no array {name!r}; there are {', '.join(sorted(arrays))}.")
    ids = arrays.pop(client) if client is not None else None
    if label is not None:
        arrays["y"] = arrays.pop(label)
    return arrays, ids


def one_per_file(
    paths: Sequence[Path], label: str | None, features: Sequence[str] | None, where: str
) -> tuple[list[dict[str, np.ndarray]], tuple[str, ...] | None]:
    """The examples of every file, one client each, and the column names of tables."""
    if paths[0].suffix == ".npz":
        return [read_arrays(path, label, None, where)[0] for path in paths], None
    parts, columns = [], None
    for path in paths:
        frame = read_table(path, where)
        part, found = columns_of(frame, label, features or columns, None, f"{where}, {path}")
        if columns is not None and features is None and len(frame.columns) != len(columns) + (label is not None):
            raise ValueError(
                f"{where}: {path} has other columns than {paths[0]}; name the common ones with features=[…]."
            )
        columns = found
        parts.append(part)
    return parts, columns
