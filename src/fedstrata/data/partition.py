"""Rules that divide one data set among clients: IID, label skew, quantity skew, natural groups, blocks of time.

Every rule assigns each row exactly once, leaves no client without a row and depends only on its seed. Where a random
rule would leave a client empty, it gets a row drawn from the clients with more than one (large clients give more).
"""

import abc
from dataclasses import dataclass

import numpy as np


def _empty_handed(ids: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Move one row to every client that has none; donors keep at least one row."""
    empty = np.flatnonzero(np.bincount(ids, minlength=clients) == 0)
    if empty.size:
        order = rng.permutation(ids.size)
        _, first = np.unique(ids[order], return_index=True)  # one row of each client stays where it is
        spare = np.delete(order, first)
        ids = ids.copy()
        ids[rng.choice(spare, empty.size, replace=False)] = empty
    return ids


def _by_shares(shares: np.ndarray, rows: int) -> np.ndarray:
    """Client ids of `rows` consecutive rows, cut in proportion to the shares."""
    middle = (np.arange(rows) + 0.5) / rows
    return np.minimum(np.searchsorted(np.cumsum(shares), middle), shares.size - 1)


@dataclass(frozen=True)
class Partition(abc.ABC):
    """A rule that assigns a client to each row.

    Args:
        clients: the number of clients.
    """

    clients: int

    def __post_init__(self) -> None:
        if isinstance(self.clients, bool) or not isinstance(self.clients, int | np.integer) or self.clients < 1:
            raise ValueError(f"{self._rule}: clients must be a positive whole number, got {self.clients!r}.")

    @property
    def _rule(self) -> str:
        return type(self).__name__

    @property
    def names(self) -> tuple[str, ...] | None:
        """The client names; None for numbered clients."""
        return None

    def assign(self, labels: int | np.ndarray, rng: int | np.random.Generator = 0) -> np.ndarray:
        """The client of each row.

        Args:
            labels: the label of each row, or the number of rows where the rule needs no labels.
            rng: a seed or a generator.
        """
        if isinstance(labels, int | np.integer):
            rows, labels_or_none = int(labels), None
        else:
            labels_or_none = np.asarray(labels)
            rows = labels_or_none.shape[0]
        if rows < self.clients:
            raise ValueError(
                f"{self._rule}: {self.clients} clients cannot share {rows} rows, each needs at least one; "
                "use fewer clients or more rows."
            )
        return self._assign(rows, labels_or_none, np.random.default_rng(rng)).astype(np.int64)

    @abc.abstractmethod
    def _assign(self, rows: int, labels: np.ndarray | None, rng: np.random.Generator) -> np.ndarray: ...

    def _codes(self, labels: np.ndarray | None) -> np.ndarray:
        """Labels as 0 … K-1, or an error for a rule by label without usable labels."""
        if labels is None:
            raise ValueError(
                f"{self._rule} divides rows by label, and there are no labels; "
                'put them in examples["y"], or use IID or QuantitySkew.'
            )
        if labels.ndim != 1 or labels.dtype.kind in "fc":
            raise TypeError(
                f"{self._rule} needs one discrete label per row, got shape {labels.shape} of {labels.dtype}; "
                "for a regression target pass binned values as clients=ByColumn(bins)."
            )
        return np.unique(labels, return_inverse=True)[1]

    def _positive(self, alpha: float) -> None:
        if not (isinstance(alpha, int | float | np.number) and np.isfinite(alpha) and alpha > 0):
            raise ValueError(
                f"{self._rule}: alpha must be a positive number, got {alpha!r}; "
                "0.1 is strong skew, 1 moderate, 100 nearly none."
            )


@dataclass(frozen=True)
class IID(Partition):
    """Rows assigned at random; client sizes differ by at most one.

    Args:
        clients: the number of clients.

    >>> np.bincount(IID(3).assign(8, rng=0))
    array([3, 3, 2])
    """

    def _assign(self, rows: int, labels: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(np.arange(rows) % self.clients)


@dataclass(frozen=True)
class Contiguous(Partition):
    """Consecutive blocks in the order of the rows, e.g. periods of time; sizes differ by at most one.

    Args:
        clients: the number of clients.

    >>> Contiguous(2).assign(5)
    array([0, 0, 0, 1, 1])
    """

    def _assign(self, rows: int, labels: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        return np.arange(rows) * self.clients // rows


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew (Hsu et al., 2019): the rows of each label are divided by a draw from Dirichlet(alpha, …, alpha).

    Args:
        clients: the number of clients.
        alpha: above 0. Small: a label is on few clients. Large: all clients have the same label shares.
    """

    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive(self.alpha)

    def _assign(self, rows: int, labels: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        codes = self._codes(labels)
        ids = np.empty(rows, np.int64)
        for code in range(codes.max() + 1):
            mine = rng.permutation(np.flatnonzero(codes == code))
            ids[mine] = _by_shares(rng.dirichlet(np.full(self.clients, self.alpha)), mine.size)
        return _empty_handed(ids, self.clients, rng)


@dataclass(frozen=True)
class LabelShards(Partition):
    """Label skew (McMahan et al., 2017): rows sorted by label, cut into equal shards, dealt to the clients.

    Args:
        clients: the number of clients.
        shards_per_client: the shards of each client.
    """

    shards_per_client: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards_per_client < 1:
            raise ValueError(f"LabelShards: shards_per_client must be at least 1, got {self.shards_per_client!r}.")

    def _assign(self, rows: int, labels: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        codes = self._codes(labels)
        shards = self.clients * self.shards_per_client
        if shards > rows:
            raise ValueError(
                f"LabelShards: {self.clients} clients x {self.shards_per_client} shards are more than {rows} rows; "
                "use fewer clients or fewer shards."
            )
        mixed = rng.permutation(rows)
        order = mixed[np.argsort(codes[mixed], kind="stable")]  # by label, at random within a label
        owner = rng.permutation(np.arange(shards) % self.clients)
        ids = np.empty(rows, np.int64)
        ids[order] = owner[np.arange(rows) * shards // rows]
        return ids


@dataclass(frozen=True)
class QuantitySkew(Partition):
    """Unequal sizes, equal distributions: sizes by a draw from Dirichlet(alpha, …, alpha), rows assigned at random.

    Args:
        clients: the number of clients.
        alpha: above 0; small values give very unequal sizes.
    """

    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive(self.alpha)

    def _assign(self, rows: int, labels: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        ids = _by_shares(rng.dirichlet(np.full(self.clients, self.alpha)), rows)
        return _empty_handed(rng.permutation(ids), self.clients, rng)


@dataclass(frozen=True, init=False, eq=False)
class ByColumn(Partition):
    """Natural clients: one for each distinct value, in sorted order, named after it.

    Args:
        values: the value of each row.

    >>> rule = ByColumn(["Oslo", "Bergen", "Oslo"])
    >>> rule.assign(3), rule.names
    (array([1, 0, 1]), ('Bergen', 'Oslo'))
    """

    values: np.ndarray

    def __init__(self, values: "np.typing.ArrayLike") -> None:
        column = np.asarray(values)
        if column.ndim != 1 or column.size == 0:
            raise ValueError(f"ByColumn: one value per row is needed, got an array of shape {column.shape}.")
        missing = sum(v is None or v != v for v in column.tolist()) if column.dtype.kind in "fO" else 0
        if missing:
            raise ValueError(f"ByColumn: {missing} rows have no value (NaN); drop them or give them a value.")
        if column.dtype == object:
            column = column.astype(str)
        object.__setattr__(self, "values", column)
        object.__setattr__(self, "clients", int(np.unique(column).size))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(str(v) for v in np.unique(self.values))

    def _assign(self, rows: int, labels: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
        if rows != self.values.size:
            raise ValueError(f"ByColumn: the column has {self.values.size} values and the data {rows} rows.")
        return np.unique(self.values, return_inverse=True)[1]
