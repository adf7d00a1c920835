"""Changes of a federation's splits: the functions behind `Federation.hold_out`, `by_label`, `impute` and others."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedstrata.base.errors import unknown
from fedstrata.data.split import Split
from fedstrata.data.validation import labels_of


def rows_of(bounds: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the chosen clients, in their order, and the offsets of the selection.

    >>> rows_of(np.array([0, 2, 3, 6]), np.array([2, 0]))
    (array([3, 4, 5, 0, 1]), array([0, 3, 5]))
    """
    starts, counts = bounds[ids], bounds[ids + 1] - bounds[ids]
    new = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return np.repeat(starts - new[:-1], counts) + np.arange(new[-1]), new


def held_out(bounds: np.ndarray, labels: np.ndarray | None, fraction: float, seed: int) -> np.ndarray:
    """A mask of the rows to hold out: round(fraction · count) of each client, spread over its labels.

    Every (client, label) group gives its share rounded down or up (largest remainders first). A client keeps at least
    one row.

    Args:
        bounds: the offsets of the clients.
        labels: the label of each row; None: not spread over labels.
        fraction: the part that is held out.
        seed: of the random choice.
    """
    rng = np.random.default_rng(seed)
    counts = np.diff(bounds)
    rows, owner = int(bounds[-1]), np.repeat(np.arange(counts.size), counts)
    wanted = np.minimum(np.floor(fraction * counts + 0.5).astype(np.int64), counts - 1)
    if labels is None:
        group, group_owner, sizes = owner, np.arange(counts.size), counts
    else:
        codes = np.unique(labels, return_inverse=True)[1]
        pairs, group, sizes = np.unique(owner * (codes.max() + 1) + codes, return_inverse=True, return_counts=True)
        group_owner = pairs // (codes.max() + 1)
    share = wanted[group_owner] * (sizes / counts[group_owner])
    take = np.floor(share + 1e-9).astype(np.int64)
    missing = wanted - np.bincount(group_owner, weights=take, minlength=counts.size).astype(np.int64)
    # Groups of one client, largest remainder first and ties at random: the first `missing` of them give one row more.
    by_need = np.lexsort((rng.random(sizes.size), take - share, group_owner))
    first = np.searchsorted(group_owner[by_need], np.arange(counts.size))
    place = np.arange(sizes.size) - first[group_owner[by_need]]
    take[by_need] += place < missing[group_owner[by_need]]

    order = np.lexsort((rng.random(rows), group))
    place_in_group = np.arange(rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.zeros(rows, bool)
    mask[order] = place_in_group < np.repeat(take, sizes)
    return mask


def by_label(splits: Mapping[str, Split], positive: int, label: str) -> dict[str, Split]:
    """The train rows with a label, and the others, as splits "positives" and "negatives"."""
    train = splits["train"]
    if not isinstance(train.examples, Mapping) or label not in train.examples:
        known = list(train.examples) if isinstance(train.examples, Mapping) else ["no named columns"]
        raise unknown("label column (Federation.by_label)", label, known)
    has = np.asarray(train.examples[label]) == positive
    if has.all() or not has.any():
        which = "all rows have" if has.all() else "no row has"
        raise ValueError(f"Federation.by_label: {which} {label} = {positive!r}; both kinds of examples are needed")
    out = dict(splits)
    for name, mask in (("positives", has), ("negatives", ~has)):
        upto = np.concatenate([[0], np.cumsum(mask)])
        rows = jax.tree.map(lambda leaf, mask=mask: np.asarray(leaf)[mask], train.examples)
        out[name] = Split(rows, upto[np.asarray(train.offsets)].astype(np.int64))
    return out


def scaling(leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every column, in float64; a constant column gets scale 1."""
    mean, scale = leaf.mean(axis=0, dtype=np.float64), leaf.std(axis=0, dtype=np.float64)
    # Compared as values: by rounding a constant column has a tiny deviation, which scaling would turn into 1.
    return mean, np.where((leaf == leaf[:1]).all(axis=0) | (scale == 0), 1.0, scale)


def _scaled(leaf: Any, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """(leaf - mean) / scale in the leaf's float type (float32 for integers)."""
    dtype = leaf.dtype if leaf.dtype.kind == "f" else np.float32
    return ((leaf - mean) / scale).astype(dtype)


def hold_out(splits: Mapping[str, Split], name: str, fraction: float, seed: int, stratify: bool) -> dict[str, Split]:
    """Splits with `name` carved out of `train`."""
    if not isinstance(name, str):
        raise TypeError(f"Federation.hold_out: name={name!r} must be a string; the part is fraction={name!r}.")
    if name in splits:
        raise ValueError(f"Federation.hold_out: there is a split {name!r} already; choose another name.")
    if not isinstance(fraction, int | float | np.number) or not 0 < fraction < 1:
        raise ValueError(f"Federation.hold_out: fraction must lie between 0 and 1 (both excluded), got {fraction!r}.")
    train = splits["train"]
    labels = labels_of(train.examples)
    by_label = stratify and labels is not None and labels.ndim == 1 and labels.dtype.kind in "iub"
    gone = held_out(train.offsets, labels if by_label else None, fraction, seed)

    def part(mask: np.ndarray) -> Split:
        bounds = np.concatenate([[0], np.cumsum(mask)])[train.offsets].astype(np.int64)
        return Split(jax.tree.map(lambda leaf: leaf[mask], train.examples), bounds)

    return {**splits, "train": part(~gone), name: part(gone)}


def standardize(splits: Mapping[str, Split], name: str) -> dict[str, Split]:
    """Splits with one leaf shifted and scaled by the statistics of its train rows."""
    train = splits["train"].examples
    if not isinstance(train, Mapping) or name not in train:
        raise unknown("leaf", name, train if isinstance(train, Mapping) else ())
    mean, scale = scaling(train[name])
    new = {}
    for key, split in splits.items():
        has = isinstance(split.examples, Mapping) and name in split.examples
        examples = {**split.examples, name: _scaled(split.examples[name], mean, scale)} if has else split.examples
        new[key] = Split(examples, split.offsets, split.pooled)
    return new


def impute(splits: Mapping[str, Split], name: str, mask: str) -> dict[str, Split]:
    """Splits with the marked entries of one leaf replaced by medians of its train rows, and without the marks."""
    train = splits["train"].examples
    for leaf in (name, mask):
        if not isinstance(train, Mapping) or leaf not in train:
            raise unknown("leaf (Federation.impute)", leaf, train if isinstance(train, Mapping) else ())
    gone = np.asarray(train[mask], bool)
    if gone.shape != train[name].shape:
        raise ValueError(
            f"Federation.impute: {mask!r} has shape {gone.shape}, {name!r} {train[name].shape}; it must be alike."
        )
    nobody = gone.all(axis=0)  # a column that no train row has is 0 wherever it is missing
    median = np.nanmedian(np.where(gone & ~nobody, np.nan, np.where(nobody, 0, train[name])), axis=0)
    new = {}
    for key, split in splits.items():
        examples = split.examples
        if isinstance(examples, Mapping) and mask in examples:
            filled = np.where(examples[mask], median, examples[name]).astype(examples[name].dtype)
            examples = {**{k: v for k, v in examples.items() if k != mask}, name: filled}
        new[key] = Split(examples, split.offsets, split.pooled)
    return new


def chosen(ids: Any, clients: int) -> np.ndarray:
    """Client ids as an array, each at most once."""
    array = np.atleast_1d(np.asarray(ids))
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"Federation.select: a list of client numbers from 0 is needed, got {ids!r} (of a name: "
            "federation.names.index(name); of a mask: numpy.flatnonzero(mask))."
        )
    if array.min() < 0 or array.max() >= clients:
        raise ValueError(f"Federation.select: ids must lie in 0 to {clients - 1}, got {array.min()} to {array.max()}.")
    if np.unique(array).size != array.size:
        raise ValueError("Federation.select: a client is named twice; list each id once.")
    return array.astype(np.int64)


def select(splits: Mapping[str, Split], ids: np.ndarray) -> dict[str, Split]:
    """Splits with the rows of the chosen clients; pooled ones as they are."""

    def part(split: Split) -> Split:
        if split.pooled:
            return split
        rows, bounds = rows_of(split.offsets, ids)
        return Split(jax.tree.map(lambda leaf: leaf[rows], split.examples), bounds)

    return {name: part(split) for name, split in splits.items()}
