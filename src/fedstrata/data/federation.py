"""A federation: one flat data set per split, and the row offsets of the clients.

No client is padded to the size of the largest. `Federation` and `Split` are pytrees, so they pass through `jax.jit` and
`jax.tree.map`. Their leaves may then be traced arrays: only the `from_…` constructors check values.
"""

import hashlib
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Self

import equinox as eqx
import numpy as np
from jaxtyping import PyTree
from numpy.typing import ArrayLike

from fedstrata.base.errors import unknown
from fedstrata.data import constructors, frames, transforms, validation
from fedstrata.data.partition import ByColumn, Partition
from fedstrata.data.split import DefaultNames, Split

__all__ = ["DefaultNames", "Federation", "Split"]

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.table import Table

    from fedstrata.base.figures import Figure


class Federation(eqx.Module):
    """Named splits over the same clients: "train", and any others such as "valid", "test" or "positives".

    Use `from_clients`, `from_arrays`, `from_frame` or `from_files` to make one from data.

    Args:
        splits: the splits by name; "train" is required.
        names: one name per client; None: "client 0", "client 1", …
        classes: the number of label values of a classification, else None.
        features: the column names of x, for tables.

    >>> fed = Federation.from_arrays({"x": np.ones((4, 2)), "y": [0, 1, 1, 0]}, clients=[0, 0, 1, 0])
    >>> fed.clients, fed["train"].counts, fed.classes
    (2, array([3, 1]), 2)
    >>> fed["train"].shard(1)["y"]
    array([1], dtype=int32)
    """

    splits: dict[str, Split]
    names: Sequence[str] = eqx.field(static=True)
    classes: int | None = eqx.field(static=True)
    features: tuple[str, ...] | None = eqx.field(static=True)

    def __init__(
        self,
        splits: Mapping[str, Split],
        names: Sequence[str] | None = None,
        classes: int | None = None,
        features: Sequence[str] | None = None,
    ):
        validation.splits(splits)
        self.splits = dict(splits)
        if names is None:
            names = DefaultNames(self.splits["train"].clients)
        self.names = names if isinstance(names, DefaultNames) else tuple(str(n) for n in names)
        validation.client_names(self.names, self.clients)
        self.classes = classes
        self.features = None if features is None else tuple(str(f) for f in features)

    @property
    def clients(self) -> int:
        """Number of clients."""
        return self.splits["train"].clients

    def __getitem__(self, split: str) -> Split:
        if split not in self.splits:
            raise unknown("split", split, self.splits)
        return self.splits[split]

    def name(self, client: int) -> str:
        """The name of one client.

        Args:
            client: its number, from 0.
        """
        return self.names[client]

    @classmethod
    def _checked(
        cls,
        splits: Mapping[str, Split],
        names: Sequence[str] | None,
        classes: int | None,
        features: Sequence[str] | None,
        where: str,
    ) -> Self:
        """A federation with all values checked."""
        if classes is None:
            classes = constructors.count_classes(split.examples for split in splits.values())
        else:
            splits = {name: constructors.whole_labels(split, where) for name, split in splits.items()}
        federation = cls(splits, names, classes, features)
        validation.nobody_empty(splits["train"].offsets, federation.names)
        for name in splits:
            federation._check_split(name, where)
        return federation

    def _check_split(self, name: str, where: str) -> None:
        train = self.splits["train"]
        validation.split(self.splits[name], train, self.names, self.classes, self.features, f"{where}, split {name!r}")

    @classmethod
    def from_offsets(
        cls,
        examples: PyTree,
        offsets: ArrayLike,
        *,
        names: Sequence[str] | None = None,
        classes: int | None = None,
        features: Sequence[str] | None = None,
    ) -> Self:
        """From rows already in client order. Fast: only the structure is checked, not the values (NaN, label range).

        Args:
            examples: arrays with one entry per row, e.g. {"x": X, "y": y}.
            offsets: client i has the rows offsets[i] to offsets[i + 1]; from 0 to the number of rows.
            names: one name per client; None: "client 0", "client 1", …
            classes: the number of label values of a classification, else None.
            features: the column names of x.
        """
        where = "Federation.from_offsets"
        examples = validation.canonical(examples, where)
        bounds = validation.offsets(offsets, validation.row_count(examples, where), where)
        federation = cls({"train": Split(examples, bounds)}, names, classes, features)
        validation.nobody_empty(bounds, federation.names)
        return federation

    @classmethod
    def from_arrays(
        cls,
        examples: PyTree,
        clients: Partition | ArrayLike,
        *,
        test: PyTree | None = None,
        classes: int | None = None,
        names: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Self:
        """From one data set that is divided among clients.

        Args:
            examples: arrays with one entry per row, e.g. {"x": X, "y": y}.
            clients: a `Partition`, or the client of each row: numbers from 0, or any names.
            test: examples of a pooled test split, which belongs to no client.
            classes: the number of label values; None: max + 1 if the labels `y` are whole numbers from 0, else none.
            names: one name per client; None: the names of the partition, or "client 0", "client 1", …
            features: the column names of x.
            seed: of the partition.
        """
        where = "Federation.from_arrays"
        examples = validation.canonical(examples, where)
        rows = validation.row_count(examples, where)
        ids, count, known = constructors.assignment(clients, examples, rows, names=names, seed=seed, where=where)
        splits = {"train": constructors.in_client_order(examples, ids, count)}
        if test is not None:
            splits["test"] = constructors.pooled(test, f"{where}, test")
        return cls._checked(splits, known if names is None else names, classes, features, where)

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[PyTree],
        *,
        test: PyTree | Sequence[PyTree] | None = None,
        names: Sequence[str] | None = None,
        classes: int | None = None,
        features: Sequence[str] | None = None,
    ) -> Self:
        """From one data set per client.

        Args:
            clients: a list of examples, e.g. [{"x": X, "y": y}, …].
            test: a list of the same kind, or examples of a pooled test split, which belongs to no client.
            names: one name per client; None: "client 0", "client 1", …
            classes: the number of label values; None: max + 1 if the labels `y` are whole numbers from 0, else none.
            features: the column names of x.
        """
        where = "Federation.from_clients"
        splits = {"train": constructors.one_after_another(clients, where)}
        if test is not None:
            splits["test"] = constructors.per_client_or_pooled(test, len(clients), f"{where}, test")
        return cls._checked(splits, names, classes, features, where)

    @classmethod
    def from_frame(
        cls,
        frame: "DataFrame",
        *,
        client: str,
        label: str | None,
        features: Sequence[str] | None = None,
        classes: int | None = None,
    ) -> Self:
        """From a pandas DataFrame, with one client per value of a column.

        Args:
            frame: the table; feature and label columns hold numbers.
            client: the column of the clients.
            label: the column of the labels, which becomes `y`; None: no labels.
            features: the columns that become `x`; None: all others.
            classes: the number of label values; None: max + 1 if the labels are whole numbers from 0, else none.
        """
        examples, columns = frames.columns_of(frame, label, features, client, "Federation.from_frame")
        return cls.from_arrays(examples, ByColumn(frame[client]), classes=classes, features=columns)

    @classmethod
    def from_files(
        cls,
        path: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        client: str | None = None,
        label: str | None = None,
        features: Sequence[str] | None = None,
        classes: int | None = None,
    ) -> Self:
        """From .csv, .parquet or .npz files: one file with a client column, or one file per client.

        Args:
            path: one file, or for one file per client a folder or a list of files.
            client: the column (.npz: the array) of the clients in one file; None: one file per client.
            label: the column of the labels, which becomes `y`; None: no labels.
            features: the columns that become `x`; None: all others.
            classes: the number of label values; None: max + 1 if the labels are whole numbers from 0, else none.
        """
        where = "Federation.from_files"
        paths = frames.list_files(path, client, where)
        if client is None:
            parts, columns = frames.one_per_file(paths, label, features, where)
            return cls.from_clients(parts, names=[p.stem for p in paths], classes=classes, features=columns)
        if paths[0].suffix == ".npz":
            examples, ids = frames.read_arrays(paths[0], label, client, where)
            return cls.from_arrays(examples, ByColumn(ids), classes=classes, features=features)
        frame = frames.read_table(paths[0], where)
        return cls.from_frame(frame, client=client, label=label, features=features, classes=classes)

    def with_split(
        self, name: str, examples: PyTree, clients: Partition | ArrayLike | None = None, *, seed: int = 0
    ) -> Self:
        """The same federation with one more split.

        Args:
            name: of the new split.
            examples: arrays with one entry per row.
            clients: a `Partition`, or the client of each row; None: a pooled split, which belongs to no client.
            seed: of the partition.
        """
        where = "Federation.with_split"
        if name in self.splits:
            raise ValueError(f"{where}: there is a split {name!r} already; choose another name.")
        split = constructors.pooled(examples, where)
        if clients is not None:
            ids = constructors.assignment(
                clients, split.examples, split.size, names=self.names, seed=seed, where=where
            )[0]
            split = constructors.in_client_order(split.examples, ids, self.clients)
        if self.classes is not None:
            split = constructors.whole_labels(split, where)
        federation = self._replace({**self.splits, name: split})
        federation._check_split(name, where)
        return federation

    def _replace(self, splits: Mapping[str, Split], names: Sequence[str] | None = None) -> Self:
        return type(self)(splits, self.names if names is None else names, self.classes, self.features)

    def hold_out(self, name: str = "test", fraction: float = 0.2, seed: int = 0, stratify: bool = True) -> Self:
        """Move a part of every client's train rows to a new split; every client keeps at least one row.

        Args:
            name: of the new split.
            fraction: the part that is moved, between 0 and 1.
            seed: of the random choice of rows.
            stratify: whether to take that fraction of each label.
        """
        return self._replace(transforms.hold_out(self.splits, name, fraction, seed, stratify))

    def by_label(self, positive: int = 1, label: str = "y") -> Self:
        """Add the splits "positives" and "negatives" of the train rows, for `fs.Pairwise`.

        A client may have rows in only one of them. Call it last: rows held out afterwards would remain in both splits.

        Args:
            positive: the label of the positives; all other labels are negatives.
            label: the leaf of the labels.
        """
        return self._replace(transforms.by_label(self.splits, positive, label))

    def standardize(self, leaf: str = "x") -> Self:
        """Shift and scale the columns of all splits to mean 0 and deviation 1 over the train rows.

        Constant columns are only centred.

        Args:
            leaf: the leaf with the columns.
        """
        return self._replace(transforms.standardize(self.splits, leaf))

    def impute(self, leaf: str = "x", mask: str = "missing") -> Self:
        """Replace missing entries of all splits by the median of their column over the known train entries.

        The mask is removed. Hold rows out before, or test rows influence the medians. The median is taken over all
        clients, like the mean of `standardize`: a real federation would have to compute it jointly.

        Args:
            leaf: the leaf with the columns.
            mask: the leaf that marks missing entries; of the same shape.
        """
        return self._replace(transforms.impute(self.splits, leaf, mask))

    def select(self, ids: ArrayLike) -> Self:
        """The federation of the chosen clients, in the given order; pooled splits stay whole.

        Args:
            ids: the numbers of the clients, from 0.
        """
        chosen = transforms.chosen(ids, self.clients)
        default = isinstance(self.names, DefaultNames) and np.array_equal(chosen, np.arange(chosen.size))
        names = DefaultNames(chosen.size) if default else [self.name(i) for i in chosen]
        return self._replace(transforms.select(self.splits, chosen), names)

    def fingerprint(self) -> str:
        """A sha256 of splits, offsets, types and values: equal data have equal fingerprints."""
        digest = hashlib.sha256()
        for name, split in sorted(self.splits.items()):
            digest.update(f"{name} {split.pooled}".encode())
            digest.update(np.ascontiguousarray(split.offsets, dtype=np.int64).data)
            for path, leaf in validation.named_leaves(split.examples):
                array = np.ascontiguousarray(leaf)
                digest.update(f"{path} {array.dtype.str} {array.shape}".encode())
                digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def summary(self, limit: int = 20) -> "Table":
        """A table for the terminal: the rows of each split and the label shares, one line per client.

        Args:
            limit: the number of clients that are shown.
        """
        from fedstrata.data import plots

        return plots.summary(self, limit)

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """A picture of the training rows of each client, stacked by label.

        Args:
            path: also save it there, in the format of the suffix.
        """
        from fedstrata.data import plots

        return plots.plot(self, path)
