r"""Small linear programs over the probability simplex, solved exactly inside a compiled program.

$$ \max_a \; c \cdot a \quad \text{subject to} \quad A a \ge b, \qquad a \ge 0, \quad \sum_j a_j = 1 $$

The simplex method with Bland's rule on a dense tableau: for about twenty variables and as many rows. Shapes are fixed
and the pivots run in a `while_loop`, so it may be jitted and vmapped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PIVOTS_PER_COLUMN = 50  # far more than are ever needed; rounding must not make a loop endless


class Tableau(NamedTuple):
    """Rows `body @ variables = level`; in each of them the variable `basis` has coefficient 1 and no other basic one.

    The variables are the n weights, then one surplus for each of the r constraints; from n + r on, a basic number
    stands for the violation of its constraint. Such a number never returns once it has left, so it needs no column.
    """

    body: Float[Array, "r+1 n+r"]
    level: Float[Array, " r+1"]
    basis: Int[Array, " r+1"]
    done: Bool[Array, ""]
    pivots: Int[Array, ""]


@jax.default_matmul_precision("highest")
def maximise(c: Float[Array, " n"], A: Float[Array, "r n"], b: Float[Array, " r"]) -> tuple[Array, Array]:
    """The optimal weights a, and whether the constraints can be met.

    If they cannot, a is a point of the simplex with the least sum of violations (each row scaled to a largest entry of
    one). Where several points are optimal, a is a vertex that depends on the order of the variables. Rows and c may
    have any scale: they are compared after scaling, with a tolerance of 4e-11 in float64.

    Args:
        c: the gain of each weight.
        A: one row per constraint.
        b: the lower bounds of A a.

    >>> a, feasible = maximise(jnp.array([1.0, 3.0]), jnp.array([[1.0, -1.0]]), jnp.array([0.0]))  # a_1 >= a_2
    >>> a.tolist(), bool(feasible)
    ([0.5, 0.5], True)
    """
    rows, n = A.shape
    if c.shape != (n,) or b.shape != (rows,):
        raise ValueError(
            f"maximise: c {c.shape} and b {b.shape} do not fit A {A.shape}; they need {(n,)} and {(rows,)}"
        )
    tolerance = float(jnp.finfo(A.dtype).eps) ** (2 / 3)
    scale = jnp.maximum(jnp.max(jnp.abs(A), axis=1), jnp.abs(b))
    scale = jnp.where(scale > 0, scale, 1)
    A, b = A / scale[:, None], b / scale
    largest = jnp.max(jnp.abs(c))
    gain = jnp.concatenate([c / jnp.where(largest > 0, largest, 1), jnp.zeros((2 * rows,), c.dtype)])

    lacking = lambda t: t.basis >= n + rows
    step = lambda t: _improve(t, gain, lacking(t), tolerance)
    limit = PIVOTS_PER_COLUMN * (n + rows)
    end = jax.lax.while_loop(lambda t: ~t.done & (t.pivots < limit), step, _start(A, b))

    feasible = jnp.sum(jnp.where(lacking(end), end.level, 0)) <= tolerance
    # Solved again from the final basis, free of the rounding of the pivots.
    exact = _basic_solution(A, b, end.basis)
    level = jnp.where(feasible & jnp.all(jnp.isfinite(exact)), exact, end.level)
    a = jnp.zeros((n + 2 * rows,), A.dtype).at[end.basis].set(level)[:n]
    a = jnp.maximum(a, 0)
    return a / jnp.sum(a), feasible


def _start(A: Array, b: Array) -> Tableau:
    """The tableau at the vertex with the smallest largest violation."""
    rows, n = A.shape
    vertex = jnp.argmax(jnp.min(A - b[:, None], axis=0, initial=jnp.inf)).astype(jnp.int32)
    spare = A[:, vertex] - b
    met = spare >= 0
    # With the vertex's weight replaced by one minus the others, A a - surplus = b has no entry in its column.
    sign = jnp.where(met, -1, 1).astype(A.dtype)
    reduced = sign[:, None] * jnp.concatenate([A - A[:, vertex][:, None], -jnp.eye(rows, dtype=A.dtype)], axis=1)
    whole = jnp.concatenate([jnp.ones((1, n), A.dtype), jnp.zeros((1, rows), A.dtype)], axis=1)
    number = jnp.arange(rows, dtype=jnp.int32)
    return Tableau(
        body=jnp.concatenate([reduced, whole]),
        level=jnp.concatenate([jnp.abs(spare), jnp.ones((1,), A.dtype)]),
        basis=jnp.concatenate([jnp.where(met, n + number, n + rows + number), vertex[None]]),
        done=jnp.array(False),
        pivots=jnp.array(0, jnp.int32),
    )


def _improve(t: Tableau, gain: Array, lacking: Array, tolerance: float) -> Tableau:
    """One pivot by Bland's rule: first towards smaller violations, then towards a larger gain."""
    columns = t.body.shape[1]
    mend = jnp.where(lacking, 1, 0).astype(t.body.dtype) @ t.body
    better = gain[:columns] - gain[t.basis] @ t.body
    mending = jnp.any(mend > tolerance)
    stuck = ~mending & (jnp.sum(jnp.where(lacking, t.level, 0)) > tolerance)
    wanted = jnp.where(mending, mend, better) > tolerance
    enters = jnp.argmax(wanted).astype(jnp.int32)  # the first
    column = t.body[:, enters]
    # A violation of zero must stay zero: it leaves as soon as the entering variable would move it.
    zero = lacking & ~mending
    bounds = (column > tolerance) | (zero & (column < -tolerance))
    safe = jnp.where(bounds, column, 1)
    ratio = jnp.where(bounds, jnp.where(zero, 0, t.level / safe), jnp.inf)
    least = ratio <= jnp.min(ratio) * (1 + tolerance) + 10 * jnp.finfo(ratio.dtype).eps
    leaves = jnp.argmin(jnp.where(least & bounds, t.basis, jnp.iinfo(jnp.int32).max))
    done = stuck | ~jnp.any(wanted) | ~jnp.any(bounds)
    after = _pivot(t, leaves, enters)._replace(done=done)
    return jax.tree.map(lambda new, old: jnp.where(done, old, new), after, t)._replace(done=done)


def _pivot(t: Tableau, row: Array, column: Array) -> Tableau:
    factor = t.body[row, column]
    body, level = t.body[row] / factor, t.level[row] / factor
    others = (jnp.arange(t.basis.shape[0]) != row).astype(t.body.dtype) * t.body[:, column]
    # Rounding may push a level of zero below it; the ratio test relies on none being negative.
    levels = jnp.maximum(t.level - others * level, 0).at[row].set(jnp.maximum(level, 0))
    bodies = (t.body - others[:, None] * body[None, :]).at[row].set(body)
    return Tableau(bodies, levels, t.basis.at[row].set(column), t.done, t.pivots + 1)


def _basic_solution(A: Array, b: Array, basis: Array) -> Array:
    """The values of the basic variables, from the constraints as they were given."""
    rows, n = A.shape
    one = jnp.eye(rows, dtype=A.dtype)
    upper = jnp.concatenate([A, -one, one], axis=1)
    lower = jnp.concatenate([jnp.ones((1, n), A.dtype), jnp.zeros((1, 2 * rows), A.dtype)], axis=1)
    columns = jnp.concatenate([upper, lower])[:, basis]
    return jnp.linalg.solve(columns, jnp.concatenate([b, jnp.ones((1,), b.dtype)]))
