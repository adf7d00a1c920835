"""Newton's method for many small strongly convex problems at once, and linear systems with their Hessians."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_solve
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Float, PyTree

DENSE = 512  # unknowns up to which a Hessian is built and factored; above, conjugate gradients
HALVINGS = 20

Stack = Float[Array, "problems unknowns"]


class Problems(NamedTuple):
    """Separable functions of stacked unknowns: `value(Y)[i]` depends on row i of Y alone."""

    value: Callable[[PyTree], Array]
    unflatten: Callable[[Array], PyTree]  # one row to one problem's unknowns

    def values(self, rows: Stack) -> Array:
        return self.value(jax.vmap(self.unflatten)(rows))

    def gradient(self, rows: Stack) -> Stack:
        return jax.grad(lambda r: jnp.sum(self.values(r)))(rows)

    def product(self, rows: Stack, v: Stack) -> Stack:
        """Every Hessian times its row of v."""
        return jax.jvp(self.gradient, (rows,), (v,))[1]

    def hessians(self, rows: Stack) -> Float[Array, "problems unknowns unknowns"]:
        columns = jax.vmap(lambda e: self.product(rows, jnp.broadcast_to(e, rows.shape)))
        return jnp.moveaxis(columns(jnp.eye(rows.shape[1], dtype=rows.dtype)), 0, 1)

    def solve(self, rows: Stack, b: Stack, tolerance: Any) -> Stack:
        """H⁻¹ b for every problem; not a number where a dense Hessian is not positive definite."""
        if rows.shape[1] <= DENSE:
            return jax.vmap(lambda lower, r: cho_solve((lower, True), r))(jnp.linalg.cholesky(self.hessians(rows)), b)
        return cg(lambda v: self.product(rows, v), b, tol=tolerance, maxiter=10 * rows.shape[1])[0]


def stacked(value: Callable[[PyTree], Array], start: PyTree, count: int) -> tuple[Problems, Stack]:
    """So many problems in unknowns like `start`, and all of them there."""
    row, unflatten = ravel_pytree(start)
    return Problems(value, unflatten), jnp.broadcast_to(row, (count, row.size))


def minimise(problems: Problems, start: Stack, tolerance: Any, steps: int) -> Stack:
    """The minimum of every problem, to a gradient of `tolerance` relative to the first (or 1, if that is more).

    Whole Newton steps, halved for each problem apart while its value does not fall.
    """
    norm = lambda rows: jnp.linalg.norm(rows, axis=1)
    first = jnp.maximum(norm(problems.gradient(start)), 1)

    class At(NamedTuple):
        rows: Array
        value: Array
        gradient: Array
        number: Array
        moved: Array

    def going(at: At) -> Array:
        return (at.number < steps) & at.moved & jnp.any(norm(at.gradient) > tolerance * first)

    def step(at: At) -> At:
        loose = jnp.minimum(0.1, jnp.sqrt(jnp.max(norm(at.gradient) / first)))
        way = problems.solve(at.rows, at.gradient, loose)
        # Close to the minimum the fall is below rounding; ~: not a number is no decrease.
        low = lambda value: value <= at.value + 8 * float(jnp.finfo(value.dtype).eps) * (1 + jnp.abs(at.value))
        short = lambda t, value: ~low(value) & (t > 0.5**HALVINGS)
        all_values = lambda t: problems.values(at.rows - t[:, None] * way)

        def halve(pair: tuple[Array, Array]) -> tuple[Array, Array]:
            t = jnp.where(short(*pair), pair[0] / 2, pair[0])
            return t, all_values(t)

        whole = jnp.ones_like(at.value)
        t, value = jax.lax.while_loop(lambda pair: jnp.any(short(*pair)), halve, (whole, all_values(whole)))
        lower = low(value)
        broken = jnp.any(jnp.isnan(way), axis=1)  # no way down from an indefinite Hessian: let it be seen
        rows = jnp.where((lower | broken)[:, None], at.rows - t[:, None] * way, at.rows)
        moved = jnp.any(lower & jnp.any(rows != at.rows, axis=1))
        return At(rows, jnp.where(lower, value, at.value), problems.gradient(rows), at.number + 1, moved)

    zero = jnp.array(0, jnp.int32)
    begin = At(start, problems.values(start), problems.gradient(start), zero, jnp.array(True))
    return jax.lax.while_loop(going, step, begin).rows


def extremes(problems: Problems, rows: Stack, products: int = 60) -> tuple[Array, Array]:
    """For every problem the smallest and the largest eigenvalue of its Hessian; for large ones an estimate."""
    if rows.shape[1] <= DENSE:
        found = jnp.linalg.eigvalsh(problems.hessians(rows))
        return found[:, 0], found[:, -1]
    scale = lambda v: v / jnp.maximum(jnp.linalg.norm(v, axis=1, keepdims=True), float(jnp.finfo(v.dtype).tiny))
    start = scale(jax.random.normal(jax.random.key(0), rows.shape, rows.dtype))

    def power(shift: Array) -> Array:
        act = lambda v: problems.product(rows, v) - shift[:, None] * v
        v = jax.lax.fori_loop(0, products, lambda _, v: scale(act(v)), start)
        return jnp.sum(v * act(v), axis=1) + shift

    far = power(jnp.zeros_like(rows[:, 0]))  # the eigenvalue of the largest size, of either sign
    other = power(far)
    return jnp.minimum(far, other), jnp.maximum(far, other)
