"""Lazy partners: scores of other clients' examples, as they were sent, with which a step pairs its active examples."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.base.clock import Clock, stream_key
from fedstrata.base.permutation import below, key_words, permute
from fedstrata.base.random import bits, fold_in
from fedstrata.core.memory import Pool

Draws = Literal["shuffled", "replacement"]


class Side(NamedTuple):
    """Partners out of one set, with weights such that Σ weight · value is their mean.

    Leaves are (p, …) where all active examples share their partners, (b, p, …) where each has separate ones.

    Args:
        rows: the rows as they were pooled: `{"score": …}`, with "u" in the first set of a nonlinear f.
        weight: of each row.
    """

    rows: PyTree
    weight: Array

    @property
    def shared(self) -> bool:
        """Whether all active examples have the same partners."""
        return self.weight.ndim == 1


class Partners(NamedTuple):
    """The partners of one step.

    Args:
        first: ζ, partners of the active second examples.
        second: ξ, partners of the active first examples.
        own: ω, the active client's weights in the first and the second set.
    """

    first: Side
    second: Side
    own: tuple[Array | float, Array | float]


def whole(pool: Pool, row_weight: Array) -> Side:
    """All rows of a pool, averaged with these weights.

    Args:
        pool: the pool.
        row_weight: (n,) how much each row counts.
    """
    count = jnp.maximum(pool.size(), 1).astype(row_weight.dtype)
    return Side(pool.rows, jnp.where(pool.valid, row_weight, 0) / count)


def drawn(
    pool: Pool, row_weight: Array, shape: tuple[int, ...], draws: Draws, key: PRNGKeyArray, clock: Clock, number: int
) -> Side:
    """Some rows of a pool.

    Rows are looked up where they are: the pool is never reordered. Rows of weight 0, from clients without examples of
    this kind, are not drawn; the weights of the others shrink accordingly.

    Args:
        pool: the pool.
        row_weight: (n,) how much each row counts.
        shape: of the drawn rows; the last axis is averaged.
        draws: "shuffled" passes through a random order of the pool, which differs between clients, and shuffles again
            at its end; "replacement" draws every row independently.
        key: the client's key of the round.
        clock: the time, for the local step.
        number: the random stream of this pool.
    """
    every = jnp.maximum(pool.size(), 1)
    pool = Pool(pool.rows, pool.client, pool.valid & (row_weight > 0), pool.capacity, pool.history)
    row_weight = row_weight * (pool.size() / every).astype(row_weight.dtype)
    count, each = jnp.maximum(pool.size(), 1), 1
    for length in shape:
        each *= length
    if draws == "replacement":
        rank = below(bits(stream_key(key, clock.local_step, number), (each,)), count)
    else:
        place = clock.local_step * each + jnp.arange(each, dtype=jnp.int32)
        base = stream_key(key, 0, number)
        words = key_words(jax.vmap(lambda turn: fold_in(base, turn))(place // count))
        rank = permute(words, place % count, count)
    index = pool.nth(rank).reshape(shape)
    weight = jnp.where(pool.valid[index], row_weight[index], 0) / shape[-1]
    return Side(jax.tree.map(lambda a: a[index], pool.rows), weight)


def pairs(function: Callable[[Any, Any], Array], active: PyTree, side: Side) -> Array:
    """`function(active example, row)` for every active example and each of its partners: (b, p, …).

    Args:
        function: of one active example and one row.
        active: the active examples, stacked.
        side: their partners.
    """
    of_one = lambda one, many: jax.vmap(lambda row: function(one, row))(many)
    return jax.vmap(of_one, in_axes=(0, None if side.shared else 0))(active, side.rows)
