"""Examples that stay in host memory or in memory-mapped files and are fetched by running programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree


class Stored:
    """The rows of a split on the host: only the rows that a program reads are copied to the device.

    Args:
        examples: the rows.
    """

    def __init__(self, examples: PyTree):
        self.examples = jax.tree.map(np.asarray, examples)

    @property
    def size(self) -> int:
        return jax.tree.leaves(self.examples)[0].shape[0]

    def take(self, rows: Array) -> PyTree:
        """These rows, fetched while the program runs."""
        like = lambda a: jax.ShapeDtypeStruct((*rows.shape, *a.shape[1:]), jax.dtypes.canonicalize_dtype(a.dtype))

        def fetch(rows: Any) -> PyTree:
            at = np.asarray(rows)
            return jax.tree.map(lambda a: a[at].astype(jax.dtypes.canonicalize_dtype(a.dtype), copy=False), examples)

        examples = self.examples
        return jax.pure_callback(fetch, jax.tree.map(like, examples), rows, vmap_method="broadcast_all")

    def column(self, name: str) -> Array:
        """One column of all rows."""
        return Stored({name: self.examples[name]}).take(jnp.arange(self.size, dtype=jnp.int32))[name]
