"""Whole splits, for exact evaluation: sums and values over all rows, in chunks."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fedstrata.base.chunks import map_in_chunks
from fedstrata.core.vector import widest
from fedstrata.problems.stored import Stored


class Rows(eqx.Module):
    """A whole split with one weight per example (summing to one), for exact evaluation.

    On a device mesh every device holds the rows of its clients, in a block that is padded to the longest one. Functions
    of rows are computed where the rows are, and only the results are sent.

    Args:
        examples: arrays on the device, or `Stored` on the host.
        weight: of each row; they sum to one.
        client: the client of each row.
        clients: the number of clients.
        chunk: rows that are evaluated at a time.
        start: the first row of each client, if its rows are contiguous and weigh the same.
        capacity: the most rows of a client.
        order: the place of each row among `examples`; None: the same.
        blocks: the number of equal parts of `examples`, one on each device.
    """

    examples: PyTree
    weight: Array
    client: Array
    clients: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True, default=4096)
    start: Array | None = None
    capacity: int = eqx.field(static=True, default=0)
    order: Array | None = None
    blocks: int = eqx.field(static=True, default=1)

    def mean(self, function: Callable[[PyTree], PyTree]) -> PyTree:
        """Σ_j w_j function(example_j), in chunks; its gradient needs no more memory."""

        def sum_up(values: Array, w: Array) -> Array:
            wide = widest(values.dtype, w.dtype)
            return jnp.tensordot(w.astype(wide), values.astype(wide), axes=1, precision="highest")

        weighted = lambda rows, w, _: jax.tree.map(lambda v: sum_up(v, w), jax.vmap(function)(rows))
        return self._over_chunks(weighted, self.chunk)

    def client_weights(self) -> Array:
        """Σ of the weights of each client's rows."""
        return jax.ops.segment_sum(self.weight, self.client, self.clients)

    def client_means(self, function: Callable[[PyTree, PyTree], PyTree], values: PyTree) -> PyTree:
        """For every client i the mean of function(values[i], example) over its rows: stacked, in and out.

        Differentiable, in chunks. A client's rows are taken together, so that products with its value are products of
        matrices. Where client sizes differ much, the value is copied for every row instead.
        """
        if self.clients == 1:
            own = jax.tree.map(lambda a: a[0], values)
            found = eqx.tree_at(lambda rows: rows.weight, self, self.weight / jnp.sum(self.weight))
            return jax.tree.map(lambda v: v[None], found.mean(lambda example: function(own, example)))
        if self.start is not None and self.clients * self.capacity <= 3 * self.weight.shape[0]:
            return self._means_of_windows(function, values)
        size = sum(int(a.size) for a in jax.tree.leaves(values)) // self.clients
        totals = self.client_weights()
        share = self.weight / totals[self.client]

        def by_client(rows: PyTree, w: Array, owner: Array) -> PyTree:
            own = jax.tree.map(lambda a: a[owner], values)
            found = jax.vmap(function)(own, rows)
            spread = lambda v: w.reshape((-1,) + (1,) * (v.ndim - 1)).astype(v.dtype) * v
            return jax.tree.map(lambda v: jax.ops.segment_sum(spread(v), owner, self.clients), found)

        scaled = eqx.tree_at(lambda rows: rows.weight, self, share)
        return scaled._over_chunks(by_client, min(self.chunk, max(1, 2**24 // max(size, 1))))

    def _means_of_windows(self, function: Callable[[PyTree, PyTree], PyTree], values: PyTree) -> PyTree:
        starts: Any = self.start
        count = jax.ops.segment_sum(jnp.ones_like(self.client), self.client, self.clients)
        length, last = max(1, self.chunk // self.clients), self.weight.shape[0] - 1

        def part(own: PyTree, start: Array, count: Array, first: Array) -> PyTree:
            at = first + jnp.arange(min(length, self.capacity), dtype=jnp.int32)
            take = jnp.minimum(start + jnp.minimum(at, jnp.maximum(count - 1, 0)), last)
            found = jax.vmap(lambda e: function(own, e))(self.at(take))
            inside = lambda v: (at < count).reshape((-1,) + (1,) * (v.ndim - 1))
            share = lambda v: jnp.sum(jnp.where(inside(v), v, 0), axis=0) / jnp.maximum(count, 1).astype(v.dtype)
            return jax.tree.map(share, found)

        zero = jnp.array(0, jnp.int32)
        whole = lambda first: jax.vmap(part, in_axes=(0, 0, 0, None))(values, starts, count, first)
        if self.capacity <= length:
            return whole(zero)
        some = jax.checkpoint(whole)
        add = lambda total, first: (jax.tree.map(jnp.add, total, some(first)), None)
        return jax.lax.scan(add, some(zero), jnp.arange(length, self.capacity, length, dtype=jnp.int32))[0]

    def at(self, index: Any) -> PyTree:
        """The examples at these places, on the device or on the host."""
        if isinstance(self.examples, Stored):
            return self.examples.take(jnp.asarray(index))
        return jax.tree.map(lambda a: a[index], self.examples)

    def map(self, function: Callable[[PyTree], PyTree]) -> PyTree:
        """function(example) for every row, in chunks."""
        if isinstance(self.examples, Stored):
            size = self.weight.shape[0]
            length = min(self.chunk, size)
            rows = np.minimum(np.arange(-(-size // length) * length), size - 1).reshape(-1, length)
            found = jax.lax.map(lambda some: jax.vmap(function)(self.at(some)), jnp.asarray(rows, jnp.int32))
            return jax.tree.map(lambda a: a.reshape((-1, *a.shape[2:]))[:size], found)
        if self.order is None:
            return map_in_chunks(function, self.examples, self.chunk)
        length, long = self._lengths(self.chunk)
        found = jax.lax.map(
            lambda number: jax.vmap(jax.vmap(function))(self._slice(self._blocked(self.examples), number, length)),
            jnp.arange(-(-long // length), dtype=jnp.int32),
        )
        block, row = self.order // long, self.order % long
        number = row // length
        place = row - jnp.minimum(number * length, long - length)
        return jax.tree.map(lambda a: a[number, block, place], found)

    def column(self, name: str) -> Array:
        """One column of all rows."""
        if isinstance(self.examples, Stored):
            return self.examples.column(name)
        values = jnp.asarray(self.examples[name])
        return values if self.order is None else values[self.order]

    def pick(self, which: Any) -> "Rows":
        """Some of the rows."""
        examples = self.at(which if self.order is None else self.order[which])
        return Rows(examples, self.weight[which], self.client[which], clients=self.clients, chunk=self.chunk)

    def _over_chunks(self, part: Callable[[PyTree, Array, Array], PyTree], length: int) -> PyTree:
        """The sum of part(examples, weights, owners) over chunks of this many rows."""
        if self.order is not None:
            return self._over_slices(part, length)
        size = self.weight.shape[0]
        if size <= length:
            whole = self.at(jnp.arange(size)) if isinstance(self.examples, Stored) else self.examples
            return part(whole, self.weight, self.client)

        @jax.checkpoint
        def chunk(number: Array) -> PyTree:
            rows = number * length + jnp.arange(length)
            take = jnp.minimum(rows, size - 1)
            return part(self.at(take), jnp.where(rows < size, self.weight[take], 0), self.client[take])

        return _sum(chunk, -(-size // length))

    def _over_slices(self, part: Callable[[PyTree, Array, Array], PyTree], length: int) -> PyTree:
        """The same for rows in blocks: a chunk is a slice of every block, taken on its device."""
        place = lambda values: jnp.zeros(self._stored(), values.dtype).at[self.order].set(values, unique_indices=True)
        lying = self._blocked((self.examples, place(self.weight), place(self.client)))
        length, long = self._lengths(length)
        flat = lambda a: a.reshape((-1, *a.shape[2:]))

        @jax.checkpoint
        def chunk(number: Array) -> PyTree:
            rows, weight, client = self._slice(lying, number, length)
            # The last slice begins early enough to be whole; what the one before has had does not count again.
            new = jnp.minimum(number * length, long - length) + jnp.arange(length) >= number * length
            weight = jnp.where(new[None, :], weight, 0)
            return part(*jax.tree.map(flat, (rows, weight, client)))

        return _sum(chunk, -(-long // length))

    def _stored(self) -> int:
        return jax.tree.leaves(self.examples)[0].shape[0]

    def _blocked(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda a: a.reshape((self.blocks, -1, *a.shape[1:])), tree)

    def _lengths(self, chunk: int) -> tuple[int, int]:
        """Rows of one block in a chunk, and in all."""
        long = self._stored() // self.blocks
        return min(max(1, chunk // self.blocks), long), long

    def _slice(self, blocked: PyTree, number: Array, length: int) -> PyTree:
        return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, number * length, length, 1), blocked)

    def mean_by_client(self, function: Callable[[PyTree], Array]) -> Array:
        """The plain mean of function(example) over each client's rows; NaN for a client without any."""
        values = self.map(function)
        total = jax.ops.segment_sum(values, self.client, self.clients)
        return total / jax.ops.segment_sum(jnp.ones_like(values), self.client, self.clients)


def _sum(chunk: Callable[[Array], PyTree], count: int) -> PyTree:
    """The sum of chunk(0) … chunk(count − 1)."""
    first = chunk(jnp.array(0))
    if count == 1:
        return first
    add = lambda total, number: (jax.tree.map(jnp.add, total, chunk(number)), None)
    return jax.lax.scan(add, first, jnp.arange(1, count))[0]


Full = Mapping[str, Rows]  # by split
