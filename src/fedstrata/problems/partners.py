"""Lazy partners: scores of other clients' examples, as they were when sent, that a step pairs its own examples with."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree

from fedstrata.clock import Clock, stream_key
from fedstrata.data.permutation import below, key_words, permute
from fedstrata.memory import Pool
from fedstrata.random import bits, fold_in

Draws = Literal["shuffled", "replacement"]


class Side(NamedTuple):
    """Partners out of one set: rows as they were pooled, and weights such that Σ weight · value is their mean.

    Leaves are (p, …) where all active examples share their partners, (b, p, …) where each has its own.
    """

    rows: PyTree
    weight: Array


class Lazy(NamedTuple):
    """The partners of one step: ζ of the active second examples, ξ of the active first ones."""

    first: Side
    second: Side
    own: tuple[Array | float, Array | float]  # the active client's weights in the first and the second set


def whole(pool: Pool, row_weight: Array) -> Side:
    """All rows of a pool, averaged with these weights."""
    count = jnp.maximum(pool.size(), 1).astype(row_weight.dtype)
    return Side(pool.rows, jnp.where(pool.valid, row_weight, 0) / count)


def drawn(
    pool: Pool, row_weight: Array, shape: tuple[int, ...], draws: Draws, key: PRNGKeyArray, clock: Clock, number: int
) -> Side:
    """Some rows of a pool. key: the client's key of the round; number: a random stream of this pool's own.

    "shuffled" goes through the pool in an order of the client's own, a piece in every step, and shuffles again when the
    pool is used up; "replacement" draws every row anew. Both look up what they need: the pool is never moved. Rows of
    weight 0, of clients that have none of this kind, are not drawn, and the others count so much less.
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


def pairs(function: Any, active: PyTree, rows: PyTree, shared: bool) -> Array:
    """function(active example, row) for every active example and each of its partners: (b, p, …)."""
    of_one = lambda one, many: jax.vmap(lambda row: function(one, row))(many)
    return jax.vmap(of_one, in_axes=(0, None if shared else 0))(active, rows)
