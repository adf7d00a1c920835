"""Newton's method for many small strongly convex problems at once, and linear systems with their Hessians."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float, PyTree

from fedstrata.core.vector import Vector, power_of_two

DENSE = 512  # unknowns up to which a Hessian is built and factored; above, conjugate gradients
HALVINGS = 20

Stack = Float[Array, "problems unknowns"]


class Problems(NamedTuple):
    """Separable functions of stacked unknowns: `value(Y)[i]` depends on row i of Y alone.

    Args:
        value: the values of all problems at stacked unknowns.
        unflatten: from one row to the unknowns of one problem.
    """

    value: Callable[[PyTree], Array]
    unflatten: Callable[[Array], PyTree]

    def values(self, rows: Stack) -> Array:
        return self.value(jax.vmap(self.unflatten)(rows))

    def gradient(self, rows: Stack) -> Stack:
        return self.values_and_gradient(rows)[1]

    def values_and_gradient(self, rows: Stack) -> tuple[Array, Stack]:
        def total(r: Stack) -> tuple[Array, Array]:
            values = self.values(r)
            return jnp.sum(values), values

        gradient, values = jax.grad(total, has_aux=True)(rows)
        return values, gradient

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
        return _conjugate_gradients(lambda v: self.product(rows, v), b, tolerance, 10 * rows.shape[1])


def stacked(value: Callable[[PyTree], Array], start: PyTree, count: int) -> tuple[Problems, Stack]:
    """Problems in unknowns like `start`, and that start once per problem.

    Args:
        value: the values of all problems at stacked unknowns.
        start: the unknowns of one problem.
        count: the number of problems.
    """
    row, unflatten = ravel_pytree(start)
    return Problems(value, unflatten), jnp.broadcast_to(row, (count, row.size))


def minimise(problems: Problems, start: Stack, tolerance: Any, steps: int) -> Stack:
    """The minimiser of every problem, up to a last Newton step of at most `tolerance` × the norm of the unknowns.

    Newton steps, halved for each problem separately while its value does not decrease. A problem also stops where its
    gradient is only rounding: its steps then neither shrink nor lower its value. The stopping rules do not depend on
    the scale of the functions or unknowns, and no minimiser depends on the other problems.

    Args:
        problems: the functions.
        start: the start values, one row per problem.
        tolerance: of the last step, relative to the unknowns.
        steps: at most so many.
    """
    rounding = 8 * float(jnp.finfo(start.dtype).eps)
    dot = lambda u, v: jnp.sum(u * v, axis=1)
    value, gradient = problems.values_and_gradient(start)
    first = _norms(gradient)

    class NewtonState(NamedTuple):
        rows: Array
        value: Array
        gradient: Array
        going: Array
        fell: Array  # whether the last step lowered the value by more than rounding
        most: Array  # the longest next step of a problem that converges
        number: Array

    def step(at: NewtonState) -> NewtonState:
        way = problems.solve(at.rows, at.gradient, jnp.minimum(0.1, jnp.sqrt(_norms(at.gradient) / first)))
        size, slope = _norms(way), dot(at.gradient, way)
        broken = jnp.isnan(size)  # an indefinite Hessian gives no descent: return NaN
        going = at.going & (at.fell | (size <= at.most) | broken)

        def tried(t: Array) -> tuple[Array, Array, Array, Array]:
            value, gradient = problems.values_and_gradient(at.rows - t[:, None] * way)
            # Close to the minimum the fall is below rounding, and the slope shows whether the step went too far.
            return t, value, gradient, (value < at.value) | (-dot(gradient, way) <= slope / 10)

        short = lambda t, value, gradient, down: going & ~broken & ~down & (t > 0.5**HALVINGS)
        halve = lambda trial: tried(jnp.where(short(*trial), trial[0] / 2, trial[0]))
        whole = tried(jnp.ones_like(at.value))
        t, value, gradient, down = jax.lax.while_loop(lambda trial: jnp.any(short(*trial)), halve, whole)
        going &= down | broken
        rows = jnp.where(going[:, None], at.rows - t[:, None] * way, at.rows)
        return NewtonState(
            rows,
            jnp.where(going, value, at.value),
            jnp.where(going[:, None], gradient, at.gradient),
            going & (size > tolerance * _norms(rows)),
            value < at.value - rounding * jnp.abs(at.value),
            (1 - t / 2) * size,
            at.number + 1,
        )

    begin = NewtonState(start, value, gradient, first > 0, jnp.ones_like(first > 0), first, jnp.array(0, jnp.int32))
    return jax.lax.while_loop(lambda at: (at.number < steps) & jnp.any(at.going), step, begin).rows


def _norms(rows: Stack) -> Array:
    return jax.vmap(lambda row: Vector(row).norm())(rows)


def _conjugate_gradients(product: Callable[[Stack], Stack], b: Stack, tolerance: Any, most: int) -> Stack:
    """H⁻¹ b, with a tolerance per problem: one for the whole stack would leave small problems unsolved."""
    unit = power_of_two(jnp.max(jnp.abs(b), axis=1, keepdims=True))
    b = b / unit
    dot = lambda u, v: jnp.sum(u * v, axis=1, keepdims=True)
    enough = jnp.broadcast_to(jnp.asarray(tolerance, b.dtype), b.shape[:1])[:, None] ** 2 * dot(b, b)

    class ConjugateState(NamedTuple):
        v: Array
        residual: Array
        way: Array
        left: Array  # |residual|²
        number: Array

    def step(at: ConjugateState) -> ConjugateState:
        going, image = at.left > enough, product(at.way)
        t = jnp.where(going, at.left / jnp.where(going, dot(at.way, image), 1), 0)
        residual = at.residual - t * image
        left = jnp.where(going, dot(residual, residual), at.left)
        way = jnp.where(going, residual + left / jnp.where(going, at.left, 1) * at.way, 0)
        return ConjugateState(at.v + t * at.way, residual, way, left, at.number + 1)

    begin = ConjugateState(jnp.zeros_like(b), b, b, dot(b, b), jnp.array(0, jnp.int32))
    return unit * jax.lax.while_loop(lambda at: (at.number < most) & jnp.any(at.left > enough), step, begin).v


def extremes(problems: Problems, rows: Stack, products: int = 60) -> tuple[Array, Array]:
    """The smallest and largest eigenvalue of every problem's Hessian: exact up to `DENSE` unknowns, else estimated.

    Args:
        problems: the functions.
        rows: where the Hessians are taken, one row per problem.
        products: Hessian products of an estimate.
    """
    if rows.shape[1] <= DENSE:
        found = jnp.linalg.eigvalsh(problems.hessians(rows))
        return found[:, 0], found[:, -1]
    scale = lambda v: v / jnp.maximum(_norms(v), float(jnp.finfo(v.dtype).tiny))[:, None]
    start = scale(jax.random.normal(jax.random.key(0), rows.shape, rows.dtype))

    def power(shift: Array) -> Array:
        act = lambda v: problems.product(rows, v) - shift[:, None] * v
        v = jax.lax.fori_loop(0, products, lambda _, v: scale(act(v)), start)
        return jnp.sum(v * act(v), axis=1) + shift

    far = power(jnp.zeros_like(rows[:, 0]))  # the eigenvalue of the largest size, of either sign
    other = power(far)
    return jnp.minimum(far, other), jnp.maximum(far, other)
