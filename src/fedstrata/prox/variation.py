"""Total variation: a regulariser for few jumps along a sequence."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedstrata.prox.base import Regularizer, number
from fedstrata.prox.trees import unit


class TotalVariation(Regularizer):
    r"""The fused lasso $\nu \sum_i |x_{i+1} - x_i|$ along the last axis: its prox is piecewise constant.

    The prox is exact and direct. Start with the whole sequence as one block. In every block, find the entries that
    belong above the block's mean (the cheapest cut of a chain, by one forward and one backward pass). Cut there, and
    repeat with the parts until none is cut: then every block is constant, at its mean shifted by
    $\pm\gamma\nu / \text{length}$ for each neighbour above or below. All blocks of a level are cut at once, so a
    sequence of n entries takes memory O(n) and work O(n) per level; levels are few (about log n) unless the data are
    made to provoke many (at most n). Derivatives are those of the block means. `distance` has no closed form here.

    Every row of a leaf's last axis is a separate sequence.

    Args:
        weight: ν, at least 0.

    >>> TotalVariation(1.0).prox(jnp.array([1.0, 0.0, 9.0, 9.0]), step=1.0).tolist()
    [1.0, 1.0, 8.5, 8.5]

    Cuts at level sets: Hochbaum (2001), Chambolle and Darbon (2009).
    """

    weight: float = number(at_least=0)

    @property
    def has_distance(self) -> bool:
        return False

    def _check_leaf(self, name: str, leaf: Any) -> None:
        if leaf.ndim < 1:
            raise ValueError(f"{self!r}: leaf {name!r} is a single number, not a sequence; choose others with .on(...)")

    def _value(self, x: Array) -> Array:
        return self.weight * jnp.sum(jnp.abs(jnp.diff(x, axis=-1)))

    def _prox(self, z: Array, step: Array) -> Array:
        if z.size == 0 or z.shape[-1] == 1:
            return z
        rows = jax.vmap(_denoised, in_axes=(0, None))(z.reshape(-1, z.shape[-1]), step * self.weight)
        return rows.reshape(z.shape)


def _denoised(z: Array, jump: Array) -> Array:
    """The minimiser of ½|x − z|² + jump · Σ|x_{i+1} − x_i| for one sequence."""
    by = unit(jnp.append(z, jump))  # the minimiser grows with z and jump: in other units it is the same
    z, jump = z / by, jump / by
    jumps = _cuts(jax.lax.stop_gradient(z), jax.lax.stop_gradient(jump))
    # With the signs of all jumps known, the problem is a mean per block of the shifted data.
    shifted, blocks = z + jump * _pull(jumps), _blocks(jumps)
    x = _block_means(shifted, blocks)
    x = x + _block_means(shifted - x, blocks)  # the digits that a long sum lost
    return by * jnp.where(jump > 0, x, z)


def _cuts(z: Array, jump: Array) -> Array:
    """The sign of x_{i+1} − x_i for every neighbouring pair: 0 within a block."""

    def refine(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        jumps, _ = carry
        blocks = _blocks(jumps)
        excess = z + jump * _pull(jumps)
        excess = excess - _block_means(excess, blocks)
        excess = excess - _block_means(excess, blocks)  # the rounding of the first mean adds up along a block
        edges = jnp.where(jumps == 0, jump, 0)  # the cost of a cut between neighbours; zero where there is one already
        above = _margin(excess, edges) > _rounding(excess, blocks, jump)
        new = jnp.where(jumps == 0, jnp.diff(above.astype(z.dtype)), jumps)
        return new, jnp.any(new != jumps)

    start = jnp.zeros_like(z[1:]), jump > 0
    return jax.lax.while_loop(lambda carry: carry[1], refine, start)[0]


def _margin(excess: Array, edges: Array) -> Array:
    """The gain of placing each entry above its block's mean instead of below, with the others placed optimally.

    Choosing a set S above costs −Σ_S excess plus the edges that S cuts. The entries to the left (right) contribute
    their balance to entry i, limited by the cost of the edge between.
    """
    both = lambda x: jnp.stack([x, x[::-1]])
    # On a CPU one by one was the fastest of those tried; elsewhere log n passes avoid n dependent steps.
    found = jax.lax.platform_dependent(
        both(excess)[:, :-1], both(edges), cpu=_limited_sums, default=_limited_sums_by_doubling
    )
    left, right = jnp.pad(found, ((0, 0), (1, 0)))
    return excess + left + right[::-1]


def _limited_sums(x: Array, limits: Array) -> Array:
    """f_i = clip(f_{i−1} + x_i, ±limits_i) along the rows, from f_0 = 0."""

    def add(f: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        f = jnp.clip(f + at[0], -at[1], at[1])
        return f, f

    return jax.lax.scan(add, jnp.zeros_like(x[:, 0]), (x.T, limits.T))[1].T


def _limited_sums_by_doubling(x: Array, limits: Array) -> Array:
    """The same in log n passes: clipped shifts f ↦ clip(f + shift, low, high) are closed under composition."""

    def double(k: Array, chain: tuple[Array, ...]) -> tuple[Array, ...]:
        distance = 1 << k
        there = (jnp.arange(x.shape[1], dtype=k.dtype) >= distance)[None, :]
        identity = (0, -math.inf, math.inf)
        before = (jnp.where(there, jnp.roll(a, distance, axis=1), i) for a, i in zip(chain, identity, strict=True))
        (shift, low, high), (more, bottom, top) = before, chain
        return shift + more, jnp.clip(low + more, bottom, top), jnp.clip(high + more, bottom, top)

    passes = math.ceil(math.log2(x.shape[1]))
    return jnp.clip(*jax.lax.fori_loop(0, passes, double, (x, -limits, limits)))


def _pull(jumps: Array) -> Array:
    """The pull of the jumps on each entry, in units of γν: +1 towards a neighbour above, −1 towards one below."""
    none = jnp.zeros_like(jumps[:1])
    return jnp.concatenate([jumps, none]) - jnp.concatenate([none, jumps])


def _blocks(jumps: Array) -> Array:
    return jnp.concatenate([jnp.zeros(1, int), jnp.cumsum(jumps != 0)])


def _block_sums(x: Array, blocks: Array) -> Array:
    """The sum over its block, for every entry."""
    return jax.ops.segment_sum(x, blocks, num_segments=x.size, indices_are_sorted=True)[blocks]


def _block_means(x: Array, blocks: Array) -> Array:
    return _block_sums(x, blocks) / _block_sums(jnp.ones_like(x), blocks)


def _rounding(excess: Array, blocks: Array, jump: Array) -> Array:
    """The largest margin that rounding alone may produce; smaller ones do not cut."""
    return 4 * jnp.finfo(excess.dtype).eps * (jump + jnp.sqrt(_block_sums(excess**2, blocks)))
