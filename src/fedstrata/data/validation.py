"""Checks of the data of a federation; every message names the client, the column and the remedy."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedstrata.data import frames
from fedstrata.data.split import Split

LARGEST = 2**31 - 2**16  # rows are numbered in 32 bits, and a chunk of rows may run past the last one
HOW = (
    'make a federation with fs.Federation.from_clients([{"x": X, "y": y}, …]), one data set per client, or '
    'fs.Federation.from_arrays({"x": X, "y": y}, clients=ids), the client of each row (see also from_frame, from_files '
    "and fs.data.federate)"
)


def named_leaves(examples: Any) -> list[tuple[str, Any]]:
    """The leaves of a pytree with readable names.

    >>> [name for name, _ in named_leaves({"x": 1, "y": {"left": 2}})]
    ['x', 'y.left']
    """
    pairs = jax.tree_util.tree_leaves_with_path(examples)
    return [(jax.tree_util.keystr(path, simple=True, separator=".") or "examples", leaf) for path, leaf in pairs]


def labels_of(examples: Any) -> Any | None:
    """The leaf `y`, if there is one."""
    return examples.get("y") if isinstance(examples, Mapping) else None


def _numeric(name: str, value: Any, where: str) -> np.ndarray:
    if value is None:
        raise TypeError(f"{where}: leaf {name!r} is None; leave it out, or give an array with one entry per row.")
    if frames.is_frame(value):
        value = frames.numbers(value, f"{where}, leaf {name!r}").astype(np.float32)
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{where}: leaf {name!r} has rows of different lengths; all must have one shape.") from None
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(
            f"{where}: leaf {name!r} has dtype {array.dtype}, numbers are needed; "
            "encode text as numbers first (e.g. pandas.get_dummies for columns, numpy.unique for labels)."
        )
    kind, label = array.dtype.kind, name == "y"
    if kind in "iu" and array.size and (label or array.dtype.itemsize > 4 or array.dtype == np.uint32):
        low, high = array.min(), array.max()
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{where}: leaf {name!r} holds {low} to {high}, which does not fit 32 bits; renumber it.")
    if (kind in "iu" and (label or array.dtype.itemsize > 4 or array.dtype == np.uint32)) or (kind == "b" and label):
        return array.astype(np.int32, copy=False)
    if kind in "fV":
        wide = array.dtype.itemsize > 4 and isinstance(value, np.ndarray | np.generic | jax.Array)
        return array.astype(np.float64 if wide else np.float32, copy=False)
    return array


def canonical(examples: Any, where: str) -> Any:
    """Leaves as numpy arrays: floats as float32 (float64 arrays stay), labels and wide integers as int32.

    Args:
        examples: a tree of arrays; a list is an array, not a tree.
        where: the caller, for errors.
    """
    if frames.is_frame(examples):
        raise TypeError(
            f"{where}: the examples are a {type(examples).__name__} without a declared label; use "
            'Federation.from_frame, or give {"x": frame[columns], "y": frame[label]}.'
        )
    if examples is None or isinstance(examples, str):
        raise TypeError(f'{where}: the examples are {examples!r}; give arrays, e.g. {{"x": features, "y": labels}}.')
    is_leaf = lambda node: isinstance(node, list) or node is None
    paths, tree = jax.tree_util.tree_flatten_with_path(examples, is_leaf=is_leaf)
    if not paths:
        raise ValueError(f'{where}: there are no arrays in the examples; pass e.g. {{"x": features, "y": labels}}.')
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "examples"
    return jax.tree.unflatten(tree, [_numeric(name(path), leaf, where) for path, leaf in paths])


def row_count(examples: Any, where: str) -> int:
    """The common number of rows of all leaves."""
    shapes = {name: leaf.shape for name, leaf in named_leaves(examples)}
    scalars = [name for name, shape in shapes.items() if not shape]
    if scalars:
        raise ValueError(f"{where}: leaf {scalars[0]!r} is a single number; every leaf needs one entry per row.")
    if len({shape[0] for shape in shapes.values()}) != 1:
        sizes = ", ".join(f"{name} {shape[0]:,}" for name, shape in shapes.items())
        raise ValueError(
            f"{where}: leaves have different numbers of rows ({sizes}); row k of each must be one example."
        )
    return next(iter(shapes.values()))[0]


def numbered(rows: int, where: str) -> None:
    """Raise for more rows than programs can number in 32 bits."""
    if rows > LARGEST:
        raise ValueError(
            f"{where} has {int(rows):,} rows, and programs number at most {LARGEST:,}; leave some out (say, with "
            "federation.select), or run on several federations"
        )


def splits(given: Any) -> None:
    """Raise unless these are splits by name, with "train", over the same number of clients."""
    if not isinstance(given, Mapping):
        raise TypeError(f"Federation: splits is a {type(given).__name__}, not a dictionary of Splits; {HOW}.")
    for name, part in given.items():
        if not isinstance(part, Split):
            raise TypeError(f"Federation: {name!r} is a {type(part).__name__}, not a Split of a federation; {HOW}.")
    if "train" not in given:
        raise ValueError(f"Federation: a 'train' split is needed; got {sorted(map(str, given)) or 'no split'}.")
    for name, part in given.items():
        if not part.pooled and part.clients != given["train"].clients:
            raise ValueError(
                f"Federation: the split {name!r} has {part.clients:,} clients, the train split "
                f"{given['train'].clients:,}; every split needs the same clients (one may have no rows in it)."
            )


def client_names(names: Sequence[str], clients: int) -> None:
    """Raise unless there is one name per client and all differ."""
    if len(names) != clients:
        raise ValueError(f"Federation: {len(names):,} names for {clients:,} clients; give one name per client.")
    if isinstance(names, tuple) and len(set(names)) != clients:
        twice = next(n for k, n in enumerate(names) if n in names[:k])
        raise ValueError(f"Federation: two clients are called {twice!r}; names must differ.")


def offsets(value: Any, rows: int, where: str) -> np.ndarray:
    """Offsets as int64, rising from 0 to the number of rows."""
    array = np.asarray(value)
    good = array.ndim == 1 and array.size >= 2 and array.dtype.kind in "iu"
    if not good or array[0] != 0 or array[-1] != rows or (np.diff(array.astype(np.int64)) < 0).any():
        raise ValueError(f"{where}: offsets must be whole numbers rising from 0 to the number of rows, {rows:,}.")
    return array.astype(np.int64)


def nobody_empty(bounds: np.ndarray, names: Sequence[str]) -> None:
    """Raise for a client without training rows."""
    empty = np.flatnonzero(np.diff(bounds) == 0)
    if empty.size:
        more = f" (and {empty.size - 1:,} more clients)" if empty.size > 1 else ""
        raise ValueError(
            f"Federation: client {names[empty[0]]!r} has no training rows{more}; leave it out, or number the "
            "clients without gaps (ByColumn(ids) does that)."
        )


def finite(examples: Any, bounds: np.ndarray, names: Sequence[str], features: Sequence[str] | None, where: str) -> None:
    """Raise for NaN or infinity in a float leaf."""
    for leaf_name, leaf in named_leaves(examples):
        if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
            continue
        bad = ~np.isfinite(leaf).reshape(leaf.shape[0], -1)
        rows, columns = np.flatnonzero(bad.any(1)), np.flatnonzero(bad.any(0))
        owner = np.searchsorted(bounds, rows, side="right") - 1
        first = owner[0]
        columns_here = np.flatnonzero(bad[rows[owner == first]].any(0))
        known = features if leaf_name == "x" and features is not None and len(features) == bad.shape[1] else None
        shown = ", ".join(repr(known[c]) if known else str(c) for c in columns_here[:5])
        shown += ", …" if columns_here.size > 5 else ""
        others = np.unique(owner).size - 1
        column = f", column {shown}" if leaf.ndim > 1 else ""
        raise ValueError(
            f"{where}: NaN or infinity in {(owner == first).sum():,} rows of client {names[first]!r} "
            f"(leaf {leaf_name!r}{column})"
            + (f", and in {others:,} other clients ({columns.size:,} columns in all)" if others else "")
            + "; drop those rows, or fill them in (e.g. with the column's median), before building the federation."
        )


def label_range(labels: Any, classes: int, bounds: np.ndarray, names: Sequence[str], where: str) -> None:
    """Raise for labels outside 0 … classes − 1."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(
            np.searchsorted(bounds, np.flatnonzero(wrong.reshape(wrong.shape[0], -1).any(1))[0], side="right") - 1
        )
        mine = slice(bounds[first], bounds[first + 1])
        values = np.unique(labels[mine][wrong[mine]])
        raise ValueError(
            f"{where}: client {names[first]!r} has labels {', '.join(map(str, values[:5]))}, outside 0 to "
            f"{classes - 1}; set classes={max(int(labels.max()) + 1, 1)} or renumber the labels from 0."
        )


