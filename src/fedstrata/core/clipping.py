"""Clipping with a bound that holds in floating point, also at large reference values and for changes of any size."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from fedstrata.core.vector import power_of_two, widest

CHUNK = 256  # numbers that are summed at once


def flat(values: PyTree) -> Float[Array, " d"]:
    """All arrays of a tree as one vector, in the widest of their dtypes and at least float32."""
    leaves = jax.tree.leaves(values)
    wide = widest(jnp.float32, *[a.dtype for a in leaves])
    return jnp.concatenate([jnp.zeros(0, wide), *[jnp.ravel(a).astype(wide) for a in leaves]])


def split(vector: Array, like: PyTree) -> Any:
    """The inverse of `flat`, in the dtype of the vector.

    Args:
        vector: the numbers.
        like: a tree with the shapes.
    """
    leaves, structure = jax.tree.flatten(like)
    out, at = [], 0
    for a in leaves:
        out.append(vector[at : at + a.size].reshape(a.shape))
        at += a.size
    return jax.tree.unflatten(structure, out)


def bounded(change: Float[Array, " d"], radius: float) -> Float[Array, " d"]:
    """change × min(1, radius / ‖change‖); its exact norm is at most the radius. A change that is not finite is zero.

    The computed norm is too small by at most a factor 1 + `margin`, which the change is shortened by. Changes whose
    largest entry is below the smallest normal number count as zero.

    Args:
        change: the vector.
        radius: the largest norm.
    """
    info = jnp.finfo(change.dtype)
    largest = jnp.max(jnp.abs(change), initial=0.0)
    # The largest of many numbers with a NaN may be another one: XLA's maximum on a CPU loses it.
    valid = jnp.all(jnp.isfinite(change)) & (largest >= float(info.tiny))
    unit = power_of_two(largest)
    # In units of the largest entry: squares neither overflow nor, where it matters, underflow.
    scaled = jnp.where(valid, change, 0) / unit
    norm = jnp.sqrt(_sum(scaled * scaled)) * (1 + margin(change.size, change.dtype))
    limit = jnp.asarray(radius, change.dtype)
    short = scaled * (limit / jnp.where(valid, norm, 1))
    return jnp.where(valid, jnp.where(norm <= limit / unit, change, short), 0)


def margin(size: int, dtype: Any) -> float:
    """A bound of the relative error of the norm in `bounded`, and of the few products that follow.

    A sum of n numbers ≥ 0 has a relative error of at most n − 1 roundings in any order; a level of `_sum` adds two for
    its lost bit. The square before and the root after add one each, and the root halves what came before it.

    Args:
        size: of the vector.
        dtype: of the vector.
    """
    roundings, n = 1, size
    while n > CHUNK:
        roundings, n = roundings + CHUNK + 2, -(-n // CHUNK)
    return float(jnp.finfo(dtype).eps) / 2 * ((roundings + n + 2) / 2 + 12)


def _sum(terms: Float[Array, " d"]) -> Array:
    """The sum of non-negative numbers, level by level, `CHUNK` at a time."""
    info = jnp.finfo(terms.dtype)
    while terms.size > CHUNK:
        rows = jnp.pad(terms, (0, -terms.size % CHUNK)).reshape(-1, CHUNK)
        # The last bit is dropped so that compilers cannot join two levels to one long sum, with a larger error.
        terms = jax.lax.reduce_precision(jnp.sum(rows, axis=1), info.nexp, info.nmant - 1)
    return jnp.sum(terms)


def clipped(sent: Mapping[str, Any], reference: Mapping[str, Any], clip: float) -> dict[str, Any]:
    """reference + (sent − reference) × min(1, clip / ‖sent − reference‖), one norm over all arrays of all fields.

    The norm of the result minus the reference, computed exactly, is at most `clip`: a value that cannot be represented
    is rounded towards the reference. A change that is not finite counts as none. Otherwise it would reveal more than
    clipped changes may.

    Args:
        sent: values by field.
        reference: those around which changes are clipped.
        clip: the largest norm.
    """
    sent, reference = dict(sent), dict(reference)
    if not jax.tree.leaves(sent):
        return sent
    change = flat(sent) - flat(reference)
    short = bounded(change, clip)
    whole = jnp.all(short == change)  # NaNs are not

    def one_leaf(a: Array, b: Array, short: Array) -> Array:
        near = b.astype(a.dtype)
        new = (b.astype(short.dtype) + short).astype(a.dtype)
        far = lambda value: jnp.abs(value.astype(short.dtype) - b.astype(short.dtype)) > jnp.abs(short)
        new = jnp.where(far(new), jnp.nextafter(new, near), new)
        return jnp.where(whole, a, jnp.where(far(new), near, new))

    return jax.tree.map(one_leaf, sent, reference, split(short, sent))
