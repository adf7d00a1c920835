"""Two kinds of memory that a state may hold besides vectors: a shared pool, and one row per example."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree


class Pool(eqx.Module):
    """Rows that clients share (a `Pooled` field), such as the prediction scores of FedX.

    In `start` it is the union over the cohort and the last `history` rounds. In a client's `state` it holds the rows of
    that client, which are the template at the start of each round and are filled by `write`. A client fills all of its
    `capacity` rows in an exchange, so that a message is a plain array. A row counts only where `valid`.

    `Pool.empty(row, capacity, history)` declares it in `init_server`.

    Args:
        rows: (n, ...) on every leaf.
        client: (n,) the client that wrote each row.
        valid: (n,) False where the history is not full yet or a cohort slot was empty.
        capacity: the rows that one client sends in one exchange.
        history: the rounds that are kept.
    """

    rows: PyTree
    client: Array
    valid: Array
    capacity: int = eqx.field(static=True)
    history: int = eqx.field(static=True)

    @classmethod
    def empty(cls, row: PyTree, capacity: int, history: int = 1) -> "Pool":
        """A pool without valid rows.

        Args:
            row: a template of one row, an array or a pytree of arrays.
            capacity: the rows that one client sends in one exchange.
            history: the rounds that are kept.
        """
        if capacity < 1 or history < 1:
            raise ValueError(f"Pool needs capacity >= 1 and history >= 1, got {capacity} and {history}")
        rows = jax.tree.map(lambda a: jnp.broadcast_to(a, (capacity, *jnp.shape(a))), row)
        return cls(rows, jnp.full((capacity,), -1, jnp.int32), jnp.zeros((capacity,), bool), capacity, history)

    def write(self, position: Array | int, rows: PyTree) -> "Pool":
        """The pool with rows written from a position on.

        Args:
            position: of the first row, e.g. local step × batch size; the rows must fit.
            rows: the new rows.
        """
        count = jax.tree.leaves(rows)[0].shape[0]
        for old, new in zip(jax.tree.leaves(self.rows), jax.tree.leaves(rows), strict=True):
            if new.shape != (count, *old.shape[1:]):
                raise ValueError(f"Pool.write: rows of shape {new.shape[1:]} into a pool of rows {old.shape[1:]}")
        if count > self.capacity or (isinstance(position, int) and not 0 <= position <= self.capacity - count):
            raise ValueError(f"Pool.write: {count} rows from {position} on do not fit into {self.capacity}")
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, jnp.asarray(new, old.dtype), position, 0)
        valid = put(self.valid, jnp.ones((count,), bool))
        return Pool(jax.tree.map(put, self.rows, rows), self.client, valid, self.capacity, self.history)

    def keep(self, chosen: Array, first: Array, rows: PyTree) -> "Pool":
        """The pool as a sample of a longer series: row p is entry chosen[p] of the series.

        Args:
            chosen: the entry of each row.
            first: the number of the first of the new entries.
            rows: the entries of the series from `first` on.
        """
        count = jax.tree.leaves(rows)[0].shape[0]
        here = (chosen >= first) & (chosen < first + count)
        at = jnp.clip(chosen - first, 0, count - 1)
        wide = lambda a: here.reshape((-1,) + (1,) * (a.ndim - 1))
        put = lambda old, new: jnp.where(wide(old), jnp.asarray(new, old.dtype)[at], old)
        return Pool(jax.tree.map(put, self.rows, rows), self.client, self.valid | here, self.capacity, self.history)

    def size(self) -> Array:
        """The number of valid rows."""
        return jnp.sum(self.valid, dtype=jnp.int32)

    def nth(self, rank: Array) -> Array:
        """The positions of valid rows, by their rank among the valid ones: nth(0) is the first of them.

        Args:
            rank: from 0.
        """
        upto = jnp.cumsum(self.valid.astype(jnp.int32))
        found = jnp.searchsorted(upto, rank.astype(jnp.int32) + 1)
        return jnp.minimum(found, self.valid.shape[0] - 1).astype(jnp.int32)

    def mean(self, values: Array) -> Array:
        """The mean over valid rows; zero for an empty pool.

        Args:
            values: one per row.
        """
        valid = self.valid.reshape((-1,) + (1,) * (values.ndim - 1))
        count = jnp.maximum(jnp.sum(self.valid), 1).astype(values.dtype)
        return jnp.sum(jnp.where(valid, values, 0), axis=0) / count


class PerExample(eqx.Module):
    """One row per example of a client's split (a `Local` field), by the position of the example: FedX2's u(z).

    It is declared in `init_server` as `PerExample(value, split)`. A client reads its rows by `u[sample.position]` and
    writes them by `u.set(sample.position, rows)`.

    Args:
        rows: the rows; in `init_server` the start value of every example.
        split: the split of the examples.
    """

    rows: PyTree
    split: str = eqx.field(static=True, default="train")

    def __getitem__(self, position: Array) -> Any:
        return jax.tree.map(lambda a: a[position], self.rows)

    def set(self, position: Array, rows: PyTree) -> "PerExample":
        """The memory with the rows at some positions replaced; where a position repeats, one of its rows is kept.

        Args:
            position: of the examples.
            rows: the new rows.
        """
        put = lambda old, new: old.at[position].set(jnp.asarray(new, old.dtype), mode="drop")
        return PerExample(jax.tree.map(put, self.rows, rows), self.split)


def is_per_example(node: Any) -> bool:
    """Whether a node of a pytree is per-example memory."""
    return isinstance(node, PerExample)
