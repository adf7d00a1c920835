"""From arrays to rows in client order: the functions behind the constructors of `Federation`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedstrata.data.partition import ByColumn, Partition
from fedstrata.data.split import Split
from fedstrata.data.validation import canonical, labels_of, named_leaves, row_count


def assignment(
    clients: Any, examples: Any, rows: int, *, names: Sequence[str] | None, seed: int, where: str
) -> tuple[np.ndarray, int, Sequence[str] | None]:
    """The client of each row, the number of clients (as many as names, if given), and the partition's names.

    Args:
        clients: a partition, or the client of each row.
        examples: the rows; a partition reads their labels.
        rows: their number.
        names: the names of the clients, if given.
        seed: of the partition.
        where: the caller, for errors.
    """
    count = None if names is None else len(names)
    if not isinstance(clients, Partition):
        ids = np.asarray(clients)
        if ids.shape != (rows,):
            raise ValueError(
                f"{where}: clients has shape {ids.shape}, the data have {rows:,} rows; give one client id per row, or "
                "a partition, e.g. fs.data.IID(5) for five clients."
            )
        if ids.dtype.kind in "iu":
            found = int(ids.max()) + 1 if rows else 0
            if rows and ids.min() < 0:
                raise ValueError(f"{where}: client ids start at 0, got {ids.min()}; ByColumn(ids) takes any values.")
            if found > (rows if count is None else count):
                limit = f"there are only {rows:,} rows" if count is None else f"there are {count:,} clients"
                raise ValueError(f"{where}: client id {found - 1:,}, but {limit}; ByColumn(ids) takes ids with gaps.")
            return ids.astype(np.int64, copy=False), found if count is None else count, None
        clients = ByColumn(ids)
    labels = labels_of(examples)
    ids = clients.assign(rows if labels is None else labels, np.random.default_rng(seed))
    if count is not None and clients.clients != count:
        raise ValueError(
            f"{where}: {type(clients).__name__} makes {clients.clients:,} clients, there are {count:,} client names."
        )
    return ids, clients.clients, clients.names


def pooled(examples: Any, where: str) -> Split:
    """Examples as a split that belongs to no client."""
    examples = canonical(examples, where)
    return Split(examples, np.array([0, row_count(examples, where)]), pooled=True)


def in_client_order(examples: Any, ids: np.ndarray, clients: int) -> Split:
    """Rows sorted by client, each client's rows in their old order."""
    bounds = np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=clients))]).astype(np.int64)
    if (np.diff(ids) >= 0).all():
        return Split(examples, bounds)
    order = np.argsort(ids, kind="stable")
    return Split(jax.tree.map(lambda leaf: leaf[order], examples), bounds)


def one_after_another(parts: Sequence[Any], where: str) -> Split:
    """One data set per client, concatenated."""
    if isinstance(parts, Mapping):
        raise TypeError(
            f"{where}: clients is a dictionary with {', '.join(map(repr, parts))}; give a list with one data set per "
            "client, e.g. from_clients(list(d.values()), names=list(d)), or one data set to from_arrays."
        )
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise TypeError(f"{where}: clients is a {type(parts).__name__}; give a list with one data set per client.")
    if not parts:
        raise ValueError(f"{where}: the list of clients is empty.")
    parts = [canonical(part, f"{where}, client {i}") for i, part in enumerate(parts)]
    counts = [row_count(part, f"{where}, client {i}") for i, part in enumerate(parts)]
    expected = {name: leaf.shape[1:] for name, leaf in named_leaves(parts[0])}
    for i, part in enumerate(parts):
        found = {name: leaf.shape[1:] for name, leaf in named_leaves(part)}
        if found != expected:
            raise ValueError(f"{where}: client {i} has leaves {found}, client 0 has {expected}; they must be alike.")
    examples = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    return Split(canonical(examples, where), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def per_client_or_pooled(examples: Any, clients: int, where: str) -> Split:
    """A list with one data set per client, or one data set that belongs to no client."""
    if not isinstance(examples, list | tuple):
        return pooled(examples, where)
    if len(examples) != clients:
        raise ValueError(
            f"{where}: a {type(examples).__name__} of {len(examples)} for {clients} clients; give a list with one data "
            'set per client, or one pooled data set, {"x": X, "y": y}.'
        )
    return one_after_another(examples, where)


def count_classes(examples: Iterable[Any]) -> int | None:
    """Largest label + 1 when all labels are whole numbers from 0; None for regression, ±1 or no labels."""
    labels = [y for y in map(labels_of, examples) if y is not None and y.size]
    if not labels or any(y.dtype.kind not in "iu" or y.min() < 0 for y in labels):
        return None
    return max(int(y.max()) for y in labels) + 1


def whole_labels(split: Split, where: str) -> Split:
    """Float labels 0.0, 1.0, … as int32, for data of a classification."""
    labels = labels_of(split.examples)
    if labels is None or labels.dtype.kind != "f" or not np.isfinite(labels).all():
        return split
    odd = labels[labels != np.round(labels)]
    if odd.size:
        raise ValueError(f"{where}: classes is given, but there is a label {odd[0]}; leave classes out for regression.")
    return Split({**split.examples, "y": labels.astype(np.int32)}, split.offsets, split.pooled)
