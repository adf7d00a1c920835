"""One client's data as an oracle sees it: windows into the flat arrays, and the examples of one draw."""

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree


class View(eqx.Module):
    """One client's rows of one split, as a window into the flat arrays."""

    examples: PyTree
    start: Array
    count: Array
    capacity: int = eqx.field(static=True)

    def take(self, index: Int[Array, " b"]) -> PyTree:
        rows = self.start + jnp.minimum(index, jnp.maximum(self.count - 1, 0))
        return jax.tree.map(lambda a: a[rows], self.examples)


Shard = Mapping[str, View]  # by split


class Sample(NamedTuple):
    """The examples of one draw, which of them count, and their positions in the shard (for per-example memory)."""

    examples: PyTree
    mask: Array | None
    position: Int[Array, " b"]

    def mean(self, values: PyTree) -> PyTree:
        """The mean over the examples that count of something with one row per example."""
        if self.mask is None:
            return jax.tree.map(lambda v: jnp.mean(v, axis=0), values)

        def masked(v: Array) -> Array:
            mask = self.mask.astype(v.dtype)  # pyright: ignore[reportOptionalMemberAccess]
            return jnp.tensordot(mask, v, axes=1, precision="highest") / jnp.maximum(jnp.sum(mask), 1)

        return jax.tree.map(masked, values)
