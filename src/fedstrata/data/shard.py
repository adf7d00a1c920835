"""One client's data for an oracle: windows into the flat arrays, and the examples of one draw."""

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree


class View(eqx.Module):
    """One client's rows of one split, as a window into the flat arrays.

    Args:
        examples: the rows of all clients.
        start: the first row of the client.
        count: the number of its rows.
        capacity: the largest count of any client.
    """

    examples: PyTree
    start: Array
    count: Array
    capacity: int = eqx.field(static=True)

    def take(self, index: Int[Array, " b"]) -> PyTree:
        """The examples at these positions of the window."""
        rows = self.start + jnp.minimum(index, jnp.maximum(self.count - 1, 0))
        return jax.tree.map(lambda a: a[rows], self.examples)


Shard = Mapping[str, View]  # by split


class Sample(NamedTuple):
    """The examples of one draw.

    Args:
        examples: one row per example.
        mask: how much each example counts, e.g. 0 for padding; None: all count the same.
        position: the positions in the shard, for per-example memory.
    """

    examples: PyTree
    mask: Array | None
    position: Int[Array, " b"]

    def mean(self, values: PyTree) -> PyTree:
        """The mean over the examples that count.

        Args:
            values: arrays with one row per example.
        """
        if (counting := self.mask) is None:
            return jax.tree.map(lambda v: jnp.mean(v, axis=0), values)

        def masked(v: Array) -> Array:
            mask = counting.astype(v.dtype)
            return jnp.tensordot(mask, v, axes=1, precision="highest") / jnp.maximum(jnp.sum(mask), 1)

        return jax.tree.map(masked, values)
