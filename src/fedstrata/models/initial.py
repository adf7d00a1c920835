"""Start values of the deep networks, described array by array and drawn together."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray, PyTree


class InitialArray(NamedTuple):
    """An array that starts at a value plus normal numbers.

    Args:
        shape: of the array.
        variance: of the normal numbers; 0: none are drawn.
        value: their mean.
    """

    shape: tuple[int, ...]
    variance: float = 0.0
    value: float = 0.0


def draw_together(arrays: PyTree, key: PRNGKeyArray, dtype: DTypeLike) -> PyTree:
    """All start values from one stream: compiling a draw for each of many shapes takes several times as long.

    Args:
        arrays: a tree of `InitialArray`.
        key: the random key.
        dtype: of the start values.
    """
    starts, tree = jax.tree.flatten(arrays, is_leaf=lambda leaf: isinstance(leaf, InitialArray))
    ends = np.cumsum([math.prod(start.shape) if start.variance else 0 for start in starts])
    normal = jnp.split(jax.random.normal(key, (int(ends[-1]),), dtype), ends[:-1])
    full = lambda start: jnp.full(start.shape, start.value, dtype)
    spread = lambda start, part: start.variance**0.5 * part.reshape(start.shape)
    return tree.unflatten([spread(s, n) if s.variance else full(s) for s, n in zip(starts, normal, strict=True)])
