"""A random permutation of [0, n), evaluated entry by entry: cohorts and epochs cost O(entries used).

A Feistel network on a grid a × b just larger than n, with modular additions and a hashed round function; results
outside [0, n) are permuted again until they fall inside (Black and Rogaway 2002, cycle walking).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

ROUNDS = 24  # on the smallest grids each pair of rounds halves the distance from a uniform permutation


def permute(words: UInt32[Array, "... 2"], index: Int[Array, "..."], n: Array | int) -> Int[Array, "..."]:
    """The image of an index under a permutation of [0, n).

    Args:
        words: two words that select the permutation, see `key_words`.
        index: entries of [0, n).
        n: the length of the permutation; may be traced.
    """
    n = jnp.asarray(n, jnp.uint32)
    a = jnp.sqrt(n.astype(jnp.float32)).astype(jnp.uint32) + 1
    b = (n + a - 1) // a
    shuffle = lambda i: _feistel(words, i, a, b)
    out = shuffle(index.astype(jnp.uint32))
    out = jax.lax.while_loop(lambda i: jnp.any(i >= n), lambda i: jnp.where(i >= n, shuffle(i), i), out)
    return out.astype(jnp.int32)


def key_words(key: Array) -> UInt32[Array, "... 2"]:
    """The two words of a key that select a permutation."""
    return jax.random.key_data(key).astype(jnp.uint32)[..., :2]


def below(bits: UInt32[Array, "..."], n: Array | int) -> Int[Array, "..."]:
    """Random 32-bit words mapped to [0, n): the high half of bits × n, uniform up to n / 2³²."""
    n = jnp.asarray(n, jnp.uint32)
    low, mask = lambda v: v & jnp.uint32(0xFFFF), jnp.uint32(16)
    high = lambda v: v >> mask
    first = high(low(bits) * low(n))
    second = high(bits) * low(n) + first
    third = low(bits) * high(n) + low(second)
    return (high(bits) * high(n) + high(second) + high(third)).astype(jnp.int32)


def _feistel(words: Array, index: Array, a: Array, b: Array) -> Array:
    def two_rounds(pair: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        (left, right), number = at, 2 * pair.astype(jnp.uint32) + 1
        key = lambda word, number: _hash(words[..., word] + number * jnp.uint32(0x9E3779B9))
        left = (left + _hash(right ^ key(0, number)) % a) % a
        return left, (right + _hash(left ^ key(1, number + 1)) % b) % b

    # A loop: unrolled, the rounds take longer to compile than most runs to draw their cohorts.
    left, right = jax.lax.fori_loop(0, ROUNDS // 2, two_rounds, (index // b, index % b))
    return left * b + right


def _hash(v: Array) -> Array:
    """The finaliser of MurmurHash3."""
    v = (v ^ (v >> 16)) * jnp.uint32(0x85EBCA6B)
    v = (v ^ (v >> 13)) * jnp.uint32(0xC2B2AE35)
    return v ^ (v >> 16)