def same_shape(examples: Any, train: Any, where: str) -> None:
    """Raise if a leaf has another shape per row than the leaf of that name in the train split."""
    if isinstance(examples, Mapping) != isinstance(train, Mapping):
        raise TypeError(
            f"{where}: the examples are a {type(examples).__name__}, those of the train split a "
            f'{type(train).__name__}; give both alike, e.g. {{"x": X, "y": y}}.'
        )
    expected = dict(named_leaves(train))
    for name, leaf in named_leaves(examples):
        if name in expected and leaf.shape[1:] != expected[name].shape[1:]:
            raise ValueError(
                f"{where}: one example of leaf {name!r} has shape {leaf.shape[1:]}, in the train split it has "
                f"{expected[name].shape[1:]}; bring both to one shape."
            )


def split(
    part: Split,
    train: Split,
    names: Sequence[str],
    classes: int | None,
    features: Sequence[str] | None,
    where: str,
) -> None:
    """All checks of the values of one split."""
    owners = ["pooled data"] if part.pooled else names
    same_shape(part.examples, train.examples, where)
    finite(part.examples, part.offsets, owners, features, where)
    labels = labels_of(part.examples)
    if classes is not None and labels is not None:
        label_range(labels, classes, part.offsets, owners, where)


def check_federation(federation: Any) -> None:
    """Raise for anything but a federation. The message explains how to create one."""
    from fedstrata.data.federation import Federation

    if not isinstance(federation, Federation):
        raise TypeError(f"federation is a {type(federation).__name__}, not a Federation; {HOW}")
