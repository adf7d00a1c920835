"""Storage of a simulated state: which fields are held once, which per client, and access to a cohort's rows.

The layout follows from placements: `Local` fields are stacked over all clients (per-example memory is flat, like its
split), pools have axes (history, cohort slot, row), everything else is held once.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.core.memory import PerExample, Pool, is_per_example
from fedstrata.core.placement import select
from fedstrata.data.shard import View


class FlatSplit(eqx.Module):
    """A split on the device: flat rows, and the first row of each client."""

    examples: PyTree
    start: Any  # (N,)
    count: Any  # (N,)
    capacity: int = eqx.field(static=True)  # the largest count
    order: Array | None = None  # (n,) on a mesh: the position of row j among the examples

    def view(self, start: Array, count: Array) -> View:
        return View(self.examples, start, count, self.capacity)

    def bare(self) -> "FlatSplit":
        """The split as one device has it, without `order`."""
        return FlatSplit(self.examples, self.start, self.count, self.capacity)


Flat = Mapping[str, FlatSplit]


def local_fields(state: type) -> tuple[str, ...]:
    """The names of the `Local` fields of a state class."""
    return select(state, lambda p: p.held == "by client")


def stack_local(value: PyTree, clients: int, flat: Flat) -> PyTree:
    """One start value for every client (for every example, in per-example memory)."""

    def stack(node: PyTree) -> Any:
        if isinstance(node, PerExample):
            size = jax.tree.leaves(flat[node.split].examples)[0].shape[0]
            return PerExample(jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *jnp.shape(a))), node.rows), node.split)
        return jnp.broadcast_to(node, (clients, *jnp.shape(node)))

    return jax.tree.map(stack, value, is_leaf=is_per_example)


def window(value: PyTree, flat: Flat) -> PyTree:
    """A client's start value: per-example memory widened from one example to the window of one client."""

    def widen(node: PyTree) -> Any:
        if not isinstance(node, PerExample):
            return node
        capacity = flat[node.split].capacity
        return PerExample(jax.tree.map(lambda a: jnp.broadcast_to(a, (capacity, *jnp.shape(a))), node.rows), node.split)

    return jax.tree.map(widen, value, is_leaf=is_per_example)


def read_rows(stacked: PyTree, ids: Array, flat: Flat, everyone: bool) -> PyTree:
    """The rows of these clients, in O(cohort) memory traffic."""

    def read(node: PyTree) -> Any:
        if isinstance(node, PerExample):
            where = jnp.minimum(_window_rows(flat[node.split], ids), _size(flat[node.split]) - 1)
            return PerExample(jax.tree.map(lambda a: a[where], node.rows), node.split)
        return node if everyone else node[ids]

    return jax.tree.map(read, stacked, is_leaf=is_per_example)


def write_rows(stacked: PyTree, rows: PyTree, ids: Array, present: Array, flat: Flat, everyone: bool) -> PyTree:
    """The stacked values with the rows of these clients replaced; empty slots write nothing."""

    def write(old: PyTree, new: PyTree) -> Any:
        if isinstance(old, PerExample):
            split = flat[old.split]
            where = _window_rows(split, ids)
            inside = jnp.arange(split.capacity, dtype=jnp.int32)[None, :] < split.count[ids][:, None]
            inside = inside & present[:, None]
            where = jnp.where(inside, where, _size(split))
            return PerExample(jax.tree.map(lambda a, b: a.at[where].set(b, mode="drop"), old.rows, new.rows), old.split)
        if everyone:
            return new
        return old.at[jnp.where(present, ids, old.shape[0])].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, stacked, rows, is_leaf=is_per_example)


def _window_rows(split: FlatSplit, ids: Array) -> Array:
    return split.start[ids][:, None] + jnp.arange(split.capacity, dtype=jnp.int32)[None, :]


def _size(split: FlatSplit) -> int:
    return jax.tree.leaves(split.examples)[0].shape[0]


def empty_union(own: Pool, cohort: int) -> Pool:
    """A pool as the server stores it: (history, cohort slot, row), with no valid rows yet."""
    widen = lambda a: jnp.broadcast_to(a, (own.history, cohort, *a.shape))
    rows, client, valid = (jax.tree.map(widen, part) for part in (own.rows, own.client, own.valid))
    return Pool(rows, client, jnp.zeros_like(valid), own.capacity, own.history)


def push_union(union: Pool, own: Pool, ids: Array, present: Array) -> Pool:
    """The oldest round leaves, the rows of this cohort enter."""
    enter = lambda old, new: jnp.concatenate([old[1:], new[None]])
    shape = (ids.shape[0], union.capacity)
    client = enter(union.client, jnp.broadcast_to(jnp.where(present, ids, -1)[:, None], shape))
    valid = enter(union.valid, jnp.broadcast_to(present[:, None], shape))
    return Pool(jax.tree.map(enter, union.rows, own.rows), client, valid, union.capacity, union.history)


def newest(union: Pool) -> Pool:
    """The rows pooled in the last round."""
    rows, client, valid = (jax.tree.map(lambda a: a[-1:], part) for part in (union.rows, union.client, union.valid))
    return Pool(rows, client, valid, union.capacity, union.history)


def flat_union(union: Pool, first: Pool | None = None) -> Pool:
    """A pool as an algorithm sees it: one axis of rows.

    first: the pool of all clients, in the place of the oldest round, which is empty while that pool lasts.
    """
    flatten = lambda a: a.reshape((-1, *a.shape[3:]))
    join = lambda a, b: jnp.concatenate([flatten(a), flatten(b[1:])])
    parts = lambda pool: (pool.rows, pool.client, pool.valid)
    flat = jax.tree.map(flatten, parts(union)) if first is None else jax.tree.map(join, parts(first), parts(union))
    rows, client, valid = flat
    return Pool(rows, client, valid, union.capacity, union.history)
