"""The data of the fairness experiments: Adult and German Credit among three clients, with a balanced "valid" split.

As in li2022: 7:3 into train and test inside every group; train among three clients, at random or with every group
divided 2:2:6; a small group-balanced validation set from each client's train rows. Other choices are arguments, or
fixed here: validation rows are removed from train, numbers are standardised by train statistics (with raw ones, steps
of 0.1 are impossible), Adult's train and test files are pooled first, and label 1 of German Credit is "bad".
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstrata.base.errors import unknown

if TYPE_CHECKING:
    from fedstrata.data.federation import Federation

SHARES = (2, 2, 6)
SEX_STATUS = 8  # the column of German Credit that holds sex and marital status


class Table(NamedTuple):
    """Rows with a sensitive group, not yet divided."""

    x: np.ndarray
    y: np.ndarray
    group: np.ndarray  # 0, 1, …
    features: tuple[str, ...]
    numbers: tuple[int, ...]  # columns of x to standardise
    sensitive: tuple[int, ...]  # columns of x that reveal the group


def federation(data: str = "adult", **options: Any) -> "Federation":
    """Adult (by race, 5 groups), "german_credit" (by sex and marital status, 4) or "synthetic" (3 groups, no files).

    options: those of `divide`.

    >>> made = federation("synthetic", iid=False, validation=5)
    >>> made.clients, sorted(made.splits), made["valid"].counts
    (3, ['test', 'train', 'valid'], array([15, 15, 15]))
    """
    tables = {"adult": adult, "german_credit": german_credit, "synthetic": synthetic}
    if data not in tables:
        raise unknown("data of the fairness experiment", data, tables)
    return divide(tables[data](), **options)


def adult() -> Table:
    """The 48,842 people of Adult's two files; words one-hot, the group is the race."""
    from fedstrata.data import load
    from fedstrata.data.sources.credit import ADULT_NUMBERS

    found = load("adult", scale=False, group="race")
    parts = (found.train, found.test or {})
    x, y, group = (np.concatenate([part[name] for part in parts]) for name in ("x", "y", "group"))
    names = found.features or ()
    sensitive = tuple(j for j, name in enumerate(names) if name.startswith("race = "))
    return Table(x, y, group, names, tuple(names.index(n) for n in ADULT_NUMBERS), sensitive)


def german_credit() -> Table:
    """The 1,000 applicants of German Credit, codes as numbers; the group is sex and marital status."""
    from fedstrata.data import load

    found = load("german_credit", encoding="ordinal", scale=False, group="sex_status")
    x, y, group = (found.train[name] for name in ("x", "y", "group"))
    return Table(x, y, group, found.features or (), tuple(range(x.shape[1])), (SEX_STATUS,))


def synthetic(rows: int = 900, seed: int = 0) -> Table:
    """Three groups of unequal sizes, which need different models and have different shares of positives."""
    rng = np.random.default_rng(seed)
    group = rng.choice(3, rows, p=[0.6, 0.3, 0.1])
    number = rng.normal(size=(rows, 4)) + 0.5 * group[:, None]
    slope = rng.normal(size=4) + 0.8 * rng.normal(size=(3, 4))
    logit = np.sum(number * slope[group], axis=1) + np.array([0.5, 0.0, -1.0])[group]
    y = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int32)
    raw = number * np.array([1.0, 10.0, 1000.0, 0.1]) + np.array([0.0, 40.0, 5000.0, 1.0])
    x = np.concatenate([raw, np.eye(3)[group]], axis=1).astype(np.float32)
    names = (*(f"number {j + 1}" for j in range(4)), *(f"group = {k}" for k in range(3)))
    return Table(x, y, group.astype(np.int32), names, (0, 1, 2, 3), (4, 5, 6))


def divide(
    table: Table,
    iid: bool = True,
    validation: int = 10,
    *,
    group_feature: bool = True,
    clients: int = 3,
    test: float = 0.3,
    split_seed: int = 0,
    partition_seed: int = 0,
    validation_seed: int = 0,
) -> "Federation":
    """Splits train and valid by client, test pooled; columns x, y and group.

    iid: rows assigned at random; otherwise every group is divided 2:2:6, and the shares go to clients in random order.
    validation: rows of each group and client in valid, or fewer if there are not enough; train keeps one.
    group_feature: the group is an input of the model. test: the part of every group. The three seeds draw test, the
    clients and valid.
    """
    from fedstrata.data import Federation

    if validation < 1:
        raise ValueError(f"fairness data: validation={validation!r} rows per group and client must be at least 1")
    if not 0 < test < 1:
        raise ValueError(f"fairness data: test={test!r} must lie between 0 and 1")
    if not iid and clients != len(SHARES):
        raise ValueError(
            f"fairness data: the division {SHARES} is for {len(SHARES)} clients, not {clients}; use iid=True"
        )
    tested = held_out(table.group, test, np.random.default_rng(split_seed))
    train = np.flatnonzero(~tested)
    owners = assign(table.group[train], iid, clients, np.random.default_rng(partition_seed))
    valid = balanced(table.group[train], owners, validation, np.random.default_rng(validation_seed))
    x = scaled(table, train[~valid])
    features = table.features
    if not group_feature:
        kept = [j for j in range(x.shape[1]) if j not in table.sensitive]
        x, features = x[:, kept], tuple(features[j] for j in kept)
    part = lambda rows: {"x": x[rows], "y": table.y[rows], "group": table.group[rows]}
    made = Federation.from_arrays(part(train[~valid]), owners[~valid], classes=2, features=features)
    return made.with_split("valid", part(train[valid]), owners[valid]).with_split("test", part(np.flatnonzero(tested)))


def held_out(group: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """A mask of the rows for tests: the fraction of every group, rounded."""
    mask = np.zeros(group.size, bool)
    for number in np.unique(group):
        rows = rng.permutation(np.flatnonzero(group == number))
        mask[rows[: round(fraction * rows.size)]] = True
    return mask


def assign(group: np.ndarray, iid: bool, clients: int, rng: np.random.Generator) -> np.ndarray:
    """The client of every row."""
    if iid:
        return rng.permutation(np.arange(group.size) % clients)
    owners = np.empty(group.size, np.int64)
    for number in np.unique(group):
        rows = rng.permutation(np.flatnonzero(group == number))
        cuts = np.round(np.cumsum(SHARES)[:-1] / sum(SHARES) * rows.size).astype(int)
        for client, share in zip(rng.permutation(clients), np.split(rows, cuts), strict=True):
            owners[share] = client
    return owners


def balanced(group: np.ndarray, owners: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """A mask of `count` rows of every group and client; fewer if there are not more: one row stays in train."""
    mask = np.zeros(group.size, bool)
    for client in np.unique(owners):
        for number in np.unique(group):
            rows = rng.permutation(np.flatnonzero((owners == client) & (group == number)))
            mask[rows[: min(count, max(rows.size - 1, 0))]] = True
    return mask


def scaled(table: Table, train: np.ndarray) -> np.ndarray:
    """x with its numbers at mean 0 and deviation 1 on the train rows; constant columns are only centred."""
    x, columns = table.x.astype(np.float64), list(table.numbers)
    mean, deviation = x[train][:, columns].mean(axis=0), x[train][:, columns].std(axis=0)
    x[:, columns] = (x[:, columns] - mean) / np.where(deviation > 1e-12 * np.abs(mean), deviation, 1.0)
    return x.astype(np.float32)
