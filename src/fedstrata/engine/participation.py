"""Participation rules: how the cohort of a round is drawn, in O(cohort)."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray

from fedstrata.base.permutation import key_words, permute


class Selection(eqx.Module):
    """A participation rule. A client takes part in a round once, also if the rule draws it several times."""

    distinct: ClassVar[bool] = False  # whether `draw` never repeats a client; otherwise every round is compared

    @property
    def full(self) -> bool:
        """Whether every slot is filled in every round."""
        return self.distinct

    @abstractmethod
    def size(self, clients: int) -> int:
        """Slots in a cohort."""

    @abstractmethod
    def draw(self, key: PRNGKeyArray, round: Array, clients: int) -> Array:
        """The ids of this round's clients, −1 for an empty slot; `key` is folded from (seed, round)."""

    def draw_once(self, key: PRNGKeyArray, round: Array, clients: int) -> Array:
        """As `draw`, with −1 where a client is repeated: it would have several parts of a mean, and several states."""
        ids = self.draw(key, round, clients)
        if self.distinct:
            return ids
        order = jnp.argsort(ids, stable=True)
        repeated = jnp.diff(ids[order], prepend=-1) == 0  # empty slots count as repeated, too
        return jnp.where(jnp.zeros_like(repeated).at[order].set(repeated), -1, ids)

    def check(self, clients: int) -> None:
        """Refuse what cannot be drawn, before anything runs."""
        if self.full and not self.distinct:
            raise ValueError(
                f"{type(self).__name__}.full is True, but a client may be drawn twice, and then takes part once: set "
                "distinct = True in the class if that cannot be, or leave out full"
            )
        size = self.size(clients)
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise ValueError(f"a cohort of {size!r} clients cannot be drawn; give a whole number")
        if not 1 <= size <= clients:
            raise ValueError(f"a cohort of {size} clients cannot be drawn from {clients}; choose 1 to {clients}")


class Everyone(Selection):
    """Full participation."""

    distinct = True

    def size(self, clients: int) -> int:
        return clients

    def draw(self, key: PRNGKeyArray, round: Array, clients: int) -> Array:
        return jnp.arange(clients, dtype=jnp.int32)


class Uniform(Selection):
    """Different clients, every subset equally likely.

    Args:
        count: clients in a cohort.
    """

    distinct = True
    count: int

    def size(self, clients: int) -> int:
        return self.count

    def draw(self, key: PRNGKeyArray, round: Array, clients: int) -> Array:
        return permute(key_words(key), jnp.arange(self.count, dtype=jnp.int32), clients)


