"""A pairwise objective over all pairs, in pieces that fit, and rank metrics of whole splits."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedstrata.core.vector import Vector
from fedstrata.problems.base import Rows
from fedstrata.problems.pairwise import columns

if TYPE_CHECKING:
    from fedstrata.problems.pairwise.problem import Pairwise

PAIRS = 2**22  # pairs in memory at a time


def objective(problem: "Pairwise", x: Vector, first: Rows, second: Rows) -> Array:
    """Σ_i w_i f(Σ_j w_j ℓ(h(z_i), h(z_j))), differentiable with as little memory as its value."""
    a, b = scores(problem.score_of, x, first), scores(problem.second_score, x, second)
    weight, other = row_share(problem.weighting, first), row_share(problem.weighting, second)
    size = max(1, PAIRS // b.shape[0])
    f = problem.f or (lambda u: u)

    @jax.checkpoint
    def part(rows: Array, share: Array) -> Array:
        of_one = lambda one: f(problem.inner_mean(jax.vmap(lambda row: problem.pair_loss(one, row))(b), other))
        return jnp.sum(jnp.where(share > 0, share * jax.vmap(of_one)(rows), 0))

    chunks = -(-a.shape[0] // size)
    if chunks == 1:
        return part(a, weight)
    pad = lambda v: jnp.pad(v, ((0, chunks * size - len(v)), *[(0, 0)] * (v.ndim - 1)), mode="edge")
    split = lambda v: v.reshape((chunks, size, *v.shape[1:]))
    share = jnp.pad(weight, (0, chunks * size - len(weight)))
    add = lambda total, given: (total + part(*given), None)
    return jax.lax.scan(add, jnp.zeros((), weight.dtype), (split(pad(a)), split(share)))[0]


def row_share(weighting: str, rows: Rows) -> Array:
    """How much each row counts in its set; they sum to one."""
    if weighting == "examples":
        return jnp.full(rows.weight.shape, 1 / rows.weight.shape[0], rows.weight.dtype)
    count = jax.ops.segment_sum(jnp.ones_like(rows.weight), rows.client, rows.clients)
    return 1 / (count[rows.client] * jnp.sum(count > 0).astype(count.dtype))


def some(rows: Rows, most: int | None) -> Rows:
    """All rows, or so many of them, evenly spaced."""
    size = rows.weight.shape[0]
    if most is None or size <= most:
        return rows
    return rows.pick(np.arange(most) * size // most)


def scores(score: Callable, x: Vector, rows: Rows) -> Array:
    return rows.map(jax.checkpoint(lambda example: score(x.tree, example)))


def labels(problem: "Pairwise", rows: Rows) -> Array:
    return rows.column(problem.label) == problem.positive


def measured(problem: "Pairwise", x: Vector, parts: Sequence[Rows]) -> dict[str, Array]:
    """The problem's rank metrics of these rows together; none for scores that are vectors."""
    together = lambda of: jnp.concatenate([of(rows) for rows in parts])
    found = together(lambda rows: scores(problem.score_of, x, rows))
    if found.ndim > 1:
        return {}
    owner, truth = together(lambda rows: rows.client), together(lambda rows: labels(problem, rows))
    return columns.measures(problem.metrics, found, truth, owner, parts[0].clients)
