"""The sizes of numbers that sites send: finite, and such that the server can compute with them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedstrata.deploy.messages import NotFinite
from fedstrata.engine.codec import named_arrays


def check_magnitudes(arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse numbers that are not finite, or so large that their squares are not.

    Args:
        arrays: of a reply, by name.

    Raises:
        NotFinite: with the array's name.
    """
    for name, array in arrays.items():
        size = largest(array)
        if not math.isfinite(size):
            raise NotFinite(f"{name} has values that are not finite")
        most = float(jnp.finfo(array.dtype).max) if size else math.inf
        if most > 1e30 and size > math.sqrt(most):  # half precision has no room for such a limit
            raise NotFinite(f"{name} has values whose squares are not finite")  # how large is not for the reports


def largest(values: Any) -> float:
    """The largest absolute value among the floats of an array or a tree; infinity if one is not finite."""
    sizes = [0.0]
    for array in map(np.asarray, jax.tree.leaves(values)):
        if array.size and jnp.issubdtype(array.dtype, jnp.inexact):
            wide = array.astype(np.float32) if array.dtype.itemsize < 4 else array
            ends = [float(wide.min()), float(wide.max())]
            sizes += [abs(end) if math.isfinite(end) else math.inf for end in ends]
    return max(sizes)


def no_longer_finite(before: Any, after: Any) -> str:
    """The name of an array of a state that was finite before and is not finite now; empty if there is none.

    Args:
        before: the state.
        after: the same state later.
    """
    then = named_arrays(before)
    for name, array in named_arrays(after).items():
        if not math.isfinite(largest(array)) and math.isfinite(largest(then.get(name, 0.0))):
            return name.lstrip(".")
    return ""
