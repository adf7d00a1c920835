"""A federation: one flat data set per split, and the row offsets that say which client owns what.

Nothing is padded to the largest client. Both classes are pytrees, so they pass through `jax.jit` and `jax.tree.map`;
their leaves may then be traced arrays, which is why the constructors check values and the classes themselves do not.
"""

import hashlib
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import equinox as eqx
import numpy as np

from fedstrata.data import build, check, edit, tables
from fedstrata.data.partition import ByColumn
from fedstrata.data.split import DefaultNames, Split
from fedstrata.errors import unknown

__all__ = ["DefaultNames", "Federation", "Split"]

if TYPE_CHECKING:
    from rich.table import Table

    from fedstrata.figures import Figure


class Federation(eqx.Module):
    """Named splits over the same clients. `train` is always there; `valid`, `test`, `positives`, … are optional.

    >>> fed = Federation.from_arrays({"x": np.ones((4, 2)), "y": [0, 1, 1, 0]}, clients=[0, 0, 1, 0])
    >>> fed.clients, fed["train"].counts, fed.classes
    (2, array([3, 1]), 2)
    >>> fed["train"].shard(1)["y"]
    array([1], dtype=int32)
    """

    splits: dict[str, Split]
    names: Sequence[str] = eqx.field(static=True)  # one per client
    classes: int | None = eqx.field(static=True)  # number of label values, for classification
    features: tuple[str, ...] | None = eqx.field(static=True)  # column names of x, for tables

    def __init__(
        self,
        splits: Mapping[str, Split],
        names: Sequence[str] | None = None,
        classes: int | None = None,
        features: Sequence[str] | None = None,
    ):
        check.splits(splits)
        self.splits = dict(splits)
        if names is None:
            names = DefaultNames(self.splits["train"].clients)
        self.names = names if isinstance(names, DefaultNames) else tuple(str(n) for n in names)
        check.client_names(self.names, self.clients)
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
        """The name of one client."""
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
        """Build it and check every value."""
        if classes is None:
            classes = build.count_classes(split.examples for split in splits.values())
        else:
            splits = {name: build.whole_labels(split, where) for name, split in splits.items()}
        federation = cls(splits, names, classes, features)
        check.nobody_empty(splits["train"].offsets, federation.names)
        for name in splits:
            federation._check_split(name, where)
        return federation

    def _check_split(self, name: str, where: str) -> None:
        train = self.splits["train"]
        check.split(self.splits[name], train, self.names, self.classes, self.features, f"{where}, split {name!r}")

    @classmethod
    def from_offsets(
        cls,
        examples: Any,
        offsets: Any,
        *,
        names: Sequence[str] | None = None,
        classes: int | None = None,
        features: Sequence[str] | None = None,
    ) -> Self:
        """From rows already in client order. Cheap: structure is checked, values (NaN, label range) are trusted."""
        where = "Federation.from_offsets"
        examples = check.canonical(examples, where)
        bounds = check.offsets(offsets, check.row_count(examples, where), where)
        federation = cls({"train": Split(examples, bounds)}, names, classes, features)
        check.nobody_empty(bounds, federation.names)
        return federation

    @classmethod
    def from_arrays(
        cls,
        examples: Any,
        clients: Any,
        *,
        test: Any = None,
        classes: int | None = None,
        names: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Self:
        """From one data set and a `Partition`, or the client of each row; `test` becomes a pooled split.

        Whole-number labels `y` from 0 make it a classification with max + 1 classes, unless `classes` says otherwise.
        """
        where = "Federation.from_arrays"
        examples = check.canonical(examples, where)
        rows = check.row_count(examples, where)
        ids, count, known = build.assignment(clients, examples, rows, names=names, seed=seed, where=where)
        splits = {"train": build.in_client_order(examples, ids, count)}
        if test is not None:
            splits["test"] = build.pooled(test, f"{where}, test")
        return cls._checked(splits, known if names is None else names, classes, features, where)

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[Any],
        *,
        test: Any = None,
        names: Sequence[str] | None = None,
        classes: int | None = None,
        features: Sequence[str] | None = None,
    ) -> Self:
        """From one data set per client; `test` is a list of the same kind, or one pooled data set."""
        where = "Federation.from_clients"
        splits = {"train": build.one_after_another(clients, where)}
        if test is not None:
            splits["test"] = build.per_client_or_pooled(test, len(clients), f"{where}, test")
        return cls._checked(splits, names, classes, features, where)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        client: str,
        label: str | None,
        features: Sequence[str] | None = None,
        classes: int | None = None,
    ) -> Self:
        """From a pandas DataFrame: a client per value of a column; features are all other columns unless named."""
        examples, columns = tables.columns_of(frame, label, features, client, "Federation.from_frame")
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
        """From .csv, .parquet or .npz: one file with a client column, or one file per client (a folder or a list)."""
        where = "Federation.from_files"
        paths = tables.list_files(path, client, where)
        if client is None:
            parts, columns = tables.one_per_file(paths, label, features, where)
            return cls.from_clients(parts, names=[p.stem for p in paths], classes=classes, features=columns)
        if paths[0].suffix == ".npz":
            examples, ids = tables.read_arrays(paths[0], label, client, where)
            return cls.from_arrays(examples, ByColumn(ids), classes=classes, features=features)
        frame = tables.read_table(paths[0], where)
        return cls.from_frame(frame, client=client, label=label, features=features, classes=classes)

    def with_split(self, name: str, examples: Any, clients: Any = None, *, seed: int = 0) -> Self:
        """The same federation with one more split; without `clients` it is pooled, that is, owned by nobody."""
        where = "Federation.with_split"
        if name in self.splits:
            raise ValueError(f"{where}: there is a split {name!r} already; choose another name.")
        split = build.pooled(examples, where)
        if clients is not None:
            ids = build.assignment(clients, split.examples, split.size, names=self.names, seed=seed, where=where)[0]
            split = build.in_client_order(split.examples, ids, self.clients)
        if self.classes is not None:
            split = build.whole_labels(split, where)
        federation = self._replace({**self.splits, name: split})
        federation._check_split(name, where)
        return federation

    def _replace(self, splits: Mapping[str, Split], names: Sequence[str] | None = None) -> Self:
        return type(self)(splits, self.names if names is None else names, self.classes, self.features)

    def hold_out(self, name: str = "test", fraction: float = 0.2, seed: int = 0, stratify: bool = True) -> Self:
        """Move a part of every client's train rows, label by label, to a new split; every client keeps a row."""
        return self._replace(edit.hold_out(self.splits, name, fraction, seed, stratify))

    def by_label(self, positive: int = 1, label: str = "y") -> Self:
        """With splits "positives" and "negatives" made of the train rows, for `fs.Pairwise`; a client may lack a kind.

        Call it last: splits that are held out afterwards would still be in them.
        """
        return self._replace(edit.by_label(self.splits, positive, label))

    def standardize(self, leaf: str = "x") -> Self:
        """Columns of all splits with the train rows' mean 0 and deviation 1; constant columns are only centred."""
        return self._replace(edit.standardize(self.splits, leaf))

    def impute(self, leaf: str = "x", mask: str = "missing") -> Self:
        """Entries that `mask` marks, in all splits, become their column's median over the known train entries.

        The mask is then gone. Hold rows out before, or they have a say in each other's values. The median is one over
        all clients, as is the mean of `standardize`: a statistic that a real federation would have to find jointly.
        """
        return self._replace(edit.impute(self.splits, leaf, mask))

    def select(self, ids: Any) -> Self:
        """The federation of the chosen clients, in the given order; pooled splits stay whole."""
        chosen = edit.chosen(ids, self.clients)
        default = isinstance(self.names, DefaultNames) and np.array_equal(chosen, np.arange(chosen.size))
        names = DefaultNames(chosen.size) if default else [self.name(i) for i in chosen]
        return self._replace(edit.select(self.splits, chosen), names)

    def fingerprint(self) -> str:
        """A sha256 of splits, offsets, types and values: equal data, equal fingerprint."""
        digest = hashlib.sha256()
        for name, split in sorted(self.splits.items()):
            digest.update(f"{name} {split.pooled}".encode())
            digest.update(np.ascontiguousarray(split.offsets, dtype=np.int64).data)
            for path, leaf in check.named_leaves(split.examples):
                array = np.ascontiguousarray(leaf)
                digest.update(f"{path} {array.dtype.str} {array.shape}".encode())
                digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def summary(self, limit: int = 20) -> "Table":
        """A table for the terminal: rows of each split and the label mix, one line per client."""
        from fedstrata.data import plots

        return plots.summary(self, limit)

    def plot(self, path: str | PathLike[str] | None = None) -> "Figure":
        """Who has what: rows of each client, stacked by label; saved when a path is given."""
        from fedstrata.data import plots

        return plots.plot(self, path)
