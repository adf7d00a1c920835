"""Map a function over the rows of a tree of arrays, in chunks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def map_in_chunks(function: Callable[[PyTree], PyTree], stacked: PyTree, size: int | None) -> PyTree:
    """`jax.lax.map` with a batch size, for trees that may have leaves without elements.

    JAX cannot split those into chunks, so the function is mapped over the other leaves.

    Args:
        function: a function of one row.
        stacked: the rows; every leaf has one entry per row.
        size: rows per chunk; None: one row at a time, as `jax.lax.map` without a batch size.

    >>> rows = {"a": jnp.arange(3.0), "none": jnp.zeros((3, 0))}
    >>> out = map_in_chunks(lambda row: {**row, "a": 2 * row["a"]}, rows, 2)
    >>> out["a"].tolist(), out["none"].shape
    ([0.0, 2.0, 4.0], (3, 0))
    """
    leaves, tree = jax.tree.flatten(stacked)
    rows, out = leaves[0].shape[0], {}

    def full_only(some: list[Any]) -> list[Any]:
        given = iter(some)
        row = [next(given) if a.size else jnp.zeros(a.shape[1:], a.dtype) for a in leaves]
        made, out["tree"] = jax.tree.flatten(jax.tree.map(jnp.asarray, function(tree.unflatten(row))))
        out["shapes"] = [(a.shape, a.dtype, a.size > 0) for a in made]
        return [a for a in made if a.size]

    found = iter(jax.lax.map(full_only, [a for a in leaves if a.size], batch_size=size))
    whole = [next(found) if full else jnp.zeros((rows, *shape), dtype) for shape, dtype, full in out["shapes"]]
    return out["tree"].unflatten(whole)