class Weighted(Selection):
    """`count` different clients, drawn one after another with probability proportional to `weights`.

    Each draw is a look-up in the cumulative weights, repeated until it gives a new client. If large weights would make
    that slow, all clients are ranked by Gumbel noise instead (the same distribution, in O(population)).

    Args:
        count: clients in a cohort.
        weights: one number ≥ 0 for every client.
    """

    distinct = True
    count: int
    table: Any  # cumulative shares of 2³² for look-ups, log shares for ranking
    rank_all: bool = eqx.field(static=True)

    def __init__(self, count: int, weights: ArrayLike):
        weights = np.asarray(weights, np.float64)
        if weights.ndim != 1 or not np.all(np.isfinite(weights)) or np.any(weights < 0):
            raise ValueError("Weighted: weights must be one finite number >= 0 per client")
        positive = int(np.count_nonzero(weights))
        if positive < count:
            raise ValueError(f"Weighted: {count} clients cannot be drawn, only {positive} have weight > 0")
        share = weights / weights.sum()
        left = 1 - np.sort(share)[::-1][: max(count - 1, 0)].sum()  # the smallest weight left for the last draw
        self.count, self.rank_all = count, bool(left < 0.01)
        total = np.cumsum(share)
        cumulated = np.minimum(np.floor(total / total[-1] * 2.0**32), 2**32 - 1).astype(np.uint32)
        self.table = np.log(np.maximum(share, 1e-300)).astype(np.float32) if self.rank_all else cumulated

    def size(self, clients: int) -> int:
        return self.count

    def check(self, clients: int) -> None:
        super().check(clients)
        if self.table.shape[0] != clients:
            raise ValueError(f"Weighted: {self.table.shape[0]} weights were given for {clients} clients")

    def draw(self, key: PRNGKeyArray, round: Array, clients: int) -> Array:
        table = jnp.asarray(self.table)
        if self.rank_all:
            noise = jax.random.gumbel(key, (clients,), table.dtype)
            return jax.lax.top_k(table + noise, self.count)[1].astype(jnp.int32)

        def more(state: tuple) -> tuple:
            ids, found, tries = state
            bits = jax.random.bits(jax.random.fold_in(key, tries), dtype=jnp.uint32)
            bits = jnp.minimum(bits, jnp.uint32(2**32 - 2))  # the largest word would be beyond all clients with weight
            new = jnp.minimum(jnp.searchsorted(table, bits, side="right"), clients - 1).astype(jnp.int32)
            is_new = jnp.all(ids != new)
            return jnp.where(is_new, ids.at[found].set(new), ids), found + is_new.astype(jnp.int32), tries + 1

        start = (jnp.full((self.count,), -1, jnp.int32), jnp.array(0, jnp.int32), jnp.array(0, jnp.int32))
        return jax.lax.while_loop(lambda s: s[1] < self.count, more, start)[0]


class Given(Selection):
    """A schedule of cohorts, repeated when it ends.

    Args:
        ids: row r has the numbers of the clients of round r; −1 leaves a slot empty.
    """

    distinct = True
    ids: Any  # (rounds, slots)
    filled: bool = eqx.field(static=True)

    def __init__(self, ids: Iterable[Sequence[int]]):
        rows = [np.atleast_1d(row).tolist() if np.ndim(row) == 1 else None for row in ids]
        if any(row is None or any(int(i) != i for i in row) for row in rows):
            raise ValueError("Given: the schedule must hold a list of whole client ids for every round")
        rows = [[int(i) for i in row or []] for row in rows]
        empty = [r for r, row in enumerate(rows) if all(i < 0 for i in row)]
        if not rows or empty:
            raise ValueError(
                f"Given: round {empty[0] if empty else 0} of the schedule has zero clients; name at least one"
            )
        if any(len({i for i in row if i >= 0}) != sum(i >= 0 for i in row) for row in rows):
            raise ValueError("Given: a client occurs twice in one round of the schedule")
        width = max(map(len, rows))
        self.ids = np.array([row + [-1] * (width - len(row)) for row in rows], np.int32)
        self.filled = bool(np.all(self.ids >= 0))

    @property
    def full(self) -> bool:
        return self.filled

    def size(self, clients: int) -> int:
        return int(self.ids.shape[1])

    def check(self, clients: int) -> None:
        super().check(clients)
        if self.ids.max() >= clients:
            raise ValueError(f"Given: the schedule names client {self.ids.max()}, but ids run from 0 to {clients - 1}")

    def draw(self, key: PRNGKeyArray, round: Array, clients: int) -> Array:
        return jnp.asarray(self.ids)[round % self.ids.shape[0]]


def selection(cohort: "int | Selection | None") -> Selection:
    """The participation rule of the option `cohort` of `fs.run`.

    Args:
        cohort: None for everyone, a number of clients for a uniform draw, or a rule.
    """
    if cohort is None:
        return Everyone()
    if isinstance(cohort, Selection):
        return cohort
    if isinstance(cohort, (int, np.integer)) and not isinstance(cohort, bool):
        return Uniform(int(cohort))
    raise TypeError(
        f"cohort={cohort!r} must be None (everyone), a number of clients, or a rule such as fs.participation.Weighted"
    )
