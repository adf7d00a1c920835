"""Measures of how sparse a point is."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fedstrata.prox.trees import squared, total, wide


def hoyer(x: PyTree) -> Array:
    r"""Hoyer's sparsity over all p entries of all leaves, between 0 (all equal in size) and 1 (one nonzero).

    $$ \frac{\sqrt{p} - |x|_1 / |x|_2}{\sqrt{p} - 1} $$

    Defined as 1 for the zero vector and for a single number, where the formula has no value.

    Args:
        x: an array or a tree of arrays.

    >>> float(hoyer({"w": jnp.array([0.0, 5.0, 0.0]), "b": jnp.array(0.0)})), float(hoyer(-jnp.ones(9)))
    (1.0, 0.0)

    Reference: hoyer2004.
    """
    leaves = [wide(leaf) for leaf in jax.tree.leaves(x)]
    size = sum(leaf.size for leaf in leaves)
    # The measure does not depend on the scale; in units of the largest sizes the squares cannot overflow.
    unit = total([jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves])
    nonzero = unit > 0
    units = [leaf.astype(unit.dtype) / jnp.where(nonzero, unit, 1) for leaf in leaves]
    one, two = total([jnp.sum(jnp.abs(u)) for u in units]), total([squared(u) for u in units])
    ratio = one / jnp.sqrt(jnp.where(nonzero, two, 1))
    measure = (math.sqrt(size) - ratio) / (math.sqrt(size) - 1) if size > 1 else jnp.ones_like(ratio)
    return jnp.where(nonzero, jnp.clip(measure, 0, 1), 1)


def zeros(x: PyTree) -> Array:
    """The number of entries that are exactly zero, over all leaves.

    Args:
        x: an array or a tree of arrays.

    >>> int(zeros([jnp.array([0.0, -0.0, 1e-30]), jnp.zeros((2, 2))]))
    6
    """
    return sum((jnp.sum(jnp.asarray(leaf) == 0) for leaf in jax.tree.leaves(x)), start=jnp.zeros((), int))
