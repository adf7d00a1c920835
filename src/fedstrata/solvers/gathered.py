"""A server's operations on gathered rows: a number or a `Vector` of each client of the cohort, stacked."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedstrata.core.vector import Vector, widest
from fedstrata.solvers.linear_program import maximise


def stack(*vectors: Vector) -> Vector:
    """Vectors of one shape as rows.

    >>> stack(Vector(jnp.zeros(3)), Vector(jnp.ones(3))).tree.shape
    (2, 3)
    """
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *vectors)


def append(rows: Vector, vector: Vector) -> Vector:
    """The rows, and one more."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), rows, vector)


def filled(rows: Vector, present: Bool[Array, " m"]) -> Vector:
    """The rows, with zeros in empty slots."""
    return rows.map(lambda a: jnp.where(present.reshape((-1,) + (1,) * (a.ndim - 1)), a, 0))


@jax.default_matmul_precision("highest")
def combine(weights: Float[Array, " m"], rows: Vector) -> Vector:
    r"""The weighted sum $\sum_i w_i r_i$.

    >>> combine(jnp.array([0.25, 0.75]), Vector(jnp.array([[4.0, 0.0], [0.0, 4.0]]))).tree.tolist()
    [1.0, 3.0]
    """

    def total(a: Array) -> Array:
        wide = widest(a.dtype, weights.dtype)
        return jnp.tensordot(weights.astype(wide), a.astype(wide), axes=1).astype(a.dtype)

    return rows.map(total)


def products(left: Vector, right: Vector) -> Float[Array, "m k"]:
    """The inner products of all rows of `left` with all rows of `right`."""
    return jax.vmap(lambda a: jax.vmap(lambda b: a @ b)(right))(left)


def largest(values: Float[Array, " m"], present: Bool[Array, " m"]) -> Array:
    """The largest value among the clients that are present."""
    return jnp.max(jnp.where(present, values, -jnp.inf))


def soft_worst(
    values: Float[Array, " m"], temperature: Array | float, present: Bool[Array, " m"]
) -> Float[Array, " m"]:
    r"""Weights $\propto e^{v_i / \text{temperature}}$: near zero they pick the client with the largest value.

    >>> soft_worst(jnp.array([1.0, 3.0, 9.0]), 0.001, jnp.array([True, True, False])).tolist()
    [0.0, 1.0, 0.0]
    """
    above = (values - largest(values, present)) / temperature
    return jax.nn.softmax(jnp.where(present, above, -jnp.inf))


def aligned(rows: Vector, target: Vector, keep: Vector) -> Vector:
    r"""The convex combination $d = \sum_j a_j r_j$ with the largest $\langle d, t \rangle$ that opposes no row of keep.

    $$ \max_{a \in \text{simplex}} \langle d, t \rangle \quad \text{subject to} \quad \langle d, k_i \rangle \ge 0 $$

    If the constraints cannot be met, d is the combination that violates them least.

    Args:
        rows: the r_j.
        target: t.
        keep: the k_i.
    """
    gain, margins = products(rows, stack(target))[:, 0], products(keep, rows)
    weights, _ = maximise(gain, margins, jnp.zeros(margins.shape[:1], margins.dtype))
    return combine(weights, rows)


def shared_level(raised: Float[Array, " m"], held: Float[Array, " m"], present: Bool[Array, " m"]) -> Array:
    r"""The t with $\sum_i (v_i - t)_+ = \sum_i h_i$ over the clients that are present.

    $(v_i - t)_+$ is then the projection of v onto the simplex with the total of h.

    Args:
        raised: v.
        held: h.
        present: which clients are present.

    >>> float(shared_level(jnp.array([0.75, 1.25, -3.0]), jnp.array([0.5, 0.0, 0.5]), jnp.array([True, True, True])))
    0.5
    """
    falling = -jnp.sort(-jnp.where(present, raised, -jnp.inf))
    excess = jnp.cumsum(falling) - jnp.sum(jnp.where(present, held, 0))
    levels = excess / jnp.arange(1, raised.size + 1, dtype=raised.dtype)
    above = jnp.maximum(jnp.sum(falling > levels), 1)  # no entry is above where the total is zero
    return levels[above - 1]
